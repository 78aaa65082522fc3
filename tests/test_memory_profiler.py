"""What a profiler measures in real loops, what it leaves behind, and whom it agrees with."""

import copy
import gc
import io
import json
import os
import types
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from ranks import run
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import zeroshard
from zeroshard import ownership, tracing
from zeroshard.errors import ConfigError
from zeroshard.memory import profile
from zeroshard.memory.allocator import AllocatorPeak, DeviceMemory, Snapshot
from zeroshard.memory.profile import MemoryProfiler
from zeroshard.memory.ranks import of_all_ranks
from zeroshard.memory.schema import CATEGORIES, POINTS, Peak, Report
from zeroshard.memory.simulate import simulate
from zeroshard.memory.timing import Timing

WIDTH, LETTERS = 32, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.widen(x)))


class Decoder(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, LETTERS)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, letters):
        x = self.embed(letters)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model, letters):
    return F.cross_entropy(model(letters).flatten(0, 1), letters.flatten())


def batch(rows=4):
    return torch.randint(LETTERS, (rows, 16))


def setting(optimizer="torch", **options):
    torch.manual_seed(0)
    model = Decoder()
    if optimizer == "torch":
        return model, torch.optim.AdamW(model.parameters(), **options)
    return model, zeroshard.AdamW(model, **options)


