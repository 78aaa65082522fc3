"""Moments in bf16 and int8: as sharded, as exact to resume and as repeatable as those in fp32.

Two oracles. What must not depend on stage, bucket, rank or world size is compared bit for bit with
itself. Each step is compared with AdamW in fp64 that starts from the moments that are stored: what
is written back may differ by the rounding of its format, everything else by that of fp32.
"""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from models import (
    LinearForm,
    SplitForm,
    assert_ranks_agree,
    assert_same,
    attribute,
    letters,
    loss_of,
    weights,
)
from ranks import run
from test_contract_precision import live_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.errors import ConfigError

stages = pytest.mark.parametrize("stage", [1, 2, 3])
both = pytest.mark.parametrize("moments", ["bf16", "int8"])
REDUCES = ("auto", "fp32", "wire16", "param")
BLOCK = 256  # elements that share a scale, in storage order

# Empty, 0-dim, one element, a block less one, a block, a block and one, several and a bit.
SIZES = {
    "matrix": (37, 29),
    "empty": (0, 3),
    "scalar": (),
    "single": (1,),
    "below": (255,),
    "block": (16, 16),
    "above": (257,),
    "experts": (3, 11, 13),
}

# dtype of the model, fields of Precision
CASES = {
    "fp32": (torch.float32, {}),
    "bf16 split": (torch.bfloat16, {"master": "split"}),
    "bf16 fp32": (torch.bfloat16, {"master": "fp32"}),
    "bf16 none": (torch.bfloat16, {"master": "none"}),
    "fp16 fp32": (torch.float16, {"master": "fp32"}),
    "cast to bf16": (torch.float32, {"param_dtype": torch.bfloat16}),
}


def gradients_of(model, draw, names=None):
    """Gradients of 4 significant bits, the same on every rank; some are 0, some next to nothing.

    Sums over up to 4 ranks and their averages over 1, 2 and 4 are exact, in bf16 and fp16 too. The
    smallest are below half of the lowest code that 8 bits have for a second moment.
    """
    generator = torch.Generator().manual_seed(draw)
    result = {}
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        size = torch.randint(-15, 16, shape, generator=generator)
        octave = torch.randint(0, 9, shape, generator=generator)
        octave = torch.where(octave == 8, 16, octave)
        if names is None or attribute(name) in names:
            result[name] = size * 0.5**octave
    return result


def uneven_groups(model):
    """Three param groups, in another order than the module's, with settings of their own."""
    by_name = {attribute(name): p for name, p in model.named_parameters()}
    first = [by_name[name] for name in ("above", "matrix", "empty")]
    second = [by_name[name] for name in ("single", "below", "scalar")]
    third = [by_name[name] for name in ("experts", "block")]
    return [
        {"params": first, "weight_decay": 0.1, "betas": (0.8, 0.99)},
        {"params": second, "lr": torch.tensor(2e-2), "weight_decay": 0.0, "maximize": True},
        {"params": third, "lr": 3e-3, "eps": 1e-2, "betas": (0.95, 0.98)},
    ]


def build(case, moments, *, seed=0, groups=uneven_groups, given=True, reduce="auto", **options):
    """A model of `SIZES` in units, and its optimizer."""
    dtype, fields = CASES[case]
    model = SplitForm(SIZES, dtype, seed)
    precision = zeroshard.Precision(moments=moments, reduce=reduce, **fields)
    options = {"lr": 1e-2, "model": model if given else None, **options}
    return model, zeroshard.AdamW(groups(model), precision=precision, **options)


def backward_step(model, optimizer, gradients):
    model(gradients).backward()
    optimizer.step()
    optimizer.zero_grad()


def assigned_step(model, optimizer, draw):
    """A step on plain, full gradients, which no average ever touches."""
    for name, value in gradients_of(model, draw).items():
        p = model.get_parameter(name)
        p.grad = (value / 3).to(p.dtype)
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, draws):
    for draw in draws:
        assigned_step(model, optimizer, draw)
    return held(model, optimizer)


# Gathering is what costs; what differs in the others shows in their weights a step later.
PICKED = {"parts.0.matrix", "above", "embed.weight", "layers.1.weight", "gain"}


def stored(model, optimizer):
    """Every stored tensor of some parameters' state, whole. Communicates."""
    found = {}
    for name, p in model.named_parameters():
        if name in PICKED:
            for key, value in optimizer.state.get(p, {}).items():
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{name}.{key}"] = value.detach().clone()
    return found


def results(model, optimizer):
    """Copies of what training leaves behind: weights, and stored state, whole."""
    return {**weights(model), **stored(model, optimizer)}


def held(model, optimizer):
    """Copies of all weights, whole, and of this rank's slices of all of the state."""
    found = weights(model)
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            value = value.to_local() if hasattr(value, "to_local") else value
            found[f"{name}.{key}"] = value.detach().clone()
    return found


