"""ZEROSHARD_DEBUG=1 and memory that is freed: the operation that would read it is an error."""

import faulthandler
import re

import pytest
import torch
import torch.nn.functional as F
from ranks import run
from torch import nn
from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard import liveness
from zeroshard import optimizer as facade
from zeroshard.errors import ConfigError, GradientError
from zeroshard.sharding import Sharding
from zeroshard.transport import Delayed

WIDTH = 8


class Block(nn.Module):
    """Keeps a view of its weight, and may put a part of the loss where no hook sees it."""

    def __init__(self, hides_loss):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hides_loss = hides_loss
        self.kept = self.hidden_loss = None

    def forward(self, x):
        self.kept = self.linear.weight.data
        if self.hides_loss:
            self.hidden_loss = self.linear(self.linear(x.detach())).sum()
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, hides_loss=False, use_reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(hides_loss) for _ in range(4))
        self.last = nn.Linear(WIDTH, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def sharded(**choices):
    torch.manual_seed(0)
    model = Stack(**choices)
    return model, zeroshard.AdamW(model, lr=1e-2, stage=3)


def batch(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, WIDTH, generator=generator, requires_grad=True)


def test_without_debug_a_kept_view_has_no_memory_and_no_mode_looks_at_operations():
    def body(rank, world_size):
        model, optimizer = sharded()
        model(batch(rank))
        kept = model.blocks[0].kept
        assert kept.numel() == WIDTH * WIDTH
        assert kept.untyped_storage().nbytes() == 0
        assert _len_torch_dispatch_stack() == 0
        assert not liveness._liveness.shardings
        assert optimizer._engine.modules.raise_event == optimizer._engine._at_module

    run(body)


def test_without_debug_reading_a_kept_view_ends_the_process():
    def body(rank, world_size):
        faulthandler.disable()  # which would write the stack that is meant to be hit
        model, _ = sharded()
        model(batch(rank))
        model.blocks[0].kept.sum()

    with pytest.raises(AssertionError, match="died with exit code -11"):
        run(body, world_size=1)


USES = {
    "aten.sum.default": lambda kept: kept.sum(),
    "aten.mm.default": lambda kept: torch.ones(2, WIDTH).mm(kept),
    "aten.clone.default": lambda kept: kept.clone(),
    "aten._to_copy.default": lambda kept: kept.double(),
    "aten.fill_.Scalar": lambda kept: kept.fill_(1.0),
    "aten.t.default": lambda kept: F.linear(torch.ones(2, WIDTH), kept),
    "aten.cat.default": lambda kept: torch.cat([torch.ones(1, WIDTH), kept]),
    "aten.copy_.default": lambda kept: torch.ones(WIDTH, WIDTH).copy_(kept),
    "aten.add.out": lambda kept: torch.add(torch.ones(()), 1, out=kept),
    "aten._foreach_mul.Scalar": lambda kept: torch._foreach_mul([torch.ones(1), kept], 2.0),
}


def test_a_kept_view_is_an_error_that_names_operation_parameter_and_unit():
    def body(rank, world_size):
        model, optimizer = sharded()
        model(batch(rank))
        kept = model.blocks[0].kept
        said = re.escape("uses parameter 'blocks.0.linear.weight' of unit 'blocks.0', while the")
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            for operation, use in USES.items():
                with mode(), pytest.raises(ConfigError, match=f"{operation} {said} .* freed"):
                    use(kept)
            with mode():  # what reads nothing is no error
                assert torch.zeros_like(kept).shape == kept.new_ones(WIDTH, WIDTH).shape
                assert kept.detach().shape == (WIDTH, WIDTH)
        assert model.blocks[-1].kept.sum() == model.blocks[-1].kept.sum()  # not freed yet
        with zeroshard.gather(model):
            assert kept.sum() == model.blocks[0].linear.weight.sum()
        optimizer.close()
        assert torch.equal(model.blocks[1].linear.weight, model.blocks[1].linear.weight + 0)

    run(body, ZEROSHARD_DEBUG=1)


def test_backward_past_the_outputs_of_a_unit_is_an_error_before_it_reads():
    def body(rank, world_size):
        model, _ = sharded(hides_loss=True)
        model(batch(rank))
        with pytest.raises(GradientError, match=r"'blocks\.0\.linear\.weight' .* in backward"):
            model.blocks[0].hidden_loss.backward()

    run(body, ZEROSHARD_DEBUG=1)


def test_a_view_that_an_autograd_function_kept_is_an_error_before_it_reads():
    class Keeping(torch.autograd.Function):
        """Keeps a view past autograd, which would have looked after it."""

        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight.detach()
            return x @ ctx.weight

        @staticmethod
        def backward(ctx, gradient):
            return gradient @ ctx.weight.t(), None

    def body(rank, world_size):
        model, _ = sharded()
        made = []
        block = model.blocks[0]
        block.register_forward_hook(
            lambda *_: made.append(Keeping.apply(batch(rank), block.linear.weight)), prepend=True
        )
        model(batch(rank))
        with pytest.raises(GradientError, match=r"'blocks\.0\.linear\.weight' .* in backward"):
            made[0].sum().backward()

    run(body, ZEROSHARD_DEBUG=1)


def test_a_backward_that_does_not_gather_is_an_error_before_it_reads(monkeypatch):
    enter = Sharding.enter

    def forgets(sharding, index):
        if torch._C._current_graph_task_id() == -1 or sharding.units[index].name != "blocks.1":
            enter(sharding, index)

    monkeypatch.setattr(Sharding, "enter", forgets)

    def body(rank, world_size):
        model, _ = sharded()
        loss = model(batch(rank)).sum()
        with pytest.raises(GradientError, match=r"'blocks\.1\.linear\.weight' .* in backward"):
            loss.backward()

    run(body, ZEROSHARD_DEBUG=1)


def test_memory_that_a_gather_has_not_filled_yet_is_an_error_too():
    def body(rank, world_size):
        connect = facade.connect
        facade.connect = lambda *args: Delayed(connect(*args), seed=rank, longest_s=0.05)
        model, _ = sharded()
        model(batch(rank))
        kept = model.blocks[1].kept
        seen = []

        def look(*_):
            if not seen and kept.untyped_storage().nbytes():
                with pytest.raises(ConfigError, match=r"unit 'blocks\.1', .* being gathered"):
                    kept.sum()
                seen.append(True)

        model.blocks[0].linear.register_forward_hook(look)
        for _ in range(2):
            model(batch(rank))
        assert seen, "blocks.1 was never gathered ahead"

    run(body, ZEROSHARD_DEBUG=1)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_sound_training_is_the_same_bit_for_bit(use_reentrant):
    def body(rank, world_size):
        model, optimizer = sharded(use_reentrant=use_reentrant)
        for step in range(3):
            model(batch(rank, step)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            model.use_reentrant = None
            with torch.inference_mode():
                model(batch(rank, step))
            model.use_reentrant = use_reentrant
        looked = _len_torch_dispatch_stack()
        with zeroshard.gather(model):
            return looked, [parameter.detach().clone().numpy() for parameter in model.parameters()]

    plain, looked_at = run(body), run(body, ZEROSHARD_DEBUG=1)
    for (none, expected), (one, weights) in zip(plain, looked_at, strict=True):
        assert (none, one) == (0, 1)
        assert all((a == b).all() for a, b in zip(expected, weights, strict=True))


def test_modes_that_users_enter_and_leave_stay_in_order():
    class Counting(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            return func(*args, **(kwargs or {}))

    def body(rank, world_size):
        outer, inner = Counting(), Counting()
        with outer:
            with inner:
                model, _ = sharded()
                model(batch(rank))
                kept = model.blocks[0].kept
                order = [_get_dispatch_stack_at(level) for level in range(3)]
                assert order == [liveness._liveness, outer, inner]
                with pytest.raises(ConfigError, match=r"aten\.sum"):
                    kept.sum()
            counted = inner.operations
            torch.ones(1).sum()
            assert inner.operations == counted
        counted = outer.operations
        torch.ones(1).sum()
        assert outer.operations == counted > 0
        assert _len_torch_dispatch_stack() == 1

    run(body, world_size=1, ZEROSHARD_DEBUG=1)
