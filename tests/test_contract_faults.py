"""Wrong use raises at once and on every rank, and no rank is left waiting without a name."""

import logging

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
    train,
    weights,
)
from ranks import run
from torch import nn

import zeroshard
from zeroshard import errors
from zeroshard.errors import CommunicationError, ConfigError, ZeroShardError

stages = pytest.mark.parametrize("stage", [1, 2, 3])
replicated_stages = pytest.mark.parametrize("stage", [1, 2])


def test_the_exceptions_are_what_callers_already_catch():
    assert issubclass(errors.ZeroShardError, Exception)
    for name, builtin in (
        ("ConfigError", ValueError),
        ("CommunicationError", RuntimeError),
        ("GradientError", RuntimeError),
        ("ShardTensorError", RuntimeError),
    ):
        kind = getattr(errors, name)
        assert issubclass(kind, errors.ZeroShardError), name
        assert issubclass(kind, builtin), name
        assert kind.__module__ == "zeroshard.errors"


WRONG = {
    "stage of 0": ({"stage": 0}, "stage"),
    "stage of 4": ({"stage": 4}, "stage"),
    "stage as text": ({"stage": "2"}, "stage"),
    "negative lr": ({"lr": -1.0}, "-1"),
    "negative eps": ({"eps": -1.0}, "-1"),
    "negative weight_decay": ({"weight_decay": -1.0}, "-1"),
    "first beta of 1": ({"betas": (1.0, 0.999)}, "1.0"),
    "second beta below 0": ({"betas": (0.9, -0.1)}, "-0.1"),
    "amsgrad": ({"amsgrad": True}, "amsgrad"),
    "differentiable": ({"differentiable": True}, "differentiable"),
    "unknown reduction": ({"reduction": "average"}, "reduction"),
    "bucket of nothing": ({"bucket_mb": 0}, "bucket_mb"),
    "negative bucket": ({"bucket_mb": -25}, "bucket_mb"),
    "negative max_grad_norm": ({"max_grad_norm": -1.0}, "max_grad_norm"),
    "mesh as text": ({"mesh": "cpu"}, "mesh"),
    "model as text": ({"model": "llama"}, "model"),
}


@stages
def test_a_wrong_argument_is_a_value_error_that_says_what_came(stage):
    def body(rank, world_size):
        accepted = []
        for what, (options, came) in WRONG.items():
            try:
                zeroshard.AdamW(letters(), **{"stage": stage, **options})
            except ValueError as error:  # torch's own checks raise no ConfigError
                if came not in str(error) or len(str(error)) < 20:
                    accepted.append(f"{what}: {error}")
            except Exception as error:
                accepted.append(f"{what}: {error!r}")
            else:
                accepted.append(f"{what}: accepted")
        assert not accepted, "\n".join(accepted)

    run(body)


@stages
def test_wrong_parameters_raise_as_in_torch(stage):
    def body(rank, world_size):
        model = letters()
        with pytest.raises(ValueError, match="empty"):
            zeroshard.AdamW([], model=model, stage=stage)
        with pytest.raises(TypeError):
            zeroshard.AdamW(model.gain, model=model, stage=stage)
        with pytest.raises(TypeError):
            zeroshard.AdamW([1.0, 2.0], model=model, stage=stage)
        with pytest.raises(ValueError, match="non-leaf"):
            zeroshard.AdamW([model.gain * 2], model=model, stage=stage)
        with pytest.raises(ValueError):
            zeroshard.AdamW([{"params": [model.gain], "lr": -1.0}], model=model, stage=stage)
        wrong = [{"params": [model.gain], "amsgrad": True}]
        with pytest.raises(ConfigError, match="amsgrad"):
            zeroshard.AdamW(wrong, model=model, stage=stage)
        optimizer = zeroshard.AdamW(decay_groups(model), model=model, stage=stage)
        with pytest.raises(ConfigError, match="amsgrad"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "amsgrad": True})
        with pytest.raises(ValueError):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": -1.0})
        assert len(optimizer.param_groups) == 2

    run(body)


@stages
def test_a_model_that_is_on_meta_on_one_rank_only_is_refused(stage):
    def body(rank, world_size):
        with torch.device("meta" if rank == 0 else "cpu"):
            model = nn.Linear(4, 4)
        with pytest.raises(ConfigError, match="meta"):
            zeroshard.AdamW(model, stage=stage)
        assert model.weight.is_meta == (rank == 0), "as it was"

    run(body)


# What acts at module boundaries must know the modules, and all of them.
WITHOUT_MODULES = {
    "no module": (lambda model: (list(model.parameters()), {}), "model"),
    "groups and no module": (lambda model: (decay_groups(model), {}), "model"),
    "a module without some of them": (
        lambda model: (list(model.parameters()), {"model": model.layers}),
        "model",
    ),
    "another module": (lambda model: (list(model.parameters()), {"model": letters()}), "model"),
    "units that are not there": (lambda model: (model, {"units": ["layers.7"]}), r"layers\.7"),
    "a class that is not there": (lambda model: (model, {"units": [nn.Conv2d]}), "Conv2d"),
    "a class name that is not there": (lambda model: (model, {"units": ["Conv2d"]}), "Conv2d"),
    "units of another kind": (lambda model: (model, {"units": [3]}), "units"),
    "text for units": (lambda model: (model, {"units": "Feed"}), "units"),
}