def through_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def consolidated(optimizer):
    """The full state as it reaches a file, on every rank."""
    optimizer.consolidate_state_dict(to=0)
    if not dist.is_initialized():
        return through_file(optimizer.state_dict())
    payload = [through_file(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(payload, 0)
    return payload[0]


def moments_of(model, optimizer):
    """What a consolidated state says about each parameter, by name; {} but on the first rank."""
    optimizer.consolidate_state_dict(to=0)
    if dist.is_initialized() and dist.get_rank() > 0:
        return {}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    names = {p: name for name, p in model.named_parameters()}
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    return {names[p]: saved[index] for index, p in enumerate(ordered) if index in saved}


def storage_order(tensor):
    """Its elements as they lie in memory, flat."""
    order = sorted(range(tensor.ndim), key=lambda dim: tensor.stride(dim), reverse=True)
    return tensor.permute(order).reshape(-1)


def assert_rounded_moments(got, exact, moments, what, *, nearest=False, noise=0.0):
    """Stored moments are exact ones (fp64, in storage order) rounded in their format.

    bf16: stochastic rounding goes to one of the two neighbours, less than 2**-7 of the value away,
    nearest half as far. int8: within a block and in units of its largest value, a first moment is
    one of 127 squares, a second moment one of 255 fourth powers; nearest in the root, at least the
    lowest where the moment is above 0. The scale itself has a few more bits than a code.
    `noise` is what fp32 arithmetic may do to a first moment before.
    """
    for name, power, levels in (("exp_avg", 2, 127), ("exp_avg_sq", 4, 255)):
        value, wanted = storage_order(got[name]).double(), exact[name]
        if moments == "bf16":
            limit = 2.0 ** -(8 if nearest else 7) * wanted.abs() + 1e-30
            if name == "exp_avg":
                limit = limit + noise
        else:
            blocks = nn.functional.pad(wanted.abs(), (0, -wanted.numel() % BLOCK)).view(-1, BLOCK)
            top = blocks.amax(1).repeat_interleave(BLOCK)[: wanted.numel()].clamp(min=1e-30)
            value, wanted = (
                x.sign() * (x.abs() / top) ** (1 / power) for x in (value, wanted.double())
            )
            limit = 0.51 / levels + 2**-9 * wanted.abs()
            if name == "exp_avg_sq":
                assert (value[wanted > 0] > 0).all(), f"{what}: a second moment became zero"
                limit = limit + (wanted.abs() < 0.5 / levels) * 0.5 / levels
        off = (value - wanted).abs() > limit
        assert not off.any(), f"{what}: {name} is off in {int(off.sum())} of {off.numel()}"


class Watched:
    """A model and its optimizer, every step of which is compared with AdamW in fp64.

    The first rank compares; that the others hold the same parameters is said elsewhere.
    """

    def __init__(self, model, optimizer, moments, *, master=True, max_grad_norm=None, start=None):
        self.model, self.optimizer, self.moments = model, optimizer, moments
        self.master, self.max_grad_norm = master, max_grad_norm
        self.now = weights(model) if start is None else start
        self.exact = {name: value.double() for name, value in self.now.items()}
        self.entries = moments_of(model, optimizer)
        self.num_steps = 0

    def step(self, gradients, what):
        model, optimizer = self.model, self.optimizer
        before, entries = self.now, self.entries
        if not self.master:
            self.exact = {name: value.double() for name, value in before.items()}
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        used = {
            name: p
            for name, p in model.named_parameters()
            if name in gradients and p.requires_grad and p in groups
        }
        backward_step(model, optimizer, gradients)
        self.num_steps += 1
        self.now, self.entries = weights(model), moments_of(model, optimizer)
        if dist.is_initialized() and dist.get_rank() > 0:
            return
        scale = 1.0
        if self.max_grad_norm is not None:
            squares = sum(gradients[name].double().square().sum() for name in used)
            scale = min(1.0, self.max_grad_norm / (math.sqrt(squares) + 1e-6))
            assert scale < 1
        for name, value in self.now.items():
            if name not in used:
                assert_same({name: value}, {name: before[name]}, f"{what}: without a gradient")
                continue
            group = groups[used[name]]
            gradient = gradients[name].double() * (-scale if group["maximize"] else scale)
            nothing = {"step": 0, "exp_avg": 0 * gradient, "exp_avg_sq": 0 * gradient}
            start = entries.get(name, nothing)
            t = int(start["step"]) + 1
            assert int(self.entries[name]["step"]) == t, f"{what}: step of {name}"
            exact = self._update(name, gradient, start, t, group)
            # Old and new may cancel, of which the roundings remain.
            noise = storage_order(2**-22 * (start["exp_avg"].abs() + gradient.abs()))
            now = self.entries[name]
            assert_rounded_moments(now, exact, self.moments, f"{what}: {name}", noise=noise)
            # A few fp32 roundings a step of the weight, and of an update of at most a few lr.
            margin = self.num_steps * 2**-21 * (self.exact[name].abs() + 7 * float(group["lr"]))
            low, high = (self.exact[name] + sign * margin for sign in (-1, 1))
            low, high = (bound.float().to(value.dtype) for bound in (low, high))
            wrong = (value < low) | (value > high)
            assert not wrong.any(), f"{what}: {int(wrong.sum())} elements of {name} are off"

    def _update(self, name, gradient, start, t, group):
        """Moves the exact weight; returns the exact moments."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        m = beta1 * start["exp_avg"].double() + (1 - beta1) * gradient
        v = beta2 * start["exp_avg_sq"].double() + (1 - beta2) * gradient.square()
        update = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
        if self.moments == "int8":
            limit = largest_update(beta1, beta2, t)
            update = update.clamp(-limit, limit)
        weight = self.exact[name]
        self.exact[name] = weight - lr * group["weight_decay"] * weight - lr * update
        return {"exp_avg": storage_order(m), "exp_avg_sq": storage_order(v)}


def largest_update(beta1, beta2, t):
    """What |m / sqrt(v)|, both unbiased, cannot exceed: by Cauchy-Schwarz on the two sums."""
    total = sum((beta1**2 / beta2) ** i for i in range(t))
    unbiased = math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(total) * unbiased


# --- what the bits do not depend on


def letter_groups(model):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr": 4e-3, "betas": (0.8, 0.9)},
    ]


@pytest.mark.parametrize("case", CASES)
@both
def test_all_stages_end_in_the_same_bits(moments, case):
    dtype, fields = CASES[case]
    layouts = [
        {"stage": 1, "bucket_mb": 25},
        {"stage": 3, "bucket_mb": 1e-3},
        {"stage": 2, "bucket_mb": 4e-3},
        {"stage": 1, "bucket_mb": 4e-3},
    ]

    def body(rank, world_size):
        generator = torch.Generator().manual_seed(rank)
        batches = [torch.randint(31, (2, 5), generator=generator) for _ in range(2)]
        other = REDUCES[1 + list(CASES).index(case) % 3]
        for reduce, some in (("auto", layouts), (other, layouts[1:3])):
            precision = zeroshard.Precision(moments=moments, reduce=reduce, **fields)
            expected = None
            for options in some:
                model = letters(dtype=dtype)
                given = options["bucket_mb"] == 25 or options["stage"] == 3
                optimizer = zeroshard.AdamW(
                    letter_groups(model),
                    lr=1e-2,
                    model=model if given else None,
                    precision=precision,
                    max_grad_norm=1.0,
                    **options,
                )
                for batch in batches:
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                got = results(model, optimizer)
                assert got["gain.step"] == 2, "no step was skipped"
                expected = expected or got
                assert_same(got, expected, f"{options}, reduce={reduce}")
            assert_ranks_agree(weights(model), f"reduce={reduce}")

    run(body, 3)


def trained_everywhere(moments, mesh_shape=None):
    """What is left of a training in every stage and every case, to be run on any world."""

    def body(rank, world_size):
        found = {}
        settings = [(2, case) for case in CASES if not case.startswith("cast")]
        settings += [(1, "bf16 split"), (3, "bf16 split"), (3, "fp32")]
        for stage, case in settings:
            mesh = None
            if mesh_shape is not None:
                mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
            options = {"max_grad_norm": 30.0, "bucket_mb": 4e-3 if stage == 2 else 25}
            model, optimizer = build(case, moments, stage=stage, mesh=mesh, **options)
            backward_step(model, optimizer, gradients_of(model, 0))
            assigned_step(model, optimizer, 1)
            # Parameters fall behind in their count of steps; all of them in a step that is skipped.
            backward_step(model, optimizer, gradients_of(model, 2, {"matrix", "single", "above"}))
            spoiled = gradients_of(model, 3)
            for name, value in spoiled.items():
                value.flatten()[-1:] = math.nan if attribute(name) == "matrix" else 0
            backward_step(model, optimizer, spoiled)
            assert int(optimizer.skipped_steps) == 1
            backward_step(model, optimizer, gradients_of(model, 4))
            found[f"stage {stage}, {case}"] = results(model, optimizer)
        return found

    return body


@both
def test_the_same_gradients_give_the_same_bits_on_every_world(moments):
    (expected,) = run(trained_everywhere(moments), 1, process_group=False)
    assert len({len(found) for found in expected.values()}) > 1, "cases differ in their fields"
    for world_size, mesh_shape in ((2, None), (4, None), (4, (2, 2))):
        for got in run(trained_everywhere(moments, mesh_shape), world_size):
            for what, found in got.items():
                assert_same(found, expected[what], f"{what}, {world_size} ranks, {mesh_shape}")


# --- what a step does


@both
@stages
def test_every_step_is_adamws_own_on_the_stored_moments(stage, moments):
    def body(rank, world_size):
        for number, (case, (_, fields)) in enumerate(CASES.items()):
            if number % 2 != (0, number % 2, 1)[stage - 1]:
                continue  # starts are dear: stage 2 has all cases, 1 and 3 share them
            max_grad_norm = (None, 20.0)[number // 2 % 2]
            start = weights(SplitForm(SIZES, CASES[case][0]))
            model, optimizer = build(
                case,
                moments,
                stage=stage,
                reduce=REDUCES[number % len(REDUCES)],
                max_grad_norm=max_grad_norm,
                bucket_mb=2e-3,
            )
            watched = Watched(
                model,
                optimizer,
                moments,
                master=fields.get("master") != "none",
                max_grad_norm=max_grad_norm,
                start=start,
            )
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            left_out = {"matrix", "single", "block"}
            for draw in range(4):
                names = set(SIZES) - left_out if draw == 2 else None
                watched.step(gradients_of(model, draw, names), f"{case}, step {draw}")
                scheduler.step()
                lr = float(optimizer.param_groups[1]["lr"])
                assert lr == pytest.approx(2e-2 * 0.5 ** (draw + 1)), "the scheduler is heard"

    run(body)


@both
@stages
def test_parameters_that_are_added_frozen_and_unfrozen_train_as_in_adamw(stage, moments):
    def body(rank, world_size):
        for case in ("fp32", "bf16 split"):
            late = ("above", "scalar", "empty")

            def early(model, late=late):
                by_name = {attribute(name): p for name, p in model.named_parameters()}
                by_name["matrix"].requires_grad_(False)
                return [p for name, p in by_name.items() if name not in late]

            model, optimizer = build(case, moments, stage=stage, groups=early)
            watched = Watched(model, optimizer, moments)

            def some_steps(draws, what, model=model, watched=watched, case=case):
                for draw in draws:
                    watched.step(gradients_of(model, draw), f"{case}, {what}, {draw}")

            some_steps((0, 1), "at first")
            assert model.matrix not in optimizer.state
            model.matrix.requires_grad_(True)
            some_steps((2, 3), "unfrozen")
            optimizer.zero_grad()
            added = [getattr(model, name) for name in late]
            for p in added:
                p.grad = None
            optimizer.add_param_group({"params": added, "lr": 3e-2, "betas": (0.7, 0.95)})
            assert set(optimizer.state[model.above]) >= {"step", "exp_avg", "exp_avg_sq"}
            model.experts.requires_grad_(False)
            some_steps((4, 5), "added")
            model.experts.requires_grad_(True)
            some_steps((6,), "unfrozen again")
            assert int(optimizer.state[model.above]["step"]) == 3
            assert int(optimizer.state[model.matrix]["step"]) == 5

    run(body)


def assert_untouched(got, before, names, what):
    """Weights and state of the parameters `names` are bit for bit what they were."""
    for key, value in got.items():
        if key.removesuffix("." + key.rpartition(".")[2]) in names or key in names:
            assert_same({key: value}, {key: before[key]}, what)


@both
@stages
def test_without_a_gradient_or_with_nan_in_one_no_bit_moves(stage, moments):
    def body(rank, world_size):
        for case in CASES:
            model, optimizer = build(case, moments, stage=stage)
            model.below.requires_grad_(False)
            for draw in range(2):
                backward_step(model, optimizer, gradients_of(model, draw))
            before = held(model, optimizer)
            some = {"matrix", "single", "above", "empty"}
            backward_step(model, optimizer, gradients_of(model, 2, some))
            got = held(model, optimizer)
            names = {name for name, _ in model.named_parameters() if attribute(name) not in some}
            assert len(names) == 4
            assert_untouched(got, before, names, f"{case}, no gradient")
            for name in names ^ {name for name, p in model.named_parameters() if p.numel()}:
                assert int(got[f"{name}.step"]) == 3
            for bad in (math.nan, math.inf):
                spoiled = gradients_of(model, 3)
                if rank == world_size - 1:
                    next(value for value in spoiled.values() if value.numel() == 257)[-1] = bad
                backward_step(model, optimizer, spoiled)
                assert_same(held(model, optimizer), got, f"{case}, {bad}")
            assert int(optimizer.skipped_steps) == 2

    run(body)


@both
@stages
def test_a_nan_that_is_not_skipped_shows_in_its_parameter_alone(stage, moments):
    def body(rank, world_size):
        for case in CASES:
            model, optimizer = build(case, moments, stage=stage, skip_nonfinite=False)
            backward_step(model, optimizer, gradients_of(model, 0))
            spoiled = gradients_of(model, 1)
            value = next(value for value in spoiled.values() if value.shape == (257,))
            value[-1] = math.nan
            backward_step(model, optimizer, spoiled)
            for _ in range(2):  # in the step itself and in the one after
                for name, weight in weights(model).items():
                    if attribute(name) == "above":
                        assert weight[-1].isnan(), case
                        # The rest is in another block.
                        assert weight[:-1].isfinite().all(), case
                    else:
                        assert weight.isfinite().all(), f"{case}: {name}"
                backward_step(model, optimizer, gradients_of(model, 2))

    run(body)


# --- what is held


@both
@stages
def test_state_exists_from_construction_and_says_what_is_stored(stage, moments):
    def body(rank, world_size):
        keys = {"step", "exp_avg", "exp_avg_sq"}
        dtypes = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
        if moments == "int8":
            keys |= {"exp_avg_scale", "exp_avg_sq_scale"}
            dtypes = {"exp_avg_scale": torch.float32, "exp_avg_sq_scale": torch.float32}
        for case in CASES:
            model, optimizer = build(case, moments, stage=stage)
            for when in range(2):
                assert optimizer.state.keys() == set(model.parameters())
                for name, p in model.named_parameters():
                    state = optimizer.state[p]
                    assert state.keys() - {"master", "remainder"} == keys, f"{case}: {name}"
                    assert int(state["step"]) == when
                    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == p.shape
                    for key, dtype in dtypes.items():
                        assert state[key].dtype == dtype, f"{case}: {key}"
                    if moments == "int8":
                        assert state["exp_avg"].element_size() == 1
                        assert state["exp_avg_sq"].element_size() == 1
                        blocks = -(-p.numel() // BLOCK)
                        assert state["exp_avg_scale"].numel() == blocks, name
                        assert state["exp_avg_sq_scale"].numel() == blocks, name
                backward_step(model, optimizer, gradients_of(model, when))

    run(body)
    run(body, 1, process_group=False)


@both
@stages
def test_blocks_follow_the_storage_of_a_channels_last_parameter(stage, moments):
    def body(rank, world_size):
        shapes = {"conv": (5, 7, 6, 8), "bias": (5,)}
        model = LinearForm(shapes)
        model.conv = nn.Parameter(model.conv.detach().to(memory_format=torch.channels_last))
        precision = zeroshard.Precision(moments=moments)
        optimizer = zeroshard.AdamW(model, stage=stage, precision=precision, bucket_mb=2e-3)
        watched = Watched(model, optimizer, moments)
        for draw in range(3):
            gradients = gradients_of(model, draw)
            # Each block of storage has its own magnitude, which no block in row-major order has.
            flat = torch.randn(1680, generator=torch.Generator().manual_seed(draw))
            flat *= 0.1 ** torch.arange(1680).div(BLOCK, rounding_mode="floor")
            gradients["conv"] = flat.view(5, 6, 8, 7).permute(0, 3, 1, 2)
            watched.step(gradients, f"step {draw}")
        if rank == 0:
            assert watched.entries["conv"]["exp_avg"].stride() == (336, 1, 56, 7)
        before, state = held(model, optimizer), consolidated(optimizer)
        row_major = copy.deepcopy(state)
        for key in ("exp_avg", "exp_avg_sq"):
            row_major["state"][0][key] = state["state"][0][key].contiguous()
        for again in (row_major, state):
            optimizer.load_state_dict(again)
            assert_same(held(model, optimizer), before, "decoded and encoded again")

    run(body)


LARGE = {"first": (301, 128), "second": (257, 100), "third": (40_001,), "bias": (128,)}
NUM_ELEMENTS = 301 * 128 + 257 * 100 + 40_001 + 128


@pytest.mark.parametrize("world_size", [1, 2])
def test_moments_take_two_or_about_one_byte_each_divided_by_the_ranks(world_size):
    def body(rank, world_size):
        gradients = {name: torch.ones(shape) for name, shape in LARGE.items()}
        for stage in (1, 2, 3):
            for case, (dtype, fields) in CASES.items():
                for moments, each in (("bf16", 4), ("int8", 2 * (1 + 4 / BLOCK))):
                    before = live_bytes()
                    model = LinearForm(LARGE, dtype)
                    precision = zeroshard.Precision(moments=moments, **fields)
                    optimizer = zeroshard.AdamW(model, stage=stage, precision=precision)
                    for when in range(2):
                        memory = optimizer.memory()
                        what = f"stage {stage}, {case}, {moments}, {when}"
                        held = memory["moments"] * world_size / NUM_ELEMENTS
                        assert held == pytest.approx(each, rel=0.02), f"{what}: {held:.3f} bytes"
                        assert memory["optimizer_state"] == memory["master"] + memory["moments"]
                        backward_step(model, optimizer, gradients)
                    memory = optimizer.memory()
                    counted = sum(memory.values()) - memory["optimizer_state"]
                    live = live_bytes() - before
                    # Tables of hyperparameters and indices are a few kilobytes.
                    assert counted == pytest.approx(live, abs=24576), what
                    del model, optimizer

    run(body, world_size)


# --- to files and back


@both
@stages
def test_a_local_state_continues_bit_for_bit(stage, moments):
    def body(rank, world_size):
        for case in list(CASES)[stage % 2 :: 2]:
            options = {"stage": stage, "bucket_mb": 2e-3}
            model, optimizer = build(case, moments, **options)
            train(model, optimizer, range(3))
            state = optimizer.state_dict()
            copied, filed = copy.deepcopy(state), through_file(state)
            start = weights(model)
            expected = train(model, optimizer, range(3, 6))
            for which, saved in (("a copy", copied), ("a file", filed)):
                again, its = build(case, moments, seed=5, lr=0.7, **options)
                again.load_state_dict(start)
                its.load_state_dict(saved)
                assert_same(train(again, its, range(3, 6)), expected, f"{case}, {which}")
            # And into the optimizer that it came from.
            optimizer.load_state_dict(optimizer.state_dict())
            assert_same(held(model, optimizer), expected, f"{case}, its own")

    run(body, 3)


@both
@stages
def test_a_consolidated_state_continues_bit_for_bit_on_every_world_and_stage(stage, moments):
    cases = list(CASES)[(stage + 1) % 2 :: 2]

    def saved(rank, world_size):
        found = {}
        for case in cases:
            model, optimizer = build(case, moments, stage=stage)
            train(model, optimizer, range(3))
            start, state = weights(model), consolidated(optimizer)
            names = [n for n, _ in model.named_parameters()]
            ordered = [p for group in optimizer.param_groups for p in group["params"]]
            assert state["state"].keys() == set(range(len(names)))
            for index, p in enumerate(ordered):
                entry = state["state"][index]
                assert entry.keys() - {"master"} == {"step", "exp_avg", "exp_avg_sq"}, case
                for key in ("exp_avg", "exp_avg_sq"):
                    assert type(entry[key]) is torch.Tensor
                    assert entry[key].dtype == torch.float32
                    assert entry[key].shape == p.shape
            before = held(model, optimizer)
            optimizer.load_state_dict(copy.deepcopy(state))
            assert_same(held(model, optimizer), before, f"{case}: decoded and encoded again")
            train(model, optimizer, range(3, 6))
            found[case] = (start, state, results(model, optimizer))
        return found

    def continued(rank, world_size):
        for case, (start, state, expected) in files.items():
            # Every stage takes it; which case meets which stage goes round.
            other = (stage + cases.index(case)) % 3 + 1
            model, optimizer = build(case, moments, seed=5, lr=0.7, stage=other)
            model.load_state_dict(start)
            optimizer.load_state_dict(copy.deepcopy(state))
            train(model, optimizer, range(3, 6))
            got = results(model, optimizer)
            assert_same(got, expected, f"{case}, stage {other}, {world_size} ranks")

    files = run(saved, 2)[0]
    run(continued, 3)
    run(continued, 1, process_group=False)


def plain_training(draws, seed=0):
    """An fp32 model and torch's AdamW after some steps."""
    model = SplitForm(SIZES, seed=seed)
    optimizer = torch.optim.AdamW(uneven_groups(model), lr=1e-2, fused=True)
    for draw in draws:
        assigned_step(model, optimizer, draw)
    return model, optimizer


@both
@stages
def test_torch_trains_on_from_a_consolidated_state(stage, moments):
    def body(rank, world_size):
        for case in ("fp32", "bf16 split"):
            model, optimizer = build(case, moments, stage=stage)
            train(model, optimizer, range(3))
            start, state = weights(model), consolidated(optimizer)
            other, plain = plain_training(())
            other.load_state_dict(start)
            plain.load_state_dict(copy.deepcopy(state))
            plain_names = {p: name for name, p in other.named_parameters()}
            for index, p in enumerate(p for group in plain.param_groups for p in group["params"]):
                for key, value in plain.state[p].items():
                    if key in ("exp_avg", "exp_avg_sq"):
                        # Nothing is lost on the way.
                        assert torch.equal(value, state["state"][index][key]), plain_names[p]
            assert plain.param_groups[0]["betas"] == (0.8, 0.99)
            if case == "fp32":
                # One step from the same moments is the same step, up to fp32 roundings.
                assigned_step(other, plain, 3)
                assigned_step(model, optimizer, 3)
                for name, value in weights(model).items():
                    # int8 limits an update that its rounding made larger than AdamW's can be: by
                    # a level of m in 127 at most, of lr.
                    near = {"rtol": 2e-6, "atol": 2e-7 if moments == "bf16" else 3e-2 * 3e-2}
                    torch.testing.assert_close(value, other.get_parameter(name).detach(), **near)
            else:
                assigned_step(other, plain, 3)

    run(body)


def assert_moments_near(got, exact, moments, what):
    assert got.keys() == exact.keys()
    for name, entry in exact.items():
        assert int(got[name]["step"]) == int(entry["step"]), f"{what}: {name}"
        wanted = {key: storage_order(entry[key]).double() for key in ("exp_avg", "exp_avg_sq")}
        if moments == "fp32":
            for key, value in wanted.items():
                assert torch.equal(storage_order(got[name][key]).double(), value), f"{what}: {name}"
        else:
            assert_rounded_moments(got[name], wanted, moments, f"{what}: {name}", nearest=True)


@stages
def test_moments_of_one_format_load_into_another_at_the_cost_of_its_rounding_alone(stage):
    def body(rank, world_size):
        plain_model, plain = plain_training(range(3))
        names = {p: name for name, p in plain_model.named_parameters()}
        torchs = {names[p]: dict(entry) for p, entry in plain.state.items()}
        case = ("fp32", "bf16 split", "fp16 fp32")[stage - 1]
        formats = ("fp32", "bf16", "int8")
        sources = [("torch's", torchs if rank == 0 else {}, plain.state_dict())]
        for moments in formats:
            model, optimizer = build(case, moments, stage=stage)
            train(model, optimizer, range(3))
            exact = moments_of(model, optimizer)
            state = consolidated(optimizer)
            # A step ends what was consolidated, loading too: from here on the state is local.
            optimizer.load_state_dict(copy.deepcopy(state))
            local = copy.deepcopy(optimizer.state_dict())
            sources += [(f"{moments}, whole", exact, state), (f"{moments}, local", exact, local)]
        for which, exact, state in sources:
            for moments in formats:
                if which.startswith(moments):
                    continue
                model, optimizer = build(case, moments, stage=stage, seed=5)
                optimizer.load_state_dict(copy.deepcopy(state))
                what = f"{case}: {which} into {moments}"
                assert_moments_near(moments_of(model, optimizer), exact, moments, what)
                assigned_step(model, optimizer, 3)
                assert int(optimizer.state[model.matrix]["step"]) == 4, what

    run(body)


# --- what the formats do to training


def test_training_reaches_the_loss_that_it_reaches_with_fp32_moments():
    def body(rank, world_size):
        losses = {}
        for moments in ("fp32", "bf16", "int8"):
            generator = torch.Generator().manual_seed(1)
            # Each letter is followed by one of three: the best loss is about log(3).
            follow = torch.randint(31, (31, 3), generator=generator)

            def batch(size, follow=follow, generator=generator):
                columns = [torch.randint(31, (size,), generator=generator)]
                for _ in range(9):
                    choice = torch.randint(3, (size,), generator=generator)
                    columns.append(follow[columns[-1], choice])
                return torch.stack(columns, 1)

            torch.manual_seed(0)
            layers = [nn.Embedding(31, 24), nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 31)]
            model = nn.Sequential(*layers)
            precision = zeroshard.Precision(moments=moments)
            optimizer = zeroshard.AdamW(model, lr=1e-2, precision=precision)
            for _ in range(200):
                loss_of(model, batch(12)).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                losses[moments] = loss_of(model, batch(512)).item()
        assert losses["fp32"] < 2.0, f"from 3.4: {losses}"
        assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03), str(losses)
        assert losses["int8"] == pytest.approx(losses["fp32"], rel=0.03), str(losses)

    run(body, 1, process_group=False)


