"""What docs/checkpoints.md says about the files, read by a program that knows nothing else."""

import json
import pathlib
import re
import zlib

import pytest
import torch
from models import assert_same, letter_batches, train, weights
from ranks import run
from test_checkpoint import FORMATS, build, state_bits
from torch.distributed.checkpoint import FileSystemReader, load

import zeroshard

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "checkpoints.md"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(folder, fmt="fp32", world_size=2, stage=2):
    """A checkpoint, the weights, and the whole state by position and key."""

    def body(rank, world_size):
        model, optimizer = build(stage, fmt)
        final = train(model, optimizer, letter_batches(rank)[:3])
        path = zeroshard.save_checkpoint(folder, model, optimizer, step=300).path
        names = [name for name, _ in model.named_parameters()]
        order = [p for group in optimizer.param_groups for p in group["params"]]
        of = {id(p): name for name, p in zip(names, model.parameters(), strict=True)}
        return path, final, state_bits(optimizer), [of[id(p)] for p in order]

    return run(body, world_size)[0]


def tensors_in(path):
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "chunks")
    }
    load(found, checkpoint_id=path, no_dist=True)
    return found


def test_the_program_in_the_documentation_reads_the_weights(tmp_path):
    _, expected, _, _ = saved(tmp_path / "checkpoints")
    program = next(
        text
        for text in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
        if "FileSystemReader" in text
    )
    names = {}
    exec(program.replace('"checkpoints/', f'"{tmp_path}/checkpoints/'), names)
    found = names["weights"]
    assert_same(found, {**expected, "head.weight": expected["embed.weight"]}, "weights")


def joined(weight, remainder):
    """As the documentation has it."""
    high = weight.view(torch.int16).to(torch.int64) - (remainder < 0).long()
    bits = (high << 16) + (remainder.to(torch.int64) & 0xFFFF)
    return (bits & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_state_has_the_names_and_the_meaning_that_are_documented(fmt, tmp_path):
    path, expected, state, order = saved(tmp_path, fmt)
    found = tensors_in(path)
    for position, name in enumerate(order):
        begin = f"optimizer.state.{name}."
        fields = {key.removeprefix(begin) for key in found if key.startswith(begin)}
        assert found[f"{begin}step"] == state[f"{position}.step"] == 3
        if fmt == "int8":
            numel = expected[name].numel()
            assert found[f"{begin}exp_avg_codes"].dtype == torch.int8
            assert found[f"{begin}exp_avg_sq_codes"].dtype == torch.uint8
            assert found[f"{begin}exp_avg_scale"].shape == (-(-numel // 256),)
            assert not fields & {"exp_avg", "exp_avg_sq"}, "codes under the name of values"
        else:
            for moment in ("exp_avg", "exp_avg_sq"):
                values = found[begin + moment]
                assert values.dtype == (torch.bfloat16 if fmt == "bf16" else torch.float32)
                assert torch.equal(values.float(), state[f"{position}.{moment}"])
        master = state.get(f"{position}.master")
        if "remainder" in fields:
            assert torch.equal(joined(found[f"model.{name}"], found[f"{begin}remainder"]), master)
        elif "master" in fields:
            assert torch.equal(found[f"{begin}master"], master)
        else:
            assert master is None


def test_every_byte_has_the_checksum_that_is_documented(tmp_path):
    path, *_ = saved(tmp_path)
    said = json.loads((path / "checkpoint.json").read_text())
    content = said["content"]
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    assert zlib.crc32(text.encode()) == said["crc32"]
    assert (content["format"], content["version"], content["step"]) == ("zeroshard", 1, 300)
    assert content["tied"] == {"head.weight": "embed.weight"}
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    assert content["files"] == {k: v for k, v in files.items() if k != "checkpoint.json"}
    sums = (path / "checksums.json").read_bytes()
    assert zlib.crc32(sums) == content["checksums"]
    covered = {}
    for name, ranges in json.loads(sums).items():
        data = (path / name).read_bytes()
        for offset, length, crc32 in ranges:
            assert zlib.crc32(data[offset : offset + length]) == crc32
        covered[name] = sum(length for _, length, _ in ranges)
    assert covered == {k: v for k, v in content["files"].items() if k != "checksums.json"}


def test_each_byte_is_written_once_by_the_rank_that_owns_it(tmp_path):
    """Tied weights and what is whole on every rank too; nothing is written with its storage."""

    def body(rank, world_size):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
        model[0].requires_grad_(False)
        model[3].weight = model[1].weight
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = zeroshard.AdamW(trained, model=model, stage=2)
        return zeroshard.save_checkpoint(tmp_path, model, optimizer).path

    path = run(body, 4)[0]
    sizes = [file.stat().st_size for file in sorted(path.glob("*.distcp"))]
    numel, trained = 4 * 512 + 3 * 512**2, 3 * 512 + 2 * 512**2
    assert len(sizes) == 4
    assert numel * 4 + trained * 8 <= sum(sizes) <= 1.02 * (numel * 4 + trained * 8) + 2**17
    assert max(sizes) <= 1.1 * min(sizes) + 2**17


def test_the_names_are_those_of_torchs_own_state_dicts(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def body(rank, world_size):
        model, optimizer = build(2)
        train(model, optimizer, letter_batches(rank)[:3])
        path = zeroshard.save_checkpoint(tmp_path, model, optimizer).path
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        for values in state["optimizer"]["state"].values():
            for value in values.values():
                getattr(value, "_local_tensor", value).zero_()
        before = weights(model)
        load(state, checkpoint_id=path)
        assert_same(weights(model), before, "weights")
        return state_bits(optimizer)

    found = run(body)[0]
    assert_same(found, saved(tmp_path)[2], "state")
