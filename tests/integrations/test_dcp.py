"""torch.distributed.checkpoint's state-dict functions on a sharded optimizer."""

import copy
import itertools
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from consumers import Consumer, tried
from models import assert_same, decay_groups, letter_batches, letters, train, weights
from ranks import run
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import zeroshard

CONSUMER = Consumer(
    "torch.distributed.checkpoint",
    "torch",
    use="`get_state_dict(model, optimizer)` and `dcp.save`, as with any optimizer.",
)
FORMATS = [
    (torch.float32, {}),
    (torch.bfloat16, {"master": "split"}),
    (torch.bfloat16, {"master": "fp32", "moments": "int8"}),
]
stages = pytest.mark.parametrize("stage", [1, 2, 3])


def build(stage, dtype=torch.float32, precision=None, seed=0, **options):
    model = letters(seed, dtype)
    precision = zeroshard.Precision(**(precision or {}))
    optimizer = zeroshard.AdamW(
        decay_groups(model), lr=1e-2, model=model, stage=stage, precision=precision, **options
    )
    return model, optimizer


def state_bits(optimizer):
    """Copies of this rank's state, by position."""
    entries = optimizer.state_dict()["state"]
    return {
        f"{position}.{key}": getattr(value, "_local_tensor", value).clone()
        for position, entry in entries.items()
        for key, value in entry.items()
    }


def from_rank_0(value):
    holder = [value]
    dist.broadcast_object_list(holder, 0)
    return holder[0]


@tried(
    "`get_optimizer_state_dict` before the first step and after: weights, moments and step count "
    "stay as they are, no step is tried and no hook fires",
    stages="1, 2, 3",
)
@stages
def test_asking_for_the_state_changes_nothing(stage):
    # Megatron-LM#5974: a dummy step that creates state advances the step counter.
    def body(rank, world_size):
        model, optimizer = build(stage)
        for steps in (1, 2):
            hook = optimizer.register_step_pre_hook(lambda *_: pytest.fail("a step was tried"))
            before, bits = weights(model), state_bits(optimizer)
            get_optimizer_state_dict(model, optimizer)
            get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(full_state_dict=True)
            )
            assert_same(weights(model), before, "weights")
            assert_same(state_bits(optimizer), bits, "state")
            hook.remove()
            train(model, optimizer, letter_batches(rank)[:1])
            assert all(s["step"] == steps for s in optimizer.state.values())

    run(body)


@tried(
    "whole state dicts (`full_state_dict`, `cpu_offload`, `broadcast_from_rank0`): training "
    "continues bit for bit, in fp32, with split masters and with 8-bit moments",
    stages="1, 2, 3",
)
@stages
def test_training_continues_from_whole_state_dicts(stage):
    def continues(rank, dtype, precision, offload, broadcast):
        batches = letter_batches(rank)
        model, optimizer = build(stage, dtype, precision)
        train(model, optimizer, batches[:3])
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        whole = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        expected = train(model, optimizer, batches[3:])
        if offload:
            assert (rank == 0) == bool(whole[0]) == bool(whole[1])
        if offload and not broadcast:
            whole = from_rank_0(whole)
        if broadcast and rank:
            whole = ({}, {})

        # In the order of set_state_dict, which takes an empty dictionary for a missing model.
        model, optimizer = build(stage, dtype, precision, seed=9, bucket_mb=1e-3)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_optimizer_state_dict(model, optimizer, whole[1], options=options)
        set_model_state_dict(model, whole[0], options=options)
        got = train(model, optimizer, batches[3:])
        assert_same(got, expected, f"{dtype} {precision}, {offload=}, {broadcast=}")

    def body(rank, world_size):
        ways = ((False, False), (True, False), (True, True))
        for (dtype, precision), (offload, broadcast) in itertools.product(FORMATS, ways):
            continues(rank, dtype, precision, offload, broadcast)

    run(body)


@tried(
    "sharded state dicts (also with `flatten_optimizer_state_dict`, `cpu_offload`): training "
    "continues bit for bit on as many ranks, in memory",
    stages="1, 2, 3",
)
@stages
def test_training_continues_from_sharded_state_dicts(stage):
    def body(rank, world_size):
        batches = letter_batches(rank)
        ways = ((False, False), (True, True))
        for (dtype, precision), (flat, offload) in itertools.product(FORMATS, ways):
            options = StateDictOptions(flatten_optimizer_state_dict=flat, cpu_offload=offload)
            model, optimizer = build(stage, dtype, precision)
            train(model, optimizer, batches[:3])
            states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
            expected = train(model, optimizer, batches[3:])

            model, optimizer = build(stage, dtype, precision, seed=9)
            names = {"model_state_dict": states[0], "optim_state_dict": states[1]}
            set_state_dict(model, optimizer, **names, options=options)
            got = train(model, optimizer, batches[3:])
            assert_same(got, expected, f"{dtype} {precision}, {flat=}, {offload=}")

    run(body)


