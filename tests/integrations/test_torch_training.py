"""torch itself: compilation, uneven inputs, averages, checkpointing, functional calls, profiles."""

import copy
import warnings

import pytest
import torch
import torch._inductor.compile_fx  # once, and not in every rank
import torch.distributed as dist
import torch.nn.functional as F
from consumers import Consumer, tried
from models import Feed, assert_same, gathered, weights
from ranks import run
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.func import functional_call
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_script import STAGES, Reader, batch_of, loss_of, same_as_ddp, start

import zeroshard
from zeroshard.errors import ConfigError

CONSUMER = Consumer("PyTorch", "torch", use="`zeroshard.AdamW(model, lr=...)`, without DDP")

ALL = "1, 2, 3"


# --- torch.compile


@tried(
    "`torch.compile(model)`, in stages 1 and 2 with `fullgraph=True`",
    stages=ALL,
    result="works; gradients arrive after the whole backward, so nothing overlaps",
)
def test_a_compiled_model_trains_bitwise_as_uncompiled_under_ddp():
    """The backend traces forward and backward, and changes no order of arithmetic."""

    def body(rank, world_size):
        def play(script):
            if script.stage:
                torch._dynamo.reset()
                script.forward = torch.compile(
                    script.model, backend="aot_eager", fullgraph=script.stage < 3
                )
            script.train(rank, range(3))

        same_as_ddp(play)

    run(body, timeout_s=180)


@tried(
    "`torch.compile(model, fullgraph=True)`",
    stages="3",
    result="refused: parameters are gathered at the boundaries of modules; torch names our hook",
)
def test_one_graph_of_a_sharded_model_is_refused_by_torch():
    def body(rank, world_size):
        script = start(3)
        script.forward = torch.compile(script.model, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="ModuleHooks"):
            script.backward(rank, 0)
        script.optimizer.zero_grad()
        script.forward = script.model
        script.train(rank, [0])

    run(body)


@tried(
    "`block.compile()` for every block",
    stages=ALL,
    result="works; gradients are reduced while backward goes on",
)
def test_compiled_blocks_train_bitwise_and_deliver_their_gradients_one_by_one():
    def body(rank, world_size):
        def play(script):
            if script.stage == 0:
                return script.train(rank, range(3))
            torch._dynamo.reset()
            heard = []
            first, last = script.model.blocks
            last.narrow.weight.register_hook(lambda grad: heard.append("last block"))
            first.narrow.weight.register_hook(lambda grad: heard.append("first block"))
            script.model.embed.register_full_backward_hook(lambda *_: heard.append("embedding"))
            for block in script.model.blocks:
                block.compile(backend="aot_eager")
            script.train(rank, range(3))
            assert [word for word in heard if word.endswith("block")] == [
                "last block",
                "first block",
            ] * 3
            assert heard[:3] == ["last block", "first block", "embedding"]

        same_as_ddp(play)

    run(body, timeout_s=180)


@tried("A model whose blocks were compiled before the optimizer was built", stages=ALL)
def test_blocks_may_be_compiled_before_the_optimizer_is_built():
    def compiled():
        model = Reader()
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    def body(rank, world_size):
        torch._dynamo.reset()
        same_as_ddp(lambda script: script.train(rank, range(2)), make=compiled)

    run(body, timeout_s=180)


@tried("A loss function compiled by Inductor", stages=ALL)
def test_a_compiled_loss_trains_bitwise_as_under_ddp():
    def body(rank, world_size):
        cross_entropy = torch.compile(F.cross_entropy, backend="inductor")

        def play(script):
            for step in range(3):
                batch = batch_of(rank, step)
                logits = script.forward(batch[:, :-1]).flatten(0, 1)
                cross_entropy(logits, batch[:, 1:].flatten()).backward()
                script.optimizer.step()
                script.optimizer.zero_grad()

        torch._inductor.config.compile_threads = 1  # its pool of processes outlives a rank
        same_as_ddp(play)

    run(body, timeout_s=400)


@tried("`torch.compile(optimizer.step)`", stages=ALL)
def test_a_compiled_step_of_the_optimizer_trains_bitwise():
    """There is nothing to compile in it: it must run as it is."""

    def body(rank, world_size):
        def play(script):
            torch._dynamo.reset()
            step_ = script.optimizer.step
            if script.stage:
                step_ = torch.compile(step_, backend="eager")
            for step in range(3):
                script.backward(rank, step)
                step_()
                script.optimizer.zero_grad()

        same_as_ddp(play)

    run(body)


