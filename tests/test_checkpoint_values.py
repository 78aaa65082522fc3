"""The user's own values and gradients in a checkpoint, and the names of its folders."""

import json
import zlib

import pytest
import torch
import torch.distributed as dist
from models import assert_same, letter_batches, loss_of, train
from ranks import run
from test_checkpoint import build, state_bits
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from zeroshard.errors import CheckpointError, ConfigError


def trained(rank, stage=2, seed=0, count=2):
    model, optimizer = build(stage, seed=seed)
    train(model, optimizer, letter_batches(rank)[:count])
    return model, optimizer


# --- slices among other values


def test_the_optimizer_of_another_model_is_kept_by_number_at_any_number_of_ranks(tmp_path):
    """Its state dict has numbers for keys, which DCP would make strings of."""

    def saved(rank, world_size):
        model, optimizer = trained(rank)
        _, other = trained(rank, stage=1, seed=3, count=3)
        zeroshard.save_checkpoint(tmp_path, model, optimizer, other=other)
        return state_bits(other)

    expected = run(saved)[0]

    def loaded(rank, world_size):
        model, optimizer = build(3, seed=9)
        _model, other = build(2, seed=8)
        zeroshard.load_checkpoint(tmp_path, model, optimizer, other=other)
        return state_bits(other)

    assert_same(run(loaded)[0], expected, "state")
    assert_same(run(loaded, 3)[0], expected, "state")


class Holder:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def test_what_stands_beside_slices_is_of_each_rank_and_keeps_its_kind(tmp_path):
    def body(rank, world_size):
        model, optimizer = trained(rank)
        moment = optimizer.state[model.embed.weight]["exp_avg"]
        value = {0: [moment, (moment, torch.full((2,), rank))], "mine": rank, "none": {}}
        zeroshard.save_checkpoint(tmp_path, model, optimizer, holder=Holder(value))
        zeros = torch.zeros_like(moment)
        holder = Holder({0: [zeros, (zeros, None)], "mine": None, "none": None})
        zeroshard.load_checkpoint(tmp_path, model, optimizer, holder=holder)
        (first, (second, own)), found = holder.value[0], holder.value
        assert torch.equal(first.to_local(), moment.to_local())
        assert torch.equal(second.to_local(), moment.to_local())
        assert own.tolist() == [rank, rank]
        assert (found["mine"], found["none"], list(found)) == (rank, {}, [0, "mine", "none"])

    run(body)