# Rounded to the nearest, an average whose steps are below half a unit of its format stands still.
@both
def test_a_slow_second_moment_follows_gradients_that_shrink_and_grow(moments):
    def body(rank, world_size):
        numel = 1024
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.zeros(numel))
        precision = zeroshard.Precision(moments=moments)
        optimizer = zeroshard.AdamW([p], lr=1e-3, weight_decay=0.0, precision=precision)
        gradient = torch.randn(numel, generator=generator)
        exact = torch.zeros(numel, dtype=torch.float64)
        for factor, num_steps in ((1.0, 300), (1 / 30, 500), (1.0, 200)):
            for _ in range(num_steps):
                p.grad = factor * gradient
                optimizer.step()
                exact = 0.999 * exact + 0.001 * (factor * gradient).double().square()
            optimizer.consolidate_state_dict()
            second = optimizer.state_dict()["state"][0]["exp_avg_sq"].double()
            ratio = second / exact
            # bf16: each of up to 1000 roundings of a value is off by less than 2**-7 of it, half
            # of that on average, to either side: a walk of at most 0.12 for one element, hence of
            # 0.004 for the mean. int8: a code is off by 4 * 0.5 / 255 at the top of the block, by
            # more below, to either side.
            assert ratio.mean().item() == pytest.approx(1, abs=0.03), f"{factor}: mean"
            assert ratio.median().item() == pytest.approx(1, abs=0.05), f"{factor}: median"

    run(body, 1, process_group=False)


