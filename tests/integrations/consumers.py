"""What was tried with whom, as rows of docs/compatibility.md.

A test file names its consumer and its tests say what they try:

    CONSUMER = Consumer("Accelerate", "accelerate", use="`accelerator.prepare(model, optimizer)`")

    @tried("`save_state` and `load_state` resume bit for bit", stages="1, 2")
    def test_...

The result of a row is that of its test. A test that checks that something is refused says so by
`result="refused: ..."`.
"""

import importlib.metadata
from dataclasses import dataclass

import pytest

OUTCOMES = pytest.StashKey()
ROWS = pytest.StashKey()
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Consumer:
    name: str
    package: str  # as on PyPI
    use: str  # one line of how to use it

    @property
    def version(self):
        return importlib.metadata.version(self.package).partition("+")[0]  # without the build


@dataclass(frozen=True)
class Row:
    consumer: Consumer
    what: str
    stages: str
    result: str
    test: str


def tried(what, *, stages, result="works"):
    return pytest.mark.tried(what, stages=stages, result=result)


def rows_of(items):
    """One row for each test function; parametrised ones share theirs."""
    rows = []
    for item in items:
        mark = item.get_closest_marker("tried")
        if mark is None:
            raise pytest.UsageError(f"{item.nodeid} does not say what it tries: see tried()")
        rows.append(Row(item.module.CONSUMER, *mark.args, **mark.kwargs, test=item.nodeid))
    return rows


def table_of(rows, outcomes):
    """The table in Markdown, in the order of the consumers' names and of their tests."""
    lines = []
    for consumer in sorted({row.consumer for row in rows}, key=lambda c: c.name.lower()):
        lines += [
            f"### {consumer.name}",
            "",
            f"With {consumer.package} {consumer.version}. {consumer.use}",
            "",
            "| tried | stages | result |",
            "| --- | --- | --- |",
        ]
        mine = [row for row in rows if row.consumer == consumer]
        for what, stages, result in dict.fromkeys((r.what, r.stages, r.result) for r in mine):
            of_row = [r for r in mine if (r.what, r.stages, r.result) == (what, stages, result)]
            bad = {outcomes.get(r.test, "not run") for r in of_row} - {"passed"}
            lines.append(f"| {what} | {stages} | {', '.join(sorted(bad)).upper() or result} |")
        lines.append("")
    return "\n".join(lines).strip()


def read(page):
    text = page.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def write(page, table):
    text = page.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(f"{before}\n{table}\n{after}")


def is_whole_run(config):
    """Whether every test runs, so that the table can be compared."""
    return not (
        config.option.keyword or config.option.markexpr or config.args_source.name == "ARGS"
    )
