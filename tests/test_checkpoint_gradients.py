"""Gradients in a checkpoint: those that wait for a step are kept, those that one used are not."""

import pytest
import torch
import torch.distributed as dist
from models import assert_same, letter_batches, loss_of, train, weights
from ranks import run
from test_checkpoint import build
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.parallel import DistributedDataParallel

import zeroshard

NOBODY = {"process_group": False, "RANK": None, "WORLD_SIZE": None}


def kept_in(saving):
    entries = FileSystemReader(saving.path).read_metadata().state_dict_metadata
    return sum(key.startswith("gradients.") for key in entries)


def continues(path, rank, forward_of, *, build_again):
    """Three backwards before a step, saved after two of them."""
    batches = letter_batches(rank)
    model, optimizer = build_again(0)
    forward = forward_of(model)
    train(model, optimizer, batches[:1], forward=forward)
    loss_of(forward, batches[1]).backward()
    optimizer.step()
    assert kept_in(zeroshard.save_checkpoint(path / "used", model, optimizer)) == 0
    optimizer.zero_grad()
    trained = len(list(model.parameters()))
    for batch in batches[2:4]:
        loss_of(forward, batch).backward()
        assert kept_in(zeroshard.save_checkpoint(path / "wait", model, optimizer)) == trained
    expected = train(model, optimizer, batches[4:], forward=forward)
    if dist.is_initialized():
        dist.barrier()

    model, optimizer = build_again(9)
    forward = forward_of(model)
    loss_of(forward, batches[5]).backward()  # of a time that is not continued from
    zeroshard.load_checkpoint(path / "used", model, optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())
    zeroshard.load_checkpoint(path / "wait", model, optimizer)
    assert_same(train(model, optimizer, batches[4:], forward=forward), expected, "weights")
    return expected


@pytest.mark.parametrize("stage", [1, 3])
def test_an_accumulation_goes_on_in_the_middle(stage, tmp_path):
    def body(rank, world_size):
        continues(tmp_path, rank, lambda m: m, build_again=lambda seed: build(stage, seed=seed))

    run(body)


def test_so_it_does_without_a_process_group(tmp_path):
    def body(rank, world_size):
        continues(tmp_path, rank, lambda m: m, build_again=lambda seed: build(2, seed=seed))

    run(body, 1, **NOBODY)


@pytest.mark.filterwarnings("ignore:the model is wrapped in DistributedDataParallel")
def test_so_it_does_under_ddp(tmp_path):
    def body(rank, world_size):
        continues(
            tmp_path,
            rank,
            DistributedDataParallel,
            build_again=lambda seed: build(1, seed=seed),
        )

    run(body)


def test_a_gradient_that_the_user_wrote_is_kept(tmp_path):
    def body(rank, world_size):
        model, optimizer = build(2)
        train(model, optimizer, letter_batches(rank)[:1])
        model.gain.grad = torch.tensor(2.0)
        zeroshard.save_checkpoint(tmp_path, model, optimizer)
        optimizer.step()
        expected = weights(model)
        model, optimizer = build(1, seed=9)
        zeroshard.load_checkpoint(tmp_path, model, optimizer)
        optimizer.step()
        assert_same(weights(model), expected, "weights")

    run(body)
