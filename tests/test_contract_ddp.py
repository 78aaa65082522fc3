"""Under a live DistributedDataParallel training is DDP's, with sharded state."""

import warnings

import pytest
import torch
from models import (
    assert_close,
    assert_same,
    decay_groups,
    letter_batches,
    letters,
    loss_of,
    train,
    train_with_ddp,
    weights,
)
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard

stages = pytest.mark.parametrize("stage", [1, 2])
orders = pytest.mark.parametrize("wrapped", ["before", "after"])
# The one warning is what the first test is about.
quietly = pytest.mark.filterwarnings("ignore:.*(DDP|DistributedDataParallel)")


def wrap(stage, wrapped, *, ddp=None, **options):
    """A model in DDP under zeroshard, the wrapper made before or after the optimizer."""
    model, options = letters(), {"lr": 1e-2, "stage": stage, **options}
    if wrapped == "before":
        forward = DistributedDataParallel(model, **(ddp or {}))
        optimizer = zeroshard.AdamW(decay_groups(forward), **options)
    else:
        optimizer = zeroshard.AdamW(decay_groups(model), **options)
        forward = DistributedDataParallel(model, **(ddp or {}))
    return model, forward, optimizer


@orders
@stages
def test_a_model_in_ddp_trains_bitwise_as_before_and_warns_once(stage, wrapped):
    def body(rank, world_size):
        expected = train_with_ddp(rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, forward, optimizer = wrap(stage, wrapped)
            got = train(model, optimizer, letter_batches(rank)[:5], forward=forward)
        assert_same(got, expected, wrapped)
        told = [w for w in caught if "DDP" in str(w.message) or "DistributedData" in str(w.message)]
        assert len(told) == 1, [str(w.message) for w in caught]

    run(body)


@quietly
@orders
@stages
def test_ddp_with_other_buckets_and_views_is_still_bitwise(stage, wrapped):
    def body(rank, world_size):
        expected = train_with_ddp(rank, steps=4)
        for ddp in (
            {"gradient_as_bucket_view": True},
            {"bucket_cap_mb": 0.001},
            {"static_graph": True},
        ):
            model, forward, optimizer = wrap(stage, wrapped, ddp=ddp, bucket_mb=1e-3)
            got = train(model, optimizer, letter_batches(rank)[:4], forward=forward)
            assert_same(got, expected, str(ddp))

    run(body)


@quietly
@orders
@stages
def test_gradients_under_ddp_stay_plain_and_whole(stage, wrapped):
    def body(rank, world_size):
        replica = letters()
        reference = DistributedDataParallel(replica)
        loss_of(reference, letter_batches(rank)[0]).backward()
        model, forward, _ = wrap(stage, wrapped)
        loss_of(forward, letter_batches(rank)[0]).backward()
        for (name, p), q in zip(model.named_parameters(), replica.parameters(), strict=True):
            assert type(p.grad) is torch.Tensor, name
            assert torch.equal(p.grad, q.grad), name

    run(body)


@quietly
@orders
@stages
def test_accumulation_and_clipping_under_ddp_are_bitwise_ddps(stage, wrapped):
    def trained(rank, model, forward, optimizer, clip):
        norms = []
        for batch in letter_batches(rank)[:3]:
            with forward.no_sync():
                loss_of(forward, batch.flip(0)).backward()
            (20 * loss_of(forward, batch)).backward()
            norms.append(float(clip(model, optimizer)))
            optimizer.step()
            optimizer.zero_grad()
        return norms, weights(model)

    def by_torch(model, optimizer):
        return nn.utils.clip_grad_norm_(model.parameters(), 0.25)

    def by_method(model, optimizer):
        return optimizer.clip_grad_norm_(0.25)

    def body(rank, world_size):
        replica = letters()
        settings = {"lr": 1e-2, "eps": 1e-2}
        plain = torch.optim.AdamW(decay_groups(replica), fused=True, **settings)
        forward = DistributedDataParallel(replica)
        norms, expected = trained(rank, replica, forward, plain, by_torch)
        got_norms, got = trained(rank, *wrap(stage, wrapped, **settings), by_torch)
        assert got_norms == norms
        assert_same(got, expected, "torch's clipping")
        # The method's norm counts the full gradient once, not once a rank. It is summed in
        # another order: a few roundings, an update moves by lr * 2 / eps times those.
        got_norms, got = trained(rank, *wrap(stage, wrapped, **settings), by_method)
        assert got_norms == pytest.approx(norms, rel=2**-20)
        assert_close(got, expected, "our clipping", atol=5e-6)
        inside = {**settings, "max_grad_norm": 0.25}
        model, forward, optimizer = wrap(stage, wrapped, **inside)
        _, got = trained(rank, model, forward, optimizer, lambda *_: 0.0)
        assert_close(got, expected, "max_grad_norm", atol=5e-6)

    run(body)


@quietly
@orders
@stages
def test_unused_parameters_under_ddp_are_bitwise_ddps(stage, wrapped):
    class Branches(nn.Module):
        def __init__(self, rank):
            super().__init__()
            torch.manual_seed(0)
            self.rank = rank
            self.always, self.first, self.never = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            x = self.always(x)
            return self.first(x) if self.rank == 0 else x

    def body(rank, world_size):
        def trained(model, forward, optimizer):
            for _ in range(3):
                x = torch.linspace(-1, 1, 24).view(4, 6) * (rank + 1)
                forward(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        settings = {"lr": 1e-2, "weight_decay": 0.5}
        unused = {"find_unused_parameters": True}
        replica, model = Branches(rank), Branches(rank)
        plain = torch.optim.AdamW(replica.parameters(), fused=True, **settings)
        expected = trained(replica, DistributedDataParallel(replica, **unused), plain)
        if wrapped == "before":
            forward = DistributedDataParallel(model, **unused)
            optimizer = zeroshard.AdamW(model, stage=stage, **settings)
        else:
            optimizer = zeroshard.AdamW(model, stage=stage, **settings)
            forward = DistributedDataParallel(model, **unused)
        assert_same(trained(model, forward, optimizer), expected, "branches")

    run(body)


@quietly
@orders
@stages
def test_the_wrapper_itself_may_be_given_as_the_module(stage, wrapped):
    def body(rank, world_size):
        model, replica = letters(), letters()
        forward = DistributedDataParallel(model)
        optimizer = zeroshard.AdamW(forward, lr=1e-2, stage=stage)
        got = train(model, optimizer, letter_batches(rank)[:3], forward=forward)
        plain = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        expected = train(
            replica, plain, letter_batches(rank)[:3], forward=DistributedDataParallel(replica)
        )
        assert_same(got, expected, "the wrapper")

    run(body)


@quietly
@orders
@stages
def test_a_grad_scaler_under_ddp_skips_on_every_rank(stage, wrapped):
    def body(rank, world_size):
        def trained(model, forward, optimizer):
            scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
            for step, batch in enumerate(letter_batches(rank)[:4]):
                loss = loss_of(forward, batch) * (float("inf") if (step, rank) == (1, 1) else 1)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return weights(model), scaler.get_scale()

        replica = letters()
        plain = torch.optim.AdamW(decay_groups(replica), lr=1e-2, fused=True)
        expected, scale = trained(replica, DistributedDataParallel(replica), plain)
        got, got_scale = trained(*wrap(stage, wrapped))
        assert_same(got, expected, "scaled")
        assert got_scale == scale

    run(body)


@quietly
@stages
def test_after_the_wrapper_is_gone_gradients_are_averaged_again(stage):
    def body(rank, world_size):
        expected = train_with_ddp(rank, steps=4)
        model, forward, optimizer = wrap(stage, "after")
        batches = letter_batches(rank)
        train(model, optimizer, batches[:2], forward=forward)
        del forward
        got = train(model, optimizer, batches[2:4])
        assert_same(got, expected, "DDP, then without")

    run(body)
