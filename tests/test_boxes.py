"""Ranges of storage order as boxes, and what torch.distributed.checkpoint makes of them."""

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from models import LinearForm, coefficients
from ranks import run

import zeroshard
from zeroshard.boxes import boxes_of


@given(st.data())
def test_boxes_hold_the_range_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    whole = torch.arange(torch.Size(shape).numel()).view([shape[dim] for dim in order])
    whole = whole.permute([order.index(dim) for dim in range(len(shape))])
    start = data.draw(st.integers(0, whole.numel()))
    numel = data.draw(st.integers(0, whole.numel() - start))
    found, at = [], 7
    for box in boxes_of(shape, whole.stride(), start, numel, at=7):
        assert box.start == at
        block = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            block = block.narrow(dim, offset, size)
        elements = block.flatten().sort().values.tolist()
        found += elements
        at += len(elements)
    assert found == list(range(start, start + numel))


def test_a_range_of_a_matrix_is_at_most_three_boxes():
    for start in range(0, 70):
        for numel in range(0, 70 - start):
            assert len(boxes_of((10, 7), (7, 1), start, numel)) <= 3


SAVED = {"matrix": (37, 29), "experts": (3, 11, 13), "scalar": (), "empty": (0, 3)}


def moments_after(rank, world_size, draws):
    model = LinearForm(SAVED)
    optimizer = zeroshard.AdamW(model, lr=1e-2, bucket_mb=0.002)
    for draw in draws:
        model(coefficients(model, rank, world_size, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}


# torch DCP keeps one rank's plain shard and gives it to all; slices that name their boxes it keeps.
def test_checkpoints_keep_every_slice_at_every_world_size(tmp_path):
    def save(rank, world_size):
        moments = moments_after(rank, world_size, [0, 1])
        dcp.save(moments, checkpoint_id=tmp_path)
        return {name: tensor.full_tensor() for name, tensor in moments.items()}

    expected = run(save, 3)[0]

    def load(rank, world_size):
        sliced = moments_after(rank, world_size, [])
        dcp.load(sliced, checkpoint_id=tmp_path)
        whole = {name: torch.zeros(shape) for name, shape in SAVED.items()}
        dcp.load(whole, checkpoint_id=tmp_path)
        for name, tensor in expected.items():
            assert torch.equal(sliced[name].full_tensor(), tensor), name
            assert torch.equal(whole[name], tensor), name

    for world_size in (1, 2, 3):
        run(load, world_size)