@pytest.mark.parametrize("what", WITHOUT_MODULES)
def test_stage_three_without_its_modules_is_refused_by_name(what):
    give, came = WITHOUT_MODULES[what]

    def body(rank, world_size):
        model = letters()
        before = weights(model)
        params, options = give(model)
        with pytest.raises(ConfigError, match=came):
            zeroshard.AdamW(params, stage=3, **options)
        assert is_plain(model)
        assert_same(weights(model), before, what)

    run(body)


@replicated_stages
def test_options_of_stage_three_warn_that_they_have_no_effect(stage):
    def body(rank, world_size):
        for options in ({"units": ["layers.0"]}, {"reshard_after_forward": False}):
            with pytest.warns(UserWarning, match=next(iter(options))):
                zeroshard.AdamW(letters(), stage=stage, **options)

    run(body)


def is_plain(model):
    """No hook is left, and p.grad is what torch makes it."""
    return all(
        not p._backward_hooks
        and not p._post_accumulate_grad_hooks
        and (p.grad is None or type(p.grad) is torch.Tensor)
        for p in model.parameters()
    ) and not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    )


@stages
def test_a_failed_constructor_leaves_a_plain_model(stage):
    def body(rank, world_size):
        expected_model, batches = letters(), letter_batches(rank)[:3]
        plain = torch.optim.AdamW(expected_model.parameters(), lr=1e-2, fused=True)
        expected = train(expected_model, plain, batches)
        for options in (
            {"stage": 4},
            {"stage": 3, "units": ["nowhere"]},
            {"betas": (0.9, 2.0)},
            {"bucket_mb": 25 if rank == 0 else 12},  # found when the ranks compare
        ):
            model = letters()
            held = {name: p.data_ptr() for name, p in model.named_parameters()}
            with pytest.raises(ValueError):
                zeroshard.AdamW(model, **{"stage": stage, **options})
            assert is_plain(model), options
            assert {name: p.data_ptr() for name, p in model.named_parameters()} == held
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            assert_same(train(model, optimizer, batches), expected, str(options))
            assert is_plain(model)

    run(body)


def of_shapes(rank, stage):
    return zeroshard.AdamW(LinearForm({"first": (30, 4), "second": (5, 3 + rank)}), stage=stage)


def of_numbers(rank, stage):
    shapes = {"first": (30, 4), **({"second": (5,)} if rank else {})}
    return zeroshard.AdamW(LinearForm(shapes), stage=stage)


def of_dtypes(rank, stage):
    dtype = torch.float32 if rank else torch.bfloat16
    return zeroshard.AdamW(LinearForm({"first": (9,)}, dtype), stage=stage)


def of_frozen_parameters(rank, stage):
    model = LinearForm(SHAPES)
    model.matrix.requires_grad_(rank == 0)
    return zeroshard.AdamW(model, stage=stage)


def of_groups(rank, stage):
    model = letters()
    groups = [decay_groups(model)[0], {"params": []}, decay_groups(model)[1]]
    return zeroshard.AdamW(groups if rank else decay_groups(model), model=model, stage=stage)


def of_membership(rank, stage):
    model = LinearForm({"first": (8,), "second": (8,), "third": (8,)})
    first, second, third = model.parameters()
    cut = [[first, second], [third]] if rank else [[first], [second, third]]
    return zeroshard.AdamW([{"params": part} for part in cut], model=model, stage=stage)


def of_precision(rank, stage):
    precision = zeroshard.Precision(master="split" if rank else "fp32")
    return zeroshard.AdamW(letters(dtype=torch.bfloat16), stage=stage, precision=precision)


def of_option(name, first, others):
    def build(rank, stage):
        value = others if rank else first
        return zeroshard.AdamW(letters(), **{"stage": stage, name: value})

    return build


