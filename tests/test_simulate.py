"""A simulation of training says what the profiler measures, to the byte, and refuses the rest."""

import gc
import resource
import threading
import time

import memory_models
import pytest
import ranks
import torch
import torch.distributed as dist
from memory_models import FAMILIES, MOE, OTHERS, SETTINGS, Case, compared, measure_all, simulated
from torch import nn

from zeroshard.errors import ConfigError
from zeroshard.memory import ghosts
from zeroshard.memory.simulate import simulate

CASES = {**FAMILIES, **SETTINGS, **OTHERS}

SMALL = 4096
"""Bytes up to which results are real here, so that the parameters of tiny models are not."""

pytestmark = [
    # transformers is about to drop a name that peft asks it for.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture(autouse=True)
def tiny_models_have_no_values(monkeypatch):
    monkeypatch.setattr(ghosts, "REAL_NBYTES", SMALL)


@pytest.fixture(scope="module")
def measurements():
    """What ranks measure, by case: all cases of a world size in one start of its ranks."""
    gc.collect()
    gc.freeze()  # every simulation collects, and need not walk what the imports made
    sizes = sorted({case.world_size for case in CASES.values()})
    found = {}
    for size in sizes:
        chosen = {name: case for name, case in CASES.items() if case.world_size == size}
        found.update(measure_all(chosen, size))
    yield found
    gc.unfreeze()


def is_late(difference):
    """Whether a thread of gloo still held what it had sent when a point was passed."""
    return "temporary" in difference and difference.endswith("simulated None")


@pytest.mark.parametrize("name", CASES)
def test_a_simulation_equals_a_measurement_to_the_byte(name, measurements):
    case = CASES[name]
    rank = list(CASES).index(name) % case.world_size
    simulation = simulated(case, rank)
    for _ in range(3):
        measurement = measurements[name][rank]
        assert isinstance(measurement, dict), measurement
        different = compared(measurement, simulation)
        if not different:
            break
        # gloo's thread lets go of what it sent when it is its turn; a fault is there every time.
        measurements.update(measure_all({name: case}, case.world_size))
    assert not different, different


def test_every_rank_is_simulated_as_it_is(measurements):
    name = "tied embeddings"
    for rank, measurement in enumerate(measurements[name]):
        different = compared(measurement, simulated(CASES[name], rank))
        assert all(map(is_late, different)), different


@pytest.mark.parametrize("name", ["llama", "mixtral", "checkpointing", "dropout", "vit"])
def test_with_the_choices_of_a_gpu_states_are_the_same_and_activations_are_not(name):
    on_cpu, on_gpu = (simulated(CASES[name], device=device) for device in ("cpu", "cuda"))
    for point in ("constructed", "after_step"):
        states = [report["points"][point] for report in (on_cpu, on_gpu)]
        for category in ("parameters", "master", "moments"):
            assert states[0].get(category) == states[1].get(category), (point, category)
    assert on_cpu["maxima"]["activations"] != on_gpu["maxima"]["activations"]


# --- what is refused


class Deciding(nn.Module):
    """A model with a part that decides by values."""

    def __init__(self, decide):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.middle = Part(decide)

    def forward(self, x):
        return self.last(self.middle(self.first(x))).square().mean()


class Part(nn.Module):
    def __init__(self, decide):
        super().__init__()
        self.decide = decide

    def forward(self, x):
        return self.decide(x)


@pytest.mark.parametrize(
    ("decide", "operation"),
    [
        (lambda x: x if x.sum() > 0 else -x, "aten._local_scalar_dense.default"),
        (lambda x: x[x > 0].view(1, -1), "aten.index.Tensor"),
        (lambda x: x[(x > 0).nonzero()[:, 0]].view(1, -1), "aten.nonzero.default"),
        (lambda x: torch.masked_select(x, x > 0), "aten.masked_select.default"),
        (lambda x: x + torch.unique(x.detach().round()).numel(), "aten._unique2.default"),
    ],
)
def test_a_model_that_decides_by_values_is_told_where_and_by_what(decide, operation):
    with pytest.raises(ConfigError, match=rf"(?s){operation}.*in middle.*zeroshard\.plan"):
        simulate(lambda: Deciding(decide), lambda: torch.randn(64, 64), world_size=2, device="cpu")


def test_experts_that_are_looped_over_are_refused_and_grouped_ones_are_not():
    def loop():
        return memory_models.of_config("Mixtral", experts_implementation="eager", **MOE)

    with pytest.raises(ConfigError, match=r"aten\..* in model\.layers\.0\.mlp"):
        simulate(loop, memory_models.batch_of, world_size=2)
    report = simulated(FAMILIES["mixtral"], device="cuda")
    assert report["peak"]["total"] > 0


def test_values_that_the_batch_brings_may_be_decided_by():
    report = simulate(
        lambda: Deciding(lambda x: x),
        lambda: (torch.randn(64, 64), torch.tensor(True)),
        world_size=2,
        device="cpu",
        loss_fn=lambda model, batch: model(batch[0]) if batch[1] else None,
    )
    assert report.peak.total > 0


def small_model():
    return Deciding(lambda x: x)


def small_batch():
    return torch.randn(64, 64)


def test_a_simulation_in_a_simulation_is_refused():
    def nested():
        simulate(small_model, small_batch, world_size=2)

    with pytest.raises(ConfigError, match="one at a time"):
        simulate(small_model, nested, world_size=2)
    assert simulate(small_model, small_batch, world_size=2).peak.total > 0


def test_a_simulation_beside_another_is_refused():
    errors = []

    def beside():
        try:
            simulate(small_model, small_batch, world_size=2)
        except ConfigError as error:
            errors.append(str(error))

    def batch():
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        return small_batch()

    simulate(small_model, batch, world_size=2)
    assert len(errors) == 2
    assert "one at a time" in errors[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_left_of_a_simulation_that_failed(device):
    kernels = torch._C._dispatch_dump("aten::scaled_dot_product_attention")
    init = torch.autocast.__init__

    def fails():
        raise RuntimeError("no batch")

    with pytest.raises(RuntimeError, match="no batch"):
        simulate(small_model, fails, world_size=4, device=device)
    assert not dist.is_initialized()
    assert gc.isenabled()
    assert torch._C._dispatch_dump("aten::scaled_dot_product_attention") == kernels
    assert torch.autocast.__init__ is init
    loss = small_model()(small_batch())
    loss.backward()
    assert loss.isfinite()


def test_a_process_group_of_the_caller_is_left_alone():
    def body(rank, world_size):
        with pytest.raises(ConfigError, match="has one already"):
            simulate(small_model, small_batch, world_size=8)
        return dist.get_world_size()

    assert ranks.run(body, 1) == [1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": "tpu"}, "device must be"),
        ({"steps": 1}, "steps must be at least 2"),
        ({"micro_batches": 0}, "micro_batches must be at least 1"),
        ({"rank": 2}, r"rank must be in 0 \.\. 1"),
    ],
)
def test_impossible_numbers_say_what_is_possible(changed, message):
    with pytest.raises(ConfigError, match=message):
        simulate(small_model, small_batch, **{"world_size": 2, **changed})


def test_a_model_without_a_loss_says_how_to_give_one():
    with pytest.raises(ConfigError, match="loss_fn"):
        simulate(lambda: nn.Linear(4, 4), lambda: torch.randn(2, 4), world_size=2)


# --- what it costs


def wide_model(num_blocks):
    return memory_models.of_config(
        "Llama",
        dtype=torch.bfloat16,
        num_hidden_layers=num_blocks,
        hidden_size=4096,
        intermediate_size=11008,
        vocab_size=32000,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=2048,
    )


def simulated_alone(num_blocks, world_size):
    """Report, seconds of a process of its own, and how far its resident memory rose, in MiB."""

    def body(rank, _):
        ghosts.REAL_NBYTES = 2**20
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        case = Case(
            model=lambda: wide_model(num_blocks),
            batch=lambda: memory_models.batch_of(1, 2048),
            world_size=world_size,
        )
        report = simulated(case, device="cuda")
        rose = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return report, time.process_time() - started, rose / 1024

    return ranks.run(body, 1, process_group=False, timeout_s=120, WORLD_SIZE=None)[0]


def test_seven_billion_parameters_take_seconds_and_no_memory():
    report, seconds, rose = simulated_alone(32, world_size=8)
    numel = sum(parameter.numel() for parameter in shapes_of(32))
    held = report["points"]["constructed"]["parameters"]
    assert 0 <= held - 2 * numel / 8 < 1e-3 * held
    assert max(seconds / 30, rose / 1024) < 1, (seconds, rose)


def shapes_of(num_blocks):
    with torch.device("meta"):
        return list(wide_model(num_blocks).parameters())


def test_a_thousand_ranks_cost_what_eight_do():
    few, seconds, _ = simulated_alone(4, world_size=8)
    many, seconds_of_many, rose = simulated_alone(4, world_size=1024)
    assert seconds_of_many < seconds + 5, "something is done for every rank"
    assert rose < 1024, rose
    assert many["maxima"]["activations"] == few["maxima"]["activations"]
    moments = [report["points"]["after_step"]["moments"] for report in (few, many)]
    assert moments[1] <= moments[0] / 128 * 1.01
