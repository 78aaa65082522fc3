"""The command line: what it prints, and what it exits with."""

import builtins
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from zeroshard import cli
from zeroshard.checkpoint.convert import FORMATS
from zeroshard.checkpoint.opening import open_source


@pytest.fixture
def checkpoint(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {
        0: {
            "step": torch.tensor(2.0),
            "exp_avg": torch.ones(2, 3),
            "exp_avg_sq": torch.full((2, 3), 2.0),
        }
    }
    groups = [{"lr": 1e-3, "params": [0], "param_names": ["weight"]}]
    content = {"model": {"weight": weight}, "optimizer": {"state": state, "param_groups": groups}}
    path = tmp_path / "checkpoint.pt"
    torch.save({**content, "step": 2}, path)
    return path


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("to", FORMATS)
def test_convert_writes_and_says_so(to, checkpoint, tmp_path, capsys):
    assert run("convert", checkpoint, tmp_path / "out", "--to", to) == 0
    out, err = capsys.readouterr()
    assert out == f"wrote {tmp_path / 'out'}\n"
    last = err.splitlines()[-1]
    assert last.startswith(f"{checkpoint} -> {tmp_path / 'out'}: ")
    assert last.endswith(" of 0.00 MiB")
    if to != "safetensors":
        with open_source(tmp_path / "out") as source:
            assert source.weights["weight"].read().tolist() == [[0, 1, 2], [3, 4, 5]]
            assert source.state["weight"]["exp_avg_sq"].read().tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize(
    ("option", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_the_dtype_is_that_of_the_weights(option, dtype, checkpoint, tmp_path):
    assert run("convert", checkpoint, tmp_path / "out", "--to", "torch", "--dtype", option) == 0
    with open_source(tmp_path / "out") as source:
        assert source.weights["weight"].dtype == dtype
        assert source.state["weight"]["exp_avg"].dtype == torch.float32


def test_a_failure_is_one_line_and_exit_1(checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").touch()
    assert run("convert", checkpoint, out, "--to", "dcp") == 1
    printed, err = capsys.readouterr()
    assert printed == ""
    assert err == (
        f"zeroshard convert: {out} exists and is not empty: pass --overwrite, or another path\n"
    )
    assert run("convert", checkpoint, out, "--to", "dcp", "--overwrite") == 0
    assert not (out / "notes.txt").exists()
    capsys.readouterr()
    assert run("convert", tmp_path / "nothing", tmp_path / "new", "--to", "dcp") == 1
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "there is nothing" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["transform"],
        ["convert", "a"],
        ["convert", "a", "b"],
        ["convert", "a", "b", "--to", "gguf"],
        ["convert", "a", "b", "--to", "dcp", "--dtype", "int8"],
        ["convert", "a", "b", "--t", "dcp"],
    ],
)
def test_wrong_usage_is_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 2
    assert "usage: zeroshard" in capsys.readouterr().err


def test_an_interruption_is_one_line_and_exit_130(checkpoint, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "convert", interrupted)
    assert run("convert", checkpoint, tmp_path / "out", "--to", "dcp") == 130
    assert capsys.readouterr().err == "zeroshard convert: interrupted\n"


def test_where_somebody_looks_there_is_a_bar(checkpoint, tmp_path, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "[bold]out"  # no markup
    assert run("convert", checkpoint, out, "--to", "torch") == 0
    err = capsys.readouterr().err
    assert "━" in err
    assert "[bold]out" in err


def test_without_rich_there_are_lines(checkpoint, tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("convert", checkpoint, tmp_path / "out", "--to", "torch") == 0
    assert "0.00 MiB of 0.00 MiB" in capsys.readouterr().err


def test_lines_of_progress_are_few(capsys):
    report = cli._lines("it")
    for done in range(1001):
        report(done * 2**20, 1000 * 2**20)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "it: 1000.00 MiB of 1000.00 MiB"
    assert len(lines) < 10
    report(3 * 2**30, 3 * 2**30)
    assert capsys.readouterr().err == "it: 3.00 GiB of 3.00 GiB\n"


def test_it_runs_as_a_module_and_as_a_script(checkpoint, tmp_path):
    command = [sys.executable, "-W", "error", "-m", "zeroshard", "convert", checkpoint]
    result = subprocess.run(
        [*command, tmp_path / "out", "--to", "safetensors"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == f"wrote {tmp_path / 'out'}\n"
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    project = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '[project.scripts]\nzeroshard = "zeroshard.cli:main"\n' in project
