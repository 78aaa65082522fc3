"""Checkpoints in other formats: what is in them, who can read them, and what memory it takes."""

import json
import os
import struct
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import assert_same, decay_groups, letter_batches, letters, loss_of, train, weights
from ranks import run
from test_checkpoint import FORMATS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from zeroshard.checkpoint import load_checkpoint, save_checkpoint
from zeroshard.checkpoint.convert import convert
from zeroshard.checkpoint.decoded import cast, master_of, moment_of
from zeroshard.checkpoint.opening import open_source
from zeroshard.errors import CheckpointError, ConfigError

safetensors = pytest.importorskip("safetensors.torch")

BF16 = torch.bfloat16
quiet = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def built(seed, dtype=torch.float32):
    """A model that FSDP2 takes too: it has no parameters without a dimension."""
    model = letters(seed, dtype)
    model.gain = nn.Parameter(model.gain.detach().reshape(1))
    return model


def parameter_names(model):
    """Names in the order of the optimizer's positions."""
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for group in decay_groups(model) for p in group["params"]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes checkpoints of ours on two ranks in stage 3: fmt -> (path, weights, state by name)."""
    made = {}

    def save(fmt):
        dtype, precision = FORMATS[fmt]
        path = tmp_path_factory.mktemp(fmt)

        def body(rank, world_size):
            model = built(0, dtype)
            optimizer = zeroshard.AdamW(
                decay_groups(model),
                lr=1e-2,
                model=model,
                stage=3,
                precision=zeroshard.Precision(**precision),
            )
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            train(model, optimizer, letter_batches(rank)[:3])
            note = {"seen": [1, 2.5], "rank": rank}
            save_checkpoint(path, model, optimizer, scheduler, mean=torch.arange(3), note=note)
            optimizer.consolidate_state_dict()
            state = optimizer.state_dict()["state"] if rank == 0 else {}
            return weights(model), state

        expected, by_position = run(body)[0]
        names = parameter_names(built(0))
        state = {
            f"{names[at]}.{key}": value
            for at, entry in by_position.items()
            for key, value in entry.items()
        }
        return path, expected, state

    def cached(fmt):
        if fmt not in made:
            made[fmt] = save(fmt)
        return made[fmt]

    return cached


def masters(expected, state):
    """The exact values of all parameters."""
    return {name: state.get(f"{name}.master", value) for name, value in expected.items()}


# --- torch


def state_by_name(content):
    groups = content["optimizer"]["param_groups"]
    names = {
        at: name
        for group in groups
        for at, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {
        f"{names[at]}.{key}": value
        for at, entry in content["optimizer"]["state"].items()
        for key, value in entry.items()
    }


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_torch_file_has_everything_bit_for_bit(fmt, saved, tmp_path):
    path, expected, state = saved(fmt)
    convert(path, tmp_path / "it.pt", "torch")
    content = torch.load(tmp_path / "it.pt", weights_only=True)
    tied = {**expected, "head.weight": expected["embed.weight"]}
    assert_same(content["model"], tied, "weights")
    assert content["model"]["head.weight"].data_ptr() == content["model"]["embed.weight"].data_ptr()
    assert_same(state_by_name(content), state, "state")
    assert content["step"] == 3
    assert content["scheduler"]["step_size"] == 100
    assert content["mean"].tolist() == [0, 1, 2]
    assert content["note"] == [{"seen": [1, 2.5], "rank": rank} for rank in (0, 1)]
    groups = content["optimizer"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [7, 9]
    assert groups[0]["params"] + groups[1]["params"] == list(range(16))
    assert groups[0]["param_names"] + groups[1]["param_names"] == parameter_names(built(0))
    assert [group["lr"] for group in groups] == [1e-2, 4e-3]


def test_the_file_is_what_torch_save_makes(saved, tmp_path):
    """Whole by its checksums, mapped and unmapped alike, with aligned tensors."""
    path, *_ = saved("int8")
    file = tmp_path / "it.pt"
    convert(path, file, "torch")
    archive = zipfile.ZipFile(file)
    assert archive.testzip() is None
    raw = file.read_bytes()
    for info in archive.infolist():
        name, extra = struct.unpack_from("<HH", raw, info.header_offset + 26)
        assert (info.header_offset + 30 + name + extra) % 64 == 0, info.filename
    content = torch.load(file, weights_only=True)
    mapped = torch.load(file, weights_only=True, mmap=True)
    assert_same(mapped["model"], content["model"], "mapped")
    assert_same(state_by_name(mapped), state_by_name(content), "mapped")
    torch.save(content, tmp_path / "anew.pt")
    assert abs(file.stat().st_size - (tmp_path / "anew.pt").stat().st_size) < 0.1 * len(raw)


@quiet
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_adamw_of_torch_goes_on_bit_for_bit(to, saved, tmp_path):
    path, *_ = saved("fp32")
    convert(path, tmp_path / "it", to)
    batches = letter_batches(7)[:3]

    model = built(3)
    optimizer = zeroshard.AdamW(decay_groups(model), lr=0.1, model=model)
    load_checkpoint(path, model, optimizer)
    expected = train(model, optimizer, batches)

    model = built(4)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=0.2)
    if to == "torch":
        content = torch.load(tmp_path / "it", weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    else:
        load_dcp(tmp_path / "it", model, optimizer)
    for group in optimizer.param_groups:
        group["fused"] = True  # as zeroshard updates on a CPU
    assert_same(train(model, optimizer, batches), expected, to)


# --- dcp


def load_dcp(path, model, optimizer):
    """What FSDP2's and DDP's tutorials do."""
    on_model, on_optimizer = get_state_dict(model, optimizer)
    content = {"model": on_model, "optimizer": on_optimizer}
    dcp.load(content, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(
        model, optimizer, model_state_dict=on_model, optim_state_dict=content["optimizer"]
    )


@quiet
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_dcp_folder_has_everything_bit_for_bit(fmt, saved, tmp_path):
    path, expected, state = saved(fmt)
    convert(path, tmp_path / "it", "dcp")
    dtype, _ = FORMATS[fmt]
    model = built(4, dtype)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=0.2, fused=dtype == torch.float32)
    load_dcp(tmp_path / "it", model, optimizer)
    assert_same(weights(model), expected, "weights")
    assert model.head.weight is model.embed.weight
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 4e-3]
    with open_source(tmp_path / "it") as source:
        read = {f"{n}.{f}": s.read() for n, entry in source.state.items() for f, s in entry.items()}
        assert_same(read, state, "state")
        assert source.weights["head.weight"] is source.weights["embed.weight"]
        assert source.step == 3
        assert source.scheduler["step_size"] == 100


@quiet
def test_the_keys_are_those_that_dcp_save_writes(saved, tmp_path):
    path, *_ = saved("fp32")
    convert(path, tmp_path / "ours", "dcp")
    model = built(0)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    train(model, optimizer, letter_batches(0)[:1])
    on_model, on_optimizer = get_state_dict(model, optimizer)
    theirs = tmp_path / "theirs"
    dcp.save({"model": on_model, "optimizer": on_optimizer}, checkpoint_id=theirs, no_dist=True)

    def described(folder):
        metadata = dcp.FileSystemReader(folder).read_metadata()
        entries = metadata.state_dict_metadata.items()
        shapes = {key: getattr(entry, "size", None) for key, entry in entries}
        return shapes, metadata.planner_data

    (ours, our_paths), (others, their_paths) = described(tmp_path / "ours"), described(theirs)
    more = {"step", "mean", *(key for key in ours if key.startswith(("scheduler.", "note.")))}
    assert {key: ours[key] for key in ours.keys() - more} == others
    for key in others:
        assert our_paths[key] == their_paths[key], key


@pytest.mark.parametrize("wrapped", ["fsdp2", "ddp"])
def test_fsdp2_and_ddp_go_on_bit_for_bit(wrapped, saved, tmp_path):
    path, *_ = saved("fp32")
    convert(path, tmp_path / "it", "dcp")

    def body(rank, world_size):
        batches = letter_batches(rank)[3:6]
        model = built(3)
        optimizer = zeroshard.AdamW(decay_groups(model), lr=0.1, model=model, stage=2)
        load_checkpoint(path, model, optimizer)
        expected = losses(model, optimizer, batches)

        model = built(4)
        if wrapped == "fsdp2":
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
            forward = model
        else:
            forward = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(decay_groups(model), lr=0.2, fused=True)
        load_dcp(tmp_path / "it", forward, optimizer)
        for group in optimizer.param_groups:
            group["fused"] = True
        assert losses(forward, optimizer, batches) == expected

    run(body)


def losses(model, optimizer, batches):
    found = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


# --- safetensors


@pytest.mark.parametrize("fmt", FORMATS)
def test_safetensors_have_the_weights_bit_for_bit_and_tied_ones_once(fmt, saved, tmp_path):
    path, expected, _ = saved(fmt)
    convert(path, tmp_path / "it", "safetensors")
    assert [file.name for file in (tmp_path / "it").iterdir()] == ["model.safetensors"]
    assert_same(safetensors.load_file(tmp_path / "it" / "model.safetensors"), expected, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_in_another_dtype_are_rounded_and_fp32_ones_are_the_masters(
    fmt, dtype, saved, tmp_path
):
    path, expected, state = saved(fmt)
    if dtype == torch.float32:
        expected = masters(expected, state)
        assert (fmt in ("fp32", "bf16")) == (not any(key.endswith(".master") for key in state))
    expected = {name: value.to(dtype) for name, value in expected.items()}
    convert(path, tmp_path / "it", "safetensors", dtype=dtype)
    assert_same(safetensors.load_file(tmp_path / "it" / "model.safetensors"), expected, fmt)
    convert(path, tmp_path / "it.pt", "torch", dtype=dtype)
    content = torch.load(tmp_path / "it.pt", weights_only=True)
    tied = {**expected, "head.weight": expected["embed.weight"]}
    assert_same(content["model"], tied, "torch")
    has_masters = any(key.endswith(".master") for key in state)
    assert ("master" in content["optimizer"]["state"][0]) == (
        has_masters and dtype != torch.float32
    )


def test_several_files_and_an_index(saved, tmp_path):
    path, expected, _ = saved("split")
    convert(path, tmp_path / "it", "safetensors", max_file_nbytes=3000)
    index = json.loads((tmp_path / "it" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "it").glob("*.safetensors"))
    assert len(files) > 3
    assert set(index["weight_map"].values()) == {file.name for file in files}
    read = {}
    for file in files:
        read.update(safetensors.load_file(file))
        assert file.stat().st_size < 4000
    assert_same(read, expected, "parts")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())


@pytest.fixture(scope="module")
def hf():
    architectures = pytest.importorskip("architectures")
    return architectures.hf


def llama(hf, tied, dtype):
    from architectures import SPECIAL, TEXT

    torch.manual_seed(0)
    config = hf.LlamaConfig(**TEXT, **SPECIAL, tie_word_embeddings=tied, dtype=dtype)
    return hf.LlamaForCausalLM(config).to(dtype)


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("tied", [True, False])
def test_from_pretrained_reads_what_was_trained(hf, tied, dtype, tmp_path):
    ids = torch.arange(3, 19).reshape(2, 8)

    def body(rank, world_size):
        model = llama(hf, tied, torch.float32)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        save_checkpoint(tmp_path / "c", model, optimizer)
        return weights(model)

    trained = llama(hf, tied, torch.float32)
    trained.load_state_dict(run(body)[0], strict=False)
    trained.tie_weights()
    for p in trained.parameters():  # buffers that are in no file stay fp32
        p.data = p.data.to(dtype)
    with torch.no_grad():
        expected = trained.eval()(input_ids=ids).logits
    convert(tmp_path / "c", tmp_path / "out", "safetensors", dtype=dtype)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json"}
    stored = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not tied)
    assert "model.embed_tokens.weight" in stored
    model, about = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(about.values()), about
    assert model.dtype == (dtype or torch.float32)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, expected)


# peft asks transformers by a name that transformers is about to drop.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_of_a_peft_model_there_are_the_adapters_as_peft_reads_them(hf, tmp_path):
    peft = pytest.importorskip("peft")
    ids = torch.arange(3, 19).reshape(2, 8)

    def body(rank, world_size):
        base = llama(hf, True, torch.float32)
        config = peft.LoraConfig(
            r=3, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"]
        )
        model = peft.get_peft_model(base, config)
        optimizer = zeroshard.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=0.1, model=model, stage=3
        )
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(tmp_path / "c", model, optimizer)
        with zeroshard.gather(model), torch.no_grad():
            return model.eval()(input_ids=ids).logits

    expected = run(body)[0]
    convert(tmp_path / "c", tmp_path / "out", "safetensors")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names
    model = peft.PeftModel.from_pretrained(llama(hf, True, torch.float32), tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, expected)


# --- from other formats


@quiet
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("source", ["torch", "dcp"])
def test_what_others_wrote_is_converted(source, to, tmp_path):
    model = built(0)
    names = {p: name for name, p in model.named_parameters()}
    groups = [
        {**group, "params": [(names[p], p) for p in group["params"]]}
        for group in decay_groups(model)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    train(model, optimizer, letter_batches(0)[:2])
    state = {
        f"{names[p]}.{key}": value
        for p, entry in optimizer.state.items()
        for key, value in entry.items()
    }
    path = tmp_path / "in"
    if source == "torch":
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**content, "step": 2}, path)
    else:
        on_model, on_optimizer = get_state_dict(model, optimizer)
        content = {"model": on_model, "optimizer": on_optimizer, "step": 2}
        dcp.save(content, checkpoint_id=path, no_dist=True)
    convert(path, tmp_path / "out", to)
    expected = dict(model.state_dict())
    if to == "safetensors":
        read = safetensors.load_file(tmp_path / "out" / "model.safetensors")
        if source == "torch":  # a folder of dcp does not tell that they are tied
            del expected["head.weight"]
        assert_same(read, expected, to)
        return
    with open_source(tmp_path / "out") as found:
        read = {name: stored.read() for name, stored in found.weights.items()}
        assert_same(read, expected, to)
        read = {f"{n}.{f}": s.read() for n, entry in found.state.items() for f, s in entry.items()}
        assert_same(read, state, to)
        assert found.step == 2
        assert [group["params"] for group in found.groups] == [
            [names[p] for p in group["params"]] for group in optimizer.param_groups
        ]


class Odd(nn.Module):
    """Parameters of every kind that is easily forgotten, and buffers."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.conv = nn.Conv2d(5, 70, 3)
        self.conv.weight = nn.Parameter(
            parameter(70, 5, 3, 3).detach().to(memory_format=torch.channels_last)
        )
        self.scalar = parameter()
        self.empty = parameter(0, 3)
        self.one = parameter(1, 1, 1)
        self.long = parameter(1_500_001)  # two chunks of a folder of dcp, and several pieces
        self.wide = parameter(3, 700_001)  # chunks that begin in the middle of a block
        self.frozen = nn.Parameter(parameter(4, 3).detach(), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_strides_empty_tensors_and_buffers(moments, tmp_path):
    model = Odd()
    trained = [p for p in model.parameters() if p.requires_grad]
    precision = zeroshard.Precision(moments=moments)
    optimizer = zeroshard.AdamW(trained, lr=1e-2, model=model, precision=precision)
    for number, p in enumerate(trained):
        p.grad = torch.empty_like(p).copy_(
            torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        )
    optimizer.step()
    save_checkpoint(tmp_path / "c", model, optimizer)
    optimizer.consolidate_state_dict()
    saved = optimizer.state_dict()["state"]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    expected = {f"{names[at]}.{k}": v for at, e in saved.items() for k, v in e.items()}

    convert(tmp_path / "c", tmp_path / "it.pt", "torch")
    content = torch.load(tmp_path / "it.pt", weights_only=True)
    assert_same(content["model"], model.state_dict(), "torch")
    assert_same(state_by_name(content), expected, "torch")
    assert content["model"]["conv.weight"].stride() == model.conv.weight.stride()
    at = names.index("conv.weight")
    assert content["optimizer"]["state"][at]["exp_avg"].stride() == model.conv.weight.stride()

    convert(tmp_path / "c", tmp_path / "dcp", "dcp")
    with open_source(tmp_path / "dcp") as source:
        read = {name: stored.read() for name, stored in source.weights.items()}
        assert_same(read, dict(model.state_dict()), "dcp")
        read = {f"{n}.{f}": s.read() for n, entry in source.state.items() for f, s in entry.items()}
        assert_same(read, expected, "dcp")

    convert(tmp_path / "c", tmp_path / "st", "safetensors")
    read = safetensors.load_file(tmp_path / "st" / "model.safetensors")
    assert_same(read, dict(model.state_dict()), "safetensors")


def test_any_range_of_decoded_values_is_that_of_the_whole(saved):
    path, expected, state = saved("int8")
    name = "layers.1.weight"
    with open_source(path) as source:
        entry, weight = source.state[name], source.weights[name]
        numel, stride = weight.numel, (18 * 18, 18, 1)
        decoded = {
            "exp_avg": moment_of(entry, "exp_avg"),
            "exp_avg_sq": moment_of(entry, "exp_avg_sq"),
            "master": master_of(weight, entry),
            "half": cast(weight, torch.float16),
        }
        whole = {key: state[f"{name}.{key}"] for key in ("exp_avg", "exp_avg_sq", "master")}
        whole["half"] = expected[name].half()
        for key, stored in decoded.items():
            for start, stop in [
                (0, numel),
                (0, 1),
                (255, 258),
                (300, 301),
                (513, numel),
                (256, 256),
            ]:
                got = stored.read_range(stride, start, stop - start)
                assert torch.equal(got, whole[key].flatten()[start:stop]), (key, start, stop)


# --- what is refused, and that nothing is left of it


def listing(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_out_is_whole_or_not_there(to, saved, tmp_path):
    """A checkpoint that turns out to be damaged in the middle, and one that stops in it."""
    path, *_ = saved("split")
    (step,) = path.glob("step-*")
    damaged = tmp_path / "damaged" / step.name
    damaged.parent.mkdir()
    subprocess.run(["cp", "-r", step, damaged], check=True)
    file = max(damaged.glob("*.distcp"), key=lambda file: file.stat().st_size)
    raw = bytearray(file.read_bytes())
    for at in range(len(raw) // 3, len(raw)):
        raw[at] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"{file.name} is damaged"):
        convert(damaged.parent, tmp_path / "out", to)
    assert sorted(os.listdir(tmp_path)) == ["damaged"]

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("kept")

    def stop(done, total):
        if done > total / 2:
            raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        convert(path, tmp_path / "out", to, overwrite=True, on_progress=stop)
    assert sorted(os.listdir(tmp_path)) == ["damaged", "out"]
    assert listing(tmp_path / "out") == ["notes.txt"]


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_what_is_there_is_replaced_only_if_told_to(to, saved, tmp_path):
    path, *_ = saved("split")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match="out exists and is not empty: pass overwrite=True"):
        convert(path, out, to)
    assert listing(out) == ["notes.txt"]
    convert(path, out, to, overwrite=True)
    assert out.is_file() == (to == "torch")
    assert "notes.txt" not in listing(out)
    convert(path, out, to, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_wrong_arguments_are_refused(saved, tmp_path):
    path, *_ = saved("split")
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="to must be one of safetensors, torch, dcp, got 'hf'"):
        convert(path, out, "hf")
    with pytest.raises(ConfigError, match=r"dtype must be a floating-point torch\.dtype"):
        convert(path, out, "torch", dtype=torch.int8)
    with pytest.raises(ConfigError, match="max_file_nbytes must be a number"):
        convert(path, out, "safetensors", max_file_nbytes=0)
    with pytest.raises(ConfigError, match="holds the checkpoint itself"):
        convert(path, path, "torch", overwrite=True)
    with pytest.raises(ConfigError, match="holds the checkpoint itself"):
        convert(path, path.parent, "torch", overwrite=True)
    with pytest.raises(CheckpointError, match="there is nothing"):
        convert(tmp_path / "none", out, "torch")
    assert not out.exists()


def test_what_a_format_has_no_place_for_is_refused(tmp_path):
    weights_only, nameless, named = (tmp_path / name for name in ("w.pt", "p.pt", "n.pt"))
    out = tmp_path / "out"
    torch.save({"a": torch.ones(3)}, weights_only)
    for to in ("torch", "dcp"):
        with pytest.raises(CheckpointError, match="has weights only: convert it to safetensors"):
            convert(weights_only, out, to)
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}}
    optimizer = {"state": state, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"a": torch.ones(3)}, "optimizer": optimizer}, nameless)
    for to in ("torch", "dcp"):
        with pytest.raises(CheckpointError, match="by position"):
            convert(nameless, out, to)
    convert(nameless, out, "safetensors")
    optimizer["param_groups"][0]["param_names"] = ["a"]
    torch.save({"optimizer": optimizer}, named)
    with pytest.raises(CheckpointError, match="expected weights, and it has none"):
        convert(named, out, "safetensors", overwrite=True)
    assert os.listdir(out) == ["model.safetensors"]


