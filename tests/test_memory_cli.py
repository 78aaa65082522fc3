"""`zeroshard simulate` and `zeroshard profile`: what they print, write and exit with."""

import json
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from ranks import run
from torch import nn

import zeroshard
from zeroshard import cli, cli_measure
from zeroshard.errors import ConfigError
from zeroshard.memory import architectures, building
from zeroshard.memory.expected import load_reports, matching, unmet
from zeroshard.memory.launched import is_launched, of_all_launched
from zeroshard.memory.models import shape_of
from zeroshard.memory.presets import PRESETS
from zeroshard.memory.schema import Peak, Report, Sample
from zeroshard.memory.scripts import Profiled, model_of, run_script
from zeroshard.memory.simulate import simulate

TOY = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen, self.narrow = nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.widen(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def pair():
    return Net(), batch


def batch():
    return (torch.randint(64, (4, 16)),)


def alone():
    return Net()


class Undecided(Net):
    def __init__(self):
        super().__init__()
        self.large = nn.Linear(1024, 1024)

    def forward(self, ids):
        return super().forward(ids) * (2 if self.large.weight.sum() > 0 else 1)


def undecided():
    return Undecided(), batch


def nothing():
    return "a model"
"""

TRAIN = """
import sys
import zeroshard
from toy import Net, batch

steps, *rest = map(int, sys.argv[1:2])
net = Net()
optimizer = zeroshard.AdamW({params}, stage={stage})
for _ in range(steps):
    net(*batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"trained as {{__name__}} {{sys.argv[1:]}}")  # in one piece, also of several ranks
{end}
"""

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder with a module of models, which is the current one; modules are forgotten again."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    yield tmp_path
    sys.modules.pop("toy", None)


def script(folder, name="train.py", params="net", stage=2, end=""):
    (folder / name).write_text(TRAIN.format(params=params, stage=stage, end=textwrap.dedent(end)))
    return name


def call(*arguments):
    """What the command exits with."""
    try:
        return cli.main([*map(str, arguments)])
    except SystemExit as end:
        return end.code


def simulated(*arguments, model="toy:pair"):
    """What simulating for two ranks exits with."""
    return call("simulate", "--model", model, "--gpus", 2, "--device", "cpu", *arguments)


# --- simulate ---------------------------------------------------------------------------------


def test_simulate_prints_what_simulating_gives(toy, capsys):
    assert simulated("--stage", 3, "--json") == 0
    printed = Report.from_json(json.loads(capsys.readouterr().out))
    sys.path.insert(0, "")
    from toy import Net, batch

    sys.path.remove("")
    expected = simulate(Net, batch, world_size=2, stage=3, device="cpu")
    assert printed.peak == expected.peak
    assert printed.points == expected.points
    assert printed.source == "simulate"
    told = printed.configuration
    assert (told["model"], told["stage"], told["world_size"]) == ("toy:pair", 3, 2)
    assert told["checkpointing"] == "none"


def test_simulate_tells_people_the_peak_and_the_points(toy, capsys):
    assert simulated("--stage", 1, "--gpu-memory", "80GiB") == 0
    out = capsys.readouterr().out
    assert out.startswith("peak ")
    assert "after backward" in out
    assert "moments" in out


def test_flags_given_several_times_are_several_simulations(toy, capsys):
    page = toy / "page.html"
    flags = ("--stage", 1, "--moments", "fp32", "--moments", "int8", "--html", page)
    assert simulated(*flags, "--json") == 0
    reports = [Report.from_json(values) for values in json.loads(capsys.readouterr().out)]
    chosen = [(r.configuration["stage"], r.configuration["moments"]) for r in reports]
    assert chosen == [(1, "fp32"), (1, "int8")]
    held = [report.points["after_step"]["moments"] for report in reports]
    assert held[1] < held[0]
    assert page.read_text().count('class="report"') == 2
    assert simulated("--markdown") == 0
    assert capsys.readouterr().out.startswith("| ")


def test_simulate_exits_with_1_above_the_memory_of_a_gpu(toy, capsys):
    assert simulated("--gpu-memory", "100KiB") == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("peak ")  # it is told all the same
    assert "more than the 100.0 KiB of a GPU" in captured.err


def test_simulate_compares_with_what_was_written_before(toy, capsys):
    assert simulated("--stage", 1, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    values["peak"]["categories"]["moments"] += values["peak"]["total"] // 10
    (toy / "other.json").write_text(json.dumps([values]))
    capsys.readouterr()
    assert simulated("--stage", 1, "--against", "other.json", "--tolerance", "20%") == 0
    assert simulated("--stage", 1, "--against", "other.json") == 1
    err = capsys.readouterr().err
    assert "differs by more than 2 % of it in moments: " in err
    assert "parameters: " not in err
    assert simulated("--stage", 3, "--against", "other.json") == 1
    assert "the closest one has stage 1 instead of 3" in capsys.readouterr().err


def test_simulate_finds_models_of_transformers_by_their_config(toy, capsys):
    pytest.importorskip("transformers")
    (toy / "config.json").write_text(json.dumps(CONFIG))
    found = []
    for flags in ((), ("--dtype", "fp32"), ("--checkpointing", "block")):
        flags += ("--seq", 64, "--micro-batch", 2, "--json")
        assert simulated(*flags, model=toy) == 0  # the folder will do
        report = Report.from_json(json.loads(capsys.readouterr().out))
        found.append(report.points["after_forward"])
    plain, wide, recomputed = found
    assert wide["parameters"] == 2 * plain["parameters"]
    assert recomputed["parameters"] == plain["parameters"]
    assert recomputed["activations"] < plain["activations"] / 2
    assert simulated(model=toy / "config.json") == 1
    assert "its sequence length is needed: --seq" in capsys.readouterr().err


def test_a_plan_of_a_published_kind_of_model_is_what_is_simulated(toy, capsys):
    pytest.importorskip("transformers")
    (toy / "config.json").write_text(json.dumps(CONFIG))
    flags = ("--model", "config.json", "--gpus", 2, "--seq", 256, "--stage", 3, "--micro-batch", 2)
    assert call("plan", *flags, "--json") == 0
    (toy / "plan.json").write_text(capsys.readouterr().out)
    assert len(load_reports(toy / "plan.json")) > 4
    assert call("simulate", *flags, "--master", "split", "--against", "plan.json") == 0


@pytest.mark.parametrize("family", architectures.FAMILIES)
def test_the_smallest_model_of_each_family_is_built_as_published(family):
    pytest.importorskip("transformers")
    presets = {name: p for name, p in PRESETS.items() if p.architecture.family == family}
    name = min(presets, key=lambda name: presets[name].numel)
    with torch.device("meta"):
        model = building.workload_of(name, seq=8).model()
    found = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert found == list(architectures.parameters(presets[name].architecture))
    assert model.dtype == torch.bfloat16
    assert model.training


def test_a_batch_is_tokens_and_labels():
    pytest.importorskip("transformers")
    batch = building.workload_of("gpt2", seq=12, micro_batch=3).batch()
    assert batch["input_ids"].shape == (3, 12)
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert int(batch["input_ids"].max()) < 50257


def test_what_cannot_be_simulated_is_said(toy, capsys, monkeypatch):
    cases = [
        ("toy:alone", (), "let it return the module and a function that gives a batch"),
        ("toy:nothing", (), "must return a torch.nn.Module, or one and a function"),
        ("toy:missing", (), "names no function that can be imported"),
        ("toy:pair", ("--checkpointing", "block"), "is no model of transformers"),
        ("toy:pair", ("--seq", "0"), "seq must be a whole number of at least 1"),
        ("toy:pair", ("--json", "--markdown"), "choose one"),
        ("toy:pair", ("--against", "no.json"), "no.json holds no reports of memory"),
        ("llama-3-9b", ("--seq", "8"), "did you mean llama-3-8b"),
        ("no/config.json", ("--seq", "8"), "is not a readable config.json"),
    ]
    for model, flags, message in cases:
        assert simulated(*flags, model=model) == 1, model
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert simulated("--seq", 8, model="llama-3-8b") == 1
    assert "pip install transformers" in capsys.readouterr().err


def test_a_model_that_cannot_be_simulated_is_planned(toy, capsys):
    arguments = ["simulate", "--model", "toy:undecided", "--gpus", "2", "--stage", "3", "--json"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    report = Report.from_json(json.loads(printed.out))
    assert report.source == "plan"
    assert any("Planned, not simulated" in note for note in report.notes)
    assert "aten._local_scalar_dense" in printed.err


def test_plan_takes_the_same_function_as_simulate(toy):
    assert shape_of("toy:pair").numel == shape_of("toy:alone").numel > 0


def test_shares_and_sizes():
    assert cli_measure.share("2%") == 0.02
    assert cli_measure.share("0.5") == 0.5
    assert cli_measure.share(" .5 %") == 0.005
    with pytest.raises(Exception, match="write 2% or"):
        cli_measure.share("two")
    assert call("simulate", "--model", "x", "--tolerance", "much") == 2


# --- reports against each other ---------------------------------------------------------------


def report_of(ranks=(), configuration=None, **categories):
    peak = Peak(of="requested", step=2, phase="forward", where="", categories=categories)
    return Report(source="plan", configuration=configuration or {}, peak=peak, ranks=ranks)


def test_the_limit_is_that_of_the_rank_that_holds_most():
    assert unmet(report_of(parameters=70), limit=70) == []
    (problem,) = unmet(report_of(ranks=(70, 90), parameters=70), limit=70)
    assert problem == "the peak is 90 B, which is 20 B more than the 70 B of a GPU"


def test_a_category_may_differ_by_a_share_of_the_expected_peak():
    expected = report_of(parameters=900, moments=100)
    assert unmet(report_of(parameters=890, moments=110), expected=expected, tolerance=0.01) == []
    (problem,) = unmet(report_of(parameters=889, moments=110), expected=expected, tolerance=0.01)
    assert problem.endswith("differs by more than 1 % of it in parameters: 0.87 KiB instead of "
                            "0.88 KiB")  # fmt: skip
    (problem,) = unmet(report_of(parameters=900), expected=expected, tolerance=0.01)
    assert "in moments: 0 B instead of 100 B" in problem


def test_the_report_of_the_same_configuration_is_found():
    reports = [report_of(configuration={"stage": s, "master": "split"}) for s in (1, 2, 3)]
    assert matching(reports, {"stage": 2, "master": "auto", "seq": 8}, "x") is reports[1]
    with pytest.raises(ConfigError, match=r"x has no report .* master split instead of none"):
        matching(reports, {"stage": 2, "master": "none"}, "x")


def test_reports_that_may_both_be_meant_are_refused():
    reports = [
        report_of(configuration={"stage": 3, "master": master, "checkpointing": kind})
        for master in ("none", "split")
        for kind in ("none", "block")
    ]
    wanted = {"stage": 3, "master": "auto", "checkpointing": "block"}
    assert matching(reports, wanted, "x") is reports[3]
    with pytest.raises(
        ConfigError, match=r"x has 2 reports .* which differ in checkpointing: give"
    ):
        matching(reports, {"stage": 3}, "x")


def test_files_without_reports_are_refused(tmp_path):
    for name, text in (("a", "{"), ("b", "[]"), ("c", "[3]"), ("d", '{"format": "x"}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=f"{name} holds no reports of memory"):
            load_reports(tmp_path / name)
    with pytest.raises(ConfigError, match="holds no reports"):
        load_reports(tmp_path / "missing")


# --- profile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_profile_runs_a_script_unchanged_and_writes_what_it_held(toy, capsys, stage):
    script(toy, stage=stage)
    before = sys.argv[:], sys.path[:], zeroshard.AdamW.__init__
    flags = ("--steps", 3, "--json", "report.json", "--html", "page.html")
    assert call("profile", *flags, "train.py", 5, "--json") == 0
    assert (sys.argv, sys.path, zeroshard.AdamW.__init__) == before
    captured = capsys.readouterr()
    assert captured.out == "trained as __main__ ['5', '--json']\n"
    assert captured.err.startswith("peak ")
    assert "times as long" in captured.err  # two steps ran free
    report = Report.load(toy / "report.json")
    assert report.source == "profile"
    assert report.configuration["stage"] == stage
    assert 2 <= report.peak.step <= 3
    held = report.points["after_step"]
    assert held["moments"] == 2 * held["parameters"]
    assert "<html" in (toy / "page.html").read_text()
    assert call("profile", "--against", "report.json", "train.py", 4) == 0
    assert call("profile", "--gpu-memory", "1KiB", "train.py", 4) == 1
    assert "more than the 1.00 KiB of a GPU" in capsys.readouterr().err


def test_profile_finds_the_model_of_bare_parameters_and_runs_modules(toy, capsys):
    script(toy, name="plain.py", params="net.parameters()")
    assert call("profile", "--json", "report.json", "-m", "plain", 3) == 0
    assert "trained as __main__ ['3']" in capsys.readouterr().out
    report = Report.load(toy / "report.json")
    assert report.configuration["model"] == "Net"
    assert any(sample.where.startswith("blocks.2") for sample in report.timeline)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no more')", 1, "no more\n"),
        ("raise OSError('broken')", 1, "OSError: broken"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_profile_exits_with_what_the_script_exits_with(toy, capsys, end, code, said):
    script(toy, end=end)
    assert call("profile", "--json", "report.json", "train.py", 2) == code
    err = capsys.readouterr().err
    assert said in err
    assert "peak " in err
    assert "scripts.py" not in err  # the traceback begins in the script
    assert Report.load(toy / "report.json").peak.total > 0
    assert call("profile", "--gpu-memory", "1KiB", "train.py", 2) == (code or 1)


def test_a_script_that_fails_before_its_first_step_keeps_its_status(toy, capsys):
    script(toy)
    assert call("profile", "train.py", 0) == 1
    assert "train.py made no step with a zeroshard.AdamW" in capsys.readouterr().err
    (toy / "early.py").write_text("import sys; sys.exit(5)")
    assert call("profile", "early.py") == 5
    assert "made no step" in capsys.readouterr().err
    (toy / "torn.py").write_text("def")
    assert call("profile", "torn.py") == 1
    assert "SyntaxError" in capsys.readouterr().err


def test_trainings_one_after_the_other_are_reports_beside_each_other(toy, capsys):
    script(
        toy,
        end="""
        other = Net()
        optimizer = zeroshard.AdamW(other, stage=3)
        for _ in range(3):
            other(*batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    assert call("profile", "--steps", 2, "--json", "both.json", "train.py", 3) == 0
    reports = load_reports(toy / "both.json")
    assert [report.configuration["stage"] for report in reports] == [2, 3]
    assert "stage 2" in capsys.readouterr().err


def test_a_second_optimizer_of_one_training_is_not_followed_and_said_so(toy, capsys):
    (toy / "two.py").write_text(
        "import zeroshard\n"
        "from toy import Net, batch\n"
        "nets = [Net(), Net()]\n"
        "both = [zeroshard.AdamW(net) for net in nets]\n"
        "for _ in range(3):\n"
        "    for net, optimizer in zip(nets, both):\n"
        "        net(*batch()).backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
    )
    assert call("profile", "--json", "one.json", "two.py") == 0
    assert len(load_reports(toy / "one.json")) == 1
    assert capsys.readouterr().err.count("One more optimizer was made before") == 1


def test_what_cannot_be_followed_does_not_disturb_the_script(toy, capsys):
    script(toy)
    assert call("profile", "--snapshot", "run.pickle", "train.py", 2) == 1
    captured = capsys.readouterr()
    assert captured.out == "trained as __main__ ['2']\n"
    assert (
        "An optimizer was not followed: a snapshot records the allocator of a GPU" in captured.err
    )
    assert "made no step" in captured.err


def test_profile_refuses_what_it_cannot_run(toy, capsys):
    script(toy)
    cases = [
        (("--steps", 0, "train.py", 3), "--steps must be at least 1"),
        (("missing.py",), "there is no script missing.py; -m takes"),
        (("--against", "no.json", "train.py", 3), "holds no reports"),
    ]
    for arguments, message in cases:
        assert call("profile", *arguments) == 1
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""  # nothing ran


def test_the_module_of_an_optimizer_is_the_outermost_that_holds_nothing_else():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    wrapped = Wrapper(first)
    both = nn.ModuleList([wrapped, second])
    optimizer = zeroshard.AdamW(first.parameters())
    assert model_of(optimizer) is wrapped
    optimizer.close()
    optimizer = zeroshard.AdamW([*first.parameters(), *second.parameters()])
    assert model_of(optimizer) is both
    optimizer.close()
    optimizer = zeroshard.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ConfigError, match=r"no module holds all .* pass model="):
        model_of(optimizer)


def test_a_failing_report_does_not_hide_the_optimizers_own_error(toy):
    profiled = Profiled(2)
    with profiled.watching(), pytest.raises(ConfigError, match="stage must be"):
        zeroshard.AdamW(nn.Linear(2, 2), stage=9)
    assert profiled.reports == []


def test_a_script_that_is_not_there_is_an_error_of_python(toy, capsys):
    assert run_script("nowhere", [], is_module=True) == 1
    assert "No module named nowhere" in capsys.readouterr().err


# --- profile on several ranks -----------------------------------------------------------------


def launched_report(rank, height):
    categories = {"parameters": 30, "activations": height}
    peak = Peak(of="requested", step=2, phase="forward", where="", categories=categories)
    sample = Sample(at=rank, phase="forward", where="", categories=categories)
    return Report(
        source="profile", configuration={}, peak=peak, maxima=categories, timeline=[sample]
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(function, world_size):
    return run(
        function,
        world_size,
        process_group=False,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
        TORCHELASTIC_USE_AGENT_STORE=None,
    )


def test_the_first_rank_hears_of_all_and_the_highest_gives_its_timeline():
    def report(rank, world_size):
        assert is_launched()
        heights = [(10, 40, 20)[rank], (50, 40, 20)[rank]]
        reports = [launched_report(rank, height) for height in heights]
        found = of_all_launched(reports, 20.0)
        return None if found is None else [report.to_json() for report in found]

    first, *others = launch(report, 3)
    assert others == [None, None]
    one, two = map(Report.from_json, first)
    assert (list(one.ranks), list(two.ranks)) == ([40, 70, 50], [80, 70, 50])
    assert [sample.at for sample in one.timeline] == [1]
    assert [sample.at for sample in two.timeline] == [0]
    assert one.maxima == {"parameters": 30, "activations": 40}
    assert one.notes[0].startswith("Rank 1 holds most, 70 B, and rank 0 least")


def test_a_rank_that_does_not_report_is_named():
    def report(rank, world_size):
        if rank == 1:
            return None
        return of_all_launched([launched_report(rank, 10)], 0.5)[0].notes

    notes, _ = launch(report, 2)
    assert notes == ["Of rank 1 nothing is known."]


def test_ranks_are_named_by_their_own_numbers_where_some_are_missing():
    def report(rank, world_size):
        if rank == 1:
            return None
        own = [] if rank == 0 else [launched_report(rank, 10 * rank)]
        found = of_all_launched(own, 1.0)
        return None if found is None else [report.to_json() for report in found]

    first, *_ = launch(report, 4)
    (found,) = map(Report.from_json, first)
    assert found.notes[0] == "Of ranks 0, 1 nothing is known."
    assert found.notes[1].startswith("Rank 3 holds most, 60 B, and rank 2 least, 50 B")
    assert [sample.at for sample in found.timeline] == [3]


def test_profile_works_under_torchrun(toy):
    script(
        toy,
        stage=3,
        end="import torch.distributed as dist; dist.destroy_process_group(); sys.exit(0)",
    )
    text = (toy / "train.py").read_text()
    begin = "import torch.distributed as dist; dist.init_process_group('gloo')\n"
    (toy / "train.py").write_text(begin + text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "zeroshard", "profile", "--json", "all.json", "train.py", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained as __main__ ['3']") == 2
    report = Report.load(toy / "all.json")
    assert report.configuration["world_size"] == 2
    assert len(report.ranks) == 2
    assert done.stderr.count(" requested in ") == 1
