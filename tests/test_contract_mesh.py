"""A two-axis mesh shards over one axis and replicates over the other; some ranks train alone."""

import pytest
import torch
import torch.distributed as dist
from models import (
    SHAPES,
    LinearForm,
    Twin,
    assert_close,
    assert_ranks_agree,
    assert_same,
    averaged,
    coefficients,
    decay_groups,
    full_gradients,
    letter_batches,
    letters,
    plain_step,
    train,
    train_with_ddp,
    weights,
)
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.errors import ConfigError

stages = pytest.mark.parametrize("stage", [1, 2, 3])
axes = ("replicate", "shard")
shapes = pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1), (1, 4)], ids=str)


@shapes
@stages
def test_a_two_axis_mesh_is_bitwise_adamw_on_the_average_of_all_ranks(stage, mesh_shape):
    def body(rank, world_size):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
        for bucket_mb in (25, 1e-3):
            twin = Twin(rank, world_size, stage=stage, mesh=mesh, bucket_mb=bucket_mb)
            for step in range(3):
                with twin.optimizer.no_sync():
                    twin.backward(2 * step)
                # Each rank leaves out another parameter, and all of them one.
                twin.backward(2 * step + 1, lambda rank: set(SHAPES) - {"pair", list(SHAPES)[rank]})
                twin.check_gradients(f"step {step}")
                twin.step()
                twin.check(f"step {step}")

    run(body, 4)


@shapes
@stages
def test_norms_on_a_mesh_count_every_element_once(stage, mesh_shape):
    def body(rank, world_size):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
        model = LinearForm(SHAPES)
        optimizer = zeroshard.AdamW(model, stage=stage, mesh=mesh)
        parts = [coefficients(model, r, world_size) for r in range(world_size)]
        model(parts[rank]).backward()
        flat = torch.cat([g.double().flatten() for g in averaged(parts, world_size).values()])
        wanted = pytest.approx(flat.norm().item(), rel=2**-21)
        assert optimizer.clip_grad_norm_(1e9).item() == wanted
        assert nn.utils.clip_grad_norm_(model.parameters(), 1e9).item() == wanted
        matrix = averaged(parts, world_size)["matrix"]
        assert model.matrix.grad.sum().item() == matrix.sum().item()
        assert model.matrix.grad.mean().item() == pytest.approx(matrix.mean().item(), rel=2**-20)
        assert model.matrix.grad.abs().max().item() == matrix.abs().max().item()

    run(body, 4)


@shapes
@stages
def test_a_network_on_a_mesh_agrees_on_all_ranks_and_with_ddp(stage, mesh_shape):
    def body(rank, world_size):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
        model = letters()
        optimizer = zeroshard.AdamW(
            decay_groups(model),
            lr=1e-2,
            eps=1e-2,
            model=model,
            stage=stage,
            mesh=mesh,
            bucket_mb=1e-3,
        )
        got = train(model, optimizer, letter_batches(rank)[:4])
        assert_ranks_agree(got, "mesh")
        # Four terms are added in another order: 3 roundings, an update moves by lr * 2 / eps
        # times those, 3.6e-7, and by its own rounding; four steps, and 3 for the feedback.
        assert_close(got, train_with_ddp(rank, steps=4, eps=1e-2), "mesh", atol=1e-5)

    run(body, 4)


@shapes
@stages
def test_memory_on_a_mesh_is_divided_by_the_shard_axis_alone(stage, mesh_shape):
    def body(rank, world_size):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
        optimizer = zeroshard.AdamW(LinearForm({"weight": (400, 500)}), stage=stage, mesh=mesh)
        memory, numel = optimizer.memory(), 400 * 500
        assert memory["moments"] == pytest.approx(8 * numel / mesh_shape[1], rel=0.01)
        parameters = 4 * numel / (mesh_shape[1] if stage == 3 else 1)
        assert memory["parameters"] == pytest.approx(parameters, rel=0.01)

    run(body, 4)


@shapes
@stages
def test_a_skip_on_a_mesh_is_taken_by_all_ranks(stage, mesh_shape):
    def body(rank, world_size):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
        twin = Twin(rank, world_size, stage=stage, mesh=mesh)
        before = weights(twin.model)
        gradients = coefficients(twin.model, rank, world_size)
        if rank == 3:
            gradients["experts"][-1, -1, -1] = float("nan")
        twin.model(gradients).backward()
        twin.optimizer.step()
        assert_same(weights(twin.model), before, "skipped")
        assert int(twin.optimizer.skipped_steps) == 1

    run(body, 4)


