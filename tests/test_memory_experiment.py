"""The sweep over what decides about memory: every configuration once, whatever happens to one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

from zeroshard.memory.schema import Peak, Report

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

TOY = """
import os
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def pair():
    count = Path("count")
    number = int(count.read_text()) if count.exists() else 0
    count.write_text(str(number + 1))
    if number == 2:
        os._exit(3)  # as where the machine runs out of memory
    return Net(), lambda: torch.ones(4, 16)
"""


@pytest.fixture
def experiment(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import memory_experiment

    return memory_experiment


@pytest.fixture
def runs(experiment, monkeypatch):
    """Stands in for the processes: who was run, with what result."""

    class Runs(list):
        results = {}

        def run_apart(self, configuration, path, timeout):
            self.append(configuration)
            result = self.results.get(configuration.stage)
            if isinstance(result, BaseException):
                raise result
            return result or {"report": report_of(configuration).to_json(), "error": None}

    runs = Runs()
    monkeypatch.setattr(experiment, "run_apart", runs.run_apart)
    monkeypatch.setattr(experiment.torch.cuda, "device_count", lambda: 0)
    return runs


def report_of(configuration):
    categories = {"parameters": 2**20 * configuration.stage, "activations": configuration.seq}
    peak = Peak(of="requested", step=2, phase="forward", where="", categories=categories)
    about = {"stage": configuration.stage, "seq": configuration.seq}
    return Report(source="simulate", configuration=about, peak=peak)


def names(folder):
    return sorted(path.name for path in folder.glob("*.json"))


def test_every_combination_is_run_once(experiment, runs, tmp_path, capsys):
    flags = ["--seq", "8", "--seq", "16", "--seq", "8", "--stage", "1", "--stage", "3"]
    assert experiment.main(["--out", str(tmp_path), *flags]) == 0
    wanted = {
        (stage, moments, checkpointing, seq)
        for stage in (1, 3)
        for moments in ("fp32", "int8")
        for checkpointing in ("none", "block")
        for seq in (8, 16)
    }
    ran = [(c.stage, c.moments, c.checkpointing, c.seq) for c in runs]
    assert len(ran) == len(wanted)
    assert set(ran) == wanted
    assert len(names(tmp_path)) == len(wanted)
    captured = capsys.readouterr()
    assert "[16/16, " in captured.err
    rows = captured.out.splitlines()
    assert rows[0].split()[:4] == ["at", "the", "peak,", "MiB"]
    peaks = [float(row.split()[-8]) for row in rows[1:17]]
    assert peaks == sorted(peaks)
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="report"') == 16


def test_what_is_done_is_not_done_again_and_torn_files_are(experiment, runs, tmp_path):
    flags = ["--out", str(tmp_path), "--checkpointing", "none", "--stage", "2"]
    assert experiment.main(flags) == 0
    assert len(runs) == 2
    first, second = (tmp_path / name for name in names(tmp_path))
    stamp = first.stat().st_mtime_ns
    second.write_text(second.read_text()[:40])
    runs.clear()
    assert experiment.main(flags) == 0
    assert len(runs) == 1
    assert second.stem == runs[0].name
    assert first.stat().st_mtime_ns == stamp
    runs.clear()
    assert experiment.main([*flags, "--stage", "3"]) == 0  # a larger sweep takes over the smaller
    assert [configuration.stage for configuration in runs] == [3, 3]


def test_a_failure_is_recorded_and_ends_nothing(experiment, runs, tmp_path, capsys):
    runs.results = {2: {"report": None, "error": "OutOfMemoryError: no room"}}
    flags = ["--out", str(tmp_path), "--checkpointing", "none", "--moments", "fp32"]
    assert experiment.main(flags) == 1
    assert [c.stage for c in runs] == [2, 3]
    out = capsys.readouterr().out
    assert "failed: gpt2-w8-stage2-fp32-none-1x512-cuda-simulate: OutOfMemoryError: no room" in out
    assert (tmp_path / "report.html").read_text().count('class="report"') == 1
    runs.results = {}
    assert experiment.main(flags) == 1
    assert len(runs) == 2  # it is known already
    assert experiment.main([*flags, "--again"]) == 0
    assert [c.stage for c in runs] == [2, 3, 2]


def test_when_all_failed_there_is_no_page(experiment, runs, tmp_path, capsys):
    runs.results = {2: {"report": None, "error": "no"}}
    flags = ["--stage", "2", "--moments", "fp32", "--checkpointing", "none"]
    assert experiment.main(["--out", str(tmp_path), *flags]) == 1
    assert not (tmp_path / "report.html").exists()
    assert "failed: " in capsys.readouterr().out


def test_an_interrupted_sweep_goes_on_where_it_was(experiment, runs, tmp_path, capsys):
    flags = ["--out", str(tmp_path), "--checkpointing", "none", "--moments", "fp32"]
    runs.results = {3: KeyboardInterrupt()}
    assert experiment.main(flags) == 1
    assert "the same command goes on after 1 of 2" in capsys.readouterr().out
    runs.results = {}
    runs.clear()
    assert experiment.main(flags) == 0
    assert [c.stage for c in runs] == [3]


def test_it_measures_where_there_are_as_many_gpus_as_asked_for(experiment, monkeypatch):
    monkeypatch.setattr(experiment.torch.cuda, "device_count", lambda: 4)
    for flags, source in (
        (["--gpus", "4"], "measure"),
        (["--gpus", "5"], "simulate"),
        (["--gpus", "4", "--device", "cpu"], "simulate"),
        (["--gpus", "5", "--source", "measure"], "measure"),
    ):
        found = experiment.configurations(experiment.parse(flags))
        assert {configuration.source for configuration in found} == {source}


def test_names_of_files_tell_configurations_apart(experiment):
    options = experiment.parse(["--model", "a/b:c", "--stage", "1", "--stage", "2"])
    found = [configuration.name for configuration in experiment.configurations(options)]
    assert len(set(found)) == len(found)
    assert all("/" not in name and ":" not in name for name in found)


def test_impossible_numbers_are_refused(experiment, capsys):
    for flags in (["--gpus", "0"], ["--seq", "0"], ["--micro-batch", "-1"], ["--timeout", "0"]):
        with pytest.raises(SystemExit):
            experiment.parse(flags)
        assert flags[0] in capsys.readouterr().err


def test_a_bar_is_shown_in_a_terminal_and_lines_elsewhere(experiment, capsys, monkeypatch):
    with experiment.progress(2) as told:
        told("one")
        told("two")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["one", "two"]
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with experiment.progress(2) as told:
        told("[bold]one")
    err = capsys.readouterr().err
    assert "[bold]one" in err
    assert "━" in err


def run(folder, *flags):
    command = [sys.executable, str(EXAMPLES / "memory_experiment.py"), *flags, "--out", "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180
    )


def test_configurations_are_processes_of_which_some_may_die(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    done = run(
        tmp_path,
        *("--model", "toy:pair", "--gpus", "2", "--device", "cpu", "--stage", "3"),
        *("--moments", "fp32", "--seq", "8", "--seq", "16"),
    )
    assert done.returncode == 1, done.stderr
    errors = {}
    for path in (tmp_path / "out").glob("*.json"):
        values = json.loads(path.read_text())
        errors[path.stem] = values["error"]
        if values["report"] is not None:
            assert Report.from_json(values["report"]).points["after_step"]["moments"] > 0
    stem = "toy_pair-w2-stage3-fp32-{}-1x{}-cpu-simulate"
    assert set(errors) == {stem.format(c, s) for c in ("none", "block") for s in (8, 16)}
    assert errors[stem.format("none", 8)] is None
    # Each configuration builds one model, the third of which is the last thing its process does.
    assert errors[stem.format("none", 16)] == "a process ended with status 3"
    for seq in (8, 16):
        assert (
            "ConfigError: toy:pair is no model of transformers" in errors[stem.format("block", seq)]
        )
    assert (tmp_path / "out" / "report.html").exists()
    assert not list((tmp_path / "out").glob("*.part"))


def test_ranks_that_are_measured_give_one_report(experiment, tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    flags = ["--model", "toy:pair", "--gpus", "2", "--device", "cpu", "--source", "measure"]
    configuration = experiment.configurations(experiment.parse([*flags, "--stage", "3"]))[0]
    port = experiment.free_port()

    def measure(rank, world_size):
        return experiment.measured(configuration, rank, port).to_json()

    first, second = ranks.run(measure, process_group=False)
    assert first == second
    report = Report.from_json(first)
    assert report.source == "profile"
    assert len(report.ranks) == 2
    assert report.configuration["world_size"] == 2
    assert report.configuration["moments"] == "fp32"
    assert report.points["after_step"]["moments"] > 0
