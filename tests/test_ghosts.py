"""Tensors without values: what operations make of them, and what is not known of them."""

import pytest
import torch
from torch import nn

from zeroshard.memory import ghosts
from zeroshard.memory.ghosts import GhostError, Ghosts

MIB = 2**20


def describe(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


def test_large_results_are_ghosts_and_small_ones_are_real():
    with Ghosts() as world:
        small, large = torch.arange(10), torch.ones(MIB)
        assert not world.is_ghost(small)
        assert world.is_ghost(large)
        assert world.is_ghost(large.sum()), "depends on a ghost"
        assert world.is_ghost(large[:1]), "is a part of one"
    assert small.sum() == 45


def test_a_ghost_takes_no_memory():
    with Ghosts():
        huge = torch.ones(2**40)  # more than any machine has
        assert (huge * 2 + 1).nbytes == 4 * 2**40


def test_what_shares_memory_with_an_argument_goes_on_sharing_it():
    unsafe_view = torch.ops.aten._unsafe_view.default  # which torch does not call a view
    x = torch.randn(6, 8)[2:]
    real = unsafe_view(x, [8, 4])
    with Ghosts() as world:
        made = unsafe_view(world.haunt(x), [8, 4])
    assert describe(made) == describe(real)
    assert made.data_ptr() == real.data_ptr() == x.data_ptr()


def test_what_was_asked_before_is_not_taken_for_something_else():
    with Ghosts() as world:
        x = world.haunt(torch.zeros(4, 6, dtype=torch.int32))
        for _ in range(2):
            assert (x + 1).dtype == torch.int32
            assert (x + 1.0).dtype == torch.float32
            assert (x + True).dtype == torch.int32
            assert (x.t() + 1).stride() == (1, 6)
            assert x.sum(0).shape == (6,)
            assert x.sum(1).shape == (4,)
            assert torch.cat([x, x]).shape == (8, 6)
            assert torch.cat([x, x], 1).shape == (4, 12)
            assert x.to(torch.float64).dtype == torch.float64


def test_writing_to_a_ghost_does_nothing_and_returns_it():
    with Ghosts():
        ghost = torch.ones(MIB)
        assert ghost.add_(1) is ghost
        assert ghost.zero_() is ghost
        out = torch.empty(MIB)
        assert torch.mul(ghost, 2, out=out) is out


OPERATIONS = {
    "matmul": lambda x: x @ x.t(),
    "transposed": lambda x: x.t().clone(),
    "channels last": lambda x: x.view(1, 4, 8, -1).to(memory_format=torch.channels_last) * 2,
    "softmax": lambda x: x.softmax(-1),
    "split": lambda x: torch.cat([part * 2 for part in x.split(2)]),
    "topk": lambda x: x.topk(3)[1],
    "sorted": lambda x: x.sort(-1)[0],
    "cast": lambda x: x.bfloat16(),
    "embedding": lambda x: nn.functional.embedding(torch.arange(3), x),
    "normal": lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    "convolved": lambda x: nn.functional.conv2d(x.view(1, 4, 8, -1), torch.ones(2, 4, 3, 3)),
    "padded": lambda x: nn.functional.pad(x, (0, 3))[:, :4],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "compared": lambda x: (x > 0).logical_not(),
    "expanded": lambda x: x[:1].expand(4, -1) + x[:4],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_ghosts_have_the_shapes_strides_and_bytes_of_values(name):
    x = torch.randn(8, 32)
    real = OPERATIONS[name](x)
    with Ghosts() as world:
        made = OPERATIONS[name](world.haunt(x.clone()))
        assert world.is_ghost(made)
    assert describe(made) == describe(real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16])
def test_grouped_products_are_known_in_every_dtype(dtype, width):
    a, b = torch.randn(12, 8, dtype=dtype), torch.randn(3, 8, width, dtype=dtype)
    ends = torch.tensor([4, 8, 12], dtype=torch.int32)
    pairs = [(a, b, ends), (torch.randn(3, 4, 8, dtype=dtype), b, None)]
    pairs.append((torch.randn(width, 16, dtype=dtype), torch.randn(16, 8, dtype=dtype), ends + 4))
    for left, right, offsets in pairs:
        real = nn.functional.grouped_mm(left, right, offs=offsets)
        with Ghosts() as world:
            made = nn.functional.grouped_mm(world.haunt(left), right, offs=offsets)
        assert describe(made) == describe(real)


def test_a_workspace_has_the_size_that_its_library_chooses():
    lstm, x = nn.LSTM(8, 16), torch.randn(5, 3, 8)
    real = lstm(x)[0].grad_fn
    with Ghosts() as world:
        made = lstm(world.haunt(x))[0].grad_fn
    while "MkldnnRnn" not in real.name():
        real, made = real.next_functions[0][0], made.next_functions[0][0]
    assert describe(made._saved_result3) == describe(real._saved_result3)
    assert real._saved_result3.nbytes > 0


def test_gradients_have_the_shapes_of_values():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    with Ghosts() as world:
        for parameter in model.parameters():
            world.haunt(parameter.data)
        model(torch.randn(4, 32)).square().mean().backward()
        for parameter in model.parameters():
            assert world.is_ghost(parameter.grad)
            assert describe(parameter.grad) == describe(parameter)


def test_what_a_ghost_does_not_know_is_an_error_with_the_operation_and_the_module():
    with Ghosts(lambda: False, where=lambda: "layers.3") as world:
        ghost = world.haunt(torch.randn(8))
        for ask, operation in (
            (lambda: ghost.nonzero(), "aten.nonzero.default"),
            (lambda: ghost.sum().item(), "aten._local_scalar_dense.default"),
            (lambda: ghost.equal(ghost), "aten.equal.default"),
        ):
            with pytest.raises(GhostError, match=r"in layers\.3") as caught:
                ask()
            assert caught.value.operation == operation
            assert caught.value.where == "layers.3"


def test_a_ghost_reads_as_zero_where_that_is_allowed():
    with Ghosts() as world:
        ghost = world.haunt(torch.randn(8))
        assert ghost.sum().item() == 0
        assert ghost.equal(ghost)


def test_what_is_real_may_be_decided_by():
    with Ghosts(lambda: False) as world:
        mask = torch.tensor([True, False, True])
        assert mask.nonzero().flatten().tolist() == [0, 2]
        rows = world.haunt(torch.randn(3, 4))[mask.nonzero().flatten()]
        assert rows.shape == (2, 4)


def test_a_mistake_of_the_program_is_its_own_error():
    with Ghosts(kernels_of="cuda") as world:
        ghost = world.haunt(torch.randn(8, 4))
        with pytest.raises(RuntimeError, match="same reduction dim"):
            ghost @ ghost


def test_kernels_of_a_gpu_are_asked_where_they_are_known(monkeypatch):
    monkeypatch.setattr(ghosts, "REAL_NBYTES", 0)
    x = torch.randn(2, 4, 8, 8)
    with Ghosts(kernels_of="cuda"):
        normed = nn.functional.batch_norm(
            x, torch.zeros(4), torch.ones(4), torch.ones(4), torch.zeros(4), training=True
        )
        assert normed.device.type == "cpu"
        assert describe(normed) == describe(x)
        assert torch.zeros(3, device="cpu").device.type == "cpu"
