"""The layout's promises, as properties of every plan."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard import layout as layout_module
from zeroshard.errors import ConfigError
from zeroshard.layout import BLOCK, ParamSpec, fingerprint, first_difference, plan_layout

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def spec(name, shape, dtype="float32", unit=""):
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return ParamSpec(
        name=name,
        shape=shape,
        stride=tuple(reversed(strides)),
        dtype=dtype,
        device="cpu",
        unit=unit,
    )


@st.composite
def layouts(draw):
    dtypes = st.sampled_from(["float32", "bfloat16"])
    kinds = draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=12))
    specs = [spec(str(i), shape, dtype) for i, (shape, dtype) in enumerate(kinds)]
    world_size = draw(st.integers(1, 9))
    bucket_nbytes = draw(st.sampled_from([1, 5000, 30_000, 10**7]))
    return plan_layout(specs, world_size=world_size, bucket_nbytes=bucket_nbytes)


@given(layouts())
def test_every_element_has_exactly_one_owner(layout):
    for slot, runs in zip(layout.slots, layout.runs_of_slot, strict=True):
        covered = [(run.slot_offset, run.slot_offset + run.numel) for run in runs]
        assert covered == sorted(covered)
        edges = [0, *(edge for pair in covered for edge in pair), slot.numel]
        assert edges[0::2] == edges[1::2], "runs follow each other without gap or overlap"


@given(layouts())
def test_every_part_lies_where_its_run_says(layout):
    for run in layout.runs:
        bucket, slot = layout.buckets[run.bucket], layout.slots[run.slot]
        shard = bucket.offset + run.rank * bucket.shard_numel
        assert shard <= run.arena_offset
        assert run.arena_offset + run.numel <= shard + bucket.shard_numel
        assert run.arena_offset - slot.offset == run.slot_offset
        assert run.arena_offset - shard == run.shard_offset - bucket.shard_offset


@given(layouts())
def test_one_ranks_runs_are_those_of_all_ranks_that_are_its_own(layout):
    for slot, runs in zip(layout.slots, layout.runs_of_slot, strict=True):
        for rank in range(layout.world_size):
            mine = tuple(run for run in runs if run.rank == rank)
            assert layout.runs_of_rank(rank)[slot.index] == mine
            ranges = layout.ranges_by_rank(slot.index)[rank]
            assert ranges == tuple((run.slot_offset, run.numel) for run in mine)
        buckets = tuple(dict.fromkeys(run.bucket for run in runs))
        assert layout.buckets_of_slot[slot.index] == buckets


def test_one_ranks_runs_of_seventy_billion_parameters_on_many_ranks_are_found_at_once(monkeypatch):
    made = []
    monkeypatch.setattr(layout_module, "Run", lambda **values: made.append(values))
    layout = plan_layout([spec("0", (2**28, 256), "bfloat16")], world_size=4096)
    layout.runs_of_rank(17)
    assert len(made) == len(layout.buckets)


@given(layouts())
def test_no_boundary_cuts_through_a_block(layout):
    for slot in layout.slots:
        assert slot.offset % BLOCK == 0
    for bucket in layout.buckets:
        assert bucket.offset % BLOCK == 0
        assert bucket.shard_numel % BLOCK == 0
        assert bucket.shard_numel * layout.world_size == bucket.numel
    for run in layout.runs:
        assert run.shard_offset % BLOCK == 0
        assert run.slot_offset % BLOCK == 0


@given(layouts())
def test_buckets_tile_their_arena_and_shards_the_flat_shard(layout):
    for arena in layout.arenas:
        offset = shard_offset = 0
        for bucket in arena.buckets:
            assert (bucket.offset, bucket.shard_offset) == (offset, shard_offset)
            offset += bucket.numel
            shard_offset += bucket.shard_numel
        assert offset == arena.numel
        assert shard_offset * layout.world_size == arena.numel


@given(layouts())
def test_a_slot_is_one_range_of_every_ranks_flat_shard(layout):
    """However many buckets it goes through; GradientNorms and ShardTensor rely on it."""
    for slot, runs in zip(layout.slots, layout.runs_of_slot, strict=True):
        for rank in range(layout.world_size):
            mine = [run for run in runs if run.rank == rank]
            start, stop = layout.local_range(slot.index, rank)
            assert stop - start == sum(run.numel for run in mine)
            for before, after in itertools.pairwise(mine):
                assert before.shard_offset + before.numel == after.shard_offset


@given(layouts())
def test_ranges_of_slots_follow_each_other_with_padding_below_a_block(layout):
    for arena in layout.arenas:
        for rank in range(layout.world_size):
            end = 0
            for slot in arena.slots:
                start, stop = layout.local_range(slot.index, rank)
                if stop > start:
                    assert start == -(-end // BLOCK) * BLOCK
                    end = stop


@given(layouts())
def test_shards_are_balanced_to_a_block_per_bucket(layout):
    """Whole-tensor sharding gives 2000/20/0/0 on four ranks; ours differ by padding only."""
    for arena in layout.arenas:
        padding = sum(-slot.numel % BLOCK for slot in arena.slots) + BLOCK * layout.world_size
        assert arena.numel - sum(slot.numel for slot in arena.slots) <= padding


@given(layouts(), st.sampled_from([None, 1, 100, 700]))
def test_segments_cover_every_slot_of_a_bucket_once(layout, direct_numel):
    for bucket in layout.buckets:
        segments = layout.segments(bucket.index, direct_numel)
        named = [slot for segment in segments for slot in segment.slots]
        assert named == list(layout.slots_of_bucket[bucket.index])
        for before, after in itertools.pairwise(segments):
            assert before.stop <= after.start
        for segment in segments:
            assert segment.direct == (
                direct_numel is not None
                and len(segment.slots) == 1
                and segment.numel >= direct_numel
            )
            for slot in segment.slots:
                start, stop = layout.part(bucket.index, slot)
                assert segment.start <= start < stop <= segment.stop


@given(layouts())
def test_extending_leaves_what_was_planned(layout):
    extended = layout.extend([spec("later", (33,)), spec("half", (5,), "bfloat16")])
    assert extended.arenas[: len(layout.arenas)] == layout.arenas
    assert extended.slots[: len(layout.slots)] == layout.slots
    assert extended.buckets[: len(layout.buckets)] == layout.buckets
    assert [slot.index for slot in extended.slots] == list(range(len(extended.slots)))
    assert [bucket.index for bucket in extended.buckets] == list(range(len(extended.buckets)))


def test_a_bucket_may_cut_through_a_parameter():
    layout = plan_layout([spec("w", (100, 100))], world_size=2, bucket_nbytes=4 * 2048)
    assert len(layout.buckets) == 5
    assert layout.buckets_of_slot[0] == (0, 1, 2, 3, 4)


def test_offsets_follow_backward_order():
    layout = plan_layout([spec("first", (300,)), spec("last", (10,))], world_size=2)
    assert layout.slots[1].offset == 0
    assert layout.slots[0].offset == BLOCK


def test_dtypes_and_units_get_arenas_of_their_own():
    specs = [spec("a", (3,)), spec("b", (3,), "bfloat16"), spec("c", (3,), unit="block")]
    layout = plan_layout(specs, world_size=3)
    assert {(arena.unit, arena.dtype) for arena in layout.arenas} == {
        ("", "float32"),
        ("", "bfloat16"),
        ("block", "float32"),
    }


def test_seventy_billion_parameters_are_planned_without_32_bit_sizes():
    """DeepSpeed#7640: tensors of 2^31 elements were never updated."""
    layout = plan_layout([spec("w", (70, 10**9), "bfloat16")], world_size=8)
    assert sum(run.numel for run in layout.runs) == 70 * 10**9


def test_a_world_of_no_rank_is_refused():
    with pytest.raises(ConfigError, match="world_size"):
        plan_layout([spec("w", (3,))], world_size=0)


def test_the_first_difference_is_named():
    ours = plan_layout([spec("w", (3,)), spec("v", (4,))], world_size=2).describe()
    other = plan_layout([spec("w", (3,)), spec("v", (5,))], world_size=2).describe()
    assert fingerprint(ours) != fingerprint(other)
    what, values = first_difference([ours, other])
    assert "(v)" in what
    assert "(4,)" in values[0]
    assert "(5,)" in values[1]
