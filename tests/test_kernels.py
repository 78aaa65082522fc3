"""Triton's kernels are bitwise their torch twins: in the interpreter, and on a GPU if there is one.

The twins themselves are tested in test_adamw_twin.py, test_cast.py and test_quantize.py.
"""

import json
import os
import pathlib
import subprocess
import sys

import kernel_cases
import pytest

NAMES = list(kernel_cases.cases("cpu"))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Case -> what differed between the interpreter and the twin."""
    out = tmp_path_factory.mktemp("kernels") / "results.json"
    script = pathlib.Path(kernel_cases.__file__)
    paths = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    # The interpreter is NumPy, which says so when a value overflows.
    command = [sys.executable, "-W", "ignore::RuntimeWarning", str(script), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_interpreter_agrees_with_the_twin(name, interpreted):
    assert interpreted[name] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_agrees_with_the_twin(name):
    assert kernel_cases.cases("cuda")[name]() == []