@tried("`torch.compile` of the function that makes a whole training step", stages=ALL)
def test_a_compiled_training_step_trains_bitwise():
    def body(rank, world_size):
        def play(script):
            torch._dynamo.reset()

            def train(batch):
                loss_of(script.forward, batch).backward()
                script.optimizer.step()
                script.optimizer.zero_grad()

            if script.stage:
                train = torch.compile(train, backend="eager")
            for step in range(3):
                train(batch_of(rank, step))

        same_as_ddp(play)

    run(body, timeout_s=180)


# --- uneven inputs


@tried(
    "`torch.distributed.algorithms.join.Join([optimizer])`: ranks with uneven inputs", stages="1, 2"
)
def test_ranks_with_uneven_inputs_join_as_under_ddp():
    """A rank without inputs adds zeros, and the average stays one over all ranks, as under DDP."""

    def body(rank, world_size):
        def play(script):
            joined = script.forward if script.stage == 0 else script.optimizer
            with Join([joined]):
                for step in range(2 + 2 * rank):
                    script.train(rank, [step])

        same_as_ddp(play, stages=(1, 2))

        def stopped(script):
            joined = script.forward if script.stage == 0 else script.optimizer
            ended = Join([joined], throw_on_early_termination=True)
            with pytest.raises(RuntimeError, match="exhausted"), ended:
                script.train(rank, range(2 + rank))

        for stage in (1, 2):
            stopped(start(stage))

    run(body)


@tried(
    "`Join([optimizer])`",
    stages="3",
    result="refused: forwards gather parameters, so a rank without inputs cannot stand aside",
)
def test_joining_under_stage_three_is_refused():
    def body(rank, world_size):
        script = start(3)
        with pytest.raises(ConfigError, match="stage"):
            Join([script.optimizer])
        script.train(rank, [0])

    run(body)


# --- averages of weights


