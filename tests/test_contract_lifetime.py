"""Copies are independent, closing gives a plain model back, and what is dropped is collected."""

import copy
import gc
import weakref

import pytest
import torch
from models import (
    SHAPES,
    LinearForm,
    Twin,
    assert_same,
    coefficients,
    decay_groups,
    letter_batches,
    letters,
    loss_of,
    train,
    weights,
)
from ranks import run

import zeroshard
from zeroshard.errors import ConfigError

stages = pytest.mark.parametrize("stage", [1, 2, 3])
# Stage 3 refuses to copy parameters that are not there.
replicated_stages = pytest.mark.parametrize("stage", [1, 2])


def is_plain(model):
    return all(
        not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters()
    )


@replicated_stages
def test_a_deep_copy_of_a_model_is_plain_and_independent(stage):
    def body(rank, world_size):
        for dtype in (torch.float32, torch.bfloat16):
            model, other = letters(dtype=dtype), letters(dtype=dtype)
            optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, stage=stage)
            parallel = zeroshard.AdamW(decay_groups(other), lr=1e-2, stage=stage)
            batches = letter_batches(rank)
            train(model, optimizer, batches[:2])
            train(other, parallel, batches[:2])
            twin = copy.deepcopy(model)
            assert is_plain(twin)
            assert_same(weights(twin), weights(model), "copied")
            sizes = {p.untyped_storage().nbytes() for p in twin.parameters()}
            assert max(sizes) <= 2 * 4 * max(p.numel() for p in twin.parameters())
            plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
            if rank == 0:  # communicates nothing
                before = weights(model)
                loss_of(twin, batches[2]).backward()
                assert all(type(p.grad) is torch.Tensor for p in twin.parameters())
                plain.step()
                assert_same(weights(model), before, "training the copy moves the copy alone")
            train(model, optimizer, batches[2:4])
            train(other, parallel, batches[2:4])
            assert_same(weights(model), weights(other), "the original trains on")

    run(body)


@replicated_stages
def test_a_deep_copy_between_backward_and_step_changes_nothing(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        assert is_plain(copy.deepcopy(twin.model))
        with twin.optimizer.no_sync():
            twin.backward(1)
            assert is_plain(copy.deepcopy(twin.model))
        twin.backward(2)
        twin.step()
        twin.check("copied meanwhile")

    run(body)


@replicated_stages
def test_an_averaged_model_follows_the_weights(stage):
    def body(rank, world_size):
        model, batches = letters(), letter_batches(rank)
        optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, stage=stage)
        average = torch.optim.swa_utils.AveragedModel(model)
        seen = []
        for batch in batches[:3]:
            train(model, optimizer, [batch])
            average.update_parameters(model)
            seen.append(weights(model)["gain"])
        torch.testing.assert_close(average.module.gain.detach(), torch.stack(seen).mean())
        assert int(average.n_averaged) == 3

    run(body)


@replicated_stages
def test_groups_can_be_copied(stage):
    def body(rank, world_size):
        model = letters()
        optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, stage=stage)
        train(model, optimizer, letter_batches(rank)[:1])
        groups = copy.deepcopy(optimizer.param_groups)
        assert [len(g["params"]) for g in groups] == [
            len(g["params"]) for g in optimizer.param_groups
        ]
        ours = {p.data_ptr() for p in model.parameters()}
        for group in groups:
            for p in group["params"]:
                assert p.data_ptr() not in ours

    run(body)


@replicated_stages
def test_a_copy_of_an_optimizer_refuses_to_step(stage):
    """Its ranks would not know of it; what it must not do is train nothing, or half."""

    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.step()
        model, optimizer = copy.deepcopy((twin.model, twin.optimizer))
        before = weights(model)
        model(coefficients(model, rank, world_size, 1)).backward()
        with pytest.raises(ConfigError):
            optimizer.step()
        assert_same(weights(model), before, "the copy")
        twin.backward(1)
        twin.step()
        twin.check("the original")

    run(body)