def test_gradients_that_wait_for_a_step_are_refused(tmp_path):
    def body(rank, world_size):
        model = built(0)
        optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, model=model)
        loss_of(model, letter_batches(0)[0]).backward()
        save_checkpoint(tmp_path / "c", model, optimizer)

    run(body)
    for to in ("torch", "dcp"):
        with pytest.raises(CheckpointError, match="gradients that wait for one"):
            convert(tmp_path / "c", tmp_path / "out", to)
    convert(tmp_path / "c", tmp_path / "out", "safetensors")


@quiet
def test_options_by_parameter_are_refused(tmp_path):
    model = built(0)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2)
    train(model, optimizer, letter_batches(0)[:1])
    options = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    on_model, on_optimizer = get_state_dict(model, optimizer, options=options)
    content = {"model": on_model, "optimizer": on_optimizer}
    dcp.save(content, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointError, match="options for each parameter"):
        convert(tmp_path / "c", tmp_path / "out", "torch")


# --- memory

MIB = 2**20
LIMIT = 64 * MIB
MEASURE = """
import resource, sys, threading, time
import torch._dynamo
from zeroshard.checkpoint.convert import convert

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.0005)

path, out = sys.argv[1:]
torch.optim.AdamW([torch.nn.Parameter(torch.ones(600, 600))])  # what it imports
before = most = anonymous()
whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
done = False
watcher = threading.Thread(target=watch)
watcher.start()
for to in ("safetensors", "torch", "dcp"):
    most = 0
    convert(path, out, to, overwrite=True)
    print(most - before)
done = True
watcher.join()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - whole) * 1024)
"""
ROWS, COLUMNS = 5 * 1024, 4096  # 80 MiB in fp32


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Checkpoints with one tensor that is larger than the limit."""
    folder = tmp_path_factory.mktemp("large")
    model = nn.Linear(COLUMNS, ROWS, bias=False, dtype=BF16)
    precision = zeroshard.Precision(moments="int8")
    optimizer = zeroshard.AdamW(model, lr=1e-2, precision=precision)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    save_checkpoint(folder / "ours", model, optimizer)
    convert(folder / "ours", folder / "torch", "torch")
    convert(folder / "ours", folder / "dcp", "dcp")
    assert (folder / "torch").stat().st_size > 4 * LIMIT
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("source", ["ours", "torch", "dcp"])
def test_memory_does_not_grow_with_the_checkpoint(source, large, tmp_path):
    command = [sys.executable, "-c", MEASURE, large / source, tmp_path / "out"]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    *anonymous, whole = map(int, result.stdout.split())
    assert len(anonymous) == 3
    assert max(anonymous) < LIMIT, anonymous
    if source != "torch":  # of which the mapped file counts as resident, as long as nobody needs it
        assert whole < LIMIT