@shapes
@stages
def test_all_ranks_of_a_mesh_start_from_the_first(stage, mesh_shape):
    def body(rank, world_size):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
        model = LinearForm(SHAPES, seed=rank)
        model.register_buffer("scale", torch.full((2,), float(rank)))
        zeroshard.AdamW(model, stage=stage, mesh=mesh)
        assert_same(weights(model), weights(LinearForm(SHAPES, seed=0)), "start")
        assert (model.scale == 0).all()

    run(body, 4)


@shapes
@stages
def test_state_on_a_mesh_is_torchs_and_loads_again(stage, mesh_shape):
    def body(rank, world_size):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
        twin = Twin(rank, world_size, stage=stage, mesh=mesh)
        twin.backward(0)
        twin.step()
        twin.optimizer.consolidate_state_dict(to=0)
        payload = [twin.optimizer.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(payload, 0)
        for index, wanted in twin.plain.state_dict()["state"].items():
            got = payload[0]["state"][index]
            assert torch.equal(got["exp_avg"], wanted["exp_avg"])
            assert torch.equal(got["exp_avg_sq"], wanted["exp_avg_sq"])
        model = type(twin.model)(SHAPES)
        model.load_state_dict(weights(twin.model))
        again = zeroshard.AdamW(model, lr=1e-2, weight_decay=0.1, stage=stage, mesh=mesh)
        again.load_state_dict(payload[0])
        twin.backward(1)
        twin.step()
        model(coefficients(model, rank, world_size, 1)).backward()
        again.step()
        assert_same(weights(model), weights(twin.model), "loaded")

    run(body, 4)


def a_process_group(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return pairs[rank // 2]


def a_row_of_a_mesh(rank):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "data"))["data"]


@pytest.mark.parametrize("make", [a_process_group, a_row_of_a_mesh])
@stages
def test_two_halves_of_the_ranks_train_two_models(stage, make):
    def body(rank, world_size):
        mesh, first = make(rank), 2 * (rank // 2)
        for _ in range(2):
            model, plain_model = LinearForm(SHAPES, seed=rank), LinearForm(SHAPES, seed=first)
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, mesh=mesh)
            plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, fused=True)
            for step in range(2 + rank // 2):  # one half takes a step more
                parts = [coefficients(model, r, 2, step) for r in (first, first + 1)]
                model(parts[rank - first]).backward()
                assert_same(full_gradients(model), averaged(parts, 2), "gradients")
                optimizer.clip_grad_norm_(1e9)
                optimizer.step()
                optimizer.zero_grad()
                plain_step(plain_model, plain, averaged(parts, 2))
            assert_same(weights(model), weights(plain_model), f"from rank {first}")

    run(body, 4)


@stages
def test_a_part_of_the_ranks_trains_alone(stage):
    def body(rank, world_size):
        process_group = dist.new_group([1, 2])
        if rank == 0:
            with pytest.raises(ConfigError, match="mesh"):
                zeroshard.AdamW(LinearForm(SHAPES), stage=stage, mesh=process_group)
            return
        model, plain_model = LinearForm(SHAPES, seed=rank), LinearForm(SHAPES, seed=1)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, mesh=process_group)
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, fused=True)
        for step in range(2):
            parts = [coefficients(model, r, 2, step) for r in (1, 2)]
            model(parts[rank - 1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            plain_step(plain_model, plain, averaged(parts, 2))
        assert_same(weights(model), weights(plain_model), "ranks 1 and 2")
        optimizer.consolidate_state_dict(to=0)

    run(body, 3)


@stages
def test_a_one_axis_mesh_is_the_default_process_group(stage):
    def body(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        twin = Twin(rank, world_size, stage=stage, mesh=mesh)
        for step in range(2):
            twin.backward(step)
            twin.step()
        twin.check("one axis")

    run(body, 3)


@stages
def test_a_mesh_of_three_axes_and_tensor_parallel_parameters_are_refused(stage):
    def body(rank, world_size):
        cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
        with pytest.raises(ConfigError, match=r"mesh|axes|dim"):
            zeroshard.AdamW(LinearForm(SHAPES), stage=stage, mesh=cube)
        plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = nn.Linear(8, 8)
        sharded = torch.distributed.tensor.distribute_tensor(
            model.weight.detach(), plane["tensor"], [torch.distributed.tensor.Shard(0)]
        )
        model.weight = nn.Parameter(sharded)
        with pytest.raises(ConfigError, match=r"DTensor|tensor.parallel"):
            zeroshard.AdamW(model, stage=stage, mesh=plane["data"])

    run(body, 4)
