"""A write to a parameter from outside takes effect and is never reverted by a stale copy."""

import copy

import pytest
import torch
from models import (
    SHAPES,
    LinearForm,
    assert_close,
    assert_ranks_agree,
    assert_same,
    coefficients,
    weights,
)
from ranks import run
from torch import nn

import zeroshard
from zeroshard.errors import ConfigError

stages = pytest.mark.parametrize("stage", [1, 2])

# What the parameters are stored as: dtype, and the copy of higher precision beside it.
KINDS = {
    "fp32": (torch.float32, "auto"),
    "split": (torch.bfloat16, "split"),
    "fp32 master": (torch.bfloat16, "fp32"),
    "fp16": (torch.float16, "fp32"),
    "no master": (torch.bfloat16, "none"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def trained(rank, world_size, stage, kind, **options):
    """A model one step into its training, so that its masters differ from its parameters."""
    dtype, master = KINDS[kind]
    model = LinearForm(SHAPES, dtype)
    precision = zeroshard.Precision(master=master)
    options = {"lr": 1e-3, "weight_decay": 0.0, **options}
    optimizer = zeroshard.AdamW(model, stage=stage, precision=precision, **options)
    steps(rank, world_size, model, optimizer, range(1))
    return model, optimizer


def steps(rank, world_size, model, optimizer, draws):
    for draw in draws:
        model(coefficients(model, rank, world_size, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()


def copy_(model, optimizer, value):
    with torch.no_grad():
        model.matrix.copy_(torch.full(SHAPES["matrix"], value))


def fill_(model, optimizer, value):
    with torch.no_grad():
        model.matrix.fill_(value)


def zero_and_add(model, optimizer, value):
    with torch.no_grad():
        model.matrix.zero_()
        model.matrix += value


def by_rows(model, optimizer, value):
    with torch.no_grad():
        for row in model.matrix:
            row.fill_(value)


def foreach_copy(model, optimizer, value):
    with torch.no_grad():
        torch._foreach_copy_([model.matrix], [torch.full(SHAPES["matrix"], value)])


def init(model, optimizer, value):
    nn.init.constant_(model.matrix, value)


def new_data(model, optimizer, value):
    model.matrix.data = torch.full(SHAPES["matrix"], value, dtype=model.matrix.dtype)


def new_data_transposed(model, optimizer, value):
    turned = torch.full(SHAPES["matrix"][::-1], value, dtype=model.matrix.dtype)
    model.matrix.data = turned.t()


def load(model, optimizer, value):
    state = {name: p.clone() for name, p in model.state_dict().items()}
    state["matrix"].fill_(value)
    model.load_state_dict(state)


def gather_model(model, optimizer, value):
    with zeroshard.gather(model, writeback=True), torch.no_grad():
        model.matrix.fill_(value)


def gather_optimizer(model, optimizer, value):
    with zeroshard.gather(optimizer, writeback=True):
        model.matrix.data.fill_(value)


def data_copy(model, optimizer, value):
    model.matrix.data.copy_(torch.full(SHAPES["matrix"], value))


def data_copy_and_refresh(model, optimizer, value):
    data_copy(model, optimizer, value)
    optimizer.refresh_master()


def data_swap_and_refresh(model, optimizer, value):
    held = model.matrix.data
    new_data(model, optimizer, 77.0)
    model.matrix.data = held
    held.fill_(value)
    optimizer.refresh_master()


WRITES = [
    copy_,
    fill_,
    zero_and_add,
    by_rows,
    foreach_copy,
    init,
    new_data,
    new_data_transposed,
    load,
    gather_model,
    gather_optimizer,
    data_copy_and_refresh,
    data_swap_and_refresh,
]


# DeepSpeed#2424, DeepSpeed#3959, Megatron-LM#6336, Megatron-LM#5071: written weights come back.
@kinds
@stages
def test_every_write_is_kept_exactly_by_a_step_that_moves_nothing(stage, kind):
    def body(rank, world_size):
        for write in (*WRITES, data_copy) if kind in ("fp32", "no master") else WRITES:
            for value in (2.0, 0.0):
                model, optimizer = trained(rank, world_size, stage, kind)
                write(model, optimizer, value)
                expected = weights(model)
                assert (expected["matrix"] == value).all()
                optimizer.param_groups[0]["lr"] = 0.0
                steps(rank, world_size, model, optimizer, [1])
                assert_same(weights(model), expected, f"{write.__name__} {value}")
                assert_ranks_agree(weights(model), f"{write.__name__} {value}")

    run(body)


@kinds
@stages
def test_training_goes_on_from_what_was_written(stage, kind):
    def body(rank, world_size):
        for write in (*WRITES, data_copy) if kind != "fp32 master" and kind != "fp16" else WRITES:
            model, optimizer = trained(rank, world_size, stage, kind)
            write(model, optimizer, 2.0)
            steps(rank, world_size, model, optimizer, range(1, 3))
            # Two updates below 7.3 * lr, the bound of AdamW, and half a bf16 ulp of 2, 2**-7.
            assert_close(
                {"matrix": model.matrix.detach()},
                {"matrix": torch.full(SHAPES["matrix"], 2.0)},
                write.__name__,
                atol=2 * 7.3e-3 + 2**-7,
            )
            assert_ranks_agree(weights(model), write.__name__)

    run(body)


@stages
def test_in_fp32_a_written_weight_trains_on_as_in_torch(stage):
    def body(rank, world_size):
        for write in (*WRITES, data_copy):
            model, optimizer = trained(rank, world_size, stage, "fp32")
            plain_model = LinearForm(SHAPES)
            plain = torch.optim.AdamW(
                plain_model.parameters(), lr=1e-3, weight_decay=0.0, fused=True
            )
            for step in range(3):
                if step == 1:
                    write(model, optimizer, 2.0)
                    with torch.no_grad():
                        plain_model.matrix.fill_(2.0)
                if step >= 1:
                    steps(rank, world_size, model, optimizer, [step])
                for r in range(world_size):
                    parts = coefficients(plain_model, r, world_size, step)
                    (plain_model(parts) / world_size).backward()
                plain.step()
                plain.zero_grad()
            assert_same(weights(model), weights(plain_model), write.__name__)

    run(body)


@stages
def test_a_split_master_sees_writes_through_data(stage):
    """`.data` moves no version counter, but the parameter is the upper half of its master."""

    def body(rank, world_size):
        for value in (2.0, 0.0, 256.0, -0.3125, float("inf")):
            model, optimizer = trained(rank, world_size, stage, "split")
            data_copy(model, optimizer, value)
            optimizer.param_groups[0]["lr"] = 0.0
            steps(rank, world_size, model, optimizer, [2])
            assert (model.matrix == value).all(), value

    run(body)


@stages
def test_a_write_to_a_part_keeps_the_rest(stage):
    def body(rank, world_size):
        for kind in KINDS:
            model, optimizer = trained(rank, world_size, stage, kind)
            with torch.no_grad():
                model.matrix[5:7].fill_(3.0)
                model.bias[0] = 1.5
                model.scalar.fill_(0.25)
            expected = weights(model)
            optimizer.param_groups[0]["lr"] = 0.0
            steps(rank, world_size, model, optimizer, [2])
            assert_same(weights(model), expected, kind)

    run(body)


@stages
def test_a_write_on_the_first_rank_wins_through_gather(stage):
    def body(rank, world_size):
        for kind in KINDS:
            model, optimizer = trained(rank, world_size, stage, kind)
            with zeroshard.gather(model, writeback=True), torch.no_grad():
                for p in model.parameters():
                    p.fill_(0.5 if rank == 0 else 9.0)
            for name, p in model.named_parameters():
                assert (p == 0.5).all(), f"{kind}: {name} on rank {rank}"
            optimizer.param_groups[0]["lr"] = 0.0
            steps(rank, world_size, model, optimizer, [2])
            for name, p in model.named_parameters():
                assert (p == 0.5).all(), f"{kind}: {name} on rank {rank} after a step"

    run(body)


@stages
def test_gather_gives_full_parameters_nests_and_allows_training_inside(stage):
    def body(rank, world_size):
        model, optimizer = trained(rank, world_size, stage, "fp32")
        other, other_optimizer = trained(rank, world_size, stage, "fp32")
        before = weights(model)
        with zeroshard.gather(model), zeroshard.gather(optimizer):
            assert_same(weights(model), before, "inside")
            model(coefficients(model, rank, world_size, 5)).backward()
        assert_same(weights(model), before, "outside")
        optimizer.step()
        steps(rank, world_size, other, other_optimizer, [5])
        assert_same(weights(model), weights(other), "a backward inside")

    run(body)


@stages
def test_weights_swapped_out_for_an_average_and_back_train_on(stage):
    """As EMA evaluation does: `p.data = average`, evaluate, `p.data = trained`."""

    def body(rank, world_size):
        for kind in KINDS:
            model, optimizer = trained(rank, world_size, stage, kind)
            other, other_optimizer = trained(rank, world_size, stage, kind)
            held = {name: p.data for name, p in model.named_parameters()}
            for p in model.parameters():
                p.data = torch.ones_like(p)
            with torch.no_grad():
                model(coefficients(model, rank, world_size))
            for name, p in model.named_parameters():
                p.data = held[name]
            steps(rank, world_size, model, optimizer, [2, 3])
            steps(rank, world_size, other, other_optimizer, [2, 3])
            assert_same(weights(model), weights(other), kind)

    run(body)


@stages
def test_a_swap_back_by_value_trains_on_from_the_value(stage):
    def body(rank, world_size):
        model, optimizer = trained(rank, world_size, stage, "fp32")
        other, other_optimizer = trained(rank, world_size, stage, "fp32")
        stored = weights(model)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.full_like(p, 9.0))
            for name, p in model.named_parameters():
                p.copy_(stored[name])
        steps(rank, world_size, model, optimizer, [2])
        steps(rank, world_size, other, other_optimizer, [2])
        assert_same(weights(model), weights(other), "restored")

    run(body)


@stages
def test_a_step_does_not_take_its_own_update_for_a_write(stage):
    """Otherwise the lower half of a split master would be lost at every step."""

    def body(rank, world_size):
        for kind in ("split", "fp32 master"):
            dtype, master = KINDS[kind]
            model = LinearForm({"weight": (300,)}, dtype)
            with torch.no_grad():
                model.weight.fill_(1.0)
            optimizer = zeroshard.AdamW(
                model,
                lr=4e-4,
                weight_decay=0.0,
                stage=stage,
                precision=zeroshard.Precision(master=master),
            )
            for _ in range(10):
                model({"weight": torch.ones(300)}).backward()
                optimizer.step()
                optimizer.zero_grad()
                model.state_dict()  # reading is not writing
                with torch.no_grad():
                    model({"weight": torch.ones(300)})
            # Each update is 4e-4, a fifth of what moves a bf16 below 1 by rounding: ten make 0.996,
            # which rounds to 1 - 2**-8.
            assert (model.weight == 1 - 2**-8).all(), f"{kind}: {model.weight[0].item()}"

    run(body)


@stages
def test_weights_written_before_the_first_step_are_the_start(stage):
    def body(rank, world_size):
        for kind in KINDS:
            dtype, master = KINDS[kind]
            model = LinearForm(SHAPES, dtype)
            precision = zeroshard.Precision(master=master)
            optimizer = zeroshard.AdamW(model, lr=0.0, stage=stage, precision=precision)
            model.load_state_dict({name: torch.ones_like(p) for name, p in weights(model).items()})
            steps(rank, world_size, model, optimizer, [0])
            assert all((p == 1).all() for p in model.parameters()), kind

    run(body)


@stages
def test_a_write_between_backward_and_step_takes_effect(stage):
    def body(rank, world_size):
        for kind in KINDS:
            model, optimizer = trained(rank, world_size, stage, kind)
            model(coefficients(model, rank, world_size, 2)).backward()
            with torch.no_grad():
                model.matrix.fill_(2.0)
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
            assert (model.matrix == 2.0).all(), kind

    run(body)


REPLACEMENTS = {
    "assign": lambda model: model.load_state_dict(
        {name: p.clone() for name, p in model.state_dict().items()}, assign=True
    ),
    "a new Parameter": lambda model: setattr(
        model, "matrix", nn.Parameter(model.matrix.detach().clone())
    ),
    "another dtype": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
    "another shape": lambda model: setattr(model.matrix, "data", torch.zeros(3, 5)),
    "another device": lambda model: model.to("meta"),
}


# pytorch#107843: parameters replaced after the optimizer was built, which trains nothing.
@pytest.mark.parametrize("how", REPLACEMENTS)
@stages
def test_a_replaced_or_converted_parameter_is_an_error_that_names_it(stage, how):
    def a_step(model, optimizer):
        total = sum(p.float().sum() for p in model.parameters())
        total.backward()
        optimizer.step()

    def body(rank, world_size):
        for build in (
            lambda model: zeroshard.AdamW(model, stage=stage),
            lambda model: zeroshard.AdamW(list(model.parameters()), model=model, stage=stage),
        ):
            model = LinearForm(SHAPES)
            optimizer = build(model)
            steps(rank, world_size, model, optimizer, [0])
            REPLACEMENTS[how](model)
            # A conversion of the whole model may be reported for any of its parameters.
            of_one = how in ("a new Parameter", "another shape")
            with pytest.raises(ConfigError, match="matrix" if of_one else "|".join(SHAPES)):
                a_step(model, optimizer)

    run(body)


@stages
def test_loading_the_models_own_copy_changes_nothing(stage):
    def body(rank, world_size):
        for kind in ("fp32", "fp32 master"):
            model, optimizer = trained(rank, world_size, stage, kind)
            other, other_optimizer = trained(rank, world_size, stage, kind)
            if kind == "fp32":
                model.load_state_dict(copy.deepcopy(model.state_dict()))
            model.to("cpu")
            model.to(KINDS[kind][0])
            model.requires_grad_(True)
            model.eval()
            model.train()
            steps(rank, world_size, model, optimizer, [2, 3])
            steps(rank, world_size, other, other_optimizer, [2, 3])
            assert_same(weights(model), weights(other), kind)

    run(body)