def test_stochastic_rounding_is_unbiased_and_differs_between_elements_moments_and_steps():
    def body(rank, world_size):
        numel = 1024
        model = LinearForm({"one": (numel,), "two": (numel,)})
        precision = zeroshard.Precision(moments="bf16")
        optimizer = zeroshard.AdamW(
            model.parameters(), betas=(0.0, 0.5), stage=2, precision=precision, bucket_mb=1e-3
        )
        # 5/8 of the way between two bf16 values; with beta1 = 0 each draw is a fresh one.
        gradient = torch.full((numel,), 1 + 0.625 * 2**-7)
        draws = []
        for _ in range(2):
            model({"one": gradient, "two": gradient}).backward()
            optimizer.step()
            optimizer.zero_grad()
            entries = moments_of(model, optimizer)
            for name, entry in entries.items():
                assert set(entry["exp_avg"].tolist()) == {1.0, 1 + 2**-7}, name
                draws.append(entry["exp_avg"] > 1)
            if len(draws) == 2:
                draws.append(entries["one"]["exp_avg_sq"] > gradient.double().square() / 2)
        if rank == 0:
            share = draws[0].double().mean().item()
            assert share == pytest.approx(0.625, abs=5 * 0.5 / 32), "unbiased: 5 sigma"
            related = torch.corrcoef(torch.stack(draws).double()) - torch.eye(len(draws))
            assert related.abs().max() < 5 / 32, f"draws repeat each other: {related}"

    run(body, 2)


