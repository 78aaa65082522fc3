"""Directories in DeepSpeed's layout, written here without it: any shapes, ranks and paddings.

Those that DeepSpeed itself wrote are in the tests of integrations.
"""

import os
import sys
import types
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same

from zeroshard.checkpoint import deepspeed_layout
from zeroshard.checkpoint.deepspeed import is_deepspeed, open_deepspeed
from zeroshard.checkpoint.deepspeed_files import StandIn, load_file
from zeroshard.errors import CheckpointError

FIELDS = ("master", "exp_avg", "exp_avg_sq")
NAN = float("nan")  # in all padding: what reads it is found
ALIGNMENT = 4
STEP = 7
BASE, BETWEEN = "base_optimizer_state", "param_alignment_paddings"


def parameters(shapes, seed=0):
    """{name: {field: values}}, no two elements alike."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {
            field: torch.randperm(prod(shape), generator=generator).reshape(shape).float()
            + 1000 * number
            for number, field in enumerate(FIELDS, start=1)
        }
        for name, shape in shapes.items()
    }


def padded(tensor, numel):
    """Flat, and NaN up to `numel` elements."""
    return torch.cat([tensor.reshape(-1), tensor.new_full((numel - tensor.numel(),), NAN)])


def on_line(group, count, field, between):
    """A param group as the ranks' flat tensors, and how many of each are padding."""
    pieces = [padded(p[field], p[field].numel() + between) for p in group.values()]
    line = torch.cat(pieces)[: -between or None]  # none after the last
    whole = padded(line, -(-line.numel() // (ALIGNMENT * count)) * ALIGNMENT * count)
    ends = [whole.numel() // count * (rank + 1) for rank in range(count)]
    parts = whole.chunk(count)
    return parts, [min(max(e - line.numel(), 0), len(p)) for e, p in zip(ends, parts, strict=True)]


def dealt_out(group, count, field):
    """A sub-group as the ranks' flat tensors."""
    shares = []
    for entry in group.values():
        share = -(-entry[field].numel() // count)
        shares.append(padded(entry[field], share * count).chunk(count))
    return [torch.cat(parts) for parts in zip(*shares, strict=True)]


def write(folder, groups, count, stage, *, between=0, frozen=None, tag="global_step7", **content):
    """A checkpoint of param groups, {name: {field: values}} each, of `count` ranks."""
    (folder / tag).mkdir(parents=True)
    (folder / "latest").write_text(tag)
    options = {"lr": 0.25, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "fused": None}
    shapes = [{name: entry["master"].shape for name, entry in g.items()} for g in groups]
    module = {name: entry["master"].bfloat16() for g in groups for name, entry in g.items()}
    frozen = frozen or {}
    by_field = {}
    for field in FIELDS:
        if stage == 3:
            by_field[field] = [(dealt_out(g, count, field), [0] * count) for g in groups]
        else:
            by_field[field] = [on_line(g, count, field, between) for g in groups]
    for rank in range(count):
        paddings = [at_end[rank] for _, at_end in by_field["master"]]
        lengths = [len(parts[rank]) for parts, _ in by_field["master"]]
        masters = [
            parts[rank][: length - padding]
            for (parts, _), length, padding in zip(
                by_field["master"], lengths, paddings, strict=True
            )
        ]
        base = {
            "state": {
                flat: {
                    "step": torch.tensor(float(STEP)),
                    **{field: by_field[field][flat][0][rank] for field in FIELDS[1:]},
                }
                for flat in range(len(groups))
            },
            "param_groups": [{**options, "params": [flat]} for flat in range(len(groups))],
        }
        if stage == 3:
            optimizer = {"fp32_flat_groups": masters, "optimizer_state_dict": base}
            optimizer["partition_count"] = count
        else:
            optimizer = {
                "single_partition_of_fp32_groups": masters,
                "base_optimizer_state": base,
                "group_paddings": paddings,
                "param_alignment_paddings": [[between] * (len(g) - 1) + [0] for g in groups],
                "partition_count": [count] * len(groups),
            }
        torch.save(
            {"optimizer_state_dict": optimizer},
            folder / tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if stage == 3 or rank == 0:
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            fragments = {
                name: padded(value, -(-value.numel() // count) * count).chunk(count)[rank]
                for name, value in frozen.items()
            }
            empty = {name: torch.empty(0) for name in (*module, *frozen)}
            model = {
                "module": empty if stage == 3 else {**module, **frozen},
                "buffer_names": [],
                "param_shapes": shapes,
                "shared_params": {},
                "frozen_param_shapes": {n: value.shape for n, value in frozen.items()},
                "frozen_param_fragments": fragments if stage == 3 else frozen,
                "lr_scheduler": None,
                "global_steps": STEP,
                "mp_world_size": 1,
                **content,
            }
            torch.save(model, folder / tag / f"{prefix}mp_rank_00_model_states.pt")
    return folder / tag


def state_of(source):
    return {
        f"{name}.{field}": stored.read()
        for name, fields in source.state.items()
        for field, stored in fields.items()
        if field != "step"
    }


def expected_of(groups):
    return {
        f"{name}.{field}": value
        for group in groups
        for name, entry in group.items()
        for field, value in entry.items()
    }


def stride_of(shape, order):
    """Dense strides, of which the last in `order` is 1."""
    stride, numel = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim], numel = numel, numel * max(1, shape[dim])
    return tuple(stride)


SHAPES = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3),
    count=st.integers(1, 5),
    stage=st.sampled_from([2, 3]),
    between=st.sampled_from([0, 0, 3]),
    data=st.data(),
)
def test_any_range_in_any_order_of_any_parameter(
    shapes, count, stage, between, data, tmp_path_factory
):
    groups = [
        parameters({f"{g}.{n}": tuple(s) for n, s in enumerate(group)}, seed=g)
        for g, group in enumerate(shapes)
    ]
    folder = tmp_path_factory.mktemp("any")
    write(folder, groups, count, stage, between=between)
    with open_deepspeed(folder) as source, pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_layout, "BUFFER_NUMEL", data.draw(st.sampled_from([1, 4, 2**20])))
        assert_same(state_of(source), expected_of(groups), "state")
        name = data.draw(st.sampled_from(sorted(source.state)))
        field = data.draw(st.sampled_from(FIELDS))
        stored, whole = source.state[name][field], expected_of(groups)[f"{name}.{field}"]
        order = data.draw(st.permutations(range(whole.ndim)))
        start = data.draw(st.integers(0, whole.numel()))
        numel = data.draw(st.integers(0, whole.numel() - start))
        got = stored.read_range(stride_of(whole.shape, order), start, numel)
        assert torch.equal(got, whole.permute(order).reshape(-1)[start : start + numel])


@pytest.mark.parametrize("stage", [2, 3])
def test_everything_that_a_source_has(stage, tmp_path):
    groups = [parameters({"a": (3, 5), "b": (7,)}), parameters({"c": (2, 2)}, seed=1)]
    frozen = {"fixed": torch.arange(5.0).bfloat16(), "empty": torch.zeros(0, 3)}
    content = {
        "shared_params": {"tied": "a"},
        "module": {"places": torch.arange(3), **{n: torch.empty(0) for n in "abc"}},
        "buffer_names": ["places"],
        "lr_scheduler": {"last_epoch": 4},
        "epoch": 2,
    }
    if stage == 2:
        content["module"] |= {n: e["master"].bfloat16() for g in groups for n, e in g.items()}
        content["module"] |= {**frozen, "tied": content["module"]["a"]}
    tag = write(tmp_path, groups, 3, stage, frozen=frozen, **content)
    for path in (tmp_path, tag):
        assert is_deepspeed(path)
        with open_deepspeed(path) as source:
            assert_same(state_of(source), expected_of(groups), "state")
            assert {fields["step"].read().item() for fields in source.state.values()} == {STEP}
            weights = {name: stored.read() for name, stored in source.weights.items()}
            expected = {n: e["master"] for g in groups for n, e in g.items()}
            expected["tied"] = expected["a"]
            if stage == 2:
                expected = {name: value.bfloat16() for name, value in expected.items()}
            assert_same(weights, {**expected, **frozen, "places": torch.arange(3)}, "weights")
            assert source.weights["tied"] is source.weights["a"]
            assert source.step == STEP
            assert source.scheduler == {"last_epoch": 4}
            assert source.extra == {"epoch": 2}
            options = {"lr": 0.25, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
            assert source.groups == [
                {**options, "params": ["a", "b"]},
                {**options, "params": ["c"]},
            ]
    assert not source.weights
    assert not source.state


def test_several_sub_groups_are_one_param_group(tmp_path):
    groups = [parameters({"a": (3, 5)}), parameters({"b": (7,)}, seed=1)]
    tag = write(tmp_path, groups, 2, 3)
    for file in tag.glob("*optim_states.pt"):
        content = torch.load(file)
        base = content["optimizer_state_dict"]["optimizer_state_dict"]
        base["param_groups"] = [{**base["param_groups"][0], "params": [0, 1]}]
        torch.save(content, file)
    with open_deepspeed(tmp_path) as source:
        assert [group["params"] for group in source.groups] == [["a", "b"]]
        assert_same(state_of(source), expected_of(groups), "state")


def test_files_of_before_there_were_paddings_between_parameters(tmp_path):
    groups = [parameters({"a": (3, 5), "b": (7,)})]
    tag = write(tmp_path, groups, 2, 2)
    for file in tag.glob("*optim_states.pt"):
        rewrite(file, lambda content: content["optimizer_state_dict"].pop(BETWEEN))
    with open_deepspeed(tmp_path) as source:
        assert_same(state_of(source), expected_of(groups), "state")


def test_steps_may_be_counted_by_the_group(tmp_path):
    tag = write(tmp_path, [parameters({"a": (3, 5)})], 2, 2)
    for file in tag.glob("*optim_states.pt"):
        rewrite(file, lambda content: content["optimizer_state_dict"][BASE]["state"][0].pop("step"))
        rewrite(file, set_at("optimizer_state_dict", BASE, "param_groups", 0, "step", 5))
    with open_deepspeed(tmp_path) as source:
        assert source.state["a"]["step"].read() == 5
        assert "step" not in source.groups[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_names_are_those_of_the_model_that_was_compiled(stage, tmp_path):
    before = {"_orig_mod.part.a": (3, 5), "_orig_mod.b": (2,)}
    write(tmp_path, [parameters(before)], 2, stage)
    with open_deepspeed(tmp_path) as source:
        assert source.state.keys() == source.weights.keys() == {"part.a", "b"}
        assert source.groups[0]["params"] == ["part.a", "b"]


def test_parameters_without_elements_are_not_taken_for_tied(tmp_path):
    empty = {"x": torch.zeros(0, 3), "y": torch.zeros(2, 0)}
    write(tmp_path, [parameters({"a": (4,)})], 1, 2, frozen=empty, shared_params={"y": "x"})
    with open_deepspeed(tmp_path) as source:
        assert_same({name: source.weights[name].read() for name in empty}, empty, "empty")


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_and_tied_parameters_may_be_left_out(stage, tmp_path):
    tied = {"shared_params": {"other_frozen": "frozen"}, "frozen_param_shapes": None}
    write(tmp_path, [parameters({"a": (4,)})], 2, stage, **tied)
    with open_deepspeed(tmp_path) as source:
        assert source.weights.keys() == {"a"}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at what is mapped")
@pytest.mark.parametrize("stage", [2, 3])
def test_tensors_stay_in_their_files_until_they_are_read(stage, tmp_path):
    tag = write(tmp_path, [parameters({"a": (40, 30)})], 2, stage)
    files = {str(file) for file in tag.iterdir() if stage == 2 or "optim" in file.name}

    def mapped():
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines} & files

    with open_deepspeed(tmp_path) as source:
        assert mapped() == files
        part = source.state["a"]["exp_avg"].read_range((30, 1), 5, 1000)
    assert not mapped()
    assert part.untyped_storage().nbytes() == 4000


@pytest.mark.parametrize("shape", [(50, 40), (5, 30, 20)])
def test_elements_in_another_order_go_through_a_small_buffer(shape, tmp_path, monkeypatch):
    groups = [parameters({"a": shape})]
    write(tmp_path, groups, 2, 3)
    monkeypatch.setattr(deepspeed_layout, "BUFFER_NUMEL", 100)
    order = list(reversed(range(len(shape))))
    with open_deepspeed(tmp_path) as source:
        stored = source.state["a"]["exp_avg"]
        taken, pieces = [], stored.pieces
        monkeypatch.setattr(
            stored, "pieces", lambda start, n: (taken.append(n), pieces(start, n))[1]
        )
        got = stored.read_range(stride_of(shape, order), 0, prod(shape))
    assert torch.equal(got, groups[0]["a"]["exp_avg"].permute(order).reshape(-1))
    assert max(taken) <= 100


# --- files that are not read


class Commands:
    """What runs a command when a file with it is unpickled."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.system, (f"touch {self.made}",)


def test_a_file_that_names_a_function_is_refused_and_runs_nothing(tmp_path):
    made = tmp_path / "made"
    tag = write(tmp_path, [parameters({"a": (4,)})], 1, 2, note=Commands(made))
    file = tag / "mp_rank_00_model_states.pt"
    with pytest.raises(CheckpointError, match=r"model_states.pt names posix\.system, which could"):
        open_deepspeed(tmp_path)
    assert not made.exists()
    torch.load(file, weights_only=False)
    assert made.exists(), "the file is harmless, and shows nothing"


@pytest.fixture
def fake(monkeypatch):
    """A module as of DeepSpeed, to write files with."""
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return sys.modules["deepspeed.runtime.zero"]


def test_its_own_classes_become_objects_that_do_nothing(fake, tmp_path, monkeypatch):
    class Scaler:
        def __init__(self):
            self.scale = 8

    def touch(path):
        path.touch()

    class Touches:
        def __reduce__(self):
            return touch, (str(tmp_path / "made"),)

    for thing in (Scaler, touch):
        thing.__module__, thing.__qualname__ = fake.__name__, thing.__name__
        setattr(fake, thing.__name__, thing)
    torch.save({"scaler": Scaler(), "touched": Touches()}, tmp_path / "file.pt")
    monkeypatch.undo()
    content = load_file(tmp_path / "file.pt")
    assert type(content["scaler"]) is StandIn
    assert content["scaler"].scale == 8
    assert type(content["touched"]) is StandIn
    assert content["touched"].args == (str(tmp_path / "made"),)
    assert not (tmp_path / "made").exists()
    assert StandIn not in [
        thing[0] for thing in torch.serialization.get_safe_globals() if type(thing) is tuple
    ]


def test_values_of_the_user_that_hold_its_objects_are_left_out(fake, tmp_path, monkeypatch):
    class Thing:
        pass

    Thing.__module__, Thing.__qualname__ = fake.__name__, "Thing"
    fake.Thing = Thing
    write(tmp_path, [parameters({"a": (4,)})], 1, 2, mine={"x": [Thing()]}, yours={"x": [1]})
    monkeypatch.undo()
    assert open_deepspeed(tmp_path).extra == {"yours": {"x": [1]}}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_whose_file_is_missing_or_cut_off_is_named(stage, tmp_path):
    frozen = {"fixed": torch.arange(5.0)}
    tag = write(tmp_path, [parameters({"a": (5, 5), "b": (3,)})], 3, stage, frozen=frozen)
    for file in sorted(tag.iterdir()):
        kept = file.read_bytes()
        for length in (0, 10, len(kept) // 2, len(kept) - 1):
            file.write_bytes(kept[:length])
            with pytest.raises(CheckpointError, match=f"{file.name} cannot be read"):
                open_deepspeed(tmp_path)
        file.unlink()
        with pytest.raises(CheckpointError, match=f"expected {file.name}, which is missing"):
            open_deepspeed(tmp_path)
        file.write_bytes(kept)
    open_deepspeed(tmp_path)


def rewrite(file, change):
    content = torch.load(file)
    change(content)
    torch.save(content, file)


def set_at(*path):
    """A change of a file's content: the value at the end of a path of keys."""
    *path, last, value = path

    def change(content):
        for key in path:
            content = content[key]
        content[last] = value(content[last]) if callable(value) else value

    return change


OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
FIRST = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
INSIDE = ("optimizer_state_dict", BASE)
ODD = {
    "of another step": (OPTIMIZER, (*INSIDE, "state", 0, "step", torch.tensor(6.0)), "step 6"),
    "of another number of ranks": (
        OPTIMIZER,
        ("optimizer_state_dict", "partition_count", [3]),
        f"{OPTIMIZER} was not saved together",
    ),
    "with a moment too short": (
        OPTIMIZER,
        (*INSIDE, "state", 0, "exp_avg", lambda t: t[:-4]),
        f"{OPTIMIZER} is damaged: expected .* elements of exp_avg",
    ),
    "with weights too short": (
        OPTIMIZER,
        ("optimizer_state_dict", "single_partition_of_fp32_groups", lambda g: [g[0][:-1]]),
        "does not fit to the weights' file: expected 30 elements",
    ),
    "of another optimizer": (
        FIRST,
        (*INSIDE, "state", 0, lambda s: {"step": s["step"], "exp_avg": s["exp_avg"]}),
        "of another optimizer than AdamW",
    ),
    "of 1-bit Adam": (
        FIRST,
        (*INSIDE, "state", 0, lambda s: {**s, "worker_error": s["exp_avg"]}),
        "another optimizer than AdamW.*worker_error",
    ),
    "without bias correction": (
        FIRST,
        (*INSIDE, "param_groups", 0, lambda g: {**g, "bias_correction": False}),
        "without bias correction",
    ),
    "of groups on different ranks": (
        FIRST,
        ("optimizer_state_dict", "partition_count", [2, 1]),
        "param groups on different numbers of ranks",
    ),
    "of no ZeRO": (FIRST, ("optimizer_state_dict", lambda _: {"state": {}}), "no fp32 weights"),
    "tensor parallel": (MODEL, ("mp_world_size", 2), "split over ranks"),
    "of another shape": (MODEL, ("param_shapes", [{"a": (5, 7)}]), "expected 35 elements"),
    "of another making": (MODEL, ("param_shapes", 5), "made in another way"),
}


@pytest.mark.parametrize("what", ODD)
def test_files_that_do_not_fit_are_refused(what, tmp_path):
    tag = write(tmp_path, [parameters({"a": (5, 6)})], 2, 2)
    file, change, message = ODD[what]
    rewrite(tag / file, set_at(*change))
    with pytest.raises(CheckpointError, match=message):
        open_deepspeed(tmp_path)


def test_a_frozen_parameter_that_a_rank_has_too_little_of_is_refused(tmp_path):
    frozen = {"fixed": torch.arange(5.0)}
    tag = write(tmp_path, [parameters({"a": (5, 6)})], 2, 3, frozen=frozen)
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    rewrite(tag / name, set_at("frozen_param_fragments", "fixed", lambda t: t[:-1]))
    with pytest.raises(CheckpointError, match=f"{name} does not fit.*expected 3 .* of 'fixed'"):
        open_deepspeed(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mp_rank_01_model_states.pt", "tensor or pipeline parallel"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline parallel"),
        ("layer_01-model_states.pt", "pipeline parallel"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "a mixture of experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "a mixture of experts"),
        ("zero", "a universal one"),
        ("offloaded_tensors", "on NVMe"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "holds two checkpoints"),
        ("zero_pp_rank_5_mp_rank_00_optim_states.pt", "holds files of two checkpoints"),
    ],
)
def test_other_kinds_of_checkpoints_are_refused(name, message, tmp_path):
    tag = write(tmp_path, [parameters({"a": (5,)})], 2, 2)
    (tag / name).touch()
    assert is_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_deepspeed(tmp_path)


def test_a_checkpoint_without_zero_is_refused(tmp_path):
    torch.save({"module": {}, "param_shapes": None}, tmp_path / MODEL)
    with pytest.raises(CheckpointError, match=r"without ZeRO.*'module' and 'optimizer'"):
        open_deepspeed(tmp_path)


def test_a_file_in_the_format_before_zip_is_refused(tmp_path):
    tag = write(tmp_path, [parameters({"a": (5,)})], 1, 2)
    content = torch.load(tag / FIRST)
    torch.save(content, tag / FIRST, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=f"{FIRST} cannot be read.*checkpoint_serialization"):
        open_deepspeed(tmp_path)


def test_the_folder_that_latest_names_is_read(tmp_path):
    old, new = parameters({"a": (5,)}, seed=1), parameters({"a": (5,)}, seed=2)
    write(tmp_path, [new], 1, 2, tag="mine")
    write(tmp_path, [old], 1, 2, tag="global_step9")
    (tmp_path / "latest").write_text("mine\n")
    with open_deepspeed(tmp_path) as source:
        assert_same(state_of(source), expected_of([new]), "state")
    for leads_nowhere in (lambda f: f.write_text("gone"), lambda f: f.unlink()):
        leads_nowhere(tmp_path / "latest")
        assert is_deepspeed(tmp_path)
        with pytest.raises(CheckpointError, match=r"no file 'latest'.*such as .*global_step9"):
            open_deepspeed(tmp_path)


def test_what_is_no_such_checkpoint_is_not_taken_for_one(tmp_path):
    (tmp_path / "step-000000000003").mkdir()
    (tmp_path / "latest").write_text("step-000000000003")
    (tmp_path / "file").write_bytes(b"\xff\x00")
    for path in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        assert not is_deepspeed(path)
        with pytest.raises(CheckpointError, match="holds no DeepSpeed checkpoint"):
            open_deepspeed(path)
    (tmp_path / "latest").write_bytes(b"\xff\x00")
    assert not is_deepspeed(tmp_path)
