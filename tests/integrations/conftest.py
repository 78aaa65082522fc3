"""What every test of a consumer needs, and the table in docs/compatibility.md."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",  # its threads do not survive a fork
    TQDM_DISABLE="1",
    CUDA_VISIBLE_DEVICES="",
)
# A rank is a fork of this process, which must not initialise CUDA: no fork survives that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pathlib

import consumers
import pytest
import torch

torch.set_num_threads(1)

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "compatibility.md"


def pytest_addoption(parser):
    parser.addoption(
        "--write-table", action="store_true", help="write docs/compatibility.md's table"
    )


def pytest_configure(config):
    config.stash[consumers.OUTCOMES] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" or report.outcome != "passed":
        outcomes = item.config.stash[consumers.OUTCOMES]
        worst = outcomes.get(item.nodeid)
        outcomes[item.nodeid] = worst if worst == "failed" else report.outcome
    return report


def pytest_collection_finish(session):
    session.config.stash[consumers.ROWS] = consumers.rows_of(session.items)


def pytest_sessionfinish(session):
    """Write the table, or fail where it does not say what this run found."""
    config = session.config
    if config.option.collectonly:
        return
    table = consumers.table_of(config.stash[consumers.ROWS], config.stash[consumers.OUTCOMES])
    if config.getoption("--write-table"):
        consumers.write(PAGE, table)
    elif consumers.is_whole_run(config) and consumers.read(PAGE) != table:
        print("\ndocs/compatibility.md does not say what this run found: run --write-table")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
