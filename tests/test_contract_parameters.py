"""Parameters of every kind train, and only those that should."""

import pytest
import torch
import torch.nn.functional as F
from models import (
    SHAPES,
    LinearForm,
    Twin,
    assert_close,
    assert_ranks_agree,
    assert_same,
    averaged,
    coefficients,
    full_gradients,
    gathered,
    plain_step,
    weights,
)
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from zeroshard.errors import ConfigError

stages = pytest.mark.parametrize("stage", [1, 2, 3])


def steps(rank, world_size, model, optimizer, draws):
    for draw in draws:
        model(coefficients(model, rank, world_size, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Strange(nn.Module):
    """Parameters that are not contiguous, each used as a network would."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(20, 45).t())
        self.permuted = nn.Parameter(torch.randn(4, 2, 3).permute(2, 0, 1))
        self.turned = nn.Parameter(torch.randn(7, 1).t())

    def forward(self, images):
        x = self.conv(images).flatten(1)
        x = torch.tanh(x @ self.transposed)[:, :12] @ self.permuted.reshape(12, 2)
        return x.square().mean() + (self.turned**2).sum()


# pytorch#130810: parameters that are not contiguous.
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # DDP's
@stages
def test_parameters_that_are_not_contiguous_are_bitwise_ddp(stage):
    def body(rank, world_size):
        generator = torch.Generator().manual_seed(rank)
        images = [torch.randn(2, 3, 5, 5, generator=generator) for _ in range(3)]

        def trained(model, forward, optimizer):
            for image in images:
                forward(image).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        replica = Strange()
        plain = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        forward = DistributedDataParallel(replica)
        expected = trained(replica, forward, plain)
        for bucket_mb in (25, 1e-3):
            model = Strange()
            before = {name: p.stride() for name, p in model.named_parameters()}
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, bucket_mb=bucket_mb)
            assert_same(trained(model, model, optimizer), expected, f"bucket_mb={bucket_mb}")
            with gathered(model):
                strides = {name: p.stride() for name, p in model.named_parameters()}
            assert strides == before
            model(images[0]).backward()
            for name, p in model.named_parameters():
                assert p.grad.full_tensor().stride() == before[name], name

    run(body)


@stages
def test_a_parameter_with_gaps_trains(stage):
    """Strided with holes, which torch's own fused kernel reads wrongly."""

    def body(rank, world_size):
        model, plain_model = LinearForm({"weight": (6, 5)}), LinearForm({"weight": (6, 5)})
        wide = torch.zeros(6, 10)
        wide[:, ::2] = model.weight.detach()
        model.weight = nn.Parameter(wide[:, ::2])
        assert not model.weight.is_contiguous()
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, fused=True)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        for step in range(3):
            parts = [coefficients(model, r, world_size, step) for r in range(world_size)]
            plain_step(plain_model, plain, averaged(parts, world_size))
            steps(rank, world_size, model, optimizer, [step])
        assert_same(weights(model), weights(plain_model), "gaps")

    run(body)


# DeepSpeed#8467, DeepSpeed#6571, TransformerEngine#3202, TransformerEngine#3207: empty tensors.
@pytest.mark.parametrize("world_size", [2, 3])
@stages
def test_empty_and_tiny_parameters_anywhere_in_the_list(stage, world_size):
    orders = [
        ["empty", "matrix", "scalar"],
        ["matrix", "empty", "bias", "single"],
        ["single", "matrix", "empty"],
        ["scalar"],
        ["single"],
        ["pair", "empty"],
        ["empty", "single"],
    ]

    def body(rank, world_size):
        for names in orders:
            shapes = {name: SHAPES[name] for name in names}
            twin = Twin(rank, world_size, shapes=shapes, stage=stage)
            for step in range(3):
                twin.backward(step)
                twin.check_gradients(str(names))
                twin.optimizer.clip_grad_norm_(1e6)
                twin.step()
                twin.check(str(names))

    run(body, world_size)


@stages
def test_a_model_of_nothing_but_empty_parameters_steps(stage):
    def body(rank, world_size):
        model = LinearForm({"empty": (0, 3), "void": (0,)})
        optimizer = zeroshard.AdamW(model, stage=stage)
        steps(rank, world_size, model, optimizer, range(2))
        assert optimizer.clip_grad_norm_(1.0).item() == 0.0

    run(body)


@pytest.mark.parametrize("world_size", [2, 4])
@stages
def test_lengths_around_the_block_of_256_elements(stage, world_size):
    lengths = (1, 7, 8, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1023, 1025)

    def body(rank, world_size):
        for bucket_mb in (25, 1e-3, 3e-3):
            for order in (lengths, lengths[::-1]):
                shapes = {f"p{length}": (length,) for length in order}
                twin = Twin(rank, world_size, shapes=shapes, stage=stage, bucket_mb=bucket_mb)
                for step in range(2):
                    twin.backward(step)
                    twin.step()
                twin.check(f"bucket_mb={bucket_mb}")

    run(body, world_size)


# Automodel#2997, ZeroRedundancyOptimizer: whole-tensor sharding leaves ranks without work.
@stages
def test_state_is_balanced_however_unequal_the_parameters_are(stage):
    def body(rank, world_size):
        model = LinearForm({"large": (100_000,), "small": (10,)})
        optimizer = zeroshard.AdamW(model, stage=stage)
        return optimizer.memory()["moments"]

    held = run(body, 4)
    fair = 8 * 100_010 / 4
    # Shards are whole blocks of 256 elements; each of the two slots may add one.
    assert all(abs(bytes_ - fair) <= 8 * 2 * 256 for bytes_ in held), held


class Mixed(nn.Module):
    """bf16 layers with an fp32 norm and an fp32 head between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 40).bfloat16()
        self.norm = nn.LayerNorm(40)
        self.second = nn.Linear(40, 12).bfloat16()
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.norm(self.first(x.bfloat16()).float())
        return self.head(self.second(x.bfloat16()).float()).square().mean()


# pytorch#156784, accelerate#3985: parameters of several dtypes in one model.
@stages
def test_dtypes_mix_in_one_model(stage):
    def body(rank, world_size):
        x = torch.linspace(-1, 1, 48).view(4, 12) * (rank + 1)
        model, replica = Mixed(), Mixed()
        optimizer = zeroshard.AdamW(model, lr=1e-3, stage=stage, bucket_mb=1e-3)
        forward = DistributedDataParallel(replica)
        model(x).backward()
        forward(x).backward()
        got, expected = full_gradients(model), full_gradients(replica)
        for name, p in model.named_parameters():
            assert p.grad.shape == p.shape
            if p.dtype is torch.float32:
                assert torch.equal(got[name], expected[name]), name
            else:
                # DDP halves and adds in bf16: one rounding of the sum.
                largest = expected[name].abs().max().item()
                torch.testing.assert_close(
                    got[name].float(), expected[name].float(), rtol=0, atol=2**-8 * largest
                )
        before = weights(model)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(3):
            model(x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        after = weights(model)
        assert_ranks_agree(after, "mixed")
        for name, value in after.items():
            assert value.dtype == before[name].dtype
            assert not torch.equal(value, before[name]), name

    run(body)


@stages
def test_double_parameters_train_as_in_torch(stage):
    def body(rank, world_size):
        shapes = {"weight": (30, 20), "bias": (7,)}
        model = LinearForm(shapes, torch.float64)
        plain_model = LinearForm(shapes, torch.float64)
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
        try:
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        except ConfigError:
            return  # refusing them by name is right as well; training them in fp32 is not
        for step in range(3):
            parts = [coefficients(model, r, world_size, step) for r in range(world_size)]
            plain_step(plain_model, plain, averaged(parts, world_size))
            steps(rank, world_size, model, optimizer, [step])
        # A few roundings of a double; in fp32 it would be off by 1e-8.
        assert_close(weights(model), weights(plain_model), "double", atol=1e-14)

    run(body)


@stages
def test_integer_parameters_are_left_alone_and_complex_ones_refused(stage):
    def body(rank, world_size):
        model = LinearForm({"weight": (30,)})
        model.table = nn.Parameter(torch.arange(9), requires_grad=False)
        model.packed = nn.Parameter(torch.arange(9, dtype=torch.uint8), requires_grad=False)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        model({"weight": torch.ones(30)}).backward()
        optimizer.step()
        got = weights(model)
        assert torch.equal(got["table"], torch.arange(9))
        assert torch.equal(got["packed"], torch.arange(9, dtype=torch.uint8))
        model.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        with pytest.raises(ConfigError, match="complex"):
            zeroshard.AdamW(model, stage=stage)

    run(body)


class Adapted(nn.Module):
    """A frozen base with trainable adapters in fp32, as LoRA leaves it."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(16, 16).to(dtype).requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(4, 16))
        self.up = nn.Parameter(0.1 * torch.randn(16, 4))

    def forward(self, x):
        y = self.base(x.to(self.base.weight.dtype)).float()
        return (y + F.linear(F.linear(x, self.down), self.up)).square().mean()


# pytorch#104690, litgpt#1417: memory as if nothing were frozen. DeepSpeed#8072: fp32 adapters in a
# bf16 model.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@stages
def test_frozen_parameters_are_untouched_and_cost_no_state(stage, dtype):
    def body(rank, world_size):
        x = torch.linspace(-1, 1, 64).view(4, 16) * (rank + 1)

        def trained(model, forward, optimizer):
            for _ in range(3):
                forward(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        replica, model = Adapted(dtype), Adapted(dtype)
        settings = {"lr": 1e-2, "weight_decay": 0.5}
        plain = torch.optim.AdamW(replica.parameters(), fused=True, **settings)
        expected = trained(replica, DistributedDataParallel(replica), plain)
        optimizer = zeroshard.AdamW(model.parameters(), model=model, stage=stage, **settings)
        got = trained(model, model, optimizer)
        assert_same(got, expected, "adapters")
        assert torch.equal(got["base.weight"], Adapted(dtype).base.weight)
        assert not optimizer.state.get(model.base.weight)
        assert not optimizer.state.get(model.base.bias)
        assert optimizer.state[model.up]
        # 128 trainable elements; the base has 272. Shards are whole blocks of 256 elements.
        assert optimizer.memory()["moments"] <= 8 * 256
        assert len(optimizer.param_groups[0]["params"]) == 4

    run(body)


# DeepSpeed#5639: a layer unfrozen later never trains.
@stages
def test_a_parameter_unfrozen_later_trains_and_one_frozen_later_stops(stage):
    def body(rank, world_size):
        for bucket_mb in (25, 1e-3):
            model, plain_model = LinearForm(SHAPES), LinearForm(SHAPES)
            frozen = ("matrix", "single", "pair")
            for one in (model, plain_model):
                for name in frozen:
                    getattr(one, name).requires_grad_(False)
            settings = {"lr": 1e-2, "weight_decay": 0.3}
            optimizer = zeroshard.AdamW(model, stage=stage, bucket_mb=bucket_mb, **settings)
            plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **settings)

            def train_both(
                draws, model=model, plain_model=plain_model, optimizer=optimizer, plain=plain
            ):
                for draw in draws:
                    parts = [coefficients(model, r, world_size, draw) for r in range(world_size)]
                    mean = averaged(parts, world_size)
                    for name, p in plain_model.named_parameters():
                        if not p.requires_grad:
                            mean.pop(name)
                    plain_step(plain_model, plain, mean)
                    model(parts[rank]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same(weights(model), weights(plain_model), f"draws {draws}")

            train_both((0, 1))
            model.matrix.requires_grad_(True)
            plain_model.matrix.requires_grad_(True)
            train_both((2, 3))
            for one in (model, plain_model):
                one.bias.requires_grad_(False)
                one.pair.requires_grad_(True)
                one.single.requires_grad_(True)
            train_both((4, 5))
            for one in (model, plain_model):
                one.matrix.requires_grad_(False)
                one.bias.requires_grad_(True)
            train_both((6, 7))
            assert len(optimizer.param_groups) == 1

    run(body)


@stages
def test_a_group_added_later_trains_with_its_own_settings(stage):
    def body(rank, world_size):
        model, plain_model = LinearForm(SHAPES), LinearForm(SHAPES)
        late = ["matrix", "scalar", "empty"]
        settings = {"lr": 1e-2, "weight_decay": 0.3}

        def early(one):
            return [p for name, p in one.named_parameters() if name not in late]

        optimizer = zeroshard.AdamW(early(model), model=model, stage=stage, **settings)
        plain = torch.optim.AdamW(early(plain_model), fused=True, **settings)

        def train_both(draws, clear):
            for draw in draws:
                parts = [coefficients(model, r, world_size, draw) for r in range(world_size)]
                model(parts[rank]).backward()
                for name, value in averaged(parts, world_size).items():
                    getattr(plain_model, name).grad = value
                optimizer.step()
                plain.step()
                for one in (model, plain_model) if clear else (optimizer, plain):
                    one.zero_grad()
            assert_same(weights(model), weights(plain_model), f"draws {draws}")

        train_both((0, 1), clear=True)
        for one, its in ((model, optimizer), (plain_model, plain)):
            its.add_param_group({"params": [getattr(one, name) for name in late], "lr": 3e-2})
        assert len(optimizer.param_groups) == 2
        assert set(optimizer.param_groups[1]) == set(plain.param_groups[1])
        train_both((2, 3), clear=False)
        assert optimizer.state[model.matrix]
        with pytest.raises(ValueError, match="appear"):
            optimizer.add_param_group({"params": [model.matrix]})
        train_both((4,), clear=False)

    run(body)


# In stage 3 a parameter that no module has is refused.
@pytest.mark.parametrize("stage", [1, 2])
def test_a_group_added_between_backward_and_step_keeps_the_gradients(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.step()
        twin.backward(1)
        for optimizer in (twin.optimizer, twin.plain):
            generator = torch.Generator().manual_seed(8)
            late = nn.Parameter(torch.randn(50, generator=generator))
            optimizer.add_param_group({"params": [late], "lr": 5e-2})
        twin.check_gradients("gradients are still there")
        twin.step()
        twin.check("and act")
        twin.backward(2)
        twin.step()
        twin.check("afterwards")

    run(body)


# pytorch#176076, accelerate#4171, DeepSpeed#3033: tied weights.
@stages
def test_tied_weights_are_one_parameter_and_stay_tied(stage):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, 6)
            self.middle = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight
            self.again = self.head

        def forward(self, x):
            return self.again(self.head(self.middle(self.embed(x))) @ self.embed.weight)

    def body(rank, world_size):
        letters = (torch.arange(20).view(4, 5) * (rank + 2)) % 11

        def trained(model, forward, optimizer):
            for _ in range(3):
                forward(letters).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        replica = Tied()
        plain = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        expected = trained(replica, DistributedDataParallel(replica), plain)
        model = Tied()
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        assert_same(trained(model, model, optimizer), expected, "tied")
        assert model.head.weight is model.embed.weight
        assert len(optimizer.param_groups[0]["params"]) == 3
        # Every row, also those the last rank owns.
        assert (weights(model)["embed.weight"] != Tied().embed.weight).all()

    run(body)


@stages
def test_a_parameter_given_twice_is_refused_as_in_torch(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        groups = [{"params": [model.bias]}, {"params": [model.bias]}]
        with pytest.raises(ValueError, match="more than one parameter group"):
            zeroshard.AdamW(groups, model=model, stage=stage)

    run(body)


@stages
def test_parameters_that_share_memory_without_being_one_are_refused(stage):
    """Two Parameters over one tensor would silently come apart; only tying by identity is kept."""

    def body(rank, world_size):
        model = LinearForm({"whole": (40,)})
        model.part = nn.Parameter(model.whole.data[:10])
        with pytest.raises(ConfigError, match=r"whole|part"):
            zeroshard.AdamW(model, stage=stage)
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight.data = tied[0].weight.data
        with pytest.raises(ConfigError, match="weight"):
            zeroshard.AdamW(tied, stage=stage)

    run(body)


@stages
def test_a_sparse_gradient_is_refused_on_every_rank(stage):
    def body(rank, world_size):
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=True)
        before = weights(model)
        optimizer = zeroshard.AdamW(model, stage=stage)

        def a_step():
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()

        with pytest.raises((RuntimeError, ValueError), match="sparse"):
            a_step()
        optimizer.zero_grad()
        assert_same(weights(model), before, "nothing moved")

    run(body)


@stages
def test_a_parameter_outside_the_optimizer_keeps_its_plain_local_gradient(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        others = [p for name, p in model.named_parameters() if name != "matrix"]
        optimizer = zeroshard.AdamW(others, model=model, lr=1e-2, stage=stage)
        before = weights(model)["matrix"]
        mine = coefficients(model, rank, world_size)
        model(mine).backward()
        assert type(model.matrix.grad) is torch.Tensor
        assert torch.equal(model.matrix.grad, mine["matrix"])
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(weights(model)["matrix"], before)

    run(body)


@stages
def test_buffers_are_not_averaged_nor_stepped(stage):
    def body(rank, world_size):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        x = torch.linspace(-1, 1, 32).view(8, 4) * (rank + 1)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert int(model[1].num_batches_tracked) == 2
        return model[1].running_mean.tolist()

    first, second = run(body)
    assert first != second, "each rank has its own running mean, as each saw its own data"


@stages
def test_ranks_start_from_the_first_rank(stage):
    def body(rank, world_size):
        for known in (True, False) if stage < 3 else (True,):
            model = LinearForm(SHAPES, seed=rank)
            model.register_buffer("scale", torch.full((3,), float(rank)))
            model.register_buffer("count", torch.tensor(rank))
            frozen = model.pair.requires_grad_(False)
            given = model if known else list(model.parameters())
            zeroshard.AdamW(given, stage=stage)
            assert_same(weights(model), weights(LinearForm(SHAPES, seed=0)), f"known={known}")
            assert not frozen.requires_grad
            if known:
                assert (model.scale == 0).all()
                assert int(model.count) == 0

    run(body, 3)


@stages
def test_sync_init_may_be_turned_off(stage):
    def body(rank, world_size):
        model = LinearForm(SHAPES, seed=rank if stage < 3 else 0)
        model.register_buffer("scale", torch.full((3,), float(rank)))
        zeroshard.AdamW(model, stage=stage, sync_init=False)
        if stage < 3:  # in stage 3 every rank gives its slice
            assert_same(weights(model), weights(LinearForm(SHAPES, seed=rank)), "left alone")
        assert (model.scale == rank).all()
        twin = Twin(rank, world_size, stage=stage, sync_init=False)
        twin.backward(0)
        twin.step()
        twin.check("equal ranks train as ever")

    run(body)
