"""Checkpoints that torch.save wrote: what is read of them, and what is refused."""

import itertools
import logging
import os
import pickle

import pytest
import torch
from models import assert_same, decay_groups, letter_batches, letters, train, weights
from ranks import run

import zeroshard
from zeroshard.checkpoint import load_checkpoint
from zeroshard.checkpoint.opening import open_source
from zeroshard.checkpoint.torch_files import TensorInMemory, is_torch_file
from zeroshard.errors import CheckpointError

BATCHES = letter_batches(0, 8)


def named_groups(model):
    """The groups of `decay_groups`, as (name, parameter)."""
    names = {p: name for name, p in model.named_parameters()}
    return [
        {**group, "params": [(names[p], p) for p in group["params"]]}
        for group in decay_groups(model)
    ]


def names_of(model):
    return [[name for name, _ in group["params"]] for group in named_groups(model)]


def trained(groups=decay_groups, steps=3, **options):
    model = letters()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, fused=True, **options)
    train(model, optimizer, BATCHES[:steps])
    return model, optimizer


def assert_holds(source, model, optimizer):
    """The source has the model's weights and the optimizer's state, bit for bit, by name."""
    read = {name: stored.read() for name, stored in source.weights.items()}
    assert_same(read, model.state_dict(), "weights")
    names = {p: name for name, p in model.named_parameters()}
    expected = {
        f"{names[p]}.{field}": value
        for p, entry in optimizer.state.items()
        for field, value in entry.items()
    }
    state = {f"{n}.{f}": s.read() for n, entry in source.state.items() for f, s in entry.items()}
    assert_same(state, expected, "state")
    assert [group["params"] for group in source.groups] == names_of(model)
    for group, ours in zip(source.groups, optimizer.param_groups, strict=True):
        assert all(group[key] == ours[key] for key in ("lr", "betas", "eps", "weight_decay"))


def test_model_optimizer_and_what_else_are_read(tmp_path):
    model, optimizer = trained(named_groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": 3,
        "epoch": 1,
        "notes": {"seen": [1, 2.5, "x"], "mean": torch.arange(3)},
    }
    torch.save(content, tmp_path / "it.pt")
    assert is_torch_file(tmp_path / "it.pt")
    with open_source(tmp_path / "it.pt") as source:
        assert_holds(source, model, optimizer)
        assert source.step == 3
        assert source.scheduler == scheduler.state_dict()
        assert source.extra.keys() == {"epoch", "notes"}
        assert source.extra["notes"]["mean"].tolist() == [0, 1, 2]
    assert not source.weights, "closed"
    assert not source.state


@pytest.mark.parametrize("step", ["step", "global_step", "iteration"])
@pytest.mark.parametrize(
    ("model_key", "optimizer_key", "scheduler_key"),
    [
        ("model", "optimizer", "scheduler"),
        ("state_dict", "optim", "lr_scheduler"),
        ("model_state_dict", "optimizer_state_dict", "lr_scheduler_state_dict"),
        ("module", "optimizer", "lr_schedulers"),
    ],
)
def test_the_usual_keys_are_known(model_key, optimizer_key, scheduler_key, step, tmp_path):
    model, optimizer = trained(named_groups, steps=1)
    content = {
        model_key: model.state_dict(),
        optimizer_key: optimizer.state_dict(),
        scheduler_key: {"last_epoch": 4},
        step: torch.tensor(7),
    }
    torch.save(content, tmp_path / "it.pt")
    with open_source(tmp_path / "it.pt") as source:
        assert_holds(source, model, optimizer)
        assert (source.step, source.scheduler, source.extra) == (7, {"last_epoch": 4}, {})


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_what_wrappers_put_before_names_is_taken_off(prefix, tmp_path):
    model, optimizer = trained(named_groups, steps=1)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["param_names"] = [prefix + name for name in group["param_names"]]
    state = {prefix + name: value for name, value in model.state_dict().items()}
    torch.save({"model": state, "optimizer": saved}, tmp_path / "it.pt")
    with open_source(tmp_path / "it.pt") as source:
        assert_holds(source, model, optimizer)


def test_a_module_that_is_called_module_keeps_its_name(tmp_path):
    state = {"module.weight": torch.ones(2), "module.bias": torch.zeros(1)}
    torch.save(state, tmp_path / "it.pt")
    with open_source(tmp_path / "it.pt", [["module.weight"]]) as source:
        assert list(source.weights) == ["module.weight", "module.bias"]
    with open_source(tmp_path / "it.pt", [["weight"]]) as source:
        assert list(source.weights) == ["weight", "bias"]
    state["other"] = torch.ones(1)  # then it was not a wrapper
    torch.save(state, tmp_path / "it.pt")
    with open_source(tmp_path / "it.pt") as source:
        assert list(source.weights) == ["module.weight", "module.bias", "other"]