@stages
def test_close_gives_back_a_plain_model_that_trains_on(stage):
    def body(rank, world_size):
        model, other = LinearForm(SHAPES), LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        for draw in range(2):
            model(coefficients(model, rank, world_size, draw)).backward()
            optimizer.step()
            optimizer.zero_grad()
        other.load_state_dict(weights(model))
        optimizer.close()
        optimizer.close()
        assert is_plain(model)
        assert all(p.grad is None for p in model.parameters())
        for one in (model, other):
            plain = torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True)
            for draw in range(2):
                mine = coefficients(one, rank, world_size, draw)
                one(mine).backward()
                for name, p in one.named_parameters():
                    assert type(p.grad) is torch.Tensor
                    assert torch.equal(p.grad, mine[name]), "local, as in torch"
                plain.step()
                plain.zero_grad()
        assert_same(weights(model), weights(other), "after close")

    run(body)


@stages
def test_after_close_16_bit_gradients_are_16_bit_again(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES, torch.bfloat16)
        optimizer = zeroshard.AdamW(model, stage=stage)
        model(coefficients(model, rank, world_size)).backward()
        optimizer.close()
        model.zero_grad()
        model(coefficients(model, rank, world_size)).backward()
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        with pytest.raises(RuntimeError):
            model.bias.grad = torch.zeros(23)

    run(body)


@stages
def test_a_model_may_be_given_to_another_optimizer_after_close(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.step()
        twin.optimizer.consolidate_state_dict(to=0)
        twin.optimizer.close()
        another = {1: 3, 2: 1, 3: 2}[stage]
        twin.optimizer = zeroshard.AdamW(twin.model, lr=1e-2, weight_decay=0.1, stage=another)
        twin.plain = torch.optim.AdamW(
            twin.plain_model.parameters(), lr=1e-2, weight_decay=0.1, fused=True
        )
        for draw in (1, 2):
            twin.backward(draw)
            twin.step()
        twin.check("second optimizer")

    run(body)


@stages
def test_a_second_optimizer_on_the_same_parameters_is_refused_or_takes_over(stage):
    """As when a notebook's cell is run again: both averaging, or both stepping, would be wrong."""

    def body(rank, world_size):
        for dropped in (True, False):
            twin = Twin(rank, world_size, stage=stage)
            twin.backward(0)
            twin.step()
            first = None if dropped else twin.optimizer
            twin.optimizer = None
            settings = {"lr": 1e-2, "weight_decay": 0.1}
            try:
                twin.optimizer = zeroshard.AdamW(twin.model, stage=stage, **settings)
            except ConfigError:
                continue
            twin.plain = torch.optim.AdamW(twin.plain_model.parameters(), fused=True, **settings)
            for draw in (1, 2):
                with twin.optimizer.no_sync():
                    twin.backward(2 * draw)
                twin.backward(2 * draw + 1)
                twin.check_gradients(f"dropped={dropped}")
                twin.step()
                twin.check(f"dropped={dropped}")
            del first

    run(body)


@stages
def test_a_dropped_optimizer_and_model_are_collected(stage):
    def body(rank, world_size):
        held = []
        for closed in (False, True):
            model = letters()
            optimizer = zeroshard.AdamW(decay_groups(model), model=model, stage=stage)
            train(model, optimizer, letter_batches(rank)[:2])
            loss_of(model, letter_batches(rank)[2]).backward()
            held += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.gain)]
            if closed:
                optimizer.close()
            del model, optimizer
        gc.collect()
        alive = [reference() for reference in held if reference() is not None]
        assert not alive, [type(thing).__name__ for thing in alive]

    run(body)


@stages
def test_training_again_and_again_holds_no_more_tensors(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)

        def count():
            gc.collect()
            return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

        twin.backward(0)
        twin.optimizer.clip_grad_norm_(1e6)  # makes its tables
        twin.step()
        before = count()
        for draw in range(8):
            twin.backward(draw)
            twin.optimizer.clip_grad_norm_(1e6)
            twin.step()
        # What one step leaves for the next may come and go.
        assert count() <= before + 4

    run(body)