def train(model, optimizer, steps=3, rows=4):
    for _ in range(steps):
        loss_of(model, batch(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()


def measured(model, optimizer, steps=3, **options):
    with MemoryProfiler(model, optimizer, **options) as profiler:
        train(model, optimizer, steps)
    return profiler


def nbytes_of(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    return [hook for m in model.modules() for kind in kinds for hook in getattr(m, kind)]


def assert_nothing_is_left(model, hooks=()):
    assert _get_current_dispatch_mode() is None
    assert not ownership._observers
    assert not tracing._followers
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert hooks_of(model) == list(hooks)


# --- what is measured -------------------------------------------------------------------------


def test_torchs_own_optimizer_is_followed_to_the_byte():
    model, optimizer = setting()
    report = measured(model, optimizer).report()
    whole = nbytes_of(model.parameters())
    assert set(report.points) == set(POINTS)
    for name in ("after_zero_grad", "after_forward", "after_backward", "after_step"):
        held = report.points[name]
        assert held["parameters"] == whole
        assert held["buffers"] == 20
        assert held["moments"] == 2 * whole
    assert "moments" not in report.points["constructed"]
    assert report.points["after_backward"]["gradients"] == whole
    assert report.points["after_step"]["gradients"] == whole
    assert "gradients" not in report.points["after_zero_grad"]
    assert report.points["after_zero_grad"]["inputs"] == nbytes_of([batch()])
    # Saved for backward: what goes into a linear layer or tanh, and tanh's result, once each; the
    # logarithms of the softmax, the loss and its weight are made behind the blocks.
    activations = 4 * 4 * 16 * (WIDTH + 3 * (4 * WIDTH + WIDTH))
    held = report.points["after_forward"]["activations"]
    assert held == activations
    assert report.points["after_forward"]["logits_and_loss"] >= 4 * 4 * 16 * LETTERS


def own_keys(held):
    """What optimizer.memory() knows, of what a profiler saw, and no empty ones."""
    keys = (
        "parameters",
        "unsharded_parameters",
        "gradients",
        "master",
        "moments",
        "communication",
    )
    # Gloo's thread may still have the few bytes that the ranks told each other last.
    return {key: held[key] for key in keys if held.get(key, 0) > 64}


def compare_with_memory(rank, world_size, stage, **options):
    """The points of one step, as the profiler and as the optimizer itself has them."""
    model, optimizer = setting("ours", stage=stage, **options)
    expected = {}
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(3):
            expected["after_zero_grad"] = own_keys(optimizer.memory())
            loss = loss_of(model, batch())
            expected["after_forward"] = own_keys(optimizer.memory())
            loss.backward()
            expected["after_backward"] = own_keys(optimizer.memory())
            optimizer.step()
            expected["after_step"] = own_keys(optimizer.memory())
            optimizer.zero_grad()
            del loss
    report = profiler.report()
    found = {name: own_keys(report.points[name]) for name in expected}
    optimizer.close()
    return found, expected, report


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_holds_what_the_optimizer_says(stage):
    found, expected, _ = compare_with_memory(0, 1, stage)
    assert found == expected


def test_two_ranks_hold_what_the_optimizer_says():
    cases = [
        {"stage": 1},
        {"stage": 2, "bucket_mb": 0.02},
        {"stage": 3},
        {"stage": 3, "precision": zeroshard.Precision(moments="int8"), "max_grad_norm": 1.0},
        {"stage": 3, "reshard_after_forward": False},
    ]

    def all_cases(rank, world_size):
        return [compare_with_memory(rank, world_size, **case) for case in cases]

    for results in run(all_cases):
        for case, (found, expected, report) in zip(cases, results, strict=True):
            assert found == expected, case
            assert found["after_step"]["moments"] > 0
            assert report.configuration["world_size"] == 2
            assert report.configuration["stage"] == case["stage"]


def test_categories_add_up_at_every_sample():
    report = measured(*setting("ours", stage=2)).report()
    assert max(sample.total for sample in report.timeline) == report.peak.total
    assert set().union(*(sample.categories for sample in report.timeline)) <= set(CATEGORIES)
    assert {sample.phase for sample in report.timeline} >= {"data", "forward", "backward", "step"}
    assert any(sample.where.startswith("blocks.1") for sample in report.timeline)


def test_the_peak_says_in_words_where_it_is():
    words = measured(*setting()).report().peak.in_words()
    assert words.startswith("peak ")
    assert " requested in backward of " in words
    assert ", step 2: moments " in words or ", step 3: moments " in words


def test_gradients_add_up_over_micro_batches():
    model, optimizer = setting()
    whole = nbytes_of(model.parameters())
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(3):
            for _ in range(3):
                loss_of(model, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    points = profiler.report().points
    assert len(profiler.summaries) == 3
    assert "gradients" not in points["after_zero_grad"]  # of the first of them
    assert points["after_forward"]["gradients"] == whole  # of the last one
    assert points["after_backward"]["gradients"] == whole


def test_no_sync_is_seen_as_a_whole_gradient():
    def accumulate(rank, world_size):
        model, optimizer = setting("ours", stage=2)
        with MemoryProfiler(model, optimizer) as profiler:
            for _ in range(2):
                with optimizer.no_sync():
                    loss_of(model, batch()).backward()
                    local = optimizer.memory()["gradients"]
                loss_of(model, batch()).backward()
                optimizer.step()
                optimizer.zero_grad()
        held = profiler.report().points["after_forward"]["gradients"]
        return held, local, nbytes_of(p.detach() for p in list(model.parameters())[:1])

    for held, local, _ in run(accumulate):
        assert held == local


@pytest.mark.parametrize("optimizer", ["torch", "ours"])
def test_a_closure_is_no_part_of_the_step(optimizer):
    model, optimizer = setting(optimizer)
    plain = measured(*setting("torch" if type(optimizer) is torch.optim.AdamW else "ours"))
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch())
        loss.backward()
        calls.append(loss.item())
        return loss

    with MemoryProfiler(model, optimizer) as profiler:
        losses = [optimizer.step(closure) for _ in range(3)]
        optimizer.step(closure=closure)
    assert [loss.item() for loss in losses] == calls[:3]
    report = profiler.report()
    assert report.points["after_backward"]["gradients"] > 0
    phases = [sample.phase for sample in report.timeline]
    assert phases[-1] == "step"
    assert "step" not in phases[: phases.index("backward")]
    if optimizer.__class__ is torch.optim.AdamW:
        expected = plain.report().points["after_backward"]["gradients"]
        assert report.points["after_backward"]["gradients"] == expected


def ddp_buckets(rank, world_size):
    found = []
    for as_view in (False, True):
        model, _ = setting()
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        optimizer = torch.optim.AdamW(wrapped.parameters())
        report = measured(wrapped, optimizer).report()
        found.append((dict(report.points["after_backward"]), nbytes_of(model.parameters())))
        found.append(hooks_of(model))
        where = {sample.where for sample in report.timeline}
        assert any(name.startswith("module.blocks.1") for name in where), where
    return found


def test_ddp_is_a_baseline_with_its_buckets():
    for (copied, whole), hooks, (as_views, _), more_hooks in run(ddp_buckets):
        assert hooks == more_hooks == []
        assert copied["parameters"] == as_views["parameters"] == whole
        assert copied["moments"] == as_views["moments"] == 2 * whole
        assert copied["gradients"] == whole
        assert as_views["gradients"] >= whole
        assert copied["communication"] >= whole
        # The used or not bits, at most: nothing of a gradient's size is there twice.
        assert as_views.get("communication", 0) < whole / 10


def test_an_evaluation_leaves_nothing_for_a_backward():
    model, optimizer = setting()
    kept = []
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(3):
            loss_of(model, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                kept = [model(batch(8))]
            model.train()
    plain = measured(*setting()).report()
    found = profiler.report()
    for name in ("activations", "logits_and_loss", "gradients", "moments"):
        assert found.points["after_forward"].get(name) == plain.points["after_forward"].get(name)
    assert found.points["after_forward"]["bookkeeping"] >= nbytes_of(kept)
    assert found.peak.categories["activations"] == plain.peak.categories["activations"]


def test_a_forward_whose_backward_never_comes_does_not_disturb():
    model, optimizer = setting()
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(3):
            model(batch())
            loss_of(model, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert profiler.report().points == measured(*setting()).report().points


def test_what_one_backward_needs_twice_is_an_activation_once():
    class Shared(Decoder):
        def forward(self, letters):
            x = super().forward(letters)
            return x + super().forward(letters)

    torch.manual_seed(0)
    model = Shared()
    report = measured(model, torch.optim.AdamW(model.parameters())).report()
    single = measured(*setting()).report()
    assert (
        report.points["after_forward"]["activations"]
        > 1.9 * (single.points["after_forward"]["activations"])
    )


def held_after_forward(model, loss, optimizer=None):
    """Points after the forward of the second step, and what the optimizer's parameters are."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(2):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    return profiler.report()


def test_an_evaluation_between_a_forward_and_its_backward_takes_nothing_from_it():
    model, _ = setting()

    def loss():
        found = loss_of(model, batch())
        with torch.no_grad():
            model(batch(8))
        return found

    found = held_after_forward(model, loss).points["after_forward"]
    assert (
        found == held_after_forward(model, lambda: loss_of(model, batch())).points["after_forward"]
    )


class Aggregate(nn.Module):
    """A layer of a graph network."""

    def __init__(self, neighbours):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("neighbours", neighbours)

    def forward(self, given, x):
        return torch.sparse.mm(given, torch.sparse.mm(self.neighbours, self.linear(x))).sum()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_tensor_is_its_indices_and_values(convert):
    model, given = Aggregate(convert(torch.eye(6))), convert(torch.eye(6))
    held = held_after_forward(model, lambda: model(given, torch.ones(6, 4)))
    found = held.points["after_forward"]
    if given.layout is torch.sparse_coo:
        parts = [given._indices(), given._values()]
    else:
        parts = [given.crow_indices(), given.col_indices(), given.values()]
    assert found["buffers"] == nbytes_of(parts)
    assert found["inputs"] == nbytes_of(parts) + 6 * 4 * 4


def test_a_sparse_gradient_is_a_gradient():
    model = nn.Embedding(50, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    report = held_after_forward(model, lambda: model(torch.arange(5)).sum(), optimizer)
    assert report.points["after_backward"]["gradients"] >= 5 * 8 * 4
    assert report.points["after_step"]["moments"] == 2 * 50 * 8 * 4


def test_a_tensor_that_an_operation_makes_larger_is_measured_again():
    model = nn.Linear(4, 4)
    kept = []

    def loss():
        larger = torch.empty(0).resize_(1000, 4).fill_(1.0)
        result = torch.empty(0)
        torch.mul(larger, 2.0, out=result)
        kept[:] = [larger, result]
        return model(result).sum()

    found = held_after_forward(model, loss).points["after_forward"]
    assert found["inputs"] == 2 * 1000 * 4 * 4


def test_a_gradient_inside_of_a_forward_is_a_part_of_that_forward():
    class Force(Decoder):
        def forward(self, letters):
            x = self.embed(letters)
            (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
            for block in self.blocks:
                slope = block(slope)
            return self.head(slope)

    torch.manual_seed(0)
    model = Force()
    found = held_after_forward(model, lambda: loss_of(model, batch())).points["after_forward"]
    plain = measured(*setting()).report().points["after_forward"]
    assert found["logits_and_loss"] == plain["logits_and_loss"]
    assert found["activations"] > plain["activations"]
    assert found.get("temporary", 0) == 0


def test_reentrant_checkpointing_does_not_make_logits_of_a_backward():
    class Checkpointed(Decoder):
        def forward(self, letters):
            x = self.embed(letters)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
            return self.head(x)

    found = []
    for reentrant in (True, False):
        torch.manual_seed(0)
        model = Checkpointed()
        model.reentrant = reentrant
        found.append(held_after_forward(model, lambda: loss_of(model, batch(64))).maxima)  # noqa: B023
    assert found[0]["logits_and_loss"] == found[1]["logits_and_loss"]
    assert found[0]["activations"] > 3 * 64 * 16 * WIDTH * 4


def test_an_optimizer_that_is_made_of_another_one_makes_one_step():
    class Outer(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            self.inner = torch.optim.AdamW(self.param_groups)

        def step(self):
            self.inner.step()

    model, _ = setting()
    profiler = measured(model, Outer(model.parameters()))
    assert len(profiler.summaries) == 3
    assert profiler.report().points["after_step"]["moments"] == 2 * nbytes_of(model.parameters())


def test_garbage_that_is_collected_while_tensors_are_listed_does_not_disturb():
    class Cycle:
        pass

    model, optimizer = setting()
    thresholds = gc.get_threshold()
    with MemoryProfiler(model, optimizer) as profiler:
        train(model, optimizer, 1)
        kept = [torch.ones(1) for _ in range(400)]
        try:
            for after in range(5, 400, 15):
                gc.disable()
                gc.collect()
                for _ in range(20):
                    cycle = Cycle()
                    cycle.tensor, cycle.itself = torch.ones(3), cycle
                del cycle
                gc.set_threshold(60 + after)
                gc.enable()
                profiler._tracker.live()
        finally:
            gc.set_threshold(*thresholds)
            gc.enable()
    assert len(kept) == 400


# --- its life ---------------------------------------------------------------------------------


def test_nothing_is_left_behind():
    model, optimizer = setting("ours", stage=3)
    hooks = hooks_of(model)
    assert_nothing_is_left(model, hooks)
    profiler = MemoryProfiler(model, optimizer)
    assert_nothing_is_left(model, hooks)
    with profiler:
        assert _get_current_dispatch_mode() is not None
        train(model, optimizer)
    assert_nothing_is_left(model, hooks)
    assert not profiler._tracker._stored


def test_an_exception_inside_leaves_nothing_behind():
    model, optimizer = setting()

    def fail(profiler):
        with profiler:
            train(model, optimizer, 2)
            loss_of(model, batch())
            raise ZeroDivisionError

    profiler = MemoryProfiler(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        fail(profiler)
    assert_nothing_is_left(model)
    assert profiler.report().peak.step == 2
    train(model, optimizer)


def test_copies_and_pickles_that_are_made_inside_take_no_hook_along():
    model, optimizer = setting()
    with MemoryProfiler(model, optimizer) as profiler:
        train(model, optimizer, 1)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        seen = len(profiler._tracker.step.points)
        for other in copies:
            other(batch())
        assert len(profiler._tracker.step.points) == seen
    assert_nothing_is_left(model)


def test_an_exception_on_entering_leaves_nothing_behind(monkeypatch):
    model, optimizer = setting()
    monkeypatch.setattr(profile, "watching_modules", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        MemoryProfiler(model, optimizer).__enter__()
    assert_nothing_is_left(model)


def test_an_exception_in_a_forward_does_not_disturb_the_next_step():
    model, optimizer = setting()
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(3):
            with pytest.raises(IndexError):
                model(batch() + LETTERS)
            loss_of(model, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    found, plain = profiler.report(), measured(*setting()).report()
    assert found.points["after_backward"] == plain.points["after_backward"]
    assert found.peak.phase == plain.peak.phase


def test_profilers_do_not_nest():
    model, optimizer = setting()
    with MemoryProfiler(model, optimizer) as profiler:
        with pytest.raises(ConfigError, match=r"followed already.*end that one first"):
            MemoryProfiler(model, optimizer).__enter__()
        with pytest.raises(ConfigError, match="followed already"):
            profiler.__enter__()
        with pytest.raises(ConfigError, match="followed already"):
            simulate(Decoder, lambda: [batch()], world_size=1, loss_fn=lambda m, b: loss_of(m, *b))
        train(model, optimizer)
    assert len(profiler.summaries) == 3
    assert_nothing_is_left(model)


def test_a_profiler_that_is_used_twice_starts_anew():
    model, optimizer = setting()
    profiler = measured(model, optimizer, 2)
    first = profiler.report()
    with profiler:
        assert not profiler.summaries
        train(model, optimizer, 3)
    assert len(profiler.summaries) == 3
    again = profiler.report()
    assert again.peak.total == first.peak.total
    assert "moments" in again.points["constructed"]  # they are there by now


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_an_optimizer_that_is_made_anew_takes_the_place_of_the_first(kind):
    model, optimizer = setting(kind)
    once = measured(*setting(kind)).report()
    with MemoryProfiler(model, optimizer) as profiler:
        train(model, optimizer, 2)
        if kind == "torch":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        else:
            optimizer.close()
            optimizer = zeroshard.AdamW(model, lr=1e-4)
        gc.collect()
        train(model, optimizer, 3)
    assert len(profiler.summaries) == 5
    assert profiler.summaries[-1].points["after_step"] == once.points["after_step"]
    assert profiler.report().maxima["moments"] == once.maxima["moments"]


def test_a_second_optimizer_of_other_parameters_makes_no_steps_of_its_own():
    torch.manual_seed(0)
    model = Decoder()
    head = list(model.head.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    first, second = torch.optim.AdamW(rest), torch.optim.AdamW(head)
    with MemoryProfiler(model, first) as profiler:
        for _ in range(3):
            loss_of(model, batch()).backward()
            second.step()
            first.step()
            model.zero_grad()
    assert len(profiler.summaries) == 3
    held = profiler.report().points["after_step"]
    assert held["moments"] == 2 * nbytes_of(model.parameters())


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_it_keeps_neither_model_nor_optimizer_alive(kind):
    model, optimizer = setting(kind)
    profiler = measured(model, optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert profiler.report().peak.total > 0
    with pytest.raises(ConfigError, match="is gone: make a new"):
        profiler.__enter__()


def test_steps_after_those_that_are_followed_run_free():
    model, optimizer = setting()
    modes = []
    with MemoryProfiler(model, optimizer, steps=2) as profiler:
        for _ in range(6):
            train(model, optimizer, 1)
            modes.append((_get_current_dispatch_mode() is not None, profiler.is_following))
            modes.append(bool(hooks_of(model)))
    assert modes == [(True, True), True] + [(False, False), False] * 5
    assert len(profiler.summaries) == 2
    (note,) = profiler.report().notes
    assert "times as long" in note
    assert "medians of 1 and 4" in note
    assert_nothing_is_left(model)


def test_a_mode_of_the_user_on_top_is_not_taken_off():
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, optimizer = setting()
    with MemoryProfiler(model, optimizer, steps=1) as profiler:
        with Other() as other:
            train(model, optimizer, 2)
            assert _get_current_dispatch_mode() is other
        train(model, optimizer, 1)
        assert not profiler.is_following
    assert_nothing_is_left(model)


def test_timing_says_how_long_and_against_what(monkeypatch):
    now = iter([0.0, 5.0, 7.0, 9.0, 10.0, 10.5, 11.5, 20.0])
    monkeypatch.setattr("zeroshard.memory.timing.time.perf_counter", lambda: next(now))
    timing = Timing()
    timing.step_is_over(was_followed=True)
    assert timing.in_words() == []
    timing.step_is_over(was_followed=True)
    timing.step_is_over(was_followed=True)
    assert timing.in_words() == [
        "A step took 2 s while it was followed (median of 2); steps= leaves later ones alone, and "
        "shows what following costs."
    ]
    for _ in range(3):
        timing.step_is_over(was_followed=False)
    timing.end()
    assert timing.in_words() == [
        "A step took 2 s while it was followed and 1 s when it was not (medians of 2 and 3): "
        "2.00 times as long."
    ]
    assert timing.total == 20.0


# --- leaks, ranks, words ----------------------------------------------------------------------


def test_a_list_that_keeps_outputs_is_found_and_named():
    model, optimizer = setting()
    kept = []
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(6):
            logits = model(batch())
            kept.append(logits)
            F.cross_entropy(logits.flatten(0, 1), batch().flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    (growth,) = profiler.growing()
    assert growth.startswith("logits_and_loss: ")
    assert growth.endswith(" in 5 steps")
    assert f"Grows from step to step: {growth}." in profiler.report().notes


def test_a_list_of_losses_that_keep_their_graph_is_found():
    model, optimizer = setting()
    kept = []
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(5):
            loss = loss_of(model, batch())
            kept.append(loss)
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    assert {growth.split(":")[0] for growth in profiler.growing()} >= {
        "activations",
        "logits_and_loss",
    }


def test_training_that_leaks_nothing_grows_in_nothing():
    for kind, options in (("torch", {}), ("ours", {"stage": 1}), ("ours", {"stage": 3})):
        assert measured(*setting(kind, **options), steps=5).growing() == []


def test_three_steps_are_too_few_to_speak_of_growth():
    model, optimizer = setting()
    kept = []
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(3):
            kept.append(model(batch()))
            kept[-1].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert profiler.growing() == []


def uneven(rank, world_size):
    found = []
    for kind in ("ours", "torch"):
        model, optimizer = setting(kind)
        with MemoryProfiler(model, optimizer) as profiler:
            train(model, optimizer, rows=4 + 12 * rank)
        own = profiler.report()
        found.append((own, profiler.gather_report()))
    with MemoryProfiler(model, optimizer) as profiler:
        train(model, optimizer, steps=rank)  # none on the first
    try:
        profiler.gather_report()
    except ConfigError as error:
        found.append(str(error))
    return found


def test_the_rank_that_holds_most_speaks_for_all():
    first, second = run(uneven)
    for place in range(2):
        (own, of_all), (largest, of_all_too) = first[place], second[place]
        assert of_all.to_json() == of_all_too.to_json()
        assert list(of_all.ranks) == [own.peak.total, largest.peak.total]
        assert of_all.peak == largest.peak
        assert of_all.timeline == largest.timeline
        assert of_all.maxima == {
            name: max(own.maxima.get(name, 0), largest.maxima.get(name, 0))
            for name in of_all.maxima
        }
        assert of_all.notes[0].startswith("Rank 1 holds most, ")
        assert "they differ most in activations" in of_all.notes[0]
    assert first[2].startswith("no optimizer step was seen")
    assert second[2].startswith("memory report failed on rank 0: no optimizer step was seen")


def report_of(**categories):
    peak = Peak(of="requested", step=2, phase="forward", where="", categories=categories)
    return Report(source="profile", configuration={}, peak=peak, maxima=categories)


def test_equal_ranks_are_said_to_be_equal():
    report = of_all_ranks([report_of(parameters=8), report_of(parameters=8)])
    assert report.notes == ["All 2 ranks have the same peak."]
    assert report.ranks == [8, 8]
    assert of_all_ranks([report_of(parameters=8)]).notes == []


def test_one_process_gathers_its_own_report():
    profiler = measured(*setting())
    of_all = profiler.gather_report()
    assert list(of_all.ranks) == [profiler.report().peak.total]


def test_printing_a_profiler_tells_the_whole_story():
    model, optimizer = setting()
    profiler = MemoryProfiler(model, optimizer)
    assert str(profiler) == "MemoryProfiler: no step was seen yet"
    with profiler:
        train(model, optimizer)
    report, text = profiler.report(), str(profiler)
    lines = text.splitlines()
    assert lines[0] == report.peak.in_words()
    total = next(line for line in lines if line.startswith("total"))
    assert len(total.split()) == 2 + len(report.points)
    header = lines[2]
    for name in report.points:
        assert name.replace("_", " ") in header
    assert any(line.startswith("moments ") for line in lines)
    assert "while it was followed" in text


def test_a_report_survives_its_file(tmp_path):
    report = measured(*setting("ours"), configuration={"batch": 4}).report()
    report.save(tmp_path / "report.json")
    loaded = Report.load(tmp_path / "report.json")
    assert json.dumps(loaded.to_json()) == json.dumps(report.to_json())
    assert loaded.configuration["batch"] == 4
    assert loaded.configuration["optimizer"] == "zeroshard.AdamW"


# --- whom it agrees with ----------------------------------------------------------------------


def kineto_peak(trace):
    """The highest sum of torch's own events of allocations and releases."""
    held = peak = 0
    events = [
        event
        for event in trace.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    assert len(events) > 100
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def step_of_llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=64,
        intermediate_size=128,
        vocab_size=512,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(512, (2, 64))

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step()
    step()
    return model, optimizer, step


def test_it_agrees_with_torchs_own_profiler_within_a_percent():
    model, optimizer, step = step_of_llama()
    with MemoryProfiler(model, optimizer) as profiler:
        before = sum(nbytes for _, nbytes in profiler._tracker.live())
        step()
    peak = profiler.report().peak.total - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as trace:
        step()
    expected = kineto_peak(trace)
    assert expected > 2**19
    assert peak == pytest.approx(expected, rel=0.01)


def test_it_needs_no_callback_in_a_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, _, _ = step_of_llama()
    optimizer = zeroshard.AdamW(model, stage=1)
    ids = torch.randint(512, (16, 32))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        optimizers=(optimizer, None),
    )
    with MemoryProfiler(model, optimizer) as profiler:
        trainer.train()
    assert len(profiler.summaries) == 4
    report = profiler.report()
    held = own_keys(report.points["after_step"])
    del held["gradients"]
    memory = own_keys(optimizer.memory())
    memory.pop("gradients", None)
    assert held == memory
    assert report.points["after_forward"]["activations"] > 0
    prepared = trainer.accelerator.prepare(optimizer) if trainer.optimizer is None else None
    wrapped = prepared or trainer.optimizer
    assert MemoryProfiler(model, wrapped).configuration["optimizer"] == "zeroshard.AdamW"


# --- on a GPU, told by stand-ins --------------------------------------------------------------


class Cuda:
    """Answers as torch.cuda does."""

    def __init__(self, *steps):
        self.steps, self.resets = list(steps), 0

    def reset_peak_memory_stats(self, device):
        self.resets += 1

    def memory_stats(self, device):
        requested, allocated, reserved, self.free = self.steps.pop(0)
        return {
            "requested_bytes.all.peak": requested,
            "allocated_bytes.all.peak": allocated,
            "reserved_bytes.all.peak": reserved,
            "reserved_bytes.all.current": reserved - 5,
        }

    def mem_get_info(self, device):
        return self.free, 1000


def test_the_allocators_peaks_start_anew_at_every_step():
    cuda = Cuda((100, 128, 200, 700), (90, 128, 160, 900))
    memory = DeviceMemory(torch.device("cuda"), cuda)
    assert cuda.resets == 1
    first = memory.take()
    assert first == AllocatorPeak(requested=100, allocated=128, reserved=200, outside=105)
    assert first.categories() == {"allocator_overhead": 100, "outside_torch": 105}
    assert cuda.resets == 2
    assert memory.take().outside == 0  # other processes went away in between


def test_what_the_allocator_says_is_in_the_report(monkeypatch):
    model, optimizer = setting()
    cuda = Cuda(*[(2**20, 2 * 2**20, 3 * 2**20 + number, 100) for number in range(3)])
    monkeypatch.setattr(profile, "DeviceMemory", lambda device: DeviceMemory(device, cuda))
    profiler = MemoryProfiler(model, optimizer)
    profiler._allocator = DeviceMemory(torch.device("cuda"), cuda)
    with profiler:
        train(model, optimizer)
    report = profiler.report()
    number = report.peak.step - 1
    assert report.maxima["allocator_overhead"] == 2 * 2**20 + number
    assert "allocator_overhead" not in report.peak.categories
    assert report.notes[0].startswith("torch's allocator in that step: 1.00 MiB requested (")
    assert "2.00 MiB allocated, 3.00 MiB reserved" in report.notes[0]


def test_tensors_on_another_device_do_not_count():
    model, optimizer = setting()
    profiler = MemoryProfiler(model, optimizer)
    profiler._device = types.SimpleNamespace(type="mtia")
    with profiler:
        train(model, optimizer)
    assert profiler.report().peak.total == 0


class History:
    def __init__(self):
        self.calls = []

    def _record_memory_history(self, **options):
        self.calls.append(("record", options))

    def _dump_snapshot(self, path):
        self.calls.append(("dump", path))
        if "full" in path:
            raise OSError("no space left")


def test_a_snapshot_is_written_and_recording_ends(tmp_path):
    history = History()
    snapshot = Snapshot(tmp_path / "snapshot.pickle", history)
    snapshot.begin()
    snapshot.end()
    (kind, options), dump, last = history.calls
    assert kind == "record"
    assert options["max_entries"] > 10**5
    assert dump == ("dump", str(tmp_path / "snapshot.pickle"))
    assert last == ("record", {"enabled": None})
    history.calls.clear()
    with pytest.raises(OSError, match="no space"):
        Snapshot(tmp_path / "full", history).end()
    assert history.calls[-1] == ("record", {"enabled": None})


def test_the_snapshot_calls_are_those_of_torch():
    assert os.path.exists(torch.cuda.memory.__file__)
    for name in ("_record_memory_history", "_dump_snapshot"):
        assert callable(getattr(torch.cuda.memory, name))
    for name in ("memory_stats", "mem_get_info", "reset_peak_memory_stats"):
        assert callable(getattr(torch.cuda, name))


def test_every_rank_writes_a_snapshot_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert Snapshot(tmp_path / "s.pickle", History()).path == tmp_path / "s-rank3.pickle"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Snapshot(tmp_path / "s.pickle", History()).path == tmp_path / "s.pickle"


@pytest.mark.gpu
def test_a_gpu_is_measured_and_its_allocator_agrees(tmp_path):
    def step():
        model(torch.randn(512, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    nn.Linear(1024, 1024, device="cuda")(torch.ones(8, 1024, device="cuda")).sum().backward()
    held = torch.cuda.memory_stats()["requested_bytes.all.current"]  # a workspace, for one
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = zeroshard.AdamW(model)
    with MemoryProfiler(model, optimizer, snapshot=tmp_path / "run.pickle") as profiler:
        for _ in range(3):
            step()
    report = profiler.report()
    allocator = profiler._allocator_peaks[report.peak.step - 1]
    assert report.peak.total == pytest.approx(allocator.requested - held, rel=0.02)
    assert allocator.requested <= allocator.allocated <= allocator.reserved
    assert report.maxima["outside_torch"] > 0
    assert report.points["after_step"]["moments"] >= 2 * nbytes_of(model.parameters())
    assert (tmp_path / "run.pickle").stat().st_size > 1000


# --- wrong use --------------------------------------------------------------------------------


def test_wrong_arguments_say_what_is_expected(tmp_path):
    model, optimizer = setting()
    other, _ = setting()
    cases = [
        ((model, "adamw"), {}, "takes a torch.nn.Module and a torch.optim.Optimizer, got Decoder"),
        ((optimizer, model), {}, "got AdamW and Decoder"),
        ((other, optimizer), {}, "trains no parameter of the model"),
        ((model, optimizer), {"steps": 0}, "steps must be a whole number of at least 1"),
        ((model, optimizer), {"snapshot": tmp_path / "s"}, "leave snapshot= out"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            MemoryProfiler(*arguments, **options)
    with pytest.raises(ConfigError, match=f"there is no folder {tmp_path}/no"):
        Snapshot(tmp_path / "no" / "s.pickle", History())
    with pytest.raises(ConfigError, match="no optimizer step was seen"):
        MemoryProfiler(model, optimizer).report()


def test_a_compiled_module_is_followed_without_being_compiled():
    model, _ = setting()
    calls = []

    def backend(graph, _):
        return lambda *arguments: (calls.append(1), graph(*arguments))[1]

    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(compiled.parameters())
    train(compiled, optimizer, 1)
    assert calls == [1]
    report = measured(compiled, optimizer).report()
    assert calls == [1]
    assert any("without being compiled" in note for note in report.notes)
    found = report.points["after_forward"]["activations"]
    assert found == measured(*setting()).report().points["after_forward"]["activations"]
    torch.compiler.reset()
    train(compiled, optimizer, 1)
    assert calls == [1, 1]
    torch.compiler.reset()


def test_a_single_step_is_said_to_be_the_first():
    report = measured(*setting(), steps=1).report()
    assert "Only one step was seen: it is the first." in report.notes


def test_counts_do_not_depend_on_who_watches():
    """The same training, followed and not, ends in the same parameters."""
    ends = []
    for follows in (True, False):
        model, optimizer = setting("ours", stage=3)
        torch.manual_seed(1)
        if follows:
            measured(model, optimizer)
        else:
            train(model, optimizer)
        optimizer.close()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert Counter(torch.equal(a, b) for a, b in zip(*ends, strict=True)) == {True: len(ends[0])}