def test_a_bare_state_dict_has_weights_only(tmp_path):
    model = letters()
    torch.save(model.state_dict(), tmp_path / "it.pt")
    with open_source(tmp_path / "it.pt") as source:
        read = {name: stored.read() for name, stored in source.weights.items()}
        assert_same(read, model.state_dict(), "weights")
        assert (source.state, source.groups, source.step, source.extra) == ({}, None, None, {})


def test_a_bare_state_of_an_optimizer_has_state_only(tmp_path):
    model, optimizer = trained(steps=1)
    torch.save(optimizer.state_dict(), tmp_path / "it.pt")
    with open_source(tmp_path / "it.pt", names_of(model)) as source:
        assert source.weights == {}
        assert len(source.state) == len(optimizer.state)


def test_tied_weights_are_one_tensor(tmp_path):
    torch.save({"model": letters().state_dict()}, tmp_path / "it.pt")
    with open_source(tmp_path / "it.pt") as source:
        assert source.weights["head.weight"] is source.weights["embed.weight"]
        others = {id(s) for n, s in source.weights.items() if n != "head.weight"}
        assert len(others) == len(source.weights) - 1


def test_positions_get_the_names_of_the_optimizer_at_hand(tmp_path):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "it")
    with open_source(tmp_path / "it", names_of(model)) as source:
        assert_holds(source, model, optimizer)


def test_positions_without_names_have_no_state_and_say_why(tmp_path):
    model, optimizer = trained(steps=1)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(content, tmp_path / "it.pt")
    with open_source(tmp_path / "it.pt") as source:
        read = {name: stored.read() for name, stored in source.weights.items()}
        assert_same(read, model.state_dict(), "weights")
        assert source.step == 1
        for field in ("state", "groups"):
            with pytest.raises(
                CheckpointError, match=r"it\.pt tells .* by position.*load_checkpoint"
            ):
                getattr(source, field)


def test_groups_of_other_sizes_are_refused(tmp_path):
    model, optimizer = trained(steps=1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "it")
    merged = [list(itertools.chain.from_iterable(names_of(model)))]
    with pytest.raises(CheckpointError, match=r"1 param groups of \[16\].* have \[7, 9\]"):
        open_source(tmp_path / "it", merged)


def test_parameters_in_another_order_are_refused_where_shapes_tell(tmp_path):
    model, optimizer = trained(steps=1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "it")
    names = names_of(model)
    names[0].reverse()
    with pytest.raises(CheckpointError, match=r"exp_avg of 'layers.2.narrow.weight' must have"):
        open_source(tmp_path / "it", names)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(120.0).reshape(2, 3, 4, 5),
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(60.0).reshape(6, 10)[1:5, 2:9:3],
        torch.arange(4.0)[1:2].expand(3, 5),
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.arange(40).to(torch.bfloat16).reshape(5, 8),
        torch.arange(40).to(torch.float8_e4m3fn).reshape(5, 8),
        torch.arange(6) % 2 == 0,
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_any_range_in_any_storage_order(tensor, tmp_path):
    torch.save({"it": tensor}, tmp_path / "it.pt")
    dims = range(tensor.ndim)
    with open_source(tmp_path / "it.pt") as source:
        stored = source.weights["it"]
        assert (stored.shape, stored.dtype) == (tuple(tensor.shape), tensor.dtype)
        for order in itertools.permutations(dims):
            stride, step = [0] * tensor.ndim, 1
            for dim in reversed(order):
                stride[dim], step = step, step * tensor.shape[dim]
            flat = tensor.permute(order).reshape(-1)
            numel = tensor.numel()
            for start, count in {(0, numel), (numel // 3, numel // 2), (numel // 2, 0)}:
                got = stored.read_range(tuple(stride), start, count)
                assert got.dtype == tensor.dtype
                assert bytes(got.untyped_storage()) == bytes(
                    flat[start : start + count].clone().untyped_storage()
                ), (order, start)


def test_a_range_is_read_from_the_mapped_file(tmp_path):
    """Opening reads no tensor: what is written to the file afterwards is what a range has."""
    path = tmp_path / "it.pt"
    tensor = torch.full((1 << 16,), 1.25)
    torch.save({"it": tensor}, path)
    with open_source(path) as source:
        place = path.read_bytes().index(tensor[:64].numpy().tobytes())
        with path.open("r+b") as file:
            file.seek(place + 4 * 60_000)
            file.write(torch.full((8,), 2.5).numpy().tobytes())
        got = source.weights["it"].read_range((1,), 59_998, 12)
    assert got.tolist() == [1.25] * 2 + [2.5] * 8 + [1.25] * 2


class Planted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_is_taken_out_of_a_file(tmp_path):
    torch.save({"model": {}, "more": Planted(tmp_path / "trap")}, tmp_path / "it.pt")
    with pytest.raises(CheckpointError, match=r"it\.pt names posix\.mkdir, which would have to be"):
        open_source(tmp_path / "it.pt")
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("part", [0.05, 0.5, 0.99])
def test_a_truncated_file_is_named(part, tmp_path):
    path = tmp_path / "it.pt"
    torch.save({"model": letters().state_dict()}, path)
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(CheckpointError, match=r"it\.pt is damaged"):
        open_source(path)


def test_a_file_of_the_old_format_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "it.pt"
    torch.save({"model": {}}, path, _use_new_zipfile_serialization=False)
    assert is_torch_file(path)
    with pytest.raises(CheckpointError, match=r"before version 1\.6.*torch\.save\(torch\.load"):
        open_source(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected a dictionary with 'model' and 'optimizer', got a list"),
        ({}, "the file has nothing"),
        ({"weights": {"a": torch.ones(1)}}, "the file has 'weights'"),
        ({"model": {"a": 3}}, "'a' is a int, which is no tensor"),
        pytest.param(
            {"model": {"a": torch.ones(3).to_sparse()}},
            "'a' must be a dense tensor",
            marks=pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
        ),
        (
            {
                "optimizer": {
                    "state": {5: {}},
                    "param_groups": [{"params": [0], "param_names": "a"}],
                }
            },
            "made in another way: KeyError",
        ),
        (
            {
                "optimizer": {
                    "state": {0: {"momentum_buffer": torch.ones(1)}},
                    "param_groups": [{"params": [0], "param_names": ["a"]}],
                }
            },
            "state of 'a' must be AdamW's .* has momentum_buffer",
        ),
    ],
)
def test_content_of_another_kind_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "it.pt")
    with pytest.raises(CheckpointError, match=rf"it\.pt.*{message}"):
        open_source(tmp_path / "it.pt")


