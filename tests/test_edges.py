"""Corners that once were wrong: state that outlives its reason, and what happens in odd orders."""

import copy
import gc

import pytest
import torch
from models import LinearForm, Twin, assert_same, coefficients, weights
from ranks import run
from torch import nn

import zeroshard
from zeroshard.errors import ConfigError, GradientError

SHAPES = {"matrix": (40, 30), "bias": (30,)}
stages = pytest.mark.parametrize("stage", [1, 2, 3])
replicated_stages = pytest.mark.parametrize("stage", [1, 2])


def backward(model, rank, world_size, draw=0, scale=1.0):
    (model(coefficients(model, rank, world_size, draw)) * scale).backward()


@stages
def test_one_inf_skips_one_step_when_gradients_are_zeroed_in_place(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(model, stage=stage)
        for draw, scale in enumerate((float("inf"), 1.0, 1.0, 1.0)):
            backward(model, rank, world_size, draw, scale)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert int(optimizer.skipped_steps) == 1

    run(body)


@stages
def test_an_inf_that_was_written_between_two_backwards_is_seen(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(model, stage=stage)
        before = weights(model)
        backward(model, rank, world_size, 0)
        model.matrix.grad.mul_(float("inf"))
        backward(model, rank, world_size, 1)
        optimizer.step()
        assert int(optimizer.skipped_steps) == 1
        assert_same(weights(model), before, "skipped")

    run(body)


@stages
@pytest.mark.parametrize("how", ["torch", "method", "fused"])
def test_clipping_is_right_in_the_step_in_which_a_layer_is_unfrozen(stage, how):
    def body(rank, world_size):
        options = {"max_grad_norm": 1.0} if how == "fused" else {}
        model = LinearForm(SHAPES)
        model.bias.requires_grad_(False)
        parameters = list(model.parameters())
        optimizer = zeroshard.AdamW(parameters, model=model, stage=stage, **options)
        for draw in range(2):
            if draw == 1:
                model.bias.requires_grad_(True)
            optimizer.zero_grad()
            backward(model, rank, world_size, draw)
            if how == "torch":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif how == "method":
                optimizer.clip_grad_norm_(1.0)
            else:
                optimizer.step()
            grads = [p.grad.full_tensor().flatten() for p in model.parameters() if p.requires_grad]
            norm = float(torch.linalg.vector_norm(torch.cat(grads).double()))
            assert norm == pytest.approx(1.0, rel=1e-5)

    run(body)


@replicated_stages
def test_a_replaced_parameter_is_found_although_the_model_was_never_given(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(list(model.parameters()), stage=stage)
        state = {name: p.detach().clone() for name, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        with pytest.raises(ConfigError, match="replaced"):
            optimizer.step()

    run(body)


@stages
def test_gradients_survive_an_autograd_grad_that_raises(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, shapes=SHAPES, stage=stage)
        twin.backward(0)

        def broken(_):
            raise KeyError("planted")

        leaf = torch.ones(3, requires_grad=True)
        leaf.register_hook(broken)
        loss = twin.model(coefficients(twin.model, rank, world_size)) + leaf.sum()
        with pytest.raises(KeyError):
            torch.autograd.grad(loss, [twin.model.matrix, twin.model.bias, leaf])
        twin.step()
        twin.check("nothing was lost")

    run(body)


@stages
@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_zeroing_in_place_also_zeroes_what_a_deferred_backward_set_aside(stage, whose):
    def body(rank, world_size):
        twin = Twin(rank, world_size, shapes=SHAPES, stage=stage)
        twin.backward(0)
        with twin.optimizer.no_sync():
            twin.backward(1)
        (twin.optimizer if whose == "optimizer" else twin.model).zero_grad(set_to_none=False)
        twin.plain.zero_grad(set_to_none=False)
        twin.backward(2)
        twin.check_gradients(whose)

    run(body)


@stages
def test_a_local_gradient_stays_local_when_it_is_rescaled(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(model, stage=stage)
        with optimizer.no_sync():
            backward(model, rank, world_size)
        for p in model.parameters():
            p.grad = p.grad / 2
        with pytest.raises(GradientError, match="no_sync"):
            optimizer.step()

    run(body)


@stages
def test_the_file_of_another_rank_is_refused(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(model, stage=stage)
        backward(model, rank, world_size)
        optimizer.step()
        everybody = [None] * world_size
        torch.distributed.all_gather_object(everybody, optimizer.state_dict())
        optimizer.load_state_dict(everybody[rank])
        with pytest.raises(ConfigError, match=f"saved by rank {1 - rank}"):
            optimizer.load_state_dict(everybody[1 - rank])

    run(body)


def test_a_file_that_asks_for_amsgrad_is_refused():
    model = LinearForm(SHAPES)
    optimizer = zeroshard.AdamW(model)
    other = torch.optim.AdamW(LinearForm(SHAPES).parameters(), amsgrad=True)
    with pytest.raises(ConfigError, match="amsgrad"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["amsgrad"] is False


def test_writing_back_what_did_not_change_keeps_the_masters():
    def body(rank, world_size):
        def trained(gathers):
            model = LinearForm(SHAPES, torch.bfloat16)
            optimizer = zeroshard.AdamW(model, lr=1e-5)
            for draw in range(20):
                backward(model, rank, world_size, draw)
                optimizer.step()
                optimizer.zero_grad()
                if gathers:
                    with zeroshard.gather(model, writeback=True):
                        pass
            optimizer.consolidate_state_dict()
            return optimizer.state_dict()["state"] if rank == 0 else {}

        for mine, other in zip(trained(True).values(), trained(False).values(), strict=True):
            assert torch.equal(mine["master"], other["master"])

    run(body)


def test_writing_back_reaches_frozen_parameters_and_several_optimizers():
    def body(rank, world_size):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].requires_grad_(False)
        kept = [zeroshard.AdamW(model[2]), zeroshard.AdamW(model[0])]
        with zeroshard.gather(model, writeback=True), torch.no_grad():
            for p in model.parameters():
                p.fill_(float(rank + 5))
        assert all(bool((p == 5).all()) for p in model.parameters())
        with zeroshard.gather(model[1]):  # nothing of it is sharded
            pass
        assert kept

    run(body)


def test_ranks_whose_frozen_parameters_or_buffers_differ_are_refused():
    def body(rank, world_size):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3 + rank), nn.BatchNorm1d(3 + rank))
        model[1].requires_grad_(False)
        model[2].requires_grad_(False)
        with pytest.raises(ConfigError, match="frozen parameter or buffer"):
            zeroshard.AdamW(model)
        assert not model[0].weight._backward_hooks

    run(body)


@stages
def test_nothing_to_train_is_no_error(stage):
    def body(rank, world_size):
        model = nn.Linear(3, 3).requires_grad_(False)
        for given in (list(model.parameters()), [{"params": []}]):
            optimizer = zeroshard.AdamW(given, model=model, stage=stage)
            optimizer.step()
            optimizer.zero_grad()
            assert float(optimizer.clip_grad_norm_(1.0)) == 0
            if stage < 3:  # frozen parameters are held by the ranks together
                assert sum(optimizer.memory().values()) == 0

    run(body)


def test_gradient_copies_of_a_single_process_are_freed_and_norms_stay_fresh():
    model = LinearForm(SHAPES)
    optimizer = zeroshard.AdamW(model)
    numel = sum(p.numel() for p in model.parameters())

    def live():
        gc.collect()
        flats = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() >= numel]
        return sum({t.untyped_storage().data_ptr(): t.nbytes for t in flats}.values())

    optimizer.step()
    held = live()
    for draw in range(3):
        backward(model, 0, 1, draw, scale=draw + 1.0)
        norm = float(optimizer.clip_grad_norm_(1e9))
        exact = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm()
        assert norm == pytest.approx(float(exact), rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        assert live() <= held
    assert optimizer.memory()["gradients"] == 0


def test_a_closed_optimizer_lets_go_of_its_memory_at_once():
    model = LinearForm(SHAPES)
    optimizer = zeroshard.AdamW(model)
    moments = optimizer.engine.arenas[0].state["exp_avg"]
    optimizer.close()
    gc.disable()
    try:
        assert not [x for x in gc.get_referrers(moments) if isinstance(x, dict) and "exp_avg" in x]
    finally:
        gc.enable()
    with pytest.raises(ConfigError, match="closed"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_a_copied_optimizer_says_that_it_is_one():
    other = copy.deepcopy(zeroshard.AdamW(LinearForm(SHAPES)))
    with pytest.raises(ConfigError, match="copy"):
        other.step()


def test_unscaling_takes_plain_gradients_among_slices():
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(coefficients(model, rank, world_size))).backward()
        model.bias.grad = torch.full((30,), 8.0)
        scaler.unscale_(optimizer)
        assert bool((model.bias.grad == 2).all())
        scaler.step(optimizer)
        scaler.update()

    run(body)


@stages
def test_a_parameter_that_nobody_uses_costs_no_further_pass(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(model, stage=stage, bucket_mb=1e-3)
        for draw in range(3):
            used = {"matrix": coefficients(model, rank, world_size, draw)["matrix"]}
            model(used).backward()
            optimizer.engine.gradients.close()
            _, flags_are_valid = optimizer.engine.gradients.collect()
            assert flags_are_valid
            optimizer.step()
            optimizer.zero_grad()

    run(body)


@stages
def test_a_local_slice_that_was_kept_keeps_its_values(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(model, stage=stage)
        backward(model, rank, world_size, 0)
        kept = model.matrix.grad.to_local()
        values = kept.clone()
        optimizer.step()
        optimizer.zero_grad()
        backward(model, rank, world_size, 1)
        assert torch.equal(kept, values)
        assert not torch.equal(model.matrix.grad.to_local(), values)

    run(body)


@stages
def test_a_norm_is_never_that_of_before_a_write(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        zeroshard.AdamW(model, stage=stage)
        backward(model, rank, world_size)
        grad = model.matrix.grad
        norm = float(grad.norm())
        for write in (
            lambda: grad.mul_(2.0),
            lambda: torch._foreach_mul_([grad], 2.0),
            lambda: grad.to_local().mul_(2.0),
            lambda: grad.copy_(grad * 2.0),
        ):
            write()
            norm *= 2
            assert float(grad.norm()) == norm

    run(body)


@stages
def test_a_layer_unfrozen_under_no_sync_adds_up_with_the_others(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, shapes=SHAPES, stage=stage)
        other = Twin(rank, world_size, shapes=SHAPES, stage=stage)
        for model in (other.model, other.plain_model):
            model.bias.requires_grad_(False)
        other.optimizer = zeroshard.AdamW(
            list(other.model.parameters()),
            lr=1e-2,
            weight_decay=0.1,
            model=other.model,
            stage=stage,
        )
        for model in (other.model, other.plain_model):
            model.bias.requires_grad_(True)
        for each in (twin, other):
            with each.optimizer.no_sync():
                each.backward(0)
                each.backward(1)
            each.backward(2)
            each.check_gradients("unfrozen" if each is other else "all along")
            each.step()
            each.check("unfrozen" if each is other else "all along")

    run(body)


@stages
def test_a_local_gradient_raises_also_when_a_layer_was_unfrozen(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        model.bias.requires_grad_(False)
        optimizer = zeroshard.AdamW(list(model.parameters()), model=model, stage=stage)
        model.bias.requires_grad_(True)
        with optimizer.no_sync():
            backward(model, rank, world_size)
        with pytest.raises(GradientError, match="no_sync"):
            optimizer.step()

    run(body)