# Without a floor and a limit, single updates of more than 1000 lr were seen in 8 bits.
@stages
def test_no_update_in_8_bits_is_larger_than_adamws_can_be(stage):
    def body(rank, world_size):
        lr, weight_decay, numel = 1e-2, 0.1, 512
        for case in ("fp32", "bf16 split"):
            dtype, fields = CASES[case]
            model = LinearForm({"weight": (numel,)}, dtype)
            precision = zeroshard.Precision(moments="int8", **fields)
            optimizer = zeroshard.AdamW(
                model, lr=lr, weight_decay=weight_decay, stage=stage, precision=precision
            )
            generator = torch.Generator().manual_seed(0)
            before = weights(model)["weight"].float()
            largest = 0.0
            for step in range(60):
                gradient = 1e-4 * torch.randn(numel, generator=generator)
                if step % 12 == 3:
                    where = torch.randint(numel, (6,), generator=generator)
                    gradient[where] *= 1e4
                elif step % 12 > 8:
                    gradient[torch.rand(numel, generator=generator) < 0.9] = 0
                if step > 40:
                    gradient[:200] *= 1e3
                backward_step(model, optimizer, {"weight": gradient})
                now = weights(model)["weight"].float()
                change = (now - before).abs()
                # 7.27 lr is the limit for betas of 0.9 and 0.999; then decay, and both roundings.
                allowed = 7.3 * lr + lr * weight_decay * before.abs()
                if dtype == torch.bfloat16:
                    allowed = allowed + 2**-7 * torch.maximum(before.abs(), now.abs())
                assert (change <= allowed).all(), f"{case}, {step}: {change.max() / lr:.1f} lr"
                largest, before = max(largest, change.max().item()), now
            assert largest > lr, "updates of outliers are larger than lr"

    run(body)


# --- what it says


def test_the_optimizer_says_which_moments_it_has_and_what_updates_them():
    def body(rank, world_size):
        for stage in (1, 2, 3):
            for case in CASES:
                for moments in ("fp32", "bf16", "int8"):
                    optimizer = build(case, moments, stage=stage)[1]
                    # Other words of the line name dtypes too.
                    lines = [line for line in repr(optimizer).splitlines() if "moments" in line]
                    assert lines, "moments are not mentioned"
                    for line in lines:
                        said = line.partition("moments")[2]
                        for other in ("fp32", "bf16", "int8"):
                            assert (other in said) == (other == moments), line
                    made_by = "torch fused" if moments == "fp32" else "torch twin"
                    other = "torch twin" if moments == "fp32" else "torch fused"
                    assert made_by in repr(optimizer), repr(optimizer)
                    assert other not in repr(optimizer), repr(optimizer)

    run(body)


def test_moments_of_another_name_are_refused_with_the_names_that_exist():
    for wrong in ("fp8", "fp16", "INT8", None, 8):
        with pytest.raises(ConfigError, match="moments") as raised:
            zeroshard.Precision(moments=wrong)
        for name in ("fp32", "bf16", "int8", str(wrong)):
            assert name in str(raised.value)