class Normed(nn.Module):
    """Has batch statistics, which an average has to find anew."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 10)
        self.blocks = nn.ModuleList(Feed(10) for _ in range(2))
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 256)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.flatten(0, 1))).view(*ids.shape, 256)


def averages(script, rank, **options):
    """The second half of a run under SWA: what the averaged model holds, and what it predicts."""
    loader = [batch_of(0, step) for step in range(3)]
    with gathered(script.model):
        average = AveragedModel(script.model, **options)
    scheduler = SWALR(script.optimizer, swa_lr=2e-2, anneal_epochs=2)
    for step in range(4):
        script.train(rank, [step])
        scheduler.step()
        with gathered(script.model):
            average.update_parameters(script.model)
    update_bn(loader, average)
    average.eval()
    noted = {f"average of {name}": p.detach() for name, p in average.named_parameters()}
    assert int(average.n_averaged) == 4
    return {**noted, "predicted": average(loader[0]).detach()}


@tried(
    "`swa_utils.AveragedModel` (SWA and EMA), `SWALR`, `update_bn`",
    stages=ALL,
    result="works; under stage 3 inside of `zeroshard.gather(model)`, or use `zeroshard.EMA`",
)
def test_averaged_models_hold_what_they_do_under_ddp():
    def body(rank, world_size):
        same_as_ddp(lambda script: averages(script, rank), make=Normed, what="SWA")
        ema = get_ema_multi_avg_fn(0.9)
        same_as_ddp(
            lambda script: averages(script, rank, multi_avg_fn=ema), make=Normed, what="EMA"
        )

    run(body)


@tried(
    "`AveragedModel(model)` outside of `zeroshard.gather`",
    stages="3",
    result="refused: the error says to do it inside",
)
def test_an_average_of_placeholders_is_refused():
    def body(rank, world_size):
        script = start(3)
        with pytest.raises(ConfigError, match=r"zeroshard\.gather"):
            AveragedModel(script.model)
        with zeroshard.gather(script.model):
            average = AveragedModel(script.model)
        script.train(rank, [0])
        average.update_parameters(script.model)
        # A placeholder reads as NaN, and so does an average of it.
        assert average.module.blocks[0].widen.weight.isnan().all()

    run(body)


# --- profiles


@tried("`torch.profiler` sees `Optimizer.step#AdamW.step` and our own ranges", stages=ALL)
def test_the_profiler_sees_every_step_of_the_optimizer():
    def body(rank, world_size):
        def counted(script):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                script.train(rank, range(3))
            return {event.key: event.count for event in profiled.key_averages()}

        expected = counted(start(0))
        for stage in STAGES:
            got = counted(start(stage))
            names = [name for name in expected if name.startswith("Optimizer.")]
            assert {name: got.get(name) for name in names} == dict.fromkeys(names, 3)
            assert "Optimizer.step#AdamW.step" in names
            assert any(name.startswith("zeroshard::") for name in got), f"stage {stage}"

    run(body)


# --- what torch tries of AdamW and of ZeroRedundancyOptimizer, as scenarios of our own


def one_parameter():
    return nn.Parameter(torch.ones(3))


INPUTS = {
    "nothing": lambda: ([], {}),
    "a tensor": lambda: (one_parameter(), {}),
    "numbers": lambda: ([1.0, 2.0], {}),
    "a tensor that is no leaf": lambda: ([one_parameter() * 2], {}),
    "a parameter twice": lambda: ([{"params": [p := one_parameter()]}, {"params": [p]}], {}),
    "a group without params": lambda: ([{"lr": 1e-2}], {}),
    "named and nameless": lambda: ([("a", one_parameter()), one_parameter()], {}),
    "a negative lr": lambda: ([one_parameter()], {"lr": -1e-3}),
    "a beta of one": lambda: ([one_parameter()], {"betas": (0.9, 1.0)}),
    "a negative beta": lambda: ([one_parameter()], {"betas": (-0.1, 0.9)}),
    "a negative eps": lambda: ([one_parameter()], {"eps": -1e-8}),
    "a negative decay": lambda: ([one_parameter()], {"weight_decay": -1.0}),
    "a generator": lambda: ((one_parameter() for _ in range(2)), {"lr": 1e-2}),
    "groups": lambda: ([{"params": one_parameter(), "lr": 0.1}, {"params": []}], {}),
    "named": lambda: ([("weight", one_parameter())], {"weight_decay": 0.0}),
    "a tensor lr": lambda: ([one_parameter()], {"lr": torch.tensor(1e-3), "capturable": True}),
    "an implementation": lambda: ([one_parameter()], {"foreach": True, "maximize": True}),
    "fused": lambda: ([one_parameter()], {"fused": True}),
    "frozen": lambda: ([one_parameter().requires_grad_(False)], {}),
}


def outcome(cls, inputs, **options):
    """The groups it has then, or the kind of its error."""
    params, settings = inputs()
    try:
        optimizer = cls(params, **settings, **options)
    except Exception as error:
        return next(kind for kind in (TypeError, ValueError, Exception) if isinstance(error, kind))
    assert isinstance(optimizer, torch.optim.Optimizer)
    return [
        {
            key: [len(value), *(p.shape for p in value)] if key == "params" else value
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]


@tried("All that the constructor of `torch.optim.AdamW` takes and refuses", stages="1, 2")
def test_constructors_take_and_refuse_what_torchs_does():
    def body(rank, world_size):
        for what, inputs in INPUTS.items():
            expected = outcome(torch.optim.AdamW, inputs)
            for stage in (1, 2):
                got = outcome(zeroshard.AdamW, inputs, stage=stage)
                assert got == expected, f"{what}, stage {stage}"

    run(body)


@tried("Every element has one owner and ranks hold equal shares of the state", stages=ALL)
def test_state_is_partitioned_by_element_and_evenly():
    def body(rank, world_size):
        for stage in STAGES:
            script = start(stage)
            script.train(rank, range(2))
            held = torch.tensor([float(script.optimizer.memory()["moments"])])
            for p in script.model.parameters():
                moment = script.optimizer.state[p]["exp_avg"]
                owned = torch.tensor([moment.to_local().numel()])
                dist.all_reduce(owned)
                assert int(owned) == p.numel() == moment.numel()
            most = held.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX)
            dist.all_reduce(held)
            # Shares end at blocks of 256 elements with two fp32 moments each; nothing else may
            # tell ranks apart.
            assert float(world_size * most - held) <= world_size * 256 * 8, f"stage {stage}"

    run(body)


@tried("`maximize`, `eps`, `betas`, a weight decay of zero, changed groups", stages=ALL)
def test_hyperparameters_act_as_in_torch_when_they_are_set_and_changed():
    def body(rank, world_size):
        def play(script):
            for step in range(4):
                script.train(rank, [step])
                for group in script.optimizer.param_groups:
                    group["lr"] *= 0.5
                    group["betas"] = (0.8, 0.95)
                    group["weight_decay"] = 0.3 if step % 2 else 0.0
                    group["maximize"] = step == 2

        same_as_ddp(play, what="minimised")
        same_as_ddp(play, what="maximised", maximize=True, eps=1e-5, betas=(0.5, 0.9))

    run(body)


@tried("Its state continues in `torch.optim.AdamW` under DDP and comes back", stages=ALL)
def test_state_goes_to_torchs_adamw_and_back_in_the_middle_of_a_run():
    def body(rank, world_size):
        def everywhere(optimizer):
            if isinstance(optimizer, zeroshard.AdamW):
                optimizer.consolidate_state_dict(to=0)
            state = [optimizer.state_dict()]
            dist.broadcast_object_list(state)
            return state[0]

        def taken_over(script, stage):
            values, state = weights(script.model), everywhere(script.optimizer)
            after = start(0) if stage == 0 else None
            model = after.model if after else Reader()
            model.load_state_dict({**values, "head.weight": values["embed.weight"]})
            after = after or start(stage, make=lambda: model)
            after.optimizer.load_state_dict(state)
            return after

        plain = start(0)
        plain.train(rank, range(6))
        for stage in STAGES:
            script = start(stage)
            script.train(rank, range(2))
            script = taken_over(script, 0)
            script.train(rank, range(2, 4))
            script = taken_over(script, stage)
            script.train(rank, range(4, 6))
            assert_same(weights(script.model), weights(plain.model), f"stage {stage}")

    run(body)


# --- the rest of torch that touches parameters and gradients


@tried("`torch.utils.checkpoint` of both kinds", stages=ALL)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_train_as_under_ddp(use_reentrant):
    class Checkpointed(Reader):
        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return self.head(self.norm(x))

    def body(rank, world_size):
        same_as_ddp(lambda script: script.train(rank, range(3)), make=Checkpointed)

    run(body)


@tried("`torch.func.functional_call` with the model's own parameters", stages=ALL)
def test_training_through_functional_call_is_as_under_ddp():
    def body(rank, world_size):
        def play(script):
            named = dict(script.forward.named_parameters())
            for step in range(3):
                loss = loss_of(
                    lambda ids: functional_call(script.forward, named, (ids,)),
                    batch_of(rank, step),
                )
                loss.backward()
                script.optimizer.step()
                script.optimizer.zero_grad()

        same_as_ddp(play)

    run(body)


@tried("`torch.func.grad` of a functional call, beside training", stages="1, 2")
def test_functional_gradients_are_those_of_backward_on_this_rank():
    def body(rank, world_size):
        def play(script):
            noted = {}
            for step in range(2):
                batch = batch_of(rank, step)
                held = {name: p.detach() for name, p in script.model.named_parameters()}
                found = torch.func.grad(
                    lambda held, batch=batch: loss_of(
                        lambda ids: functional_call(script.model, held, (ids,)), batch
                    )
                )(held)
                noted.update({f"{step}: {name}": value for name, value in found.items()})
                script.train(rank, [step])
            return noted

        same_as_ddp(play, stages=(1, 2))

    run(body)


@tried(
    "`torch.func.grad` and other transforms of a sharded module",
    stages="3",
    result="refused: transform a copy that was made inside of `zeroshard.gather`",
)
def test_transforms_of_a_sharded_module_are_refused_and_a_copy_takes_them():
    def body(rank, world_size):
        script = start(3)
        with zeroshard.gather(script.model):
            plain = copy.deepcopy(script.model)
        held = {name: p.detach() for name, p in plain.named_parameters()}
        batch = batch_of(rank, 0)

        def gradients(model):
            return torch.func.grad(
                lambda held: loss_of(lambda ids: functional_call(model, held, (ids,)), batch)
            )(held)

        with pytest.raises(ConfigError, match="gather"):
            gradients(script.model)
        script.train(rank, [0])
        assert_same(gradients(plain), gradients(start(0).model), "a plain copy")

    run(body)


class Positive(nn.Module):
    def forward(self, x):
        return F.softplus(x)


@tried("`torch.nn.utils`: `parametrize`, both `weight_norm`, `spectral_norm`, `prune`", stages=ALL)
def test_parametrised_modules_train_as_under_ddp():
    def parametrised():
        model = Reader(depth=3)
        parametrizations.weight_norm(model.blocks[0].widen)
        parametrize.register_parametrization(model.blocks[1].norm, "weight", Positive())
        parametrizations.spectral_norm(model.blocks[1].narrow)
        nn.utils.weight_norm(model.blocks[2].narrow)
        prune.l1_unstructured(model.blocks[2].widen, "weight", 0.5)
        return model

    def body(rank, world_size):
        same_as_ddp(lambda script: script.train(rank, range(3)), make=parametrised)

    run(body)


@tried(
    "Parametrising or pruning a module after the optimizer was built",
    stages=ALL,
    result="refused: it takes the parameter out of its place; the error says to build the "
    "optimizer last",
)
@pytest.mark.parametrize("how", ["parametrised", "weight_norm", "pruned"])
def test_a_module_that_loses_its_parameter_is_an_error(how):
    def body(rank, world_size):
        for stage in STAGES:
            script = start(stage)
            script.train(rank, [0])
            layer = script.model.blocks[0].widen
            with gathered(script.model):
                if how == "parametrised":
                    parametrize.register_parametrization(layer, "weight", Positive())
                elif how == "weight_norm":
                    parametrizations.weight_norm(layer)
                else:
                    prune.l1_unstructured(layer, "weight", 0.5)
            with pytest.raises(ConfigError, match=r"blocks\.0\.widen\.weight.*optimizer last"):
                script.train(rank, [1])

    run(body)


@tried(
    "`detect_anomaly`, `FlopCounterMode`, `save_on_cpu`, `use_deterministic_algorithms`",
    stages=ALL,
)
def test_modes_around_training_change_nothing():
    def body(rank, world_size):
        def play(script):
            with torch.autograd.set_detect_anomaly(True, check_nan=True):
                script.train(rank, [0])
            with FlopCounterMode(display=False) as counter:
                script.train(rank, [1])
            with torch.autograd.graph.save_on_cpu():
                script.train(rank, [2])
            with torch.device("cpu"):
                script.train(rank, [3])
            torch.use_deterministic_algorithms(True)
            script.train(rank, [4])
            torch.use_deterministic_algorithms(False)
            return {"flops": torch.tensor(counter.get_total_flops())}

        same_as_ddp(play)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection")
        run(body)


@tried(
    "`torch.export` of the model between two steps",
    stages=ALL,
    result="works; under stage 3 inside of `zeroshard.gather(model)`",
)
def test_an_exported_model_predicts_what_the_model_does():
    def body(rank, world_size):
        def play(script):
            script.train(rank, [0])
            ids = batch_of(0, 0)
            with gathered(script.model):
                exported = torch.export.export(script.model, (ids,))
                wanted = script.model(ids).detach()
                assert torch.equal(exported.module()(ids), wanted)
            script.train(rank, [1])
            return {"predicted": wanted}

        same_as_ddp(play)

    run(body)


@tried("`parameters_to_vector` and `vector_to_parameters`", stages=ALL)
def test_parameters_go_to_a_vector_and_come_back():
    """Under stage 3 a vector is read inside of `zeroshard.gather`, and may be written anywhere."""

    def body(rank, world_size):
        def play(script):
            script.train(rank, range(2))
            with gathered(script.model):
                vector = parameters_to_vector(script.model.parameters()).detach().clone()
            vector_to_parameters(vector * 0.5, script.model.parameters())
            script.train(rank, range(2, 4))
            return {"vector": vector}

        same_as_ddp(play)

    run(body)


@tried("`nn.DataParallel` beside it, without a process group", stages=ALL)
def test_a_single_process_with_data_parallel_trains_as_torchs():
    def trained(optimizer_of):
        torch.manual_seed(0)
        model = Reader()
        optimizer, forward = optimizer_of(model), nn.DataParallel(model)
        for step in range(3):
            loss_of(forward, batch_of(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    def body(rank, world_size):
        expected = trained(lambda m: torch.optim.AdamW(m.parameters(), fused=True))
        for stage in STAGES:
            got = trained(lambda m, stage=stage: zeroshard.AdamW(m, stage=stage))
            assert_same(got, expected, f"stage {stage}")

    run(body, 1, process_group=False, WORLD_SIZE=None)
