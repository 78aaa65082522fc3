"""Stage 3 where ranks differ inside of units, and where modules do unusual things."""

import warnings

import pytest
import torch
from models import assert_same, weights
from ranks import run
from torch import nn

import zeroshard
from zeroshard.errors import ZeroShardError

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.skips = False

    def forward(self, x):
        return x if self.skips else x + torch.tanh(self.mix(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, kind=Block, count=4):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(count))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def inputs(rank, step):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model, optimizer, rank, *, steps=3, before=lambda step: None):
    for step in range(steps):
        before(step)
        model(inputs(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def of_stage(stage, build=Stack, **options):
    model = build()
    return model, zeroshard.AdamW(model, lr=1e-2, stage=stage, **options)


def test_a_graph_that_one_rank_keeps_alive_changes_nothing():
    """What backward has left for good must not depend on which graphs a rank still holds."""

    def body(rank, world_size):
        def play(stage):
            model, optimizer = of_stage(stage)
            kept = []

            def look(step):
                output = model(inputs(rank, 50 + step))
                if rank == 0:
                    kept.append(output)

            return trained(model, optimizer, rank, before=look)

        assert_same(play(3), play(1), "kept graphs")

    run(body, 2, timeout_s=20)


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_block_may_be_skipped_inside_on_one_rank(index):
    """Stochastic depth: the block gives back the very tensor that it was given."""

    def body(rank, world_size):
        def play(stage):
            model, optimizer = of_stage(stage)
            model.blocks[index].skips = rank == 1
            return trained(model, optimizer, rank)

        assert_same(play(3), play(1), "skipped")

    run(body, 2, timeout_s=20)


def test_a_module_used_twice_whose_backwards_come_one_by_one_trains_alike():
    """Gradients that come after their unit seemed done go into a second round, on all ranks."""

    class Twice(Stack):
        def forward(self, x):
            x = self.first(x)
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
            return self.last(x)

    def body(rank, world_size):
        def play(stage):
            model, optimizer = of_stage(stage, Twice)
            for step in range(2):
                first, second = (model(inputs(rank, 2 * step + n)) for n in (0, 1))
                first.square().mean().backward(retain_graph=True)
                second.square().mean().backward()
                first.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        assert_same(play(3), play(1), "one by one")

    run(body, 2, timeout_s=20)


READS = {
    "leaf": lambda block, x: x * block.norm.weight,
    "slice": lambda block, x: x * block.mix.weight[0],
    "product": lambda block, x: x @ block.mix.weight.T,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_parameter_read_behind_its_units_back_is_nan_or_refused(read):
    class Reading(Stack):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = read(block, block(x))
            return self.last(x)

    def body(rank, world_size):
        model, _ = of_stage(3, Reading)
        loss = model(inputs(rank, 0)).square().mean()
        assert loss.isnan()
        try:
            loss.backward()
        except ZeroShardError:
            return
        grad = model.first.weight.grad
        assert not bool(torch.isfinite(grad).all())

    run(body, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_taken_from_gather_in_any_mode_leave_training_as_it_was(mode):
    """As they are sent to an inference engine between steps (trl#5766)."""

    def body(rank, world_size):
        def play(stage, *, takes):
            model, optimizer = of_stage(stage)
            taken = []

            def take(step):
                if takes:
                    with mode(), zeroshard.gather(model):
                        taken.append(dict(model.state_dict()))

            after = trained(model, optimizer, rank, before=take)
            return taken, after

        taken, after = play(3, takes=True)
        assert_same(after, play(1, takes=False)[1], "training")
        model, _ = of_stage(1)
        assert_same(taken[0], weights(model), "what was taken first")

    run(body, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_default_dtype_may_be_bfloat16(stage):
    def body(rank, world_size):
        model, optimizer = of_stage(stage)
        plain, reference = of_stage(stage)
        expected = trained(plain, reference, rank)
        torch.set_default_dtype(torch.bfloat16)
        try:
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + rank)
                x = torch.randn(5, WIDTH, generator=generator, dtype=torch.float32)
                model(x).square().mean().backward()
                optimizer.clip_grad_norm_(1e6)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same(weights(model), expected, "default dtype")

    run(body, 2)


def test_a_module_may_call_itself():
    class Recursive(Block):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, depth=2):
            if depth:
                x = self(x, depth - 1)
            return super().forward(x) * self.own

    def body(rank, world_size):
        def play(stage):
            model, optimizer = of_stage(stage, lambda: Stack(Recursive))
            return trained(model, optimizer, rank)

        assert_same(play(3), play(1), "recursive")

    run(body, 2)


def test_an_attention_in_the_root_is_no_head_though_its_sizes_are():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(WIDTH, WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, ids):
            x = self.embed(ids)
            x = self.attention(x, x, x, need_weights=False)[0]
            for block in self.blocks:
                x = block(x)
            return x

    def body(rank, world_size):
        def play(stage):
            model, optimizer = of_stage(stage, Attending)
            for step in range(3):
                ids = inputs(rank, step)[:, :4].abs().mul(2).long() % WIDTH
                model(ids).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        assert_same(play(3), play(1), "attention")

    run(body, 2)


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "each block"])
def test_a_compiled_model_trains_alike(whole):
    """pytorch#115484: with the eager backend the graphs are broken, and nothing else changes."""

    def body(rank, world_size):
        warnings.simplefilter("ignore")  # those of the tracer about what it looks at

        def play(stage, *, compiled):
            model, optimizer = of_stage(stage)
            if compiled and whole:
                model.compile(backend="eager")
            for block in model.blocks if compiled and not whole else ():
                block.compile(backend="eager")
            return trained(model, optimizer, rank)

        assert_same(play(3, compiled=True), play(1, compiled=False), "compiled")

    run(body, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_kept_over_zero_grad_answers_for_itself(stage):
    def body(rank, world_size):
        model, optimizer = of_stage(stage)
        model(inputs(rank, 0)).square().mean().backward()
        kept = model.blocks[1].mix.weight.grad
        before = (kept.norm(), kept.sum(), kept.full_tensor())
        optimizer.zero_grad()
        (100 * model(inputs(rank, 1)).square().mean()).backward()
        model.blocks[1].mix.weight.grad.norm()
        after = (kept.norm(), kept.sum(), kept.full_tensor())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    run(body, 2)