@tried(
    "`dcp.save` at two ranks and `dcp.load` at three, into another stage: the same weights and "
    "state, bit for bit",
    stages="1, 2, 3",
)
@stages
def test_a_checkpoint_loads_at_another_world_size(stage):
    with tempfile.TemporaryDirectory() as folder:

        def states_of(model, optimizer):
            states = get_state_dict(model, optimizer)
            return dict(zip(("model", "optimizer"), states, strict=True))

        def whole_of(model, optimizer):
            options = StateDictOptions(full_state_dict=True)
            _, state = get_state_dict(model, optimizer, options=options)
            flat = {
                f"{name}.{key}": value
                for name, entry in state["state"].items()
                for key, value in entry.items()
            }
            return weights(model) | flat, state["param_groups"]

        def saved(rank, world_size, precision):
            model, optimizer = build(stage, torch.bfloat16, precision)
            train(model, optimizer, letter_batches(rank)[:3])
            dcp.save(states_of(model, optimizer), checkpoint_id=f"{folder}/{precision}")
            return whole_of(model, optimizer)

        def loaded(rank, world_size, precision):
            model, optimizer = build(1 + stage % 3, torch.bfloat16, precision, seed=9)
            states = states_of(model, optimizer)
            dcp.load(states, checkpoint_id=f"{folder}/{precision}")
            parts = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
            set_state_dict(model, optimizer, **parts)
            return whole_of(model, optimizer)

        for precision in ({"master": "split"}, {"master": "fp32", "moments": "int8"}):
            tensors, groups = run(lambda rank, w, p=precision: saved(rank, w, p))[0]
            for got, got_groups in run(lambda rank, w, p=precision: loaded(rank, w, p), 3):
                assert_same(got, tensors, f"{precision}")
                assert got_groups == groups


@tried(
    "whole state dicts from `torch.optim.AdamW` under DDP and to it: both continue bit for bit",
    stages="1, 2, 3",
)
@stages
def test_state_is_exchanged_with_torchs_adamw_by_name(stage):
    whole = StateDictOptions(full_state_dict=True)

    def plain(rank, states, batches):
        model = letters(seed=9)
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2, fused=True)
        if states is not None:
            set_model_state_dict(model, states[0], options=whole)
            set_optimizer_state_dict(model, optimizer, states[1], options=whole)
        got = train(model, optimizer, batches, forward=replica)
        return copy.deepcopy(get_state_dict(model, optimizer, options=whole)), got

    def ours(rank, states, batches):
        model, optimizer = build(stage, seed=9)
        set_model_state_dict(model, states[0], options=whole)
        set_optimizer_state_dict(model, optimizer, states[1], options=whole)
        got = train(model, optimizer, batches)
        return copy.deepcopy(get_state_dict(model, optimizer, options=whole)), got

    def body(rank, world_size):
        batches = letter_batches(rank)
        states, _ = plain(rank, None, batches[:2])
        by_ours, got = ours(rank, copy.deepcopy(states), batches[2:4])
        by_torch, expected = plain(rank, states, batches[2:4])
        assert_same(got, expected, "ours from torch's")
        _, got = plain(rank, by_ours, batches[4:])
        _, expected = plain(rank, by_torch, batches[4:])
        assert_same(got, expected, "torch's from ours")

    run(body)


@tried(
    "`load_state_dict` never casts: moments and masters of a bf16 model stay fp32", stages="1, 2, 3"
)
@stages
def test_loading_casts_nothing(stage):
    # torch's own Optimizer.load_state_dict casts floating-point state to the parameter's dtype.
    def body(rank, world_size):
        for _, precision in FORMATS[1:]:
            model, optimizer = build(stage, torch.bfloat16, precision)
            train(model, optimizer, letter_batches(rank)[:2])
            bits = state_bits(optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            assert_same(state_bits(optimizer), bits, f"{precision}")
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
            assert_same(state_bits(optimizer), bits, f"{precision}")

    run(body)