DIFFERENCES = {
    "shape": (of_shapes, r"shape|second|\(5, [345]\)"),
    "number of parameters": (of_numbers, "parameter"),
    "dtype": (of_dtypes, "dtype|float"),
    "requires_grad": (of_frozen_parameters, "requires_grad|frozen|trainable|parameter"),
    "number of groups": (of_groups, "group"),
    "groups": (of_membership, "group"),
    "precision": (of_precision, "precision|master"),
    "stage": (of_option("stage", 1, 2), "stage"),
    "stage 3": (of_option("stage", 2, 3), "stage"),
    "bucket_mb": (of_option("bucket_mb", 1, 2), "bucket_mb"),
    "reduction": (of_option("reduction", "mean", "sum"), "reduction"),
    "max_grad_norm": (of_option("max_grad_norm", None, 1.0), "max_grad_norm"),
    "skip_nonfinite": (of_option("skip_nonfinite", True, False), "skip_nonfinite"),
    "lr": (of_option("lr", 1e-3, 2e-3), "lr"),
    "sync_init": (of_option("sync_init", True, False), "sync_init"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
@stages
def test_ranks_that_differ_are_told_on_every_rank_what_differs(stage, what):
    build, words = DIFFERENCES[what]

    def body(rank, world_size):
        with pytest.raises(ConfigError, match=f"(?i){words}") as caught:
            build(rank, stage)
        assert "rank" in str(caught.value)

    run(body, 3, timeout_s=20)


def test_a_wrong_argument_on_one_rank_leaves_no_rank_hanging():
    def body(rank, world_size):
        with pytest.raises(ConfigError if rank == 1 else ZeroShardError):
            zeroshard.AdamW(letters(), stage=4 if rank == 1 else 2)

    run(body, timeout_s=6)


# A rank that does one more step or runs out of data: DeepSpeed#2223, pytorch#38174.
@pytest.mark.parametrize("extra", ["backward", "step"])
@stages
def test_a_rank_that_goes_on_alone_ends_in_a_named_error(stage, extra):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.optimizer.step()
        if rank == 0:
            return

        def alone():
            if extra == "backward":
                twin.optimizer.zero_grad()
                twin.model(coefficients(twin.model, rank, world_size, 1)).backward()
            twin.optimizer.step()

        with pytest.raises(CommunicationError) as caught:
            alone()
        message = str(caught.value).lower()
        words = ("gradient", "reduc", "backward", "bucket") if extra == "backward" else ("step",)
        if stage == 3:  # a forward comes first
            words = (*words, "gather", "forward")
        assert any(word in message for word in (*words, "step")), message

    run(body, timeout_s=6)


def backward_and_step(twin):
    twin.backward(2)
    twin.optimizer.step()


@pytest.mark.parametrize("extra", ["backward", "step"])
@stages
def test_in_debug_mode_crossed_ranks_are_told_the_phase_and_the_ranks(stage, extra):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.step()
        twin.backward(1)
        if rank == 1:
            if extra == "backward":
                with pytest.raises(ZeroShardError) as caught:
                    backward_and_step(twin)
            else:
                twin.optimizer.step()
                with pytest.raises(ZeroShardError) as caught:
                    twin.optimizer.step()
        elif extra == "backward":
            with pytest.raises(ZeroShardError) as caught:
                twin.optimizer.step()
        else:
            twin.optimizer.step()
            with pytest.raises(ZeroShardError) as caught:
                twin.backward(2)
        message = str(caught.value).lower()
        assert "step" in message, message
        words = ("backward", "gradient", "reduce", *(("gather", "forward") if stage == 3 else ()))
        assert any(word in message for word in words), message
        assert "rank" in message, message
        assert "0" in message, message
        assert "1" in message, message

    run(body, timeout_s=16, ZEROSHARD_DEBUG=1)


@stages
def test_debug_mode_changes_no_result(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage, max_grad_norm=1e6)
        for step in range(3):
            with twin.optimizer.no_sync():
                twin.backward(2 * step)
            names = [{"single", "bias"}, {"matrix", "scalar"}]
            twin.backward(2 * step + 1, lambda rank, names=names: names[rank])
            twin.step()
            twin.check(f"step {step}")
        twin.optimizer.consolidate_state_dict(to=1)
        if rank == 1:
            assert len(twin.optimizer.state_dict()["state"]) == len(SHAPES)

    run(body, ZEROSHARD_DEBUG=1)


@stages
def test_an_error_inside_a_backward_leaves_training_usable(stage):
    """As after running out of memory: every rank catches it, drops the gradients and goes on."""

    def body(rank, world_size):
        for bucket_mb in (25, 1e-3):
            twin = Twin(rank, world_size, stage=stage, bucket_mb=bucket_mb)
            twin.backward(0)
            twin.step()

            def fail(gradient):
                raise MemoryError("in the middle of a backward")

            hook = twin.model.block.register_hook(fail)
            with pytest.raises(MemoryError):
                twin.backward(1)
            hook.remove()
            twin.zero_grad()
            twin.backward(2)
            twin.check_gradients("the backward after")
            twin.step()
            twin.check("after a failed backward")

    run(body)


@stages
def test_a_gradient_of_another_dtype_is_refused_or_used_rightly(stage):
    def body(rank, world_size):
        model = LinearForm({"weight": (300,)}, torch.bfloat16)
        optimizer = zeroshard.AdamW(model, lr=1e-3, stage=stage)
        before = weights(model)
        model.weight.grad = torch.full((300,), 0.5, dtype=torch.bfloat16)
        optimizer.step()
        moved = weights(model)["weight"].float() - before["weight"].float()
        assert (moved <= 0).all()
        assert moved.any()

    run(body)


def test_the_library_logs_under_its_own_name_and_never_prints(capfd):
    def body(rank, world_size):
        logging.getLogger().setLevel(logging.DEBUG)
        twin = Twin(rank, world_size, stage=2)
        twin.backward(0)
        twin.step()
        repr(twin.optimizer)

    run(body)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""