def test_one_ranks_slices_are_refused(tmp_path):
    def body(rank, world_size):
        model = letters()
        optimizer = zeroshard.AdamW(named_groups(model), lr=1e-2, model=model)
        train(model, optimizer, BATCHES[:1])
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        path = tmp_path / f"{rank}.pt"
        torch.save(content, path)
        with pytest.raises(
            CheckpointError, match=r"'embed\.weight' is a ShardTensor, which is one"
        ):
            open_source(path)

    run(body)


def test_values_that_are_not_plain_are_left_out_aloud(tmp_path, caplog):
    torch.save({"model": {}, "made": torch.nn.Parameter(torch.ones(1))}, tmp_path / "a.pt")
    with open_source(tmp_path / "a.pt") as source:
        assert list(source.extra) == ["made"]
    with torch.serialization.safe_globals([Kept]):
        torch.save({"model": {}, "made": Kept()}, tmp_path / "b.pt")
        with caplog.at_level(logging.WARNING), open_source(tmp_path / "b.pt") as source:
            assert source.extra == {}
    assert "'made' is not plain values, and is left out" in caplog.text


class Kept:
    pass


def test_nothing_and_folders_of_other_things_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="there is nothing"):
        open_source(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match="an empty folder"):
        open_source(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"a folder with model\.safetensors"):
        open_source(tmp_path / "b")
    (tmp_path / "c").write_bytes(pickle.dumps({}))
    assert not is_torch_file(tmp_path / "c")
    with pytest.raises(CheckpointError, match="a file of another kind"):
        open_source(tmp_path / "c")


@pytest.mark.parametrize("groups", [decay_groups, named_groups])
def test_training_of_torch_goes_on_bit_for_bit(groups, tmp_path):
    """A file of DDP's model and torch's optimizer, under two ranks in stage 3."""
    model, optimizer = trained(groups)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "it")
    expected = train(model, optimizer, BATCHES[3:6])

    def body(rank, world_size):
        model = letters(5)
        optimizer = zeroshard.AdamW(groups(model), lr=0.7, model=model, stage=3)
        load_checkpoint(tmp_path / "it", model, optimizer)
        train(model, optimizer, BATCHES[3:6])  # the same on both ranks: the average is it
        assert_same(weights(model), expected, "after a file of torch.save")

    run(body)


@pytest.mark.parametrize("named", [False, True])
def test_a_consolidated_state_with_masters_goes_on_bit_for_bit(named, tmp_path):
    groups = named_groups if named else decay_groups

    def build(seed, **options):
        model = letters(seed, torch.bfloat16)
        return model, zeroshard.AdamW(groups(model), lr=1e-2, model=model, **options)

    model, optimizer = build(0)
    train(model, optimizer, BATCHES[:3])
    optimizer.consolidate_state_dict()
    saved = optimizer.state_dict()
    assert "master" in saved["state"][0]
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "it")
    expected = train(model, optimizer, BATCHES[3:6])

    model, optimizer = build(7)
    load_checkpoint(tmp_path / "it", model, optimizer)
    assert_same(train(model, optimizer, BATCHES[3:6]), expected, "after a consolidated state")


def test_a_tensor_in_memory_is_read_as_a_file_is(tmp_path):
    stored = TensorInMemory(torch.arange(6).reshape(2, 3), tmp_path)
    assert stored.read().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert stored.read_range((1, 2), 1, 3).tolist() == [3, 1, 4]
