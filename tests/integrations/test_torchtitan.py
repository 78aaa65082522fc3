"""One optimizer for each part of a model, in a container that is an optimizer itself.

torchtitan is no package to install; the container here does what torchtitan's does.
"""

import copy
import pydoc_data.topics

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from consumers import Consumer, tried
from models import assert_same, weights
from ranks import run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import zeroshard

CONSUMER = Consumer(
    "torchtitan-style container",
    "torch",
    use="Let the container build `zeroshard.AdamW(part, ...)` for each part of the model.",
)
STAGES = (1, 2, 3)
TEXT = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
WIDTH = 18
FLAT = {"flatten_optimizer_state_dict": True}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.narrow = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x):
        return x + self.narrow(F.silu(self.widen(self.norm(x))))


class Part(nn.Module):
    """The first or the second half of a next-byte model; names of parameters differ."""

    def __init__(self, number):
        super().__init__()
        if number == 0:
            self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleDict({str(2 * number + n): Block() for n in range(2)})
        if number == 1:
            self.head = nn.Linear(WIDTH, 256)
        self.is_first = number == 0

    def forward(self, x):
        if self.is_first:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.is_first else self.head(x)


def parts():
    torch.manual_seed(0)
    return [Part(0), Part(1)]


class OptimizersContainer(torch.optim.Optimizer, Stateful):
    """An optimizer for each part of a model, seen as one; the state is flat, by parameter name."""

    def __init__(self, model_parts, build):
        self.model_parts = model_parts
        self.optimizers = [build(part) for part in model_parts]
        every = [p for part in model_parts for p in part.parameters() if p.requires_grad]
        super().__init__(every, {"lr": 1e-2})  # for its hooks

    def __iter__(self):
        return iter(self.optimizers)

    def __len__(self):
        return len(self.optimizers)

    def step(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self, **options):
        options = StateDictOptions(**FLAT, **options)
        whole = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            whole |= get_optimizer_state_dict(part, optimizer, options=options)
        return whole

    def load_state_dict(self, state_dict, **options):
        options = StateDictOptions(**FLAT, **options)
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=options)


class CachingContainer(OptimizersContainer):
    """Makes its state dict once, as for fault tolerance, and gives that one from then on."""

    def init_cache_state_dict(self):
        self.cached = super().state_dict()

    def state_dict(self):
        return self.cached

    def load_state_dict(self, state_dict):
        self.cached = {}
        super().load_state_dict(state_dict)
        self.init_cache_state_dict()


class Model(Stateful):
    """All parts of a model in one state dict."""

    def __init__(self, model_parts):
        self.model_parts = model_parts

    def state_dict(self):
        return {k: v for part in self.model_parts for k, v in get_model_state_dict(part).items()}

    def load_state_dict(self, state_dict):
        options = StateDictOptions(strict=False)
        for part in self.model_parts:
            set_model_state_dict(part, state_dict, options=options)


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