def test_a_damaged_slice_of_an_object_is_found_before_anything_changes(tmp_path):
    def body(rank, world_size):
        model, optimizer = trained(rank)
        ema = zeroshard.EMA(optimizer)
        for step in (1, 2):
            path = zeroshard.save_checkpoint(tmp_path, model, optimizer, step=step, ema=ema).path
        metadata = torch.distributed.checkpoint.FileSystemReader(path).read_metadata()
        if rank == 0:
            (info, *_) = (
                info
                for index, info in metadata.storage_data.items()
                if index.fqn.startswith("extra_slices.ema") and info.length > 1500
            )
            data = bytearray((path / info.relative_path).read_bytes())
            data[info.offset + info.length // 2] ^= 1
            (path / info.relative_path).write_bytes(data)
        dist.barrier()
        assert zeroshard.load_checkpoint(tmp_path, model, optimizer, ema=ema)["step"] == 1
        before = state_bits(optimizer)
        with pytest.raises(CheckpointError, match="is damaged"):
            zeroshard.load_checkpoint(path, model, optimizer, ema=ema)
        assert_same(state_bits(optimizer), before, "state")
        train(model, optimizer, letter_batches(rank)[:1])

    run(body)


# --- what could not be read again is refused when it is saved, on all ranks at once


class Kind(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "could not be read again without running code"),
        (torch.zeros(2).as_subclass(Kind), "is a Kind"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.empty(2, device="meta"), "has no values"),
        ({"a": object()}, "'a' of 'value' is a object"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_value_is_refused_on_every_rank_though_one_alone_has_it(value, message, tmp_path):
    def body(rank, world_size):
        model, optimizer = build(1)
        with pytest.raises(ConfigError, match=message):
            zeroshard.save_checkpoint(
                tmp_path, model, optimizer, value=value if rank == 1 else None
            )
        assert not list(tmp_path.iterdir())

    run(body)


def test_values_that_only_look_alike_are_kept_apart(tmp_path):
    def body(rank, world_size):
        model, optimizer = build(1)
        mine = {"a": {}, "b": 1} if rank == 0 else {"a": {"b": 1}}
        zeroshard.save_checkpoint(tmp_path, model, optimizer, value=mine)
        assert zeroshard.load_checkpoint(tmp_path, model, optimizer)["value"] == mine

    run(body)


def test_a_view_is_saved_without_its_storage(tmp_path):
    def body(rank, world_size):
        model, optimizer = build(1)
        return zeroshard.save_checkpoint(
            tmp_path, model, optimizer, position=torch.zeros(10**6)[:2]
        ).path

    path = run(body)[0]
    assert sum(file.stat().st_size for file in path.iterdir()) < 10**6


# --- gradients


@pytest.mark.filterwarnings("ignore:the model is wrapped in DistributedDataParallel")
def test_a_gradient_that_ddps_own_no_sync_left_is_refused(tmp_path):
    def body(rank, world_size):
        model, optimizer = build(1)
        replica = DistributedDataParallel(model)
        batches = letter_batches(rank)
        loss_of(replica, batches[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with replica.no_sync():
            loss_of(replica, batches[1]).backward()
        with pytest.raises(ConfigError, match=r"under\s+no_sync\(\), which a checkpoint cannot"):
            zeroshard.save_checkpoint(tmp_path, model, optimizer)
        loss_of(replica, batches[2]).backward()
        zeroshard.save_checkpoint(tmp_path, model, optimizer)

    run(body)


def test_a_slice_that_the_user_put_into_grad_is_kept(tmp_path):
    def body(rank, world_size):
        model, optimizer = build(2)
        loss_of(model, letter_batches(rank)[0]).backward()
        kept = model.gain.grad.clone(), model.embed.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        model.gain.grad, model.embed.weight.grad = kept
        zeroshard.save_checkpoint(tmp_path, model, optimizer)
        zeroshard.load_checkpoint(tmp_path, model, optimizer)
        assert torch.equal(model.embed.weight.grad.to_local(), kept[1].to_local())
        assert model.head.bias.grad is None

    run(body)


# --- folders


def test_a_second_save_of_a_step_has_the_name_of_the_first(tmp_path):
    def body(rank, world_size):
        model, optimizer = trained(rank)
        paths = []
        for value in (1, 2, 3):
            saving = zeroshard.save_checkpoint(
                tmp_path, model, optimizer, step=7, value=value, blocking=value != 2
            )
            paths.append(saving.wait())
            assert saving.path == paths[0]
        assert zeroshard.load_checkpoint(paths[0], model, optimizer)["value"] == 3
        assert (tmp_path / "latest").read_text() == f"{paths[0].name}\n"

    run(body)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", "step-000000000007"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_latest_of_something_else_stays(kind, tmp_path, caplog):
    latest = tmp_path / "latest"
    latest.mkdir() if kind == "folder" else latest.write_text("global_step10")

    def body(rank, world_size):
        model, optimizer = build(1)
        zeroshard.save_checkpoint(tmp_path, model, optimizer, step=1)
        return zeroshard.load_checkpoint(tmp_path, model, optimizer)["step"]

    assert run(body) == [1, 1]
    assert latest.is_dir() if kind == "folder" else latest.read_text() == "global_step10"
    assert not (tmp_path / ".latest").exists()


def test_a_later_version_of_the_format_is_not_guessed_at(tmp_path):
    def save(rank, world_size):
        model, optimizer = build(1)
        return zeroshard.save_checkpoint(tmp_path, model, optimizer, step=1).path

    file = run(save)[0] / "checkpoint.json"
    content = json.loads(file.read_text())["content"] | {"version": 2}
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    file.write_text(json.dumps({"content": content, "crc32": zlib.crc32(text.encode())}))

    def load(rank, world_size):
        model, optimizer = build(1)
        with pytest.raises(CheckpointError, match=r"version 2, and this reads .*version 1"):
            zeroshard.load_checkpoint(tmp_path, model, optimizer)

    run(load)


def test_a_file_is_no_folder_to_begin_in(tmp_path):
    (tmp_path / "log").write_text("text")

    def body(rank, world_size):
        model, optimizer = build(1)
        with pytest.raises(CheckpointError, match="there is a file of another kind"):
            zeroshard.load_checkpoint(tmp_path / "log", model, optimizer, missing_ok=True)

    run(body)


def test_a_path_that_does_not_exist_is_missing(tmp_path):
    def body(rank, world_size):
        model, optimizer = build(1)
        for path in (tmp_path / "none", tmp_path / "step-000000000001"):
            assert zeroshard.load_checkpoint(path, model, optimizer, missing_ok=True) == {}
            with pytest.raises(CheckpointError, match="there is nothing"):
                zeroshard.load_checkpoint(path, model, optimizer)

    run(body)


def test_two_optimizers_of_one_model_are_refused_before_anything_changes(tmp_path):
    def body(rank, world_size):
        model, _ = build(2)
        halves = [model.layers, model.head]
        one, two = (zeroshard.AdamW(list(half.parameters()), stage=2) for half in halves)
        for call in (zeroshard.save_checkpoint, zeroshard.load_checkpoint):
            with pytest.raises(ConfigError, match="is in another zeroshard optimizer"):
                call(tmp_path, model, one)
        del two

    run(body)
