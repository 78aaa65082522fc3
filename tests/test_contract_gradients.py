"""After a synced backward p.grad is this rank's slice of the average, and backwards add up."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from models import (
    SHAPES,
    LinearForm,
    Twin,
    assert_close,
    assert_ranks_agree,
    assert_same,
    attribute,
    averaged,
    coefficients,
    decay_groups,
    full_gradients,
    letter_batches,
    letters,
    loss_of,
    weights,
)
from ranks import run
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard.errors import GradientError, ShardTensorError

stages = pytest.mark.parametrize("stage", [1, 2, 3])
# What is one piece of code for all stages, or what stage 3 does otherwise.
replicated_stages = pytest.mark.parametrize("stage", [1, 2])


def is_shard_tensor(value):
    return isinstance(value, DTensor) and type(value).__name__ == "ShardTensor"


def synced(rank, world_size, stage, **options):
    """A model after one synced backward, and the gradients it should have."""
    model = LinearForm(SHAPES)
    optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, **options)
    parts = [coefficients(model, r, world_size) for r in range(world_size)]
    model(parts[rank]).backward()
    return model, optimizer, averaged(parts, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@stages
def test_gradients_are_slices_of_the_average_with_the_global_shape(stage, world_size):
    def body(rank, world_size):
        model, _, expected = synced(rank, world_size, stage)
        for name, p in model.named_parameters():
            assert is_shard_tensor(p.grad), name
            assert isinstance(p.grad, torch.Tensor)
            assert p.grad.shape == p.shape
            assert p.grad.numel() == p.numel()
            assert p.grad.dtype == p.dtype
            local = p.grad.to_local()
            assert type(local) is torch.Tensor, name
            total = torch.tensor(local.numel())
            dist.all_reduce(total)
            assert total == p.numel(), f"{name}: the slices of all ranks make {total} elements"
            summed = local.double().sum()
            dist.all_reduce(summed)
            assert summed == expected[name].double().sum(), name
        assert_same(full_gradients(model), expected, "full_tensor()")

    run(body, world_size)


@stages
def test_gradients_of_a_network_are_bitwise_those_of_ddp(stage):
    def body(rank, world_size):
        model, replica = letters(), letters()
        zeroshard.AdamW(model, stage=stage)
        loss_of(model, letter_batches(rank)[0]).backward()
        forward = DistributedDataParallel(replica)
        loss_of(forward, letter_batches(rank)[0]).backward()
        assert_same(full_gradients(model), full_gradients(replica), "gradients")

    run(body)


@pytest.mark.parametrize("world_size", [2, 3])
@stages
def test_full_reductions_are_global_and_replicated(stage, world_size):
    reductions = {
        "norm": lambda g: g.norm(),
        "linalg norm": lambda g: torch.linalg.vector_norm(g),
        "one norm": lambda g: torch.linalg.vector_norm(g, 1),
        "sum": lambda g: g.sum(),
        "mean": lambda g: g.mean(),
        "abs max": lambda g: g.abs().max(),
        "max": lambda g: g.max(),
        "min": lambda g: g.min(),
        "square sum": lambda g: g.square().sum(),
        "three norm": lambda g: g.norm(3),
        "sum over all dims": lambda g: g.sum(dim=tuple(range(g.ndim))),
        "sum in double": lambda g: g.sum(dtype=torch.float64),
        "count": lambda g: torch.count_nonzero(g),
        "isfinite": lambda g: g.isfinite().all(),
        "isnan": lambda g: torch.isnan(g).any(),
    }

    def body(rank, world_size):
        model, _, expected = synced(rank, world_size, stage)
        for name, p in model.named_parameters():
            if not p.numel():
                continue
            for what, reduction in reductions.items():
                result = reduction(p.grad)
                got, wanted = result.item(), reduction(expected[name].double()).item()
                assert f"{result:.3f}" == f"{got:.3f}", f"{name}: {what}"
                # Sums of at most 1073 integers below 4**2: exact in fp32. A norm is a square root
                # of one, two roundings.
                assert got == pytest.approx(wanted, rel=2**-22, abs=2**-22), f"{name}: {what}"
        assert model.empty.grad.sum().item() == 0.0
        assert model.empty.grad.norm().item() == 0.0
        assert model.empty.grad.isfinite().all().item() is True

    run(body, world_size)


@stages
def test_a_nonfinite_element_is_seen_by_every_rank(stage):
    def body(rank, world_size):
        for value in (float("inf"), float("-inf"), float("nan")):
            for position in (0, -1):
                model = LinearForm({"weight": (300,), "other": (300,)})
                zeroshard.AdamW(model, stage=stage)
                gradients = coefficients(model, rank, world_size)
                if rank == 0:
                    gradients["weight"][position] = value
                model(gradients).backward()
                assert model.weight.grad.isfinite().all().item() is False
                assert model.other.grad.isfinite().all().item() is True
                assert not torch.isfinite(model.weight.grad.norm()).item()
                assert not torch.isfinite(model.weight.grad.sum()).item()

    run(body)


ELEMENTWISE = {
    "mul_": lambda g: g.mul_(0.5),
    "mul": lambda g: g * 2,
    "rmul": lambda g: 2 * g,
    "div": lambda g: g / 2,
    "div_": lambda g: g.div_(4),
    "neg": lambda g: -g,
    "add scalar": lambda g: g + 1.0,
    "add self": lambda g: g + g,
    "sub clone": lambda g: g - 3 * g.clone(),
    "product": lambda g: g * g,
    "clone": lambda g: g.clone(),
    "detach": lambda g: g.detach(),
    "abs": lambda g: g.abs(),
    "square": lambda g: g.square(),
    "clamp_": lambda g: g.clamp_(-1.5, 1.5),
    "clamp": lambda g: g.clamp(min=-0.5),
    "zero_": lambda g: g.zero_(),
    "detach_ and zero_": lambda g: g.detach_().zero_(),
    "zeros_like": lambda g: torch.zeros_like(g),
    "device scalar": lambda g: g * torch.tensor(0.25),
    "device scalar in place": lambda g: g.mul_(torch.tensor(0.25)),
    "add_ with alpha": lambda g: g.add_(g.clone(), alpha=2),
}


@replicated_stages
def test_elementwise_operations_keep_the_layout_and_act_in_the_step(stage):
    def body(rank, world_size):
        for what, operation in ELEMENTWISE.items():
            twin = Twin(rank, world_size, stage=stage)
            twin.backward(0)
            for model in (twin.model, twin.plain_model):
                for p in model.parameters():
                    p.grad = operation(p.grad)
            assert all(is_shard_tensor(p.grad) for p in twin.model.parameters()), what
            twin.check_gradients(what)
            twin.step()
            twin.check(what)

    run(body)


FOREACH = {
    "mul_": lambda gs: torch._foreach_mul_(gs, 0.5),
    "mul_ by a tensor": lambda gs: torch._foreach_mul_(gs, torch.tensor(0.5)),
    "mul_ by a list": lambda gs: torch._foreach_mul_(gs, [0.5 + i for i in range(len(gs))]),
    "div_": lambda gs: torch._foreach_div_(gs, 4.0),
    "add_": lambda gs: torch._foreach_add_(gs, [g.clone() for g in gs]),
    "neg_": lambda gs: torch._foreach_neg_(gs),
    "clamp_min_": lambda gs: torch._foreach_clamp_min_(gs, -0.5),
    "clamp_max_": lambda gs: torch._foreach_clamp_max_(gs, 0.5),
    "zero_": lambda gs: torch._foreach_zero_(gs),
}


@replicated_stages
def test_foreach_operations_act_on_the_slices(stage):
    def body(rank, world_size):
        for what, operation in FOREACH.items():
            twin = Twin(rank, world_size, stage=stage)
            twin.backward(0)
            for model in (twin.model, twin.plain_model):
                operation([p.grad for p in model.parameters()])
            twin.check_gradients(what)
            twin.step()
            twin.check(what)
        model, _, expected = synced(rank, world_size, stage)
        halves = torch._foreach_mul([p.grad for p in model.parameters()], 0.5)
        assert all(is_shard_tensor(half) for half in halves)
        for half, name in zip(halves, expected, strict=True):
            assert torch.equal(half.full_tensor(), 0.5 * expected[name])
        norms = torch._foreach_norm([p.grad for p in model.parameters()])
        for norm, name in zip(norms, expected, strict=True):
            assert norm.item() == pytest.approx(expected[name].norm().item(), rel=2**-22)

    run(body)


UNANSWERABLE = {
    "matmul": lambda g: g @ torch.ones(29, 4),
    "matmul from the left": lambda g: torch.ones(4, 37) @ g,
    "view": lambda g: g.view(-1),
    "flatten": lambda g: g.flatten(),
    "reshape": lambda g: g.reshape(29, 37),
    "transpose": lambda g: g.t(),
    "sum over a dim": lambda g: g.sum(0),
    "mean over a dim": lambda g: g.mean(1),
    "norm over a dim": lambda g: g.norm(dim=1),
    "max over a dim": lambda g: g.max(0),
    "index": lambda g: g[0],
    "element": lambda g: g[0, 0],
    "slice": lambda g: g[:3],
    "iteration": lambda g: list(g),
    "cat": lambda g: torch.cat([g, g]),
    "stack": lambda g: torch.stack([g, g]),
    "plain operand": lambda g: g + torch.ones(37, 29),
    "broadcast operand": lambda g: g * torch.ones(29),
    "in place from plain": lambda g: g.copy_(torch.ones(37, 29)),
    "numpy": lambda g: g.numpy(),
    "tolist": lambda g: g.tolist(),
    "median": lambda g: g.median(),
    "topk": lambda g: g.topk(2),
    "std": lambda g: g.std(),
    "sort": lambda g: g.sort(),
    "masked select": lambda g: g[g > 0],
    "cumsum": lambda g: g.cumsum(0),
    "softmax": lambda g: g.softmax(-1),
    "equal to plain": lambda g: torch.equal(g, torch.ones(37, 29)),
}


@replicated_stages
def test_what_a_slice_cannot_answer_raises_and_names_full_tensor(stage):
    def body(rank, world_size):
        model, _, _ = synced(rank, world_size, stage)
        answered = []
        for what, operation in UNANSWERABLE.items():
            try:
                operation(model.matrix.grad)
            except ShardTensorError as error:
                if "full_tensor" not in str(error):
                    answered.append(f"{what}: no remedy in {error}")
            except Exception as error:
                answered.append(f"{what}: {error!r}")
            else:
                answered.append(f"{what}: no error")
        assert not answered, "\n".join(answered)

    run(body)


@stages
def test_equality_of_two_gradients_is_global_or_refused(stage):
    def body(rank, world_size):
        model, _, _ = synced(rank, world_size, stage)
        same, other = model.matrix.grad.clone(), model.matrix.grad.clone()
        if other.to_local().numel():
            other.to_local()[-1] += 1
        for value, wanted in ((same, True), (other, False)):
            try:
                answer = torch.equal(model.matrix.grad, value)
            except ShardTensorError:
                continue
            assert answer is wanted

    run(body, 3)


@stages
def test_slices_of_different_layout_do_not_mix(stage):
    def body(rank, world_size):
        model = LinearForm({"first": (600,), "second": (600,), "third": (600,)})
        optimizer = zeroshard.AdamW(model, stage=stage)
        model(coefficients(model, rank, world_size)).backward()
        with pytest.raises(ShardTensorError, match="full_tensor"):
            model.first.grad + model.third.grad
        with pytest.raises(ShardTensorError, match="full_tensor"):
            model.first.grad.add_(model.third.grad)
        with pytest.raises(ShardTensorError, match="full_tensor"):
            torch._foreach_add_([model.first.grad], [model.third.grad])
        before = weights(model)
        model.first.grad, model.third.grad = model.third.grad, model.first.grad
        with pytest.raises((GradientError, ShardTensorError)):
            optimizer.step()
        assert_same(weights(model), before, "nothing moved")

    run(body)


@stages
def test_a_gradient_survives_printing_and_conversion(stage):
    def body(rank, world_size):
        model, _, expected = synced(rank, world_size, stage)
        if rank == 0:  # communicates nothing
            for p in model.parameters():
                assert repr(p.grad)
                assert str(p.grad)
        wide = model.matrix.grad.double()
        assert is_shard_tensor(wide)
        assert torch.equal(wide.full_tensor(), expected["matrix"].double())
        short = model.matrix.grad.bfloat16()
        assert torch.equal(short.full_tensor(), expected["matrix"].bfloat16())
        moved = model.matrix.grad.to("cpu")
        assert torch.equal(moved.full_tensor(), expected["matrix"])
        again = copy.deepcopy(model.matrix.grad)
        model.matrix.grad.zero_()
        assert torch.equal(again.full_tensor(), expected["matrix"])

    run(body)


@stages
def test_a_pickled_gradient_is_the_slice_and_small(stage):
    def body(rank, world_size):
        model, _, _ = synced(rank, world_size, stage)
        for name, p in model.named_parameters():
            buffer = io.BytesIO()
            torch.save(p.grad, buffer)
            # The slice, not the storage it is a view of; torch's own container takes 2 KiB.
            slack = 4096
            assert buffer.tell() <= p.grad.to_local().numel() * 4 + slack, name
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=False)
            assert loaded.shape == p.shape
            assert torch.equal(loaded.to_local(), p.grad.to_local()), name
            # The other ranks' slices are in their own files.
            with pytest.raises(ShardTensorError, match="load"):
                loaded.full_tensor()

    run(body)


@stages
def test_a_gradient_kept_across_steps_keeps_its_values(stage):
    keep = {
        "itself": lambda g: g,
        "detached": lambda g: g.detach(),
        "data": lambda g: g.data,
    }

    def body(rank, world_size):
        for how, take in keep.items():
            model, optimizer, expected = synced(rank, world_size, stage)
            kept = {name: take(p.grad) for name, p in model.named_parameters()}
            for draw in (1, 2):
                optimizer.step()
                optimizer.zero_grad()
                model(coefficients(model, rank, world_size, draw)).backward()
            got = {name: value.full_tensor() for name, value in kept.items()}
            assert_same(got, expected, f"kept {how}")

    run(body)


# DeepSpeed's stages 2 and 3 decay parameters that were not used.
@pytest.mark.parametrize("world_size", [2, 3])
@stages
def test_parameters_without_a_gradient_are_not_touched_not_even_decayed(stage, world_size):
    choices = {
        "unused everywhere": lambda rank: {"matrix", "bias"},
        "used on the first rank only": lambda rank: (
            set(SHAPES) - {"single"} if rank == 0 else {"matrix", "bias"}
        ),
        "used on the last rank only": lambda rank: (
            set(SHAPES) if rank == world_size - 1 else {"bias"}
        ),
        "a different one on every rank": lambda rank: {list(SHAPES)[rank], "block"},
        "all": lambda rank: set(SHAPES),
        "no rank uses the largest": lambda rank: set(SHAPES) - {"matrix"},
    }

    def body(rank, world_size):
        for bucket_mb in (25, 1e-3):
            settings = {"weight_decay": 0.5}
            twin = Twin(rank, world_size, settings=settings, stage=stage, bucket_mb=bucket_mb)
            for draw, (what, names_by_rank) in enumerate(choices.items()):
                twin.backward(draw, names_by_rank)
                used = set().union(*(names_by_rank(r) for r in range(world_size)))
                for name, p in twin.model.named_parameters():
                    assert (p.grad is None) == (attribute(name) not in used), f"{what}: {name}"
                    assert p.grad is None or is_shard_tensor(p.grad), f"{what}: {name}"
                twin.check_gradients(what)
                twin.step()
                twin.check(what)

    run(body, world_size)


# pytorch#158719, pytorch#126616, DeepSpeed#4808: a rank that skips an expert or a branch hangs.
@stages
def test_a_branch_taken_on_one_rank_is_bitwise_ddp(stage):
    class Branches(nn.Module):
        def __init__(self, rank):
            super().__init__()
            torch.manual_seed(0)
            self.rank = rank
            self.always, self.first, self.never = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            x = self.always(x)
            return self.first(x) if self.rank == 0 else x

    def body(rank, world_size):
        def trained(model, forward, optimizer):
            for scale in (1.0, 8.0, 0.25):
                x = torch.linspace(-1, 1, 24).view(4, 6) * (rank + 1)
                (scale * forward(x).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        settings = {"lr": 1e-2, "weight_decay": 0.5}
        replica, model = Branches(rank), Branches(rank)
        forward = DistributedDataParallel(replica, find_unused_parameters=True)
        plain = torch.optim.AdamW(replica.parameters(), fused=True, **settings)
        expected = trained(replica, forward, plain)
        got = trained(model, model, zeroshard.AdamW(model, stage=stage, **settings))
        assert_same(got, expected, "branches")
        assert torch.equal(got["never.weight"], Branches(rank).never.weight)

    run(body)


# DeepSpeed ZeRO-2 keeps the last of several backwards; accelerate#3877.
@pytest.mark.parametrize("world_size", [1, 2, 3])
@stages
def test_several_backwards_add_up_synced_or_not(stage, world_size):
    patterns = {
        "synced": "sss",
        "deferred": "nns",
        "a sync in the middle": "nsns",
        "a sync first": "snns",
        "one": "s",
    }

    def body(rank, world_size):
        for bucket_mb in (25, 1e-3):
            twin = Twin(rank, world_size, stage=stage, bucket_mb=bucket_mb)
            draw = 0
            for what, pattern in patterns.items():
                for kind in pattern:
                    draw += 1
                    if kind == "n":
                        with twin.optimizer.no_sync():
                            twin.backward(draw)
                    else:
                        twin.backward(draw)
                twin.check_gradients(what)
                twin.step()
                twin.check(what)

    run(body, world_size)


@replicated_stages
def test_ranks_may_defer_different_numbers_of_backwards(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        numbers = [3, 1, 0]
        for step in range(2):
            with twin.optimizer.no_sync():
                for draw in range(numbers[rank]):
                    mine = coefficients(twin.model, rank, world_size, 10 * step + draw)
                    twin.model(mine).backward()
            parts = [
                coefficients(twin.model, r, world_size, 10 * step + draw)
                for r in range(world_size)
                for draw in range(numbers[r])
            ]
            twin.expect(averaged(parts, world_size))
            twin.backward(10 * step + 9)
            twin.check_gradients(f"step {step}")
            twin.step()
            twin.check(f"step {step}")

    run(body, 3)


@stages
def test_accumulated_gradients_of_a_network_equal_ddps(stage):
    def body(rank, world_size):
        replica = letters()
        forward = DistributedDataParallel(replica)
        for batch in letter_batches(rank)[:3]:
            loss_of(forward, batch).backward()
        expected = full_gradients(replica)
        for deferred in (False, True):
            model = letters()
            optimizer = zeroshard.AdamW(model, stage=stage)
            first, second, third = letter_batches(rank)[:3]
            for batch in (first, second):
                if deferred:
                    with optimizer.no_sync():
                        loss_of(model, batch).backward()
                else:
                    loss_of(model, batch).backward()
            loss_of(model, third).backward()
            largest = max(float(g.abs().max()) for g in expected.values())
            # Six terms are added in another order: at most 5 roundings of a partial sum that is
            # below six times the largest entry.
            bound = 5 * 2**-24 * 6 * largest
            assert_close(full_gradients(model), expected, f"deferred={deferred}", atol=bound)

    run(body)


@stages
def test_gradients_not_cleared_after_a_step_go_on_adding_up(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        for step in range(3):
            twin.backward(step)
            twin.optimizer.step()
            twin.plain.step()
            twin.check(f"step {step}")

    run(body)


@stages
def test_a_parameter_used_only_in_a_deferred_backward_is_counted(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        with twin.optimizer.no_sync():
            twin.backward(0, lambda rank: {"matrix", "single"} if rank == 0 else {"bias"})
        twin.backward(1, lambda rank: {"block", "bias"})
        twin.check_gradients("after the sync")
        twin.step()
        twin.check("after the step")

    run(body)


@stages
def test_a_step_on_gradients_left_local_raises_on_every_rank(stage):
    def body(rank, world_size):
        for first in ("nothing", "a synced backward"):
            twin = Twin(rank, world_size, stage=stage)
            before = weights(twin.model)
            if first == "a synced backward":
                twin.backward(0)
            with twin.optimizer.no_sync():
                twin.backward(1)
            with pytest.raises(GradientError, match="no_sync"):
                twin.optimizer.step()
            assert_same(weights(twin.model), before, "nothing moved")
            twin.backward(2)
            twin.step()
            twin.check(f"synced after {first}")
            with twin.optimizer.no_sync():
                twin.backward(3)
            twin.zero_grad()
            twin.backward(4)
            twin.step()
            twin.check("a local gradient that was dropped is forgotten")

    run(body)


@stages
def test_gradients_dropped_after_a_deferred_backward_stay_dropped(stage):
    """By whoever drops them: also what an earlier synced backward had left."""

    def by_hand(twin):
        for model in (twin.model, twin.plain_model):
            for p in model.parameters():
                p.grad = None

    def by_model(twin):
        twin.model.zero_grad()
        twin.plain_model.zero_grad()

    def one(twin):
        twin.model.matrix.grad = None
        twin.plain_model.matrix.grad = None

    def body(rank, world_size):
        for drop in (Twin.zero_grad, by_model, by_hand, one):
            for names in ({"matrix", "bias"}, {"bias"}):
                twin = Twin(rank, world_size, stage=stage)
                twin.backward(0)
                with twin.optimizer.no_sync():
                    twin.backward(1, lambda rank: set(SHAPES) if rank else {"bias"})
                drop(twin)
                twin.backward(2, lambda rank, names=names: names)
                twin.check_gradients(drop.__name__)
                twin.step()
                twin.check(drop.__name__)

    run(body)


@stages
def test_a_local_gradient_of_one_rank_raises_on_every_rank(stage):
    def body(rank, world_size):
        model = LinearForm({"first": (300,), "second": (20,)})
        optimizer = zeroshard.AdamW(model, stage=stage)
        gradients = coefficients(model, rank, world_size)
        with optimizer.no_sync():
            model({"second": gradients["second"]} if rank == 1 else gradients).backward()
        before = weights(model)
        with pytest.raises(GradientError, match="no_sync"):
            optimizer.step()
        assert_same(weights(model), before, "nothing moved")

    run(body)


@stages
def test_no_sync_ends_with_its_block_even_by_an_error_and_nests(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        with pytest.raises(KeyError), twin.optimizer.no_sync():
            raise KeyError("a loader")
        twin.backward(0)
        twin.step()
        twin.check("after an error")
        with twin.optimizer.no_sync():
            with twin.optimizer.no_sync():
                twin.backward(1)
            twin.backward(2)
        twin.backward(3)
        twin.step()
        twin.check("nested")

    run(body)


@stages
def test_two_losses_of_different_submodules_before_a_step(stage):
    def body(rank, world_size):
        for bucket_mb in (25, 1e-3):
            twin = Twin(rank, world_size, stage=stage, bucket_mb=bucket_mb)
            for draw in range(0, 9, 3):
                twin.backward(draw, lambda rank: {"matrix", "bias", "empty"})
                assert twin.model.experts.grad is None
                twin.backward(draw + 1, lambda rank: {"experts", "scalar", "bias"})
                twin.backward(draw + 2, lambda rank: {"pair"})
                twin.check_gradients("three losses")
                twin.step()
                twin.check("three losses")

    run(body)


@stages
def test_a_retained_graph_may_be_run_twice(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)

        def twice(loss):
            loss.backward(retain_graph=True)
            loss.backward()

        twin.backward(0, backward=twice)
        parts = [coefficients(twin.model, r, world_size, 0) for r in range(world_size)]
        twin.expect(averaged(parts, world_size))
        twin.check_gradients("twice")
        twin.step()
        twin.check("twice")

    run(body)


@stages
def test_backward_may_be_called_with_a_gradient_and_with_chosen_inputs(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0, backward=lambda loss: loss.backward(torch.tensor(1.0)))
        twin.check_gradients("a gradient of one")
        chosen = {"matrix", "scalar"}
        inputs = [getattr(twin.model, name) for name in sorted(chosen)]
        parts = [coefficients(twin.model, r, world_size, 1) for r in range(world_size)]
        twin.model(parts[rank]).backward(inputs=inputs)
        kept = [{n: c for n, c in part.items() if attribute(n) in chosen} for part in parts]
        twin.expect(averaged(kept, world_size))
        twin.check_gradients("chosen inputs")
        twin.step()
        twin.check("chosen inputs")

    run(body)


@stages
def test_autograd_grad_between_backwards_leaves_gradients_alone(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        for draw in range(2):
            twin.backward(2 * draw)
            other = coefficients(twin.model, rank, world_size, 99)
            found = torch.autograd.grad(twin.model(other), list(twin.model.parameters()))
            for name, gradient in zip(other, found, strict=True):
                assert type(gradient) is torch.Tensor
                assert torch.equal(gradient, other[name]), "the plain gradient of this rank"
            assert all(is_shard_tensor(p.grad) for p in twin.model.parameters())
            twin.check_gradients("after autograd.grad")
            some = [twin.model.matrix, twin.model.bias]
            torch.autograd.grad(twin.model(other), some)
            twin.check_gradients("after autograd.grad of some")
            twin.backward(2 * draw + 1)
            twin.check_gradients("added up")
            twin.step()
            twin.check("after the step")

    run(body)


@replicated_stages
def test_autograd_grad_on_one_rank_only_is_local(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        if rank == 1:
            other = coefficients(twin.model, rank, world_size, 99)
            torch.autograd.grad(twin.model(other), list(twin.model.parameters()))
        twin.check_gradients("after autograd.grad")
        twin.backward(1)
        twin.step()
        twin.check("after the step")

    run(body)


@replicated_stages
def test_a_gradient_penalty_is_bitwise_ddp(stage):
    def penalised(model, forward, optimizer, batches):
        for batch in batches:
            loss = loss_of(forward, batch)
            found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + 0.1 * sum(g.square().sum() for g in found)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    def body(rank, world_size):
        batches = letter_batches(rank)[:2]
        plain_model, model = letters(), letters()
        # DDP does not support autograd.grad: average by hand, halves being exact.
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, fused=True)

        def average(*_):
            for p in plain_model.parameters():
                p.grad.div_(world_size)
                dist.all_reduce(p.grad)

        plain.register_step_pre_hook(average)
        expected = penalised(plain_model, plain_model, plain, batches)
        got = penalised(model, model, zeroshard.AdamW(model, lr=1e-2, stage=stage), batches)
        assert_same(got, expected, "penalty")

    run(body)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@stages
def test_backward_with_create_graph_gives_the_same_gradients(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        for draw in range(2):
            twin.backward(draw, backward=lambda loss: loss.backward(create_graph=True))
        twin.check_gradients("create_graph")
        twin.step()
        twin.check("create_graph")

    run(body)


class Stack(nn.Module):
    """Checkpointed blocks, one of them used twice; with adapters all else is frozen."""

    def __init__(self, kind, *, adapters=False):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 9)) for _ in range(3)
        )
        self.adapters = None
        if adapters:
            self.requires_grad_(False)
            self.adapters = nn.ModuleList(nn.Linear(9, 9, bias=False) for _ in range(3))
        else:
            self.last = nn.Linear(9, 1)

    def block(self, index, x):
        y = x + self.blocks[index](x)
        return y if self.adapters is None else y + self.adapters[index](x)

    def forward(self, x):
        for index in (0, 1, 2, 0):
            if self.kind is None:
                x = self.block(index, x)
            else:
                x = checkpoint(self.block, index, x, use_reentrant=self.kind == "re-entrant")
        return x.square().mean() if self.adapters is not None else self.last(x).square().mean()


def stack_input(rank, draw):
    generator = torch.Generator().manual_seed(50 + 10 * draw + rank)
    # Re-entrant checkpointing needs an input that requires a gradient.
    return torch.randn(5, 9, generator=generator).requires_grad_()


# DeepSpeed#4332, DeepSpeed#4595, trl#2514: checkpointing of both kinds, with frozen parts.
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("kind", [None, "non-re-entrant", "re-entrant"])
@stages
def test_checkpointed_blocks_used_twice_have_the_gradients_of_ddp(stage, kind, adapters):
    def body(rank, world_size):
        replica = Stack(None, adapters=adapters)
        forward = DistributedDataParallel(replica)
        for draw in range(2):
            forward(stack_input(rank, draw)).backward()
        expected = full_gradients(replica)
        largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
        for bucket_mb in (25, 1e-3):
            model = Stack(kind, adapters=adapters)
            optimizer = zeroshard.AdamW(model, stage=stage, bucket_mb=bucket_mb)
            for _ in range(2):
                for draw in range(2):
                    model(stack_input(rank, draw)).backward()
                got = full_gradients(model)
                frozen = [name for name, g in got.items() if g is None]
                assert frozen == [name for name, g in expected.items() if g is None]
                # Two uses, two ranks and two backwards are added in another order: 7 roundings
                # of a partial sum below eight times the largest entry.
                assert_close(
                    {name: g for name, g in got.items() if g is not None},
                    {name: g for name, g in expected.items() if g is not None},
                    f"{kind}, bucket_mb={bucket_mb}",
                    atol=7 * 2**-24 * 8 * largest,
                )
                optimizer.zero_grad()

    run(body)


@pytest.mark.parametrize("kind", [None, "non-re-entrant", "re-entrant"])
@stages
def test_checkpointed_training_leaves_the_ranks_in_agreement(stage, kind):
    def body(rank, world_size):
        for adapters in (False, True):
            model = Stack(kind, adapters=adapters)
            before = weights(model)
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, bucket_mb=1e-3)
            for draw in range(4):
                model(stack_input(rank, draw)).backward()
                optimizer.step()
                optimizer.zero_grad()
            after = weights(model)
            assert_ranks_agree(after, f"{kind}, adapters={adapters}")
            for name, p in model.named_parameters():
                moved = not torch.equal(after[name], before[name])
                assert moved == p.requires_grad, name

    run(body)


@replicated_stages
def test_checkpointing_on_one_rank_only_changes_nothing(stage):
    def body(rank, world_size):
        expected = Stack(None)
        zeroshard.AdamW(expected, stage=stage)
        expected(stack_input(rank, 0)).backward()
        model = Stack("re-entrant" if rank == 1 else None)
        zeroshard.AdamW(model, stage=stage, bucket_mb=1e-3)
        model(stack_input(rank, 0)).backward()
        wanted = full_gradients(expected)
        largest = max(float(g.abs().max()) for g in wanted.values())
        # As above, of one backward: four terms.
        assert_close(full_gradients(model), wanted, "mixed", atol=3 * 2**-24 * 4 * largest)

    run(body)


@stages
def test_a_full_plain_gradient_given_by_the_user_is_used_as_it_is(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        given = torch.randn(37, 29, generator=torch.Generator().manual_seed(5))
        for model in (twin.model, twin.plain_model):
            model.matrix.grad = given.clone()
        twin.step()
        twin.check("one of them plain")
        for model in (twin.model, twin.plain_model):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.75)
        twin.step()
        twin.check("all plain, no backward")
        for model in (twin.model, twin.plain_model):
            model.bias.grad = torch.full_like(model.bias, 2.0)
        twin.backward(1)
        twin.check_gradients("a backward on top")
        twin.step()
        twin.check("a backward on top")

    run(body)


@stages
def test_a_full_gradient_taken_out_and_put_back_is_the_same(stage):
    """Gradient surgery: `p.grad = f(p.grad.full_tensor())`."""

    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        for draw in range(2):
            twin.backward(draw)
            for p, q in zip(twin.model.parameters(), twin.plain_model.parameters(), strict=True):
                p.grad = 2 * p.grad.full_tensor()
                q.grad = 2 * q.grad
            twin.step()
            twin.check("surgery")

    run(body)


@stages
def test_hooks_of_the_user_see_plain_local_gradients(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        seen = []

        def double(gradient):
            seen.append(type(gradient))
            return 2 * gradient

        twin.model.matrix.register_hook(double)
        twin.plain_model.matrix.register_hook(double)  # never fires: its gradients are given
        for draw in range(2):
            twin.backward(draw, lambda rank: {"matrix", "bias"})
            parts = [coefficients(twin.model, r, world_size, draw, {"matrix"}) for r in range(2)]
            twin.expect(averaged(parts, world_size))
            twin.check_gradients("doubled by a hook")
        twin.step()
        twin.check("doubled by a hook")
        assert seen == [torch.Tensor] * 2

    run(body)


@stages
def test_a_backward_through_a_graph_from_before_the_step_raises_as_in_torch(stage):
    def body(rank, world_size):
        model = letters()
        optimizer = zeroshard.AdamW(decay_groups(model), model=model, stage=stage)
        stale = loss_of(model, letter_batches(rank)[0])
        loss_of(model, letter_batches(rank)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    run(body)


@stages
def test_an_optimizer_dropped_by_the_user_still_averages(stage):
    """Its hooks live on the parameters: no rank may be left with local gradients."""

    def body(rank, world_size):
        model, optimizer, expected = synced(rank, world_size, stage)
        optimizer.zero_grad()
        del optimizer
        parts = [coefficients(model, r, world_size) for r in range(world_size)]
        model(parts[rank]).backward()
        assert_same(full_gradients(model), averaged(parts, world_size), "no optimizer held")
        assert_same(full_gradients(model), expected, "no optimizer held")

    run(body)


@stages
def test_a_gradient_that_was_kept_over_zero_grad_and_put_back_counts(stage):
    """Also on a rank that has none of its own in the next backward."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(600)), nn.Parameter(torch.ones(600))

        def forward(self, uses_b):
            return self.a.sum() * 2 + (self.b.sum() * 3 if uses_b else 0)

    def body(rank, world_size):
        model = Two()
        optimizer = zeroshard.AdamW(model, stage=stage)
        model(True).backward()
        kept = model.b.grad
        optimizer.zero_grad()
        model.b.grad = kept
        model(rank == 1).backward()
        assert model.b.grad.full_tensor().unique().tolist() == [4.5]

    run(body)
