"""`generate()` of a sharded model: token by token, gathered, and on ranks that end apart."""

import pytest
import torch
from architectures import SPECIAL, TEXT, VOCABULARY, hf
from ranks import run

import zeroshard
import zeroshard.optimizer
from zeroshard.errors import CommunicationError
from zeroshard.transport import Counting, connect

NEW = 6


def llama():
    torch.manual_seed(0)
    config = hf.LlamaConfig(**TEXT, **SPECIAL)
    config.eos_token_id = None  # every sequence gets its full length
    model = hf.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(rank, length=5):
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(rank))


def generate(model, rank, **options):
    return model.generate(prompt(rank), do_sample=False, max_new_tokens=NEW, **options)


def sharded():
    model = llama()
    return model, zeroshard.AdamW(model, lr=1e-2, stage=3)


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_is_right_token_by_token_and_training_goes_on(use_cache):
    def body(rank, world_size):
        expected = generate(llama(), rank, use_cache=use_cache)
        model, optimizer = sharded()
        for _ in range(2):
            assert torch.equal(generate(model, rank, use_cache=use_cache), expected)
            assert optimizer.memory()["unsharded_parameters"] == 0
        before = [p.clone() for _, p in zeroshard.full_parameters(model)]
        loss = model(prompt(rank), labels=prompt(rank)).loss
        loss.backward()
        optimizer.step()
        after = [p.clone() for _, p in zeroshard.full_parameters(model)]
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    run(body)


def test_inside_of_gather_each_unit_is_gathered_once(monkeypatch):
    counted = []

    def count(*args):
        counted.append(Counting(connect(*args)))
        return counted[-1]

    monkeypatch.setattr(zeroshard.optimizer, "connect", count)

    def body(rank, world_size):
        expected = generate(llama(), rank)
        model, optimizer = sharded()
        units = sum(bool(unit.places) for unit in optimizer.engine.sharding.units)
        calls = counted[-1].calls
        before = calls["gather"]
        with zeroshard.gather(model):
            assert torch.equal(generate(model, rank), expected)
        assert calls["gather"] - before == units
        before = calls["gather"]
        generate(model, rank)
        assert calls["gather"] - before >= units * NEW, "a gather for each token, without it"

    run(body)


def uneven(model, rank, **options):
    """The second rank wants twice as many tokens."""
    options = {"do_sample": False, "max_new_tokens": NEW * (rank + 1), **options}
    return model.generate(prompt(rank), **options)


@pytest.mark.parametrize("way", ["gather", "synced_gpus"])
def test_ranks_may_end_at_different_lengths_where_they_are_told_to(way):
    def body(rank, world_size):
        expected = uneven(llama(), rank)
        model, _ = sharded()
        if way == "gather":
            with zeroshard.gather(model):
                found = uneven(model, rank)
        else:
            found = uneven(model, rank, synced_gpus=True)
        assert torch.equal(found, expected)

    run(body)


def test_ranks_that_end_at_different_lengths_are_told_so():
    def body(rank, world_size):
        model, _ = sharded()

        def go_on():
            uneven(model, rank)
            zeroshard.load_weights(model, "nowhere")  # the first rank is here already

        with pytest.raises(CommunicationError) as caught:
            go_on()
        assert "rank 0: load_weights" in str(caught.value)
        assert "rank 1: gather of bucket" in str(caught.value)
        assert "unit" in str(caught.value)

    run(body, ZEROSHARD_DEBUG="1")