class Run:
    """A model in parts with its container and schedulers; stage 0 is torch's AdamW and DDP."""

    def __init__(self, stage, container=OptimizersContainer):
        self.stage, self.parts = stage, parts()
        self.container = container(self.parts, self.build)
        warmup = [LambdaLR(each, lambda step: (step + 1) / 4) for each in self.container]
        self.schedulers = warmup
        wrapped = [DistributedDataParallel(part) for part in self.parts] if stage == 0 else None
        self.called = wrapped or self.parts

    def build(self, part):
        if self.stage == 0:
            return torch.optim.AdamW(part.parameters(), **SETTINGS)
        return zeroshard.AdamW(part, stage=self.stage, **SETTINGS)

    def backward(self, number):
        start = 5000 * dist.get_rank() + 50 * number
        bytes_ = TEXT[start : start + 50].view(2, 25)
        x = bytes_[:, :-1]
        for part in self.called:
            x = part(x)
        loss = F.cross_entropy(x.flatten(0, 1), bytes_[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def train(self, first=0, steps=3):
        """Some steps; their losses, and the weights after them."""
        found = {}
        for number in range(first, first + steps):
            found[f"loss {number}"] = self.backward(number)
            self.container.step()
            for scheduler in self.schedulers:
                scheduler.step()
            self.container.zero_grad()
        return found | self.weights()

    def start_from(self, values, steps):
        """Take some weights, and let schedulers have seen `steps` steps."""
        for part in self.parts:
            names = dict(part.named_parameters())
            part.load_state_dict({n: v for n, v in values.items() if n in names}, strict=False)
        for scheduler in self.schedulers:
            scheduler.last_epoch = steps

    def weights(self):
        return {name: value for part in self.parts for name, value in weights(part).items()}

    def state(self):
        """The whole state by name, plain tensors."""
        found = {}
        for key, value in self.container.state_dict().items():
            if key.startswith("state."):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[key] = whole.detach().clone()
        return found


# --- training


@tried(
    "a container of one optimizer for each part of a model, a scheduler for each, `step()` without "
    "closure: bit for bit as with torch's fused AdamW",
    stages="1, 2, 3",
)
def test_a_container_trains_as_with_torchs_adamw():
    def body(rank, world_size):
        reference = Run(0)
        expected = reference.train(steps=5)
        rates = [each.param_groups[0]["lr"] for each in reference.container]
        for stage in STAGES:
            script = Run(stage)
            assert isinstance(script.container, torch.optim.Optimizer)
            assert isinstance(script.container, Stateful)
            assert_same(script.train(steps=5), expected, f"stage {stage}")
            assert [each.param_groups[0]["lr"] for each in script.container] == rates
            assert_same(script.state(), reference.state(), f"state in stage {stage}")

    run(body)


def note(optimizer, name, fired):
    """Write down when its hooks fire."""
    optimizer.register_step_pre_hook(lambda *_: fired.append(f"pre {name}"))
    optimizer.register_step_post_hook(lambda *_: fired.append(f"post {name}"))


@tried("hooks of the container and of the optimizers in it fire once a step", stages="1, 2, 3")
def test_hooks_fire_once():
    def body(rank, world_size):
        for stage in STAGES:
            script = Run(stage)
            fired = []
            note(script.container, "container", fired)
            for number, optimizer in enumerate(script.container):
                note(optimizer, f"part {number}", fired)
            script.train(steps=1)
            inner = [f"{when} part {n}" for n in range(2) for when in ("pre", "post")]
            assert fired == ["pre container", *inner, "post container"], f"stage {stage}"

    run(body)


@tried(
    "one norm over all parts by `get_total_norm` and `clip_grads_with_norm_`",
    stages="1, 2, 3",
)
def test_gradients_of_all_parts_are_clipped_together():
    max_norm = 0.5

    def norm_and_weights(stage):
        script = Run(stage)
        every = [p for part in script.parts for p in part.parameters()]
        script.backward(0)
        norm = torch.nn.utils.get_total_norm([p.grad for p in every], foreach=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(every, max_norm, norm, foreach=True)
        clipped = torch.nn.utils.get_total_norm([p.grad for p in every])
        script.container.step()
        return norm, clipped, script.weights(), sum(p.numel() for p in every)

    def body(rank, world_size):
        expected, _, _, numel = norm_and_weights(0)
        assert expected > max_norm
        # A sum of `numel` squares in any order is off by at most numel * 2^-24 relatively, its root
        # by half of that, and there are two of them to compare.
        tolerance = numel * 2**-24
        first = None
        for stage in STAGES:
            norm, clipped, after, _ = norm_and_weights(stage)
            assert abs(norm - expected) <= tolerance * expected, f"stage {stage}"
            assert abs(clipped - max_norm) <= 2 * tolerance * max_norm, f"stage {stage}"
            first = first or after
            assert_same(after, first, f"stage {stage}")

    run(body)


# --- state


@tried(
    "`get_optimizer_state_dict` with `flatten_optimizer_state_dict`: the names and values of "
    "torch's AdamW, before the first step and after; asking changes nothing",
    stages="1, 2, 3",
)
def test_the_flat_state_has_the_names_of_torchs_adamw():
    def body(rank, world_size):
        plain = Run(0)
        # Not asked before: torch's AdamW answers with a trial step, which its counters keep.
        untouched = plain.train()
        names = plain.container.state_dict().keys()
        for stage in STAGES:
            script = Run(stage)
            before = script.weights()
            fresh = script.state()
            assert script.container.state_dict().keys() == names, f"stage {stage}"
            assert all(not value.any() for value in fresh.values()), "state before the first step"
            assert_same(script.weights(), before, "weights")
            assert_same(script.train(), untouched, f"stage {stage}")
            assert script.container.state_dict().keys() == names, f"stage {stage}"
            assert_same(script.state(), plain.state(), f"stage {stage}")

    run(body)


@tried(
    "`dcp.save` and `dcp.load` of model and container; a new one continues bit for bit, in another "
    "stage too",
    stages="1, 2, 3",
)
def test_a_container_resumes_from_a_distributed_checkpoint(tmp_path):
    def body(rank, world_size):
        for stage, other in ((1, 1), (2, 2), (3, 3), (1, 3), (3, 2)):
            script = Run(stage)
            script.train()
            path = tmp_path / f"{stage}-{other}"
            dcp.save(
                {"model": Model(script.parts), "optimizer": script.container}, checkpoint_id=path
            )
            expected = script.train(first=3)

            fresh = Run(other)
            dcp.load(
                {"model": Model(fresh.parts), "optimizer": fresh.container}, checkpoint_id=path
            )
            fresh.start_from({}, steps=3)
            found = fresh.train(first=3)
            assert_same(found, expected, f"stage {stage} continued in stage {other}")

    run(body, timeout_s=120)


@tried(
    "a state that is filled before the first step (from torch's AdamW, flat, whole tensors) is "
    "honoured: training continues bit for bit as torch's",
    stages="1, 2, 3",
)
def test_a_state_that_was_filled_before_the_first_step_is_honoured():
    def body(rank, world_size):
        plain = Run(0)
        plain.train()
        before = plain.weights()
        saved = copy.deepcopy(plain.container.state_dict())
        state = plain.state()
        expected = plain.train(first=3)
        for stage in STAGES:
            script = Run(stage)
            script.start_from(before, steps=3)
            script.container.load_state_dict(saved)
            assert_same(script.state(), state, f"state in stage {stage}")
            assert_same(script.train(first=3), expected, f"stage {stage}")

    run(body)


@tried("full state: `full_state_dict=True`, with `cpu_offload`", stages="1, 2, 3")
@pytest.mark.parametrize("steps", [0, 3])
def test_the_full_state_is_that_of_torchs_adamw(steps):
    def body(rank, world_size):
        plain = Run(0)
        plain.train(steps=steps)
        expected = plain.state() if steps else {}  # see above: asked before, torch makes a step
        before = plain.weights()
        continued = plain.train(first=steps)
        for stage in STAGES:
            script = Run(stage)
            script.train(steps=steps)
            for offload in (False, True):
                # As torch says: offloaded, a full state dict is on the first rank alone.
                full = script.container.state_dict(full_state_dict=True, cpu_offload=offload)
                if offload and rank:
                    assert not full
                    continue
                state = {key: value for key, value in full.items() if key.startswith("state.")}
                assert {type(value) for value in state.values()} == {torch.Tensor}
                if steps:
                    assert_same(state, expected, f"stage {stage}")
                else:
                    assert all(not value.any() for value in state.values())
            # Not flat: given a state that is flat and full, torch raises KeyError for AdamW too.
            for options in ({}, {"broadcast_from_rank0": True}):
                options = StateDictOptions(full_state_dict=True, **options)
                fresh = Run(stage)
                fresh.start_from(before, steps)
                for old, new, ours, part in zip(
                    script.container, fresh.container, script.parts, fresh.parts, strict=True
                ):
                    full = get_optimizer_state_dict(ours, old, options=options)
                    if options.broadcast_from_rank0 and rank:
                        full = {}
                    set_optimizer_state_dict(part, new, full, options=options)
                assert_same(fresh.state(), script.state(), f"{options} in stage {stage}")
                assert_same(fresh.train(first=steps), continued, f"{options} in stage {stage}")

    run(body, timeout_s=120)


@tried("a state dict that is made once and kept (`init_cache_state_dict`)", stages="1, 2, 3")
def test_a_cached_state_dict_follows_the_optimizer(tmp_path):
    def body(rank, world_size):
        for stage in STAGES:
            script = Run(stage, CachingContainer)
            script.container.init_cache_state_dict()
            cached = script.container.state_dict()
            script.train()
            now = OptimizersContainer.state_dict(script.container)
            tensors = [key for key, value in now.items() if torch.is_tensor(value)]
            assert tensors
            for key in tensors:
                was, is_now = cached[key], now[key]
                if hasattr(was, "to_local"):
                    was, is_now = was.to_local(), is_now.to_local()
                assert torch.equal(was, is_now), f"{key} in stage {stage}"
            path = tmp_path / str(stage)
            dcp.save(
                {"model": Model(script.parts), "optimizer": script.container}, checkpoint_id=path
            )
            expected = script.train(first=3)
            fresh = Run(stage, CachingContainer)
            fresh.container.init_cache_state_dict()
            dcp.load(
                {"model": Model(fresh.parts), "optimizer": fresh.container}, checkpoint_id=path
            )
            fresh.start_from({}, steps=3)
            # Numbers in the dict are those of the time when it was made; schedulers have their own.
            for scheduler in fresh.schedulers:
                scheduler.optimizer.param_groups[0]["lr"] = SETTINGS["lr"] * (3 + 1) / 4
            assert_same(fresh.train(first=3), expected, f"stage {stage}")

    run(body)


def fill(optimizer, value, dtype=None):
    """Fill the state of an optimizer before its first step, as torch's AdamW lays it out."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.full(p.shape, value, dtype=dtype or p.dtype),
                "exp_avg_sq": torch.full(p.shape, value * value, dtype=dtype or p.dtype),
            }


@tried(
    "a hook that fills empty state with bf16 moments before the first step: no state is empty, so "
    'it leaves it alone; ask by `Precision(moments="bf16")`',
    stages="1, 2, 3",
)
def test_a_hook_that_fills_empty_state_finds_none_empty():
    def if_empty(optimizer, *_):
        if not optimizer.state:
            fill(optimizer, 0.0, torch.bfloat16)

    def body(rank, world_size):
        expected = Run(0).train()
        for stage in STAGES:
            script = Run(stage)
            for optimizer in script.container:
                optimizer.register_step_pre_hook(if_empty)
            assert_same(script.train(), expected, f"stage {stage}")

    run(body)


@tried(
    'state that is filled before the first step, in place (`state[p]["exp_avg"].fill_(...)`) or by '
    "other tensors, which are copied in",
    stages="1, 2, 3",
)
def test_state_that_is_written_before_the_first_step_is_never_ignored():
    def body(rank, world_size):
        plain = Run(0)
        for optimizer in plain.container:
            fill(optimizer, 0.25)
        expected = plain.train()
        for stage in STAGES:
            script = Run(stage)
            for optimizer in script.container:
                for state in optimizer.state.values():
                    state["exp_avg"].fill_(0.25)
                    state["exp_avg_sq"].fill_(0.0625)
            assert_same(script.train(), expected, f"written in place in stage {stage}")

            for dtype in (None, torch.bfloat16):  # which holds these values exactly
                script = Run(stage)
                for optimizer in script.container:
                    fill(optimizer, 0.25, dtype)
                assert_same(script.train(), expected, f"replaced by {dtype} in stage {stage}")
                held = [s["exp_avg"].dtype for o in script.container for s in o.state.values()]
                assert set(held) == {torch.float32}

    run(body)
