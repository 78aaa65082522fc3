"""Architectures of transformers and a ResNet: alike under every stage, and alike under DDP.

One start of two ranks per architecture and dtype runs all variants, and what it found serves all
tests and the table in docs/models.md, which this writes:

    python tests/test_models.py --write docs/models.md
"""

import dataclasses
import functools
import pathlib
import re
import sys
import traceback

import pytest
import torch
from architectures import ARCHITECTURES, STEPS, built, hf, train  # skips without transformers
from models import assert_same
from ranks import run
from torch.nn.parallel import DistributedDataParallel

import zeroshard

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = {"no checkpointing": None, "non-reentrant": False, "re-entrant": True}
NAMES = [architecture.name for architecture in ARCHITECTURES]

each_architecture = pytest.mark.parametrize("name", NAMES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@dataclasses.dataclass(kw_only=True)
class Findings:
    """What the runs of one architecture in one dtype showed.

    Attributes:
        faults: (kind of checkpointing, claim) -> what speaks against it; empty if nothing does.
            The claims are "stages", all stages alike, and "DDP", the losses of DDP.
        model_class: name of the class.
        units: name of the unit -> (parameters, elements), as `repr(optimizer)` shows them.
        num_parameters, numel: of the whole model.
    """

    faults: dict[tuple[str, str], list[str]]
    model_class: str
    units: dict[str, tuple[int, int]]
    num_parameters: int
    numel: int


def architecture_of(name):
    return next(architecture for architecture in ARCHITECTURES if architecture.name == name)


def units_shown(optimizer):
    """The units in `repr(optimizer)`, the root as ""."""
    found = re.findall(r"^  unit (\S+): (\d+) parameters, (\d+) elements$", repr(optimizer), re.M)
    return {
        "" if name == "(root)" else name: (int(count), int(numel)) for name, count, numel in found
    }


def shorten(names):
    """Names with the numbers of consecutive ones as a range: "h.0", "h.1" -> "h.0-1"."""
    result = []
    for name in names:
        stem, _, number = name.rpartition(".")
        if number.isdigit() and result:
            found = re.fullmatch(re.escape(stem) + r"\.(\d+)(?:-(\d+))?", result[-1])
            if found and int(found[2] or found[1]) == int(number) - 1:
                result[-1] = f"{stem}.{found[1]}-{number}"
                continue
        result.append(name)
    return result


class Runs:
    """All runs of one architecture in one dtype on one rank."""

    def __init__(self, architecture, dtype, rank):
        self.architecture, self.dtype, self.rank = architecture, dtype, rank

    def ours(self, use_reentrant, **options):
        model = self.model(use_reentrant)
        optimizer = zeroshard.AdamW(model, **SETTINGS, **options)
        result = train(model, optimizer, self.architecture, self.dtype, self.rank)
        if options["stage"] == 3:
            assert not result.whole, f"not sharded: {result.whole}"
        optimizer.close()
        return result

    def ddp(self, use_reentrant):
        # DDP takes parameters without gradient, and with static_graph=True re-entrant checkpointing
        # that brings several gradients of one, but not both: then its model is not checkpointed.
        is_partly_used = bool(self.architecture.unused)
        use_reentrant = None if is_partly_used else use_reentrant
        model = self.model(use_reentrant)
        replica = DistributedDataParallel(
            model, find_unused_parameters=is_partly_used, static_graph=use_reentrant is True
        )
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)
        # In 16 bits the optimizers differ by design: ours has masters in 32.
        steps = STEPS if self.dtype is torch.float32 else 1
        return train(
            model, optimizer, self.architecture, self.dtype, self.rank, forward=replica, steps=steps
        )

    def model(self, use_reentrant):
        model = built(self.architecture, self.dtype)
        if use_reentrant is not None:
            self.architecture.checkpoint(model, use_reentrant)
        return model

    def check_stages(self, use_reentrant, expected):
        others = {"stage 2": {"stage": 2}, "stage 3": {"stage": 3}}
        if self.architecture.told:
            others["stage 3 with units="] = {"stage": 3, "units": list(self.architecture.told)}
        faults = []
        for label, options in others.items():
            try:
                got = self.ours(use_reentrant, **options)
                assert got.losses == expected.losses, f"losses {got.losses}, {expected.losses}"
                assert_same(got.parameters, expected.parameters, "parameters")
                assert_same(got.buffers, expected.buffers, "buffers")
            except Exception:
                faults.append(f"{label} is not stage 1:\n{traceback.format_exc()}")
        return faults

    def check_training(self, got):
        """That it trained what it should and left the layout of every parameter as it was."""
        before = self.model(None)
        for name, old in before.named_parameters():
            new = got.parameters[name]
            is_same = torch.equal(old, new)
            assert is_same == (name in self.architecture.unused), f"{name}: untouched {is_same}"
            assert new.stride() == old.stride(), f"{name} has strides {new.stride()}"

    def check_ddp(self, got, expected):
        count = len(expected.losses)
        assert got.losses[:count] == expected.losses, f"losses {got.losses}, {expected.losses}"
        if count == STEPS:
            assert_same(got.parameters, expected.parameters, "parameters")


def body_of(architecture, dtype):
    def body(rank, world_size):
        runs = Runs(architecture, dtype, rank)
        faults = {(kind, claim): [] for kind in KINDS for claim in ("stages", "DDP")}
        for kind, use_reentrant in KINDS.items():
            try:
                first = runs.ours(use_reentrant, stage=1)
                runs.check_training(first)
            except Exception:
                text = f"stage 1:\n{traceback.format_exc()}"
                faults[kind, "stages"].append(text)
                faults[kind, "DDP"].append(text)
                continue
            faults[kind, "stages"] += runs.check_stages(use_reentrant, first)
            try:
                runs.check_ddp(first, runs.ddp(use_reentrant))
            except Exception:
                faults[kind, "DDP"].append(traceback.format_exc())
        model = runs.model(None)
        optimizer = zeroshard.AdamW(model, stage=3)
        return Findings(
            faults=faults,
            model_class=type(model).__name__,
            units=units_shown(optimizer),
            num_parameters=len(list(model.parameters())),
            numel=sum(p.numel() for p in model.parameters()),
        )

    return body


@functools.cache
def outcome_of(name, dtype):
    """The findings of every rank, or the error that left none, so that a hang costs once."""
    try:
        return run(body_of(architecture_of(name), DTYPES[dtype]), timeout_s=60)
    except AssertionError as error:
        return error


def findings_of(name, dtype):
    """Those of rank 0, with the faults of all ranks."""
    outcome = outcome_of(name, dtype)
    if isinstance(outcome, AssertionError):
        raise AssertionError(f"{name}, {dtype}: {outcome}")
    faults = {
        key: [text for findings in outcome for text in findings.faults[key]]
        for key in outcome[0].faults
    }
    return dataclasses.replace(outcome[0], faults=faults)


def faults_of(name, dtype, claim):
    faults = findings_of(name, dtype).faults
    return [f"{name}, {dtype}, {kind}: {text}" for kind in KINDS for text in faults[kind, claim]]


@each_dtype
@each_architecture
def test_all_stages_train_alike_with_and_without_checkpointing(name, dtype):
    faults = faults_of(name, dtype, "stages")
    assert not faults, "\n".join(faults)


@each_dtype
@each_architecture
def test_losses_are_those_of_ddp(name, dtype):
    faults = faults_of(name, dtype, "DDP")
    assert not faults, "\n".join(faults)


@each_architecture
def test_units_are_found_without_being_told(name):
    architecture = architecture_of(name)
    for dtype in DTYPES:
        findings = findings_of(name, dtype)
        root, *others = findings.units
        assert root == ""
        assert ", ".join(shorten(others)) == architecture.units
        counts, numels = zip(*findings.units.values(), strict=True)
        assert sum(counts) == findings.num_parameters
        assert sum(numels) == findings.numel


# --- the table


def verdict(name, claim, kinds=tuple(KINDS), dtypes=tuple(DTYPES)):
    faults = [findings_of(name, dtype).faults[kind, claim] for dtype in dtypes for kind in kinds]
    return "**differs**" if any(faults) else "bitwise"


def rows():
    """The table of docs/models.md, a line each."""
    heads = [
        "architecture",
        "class",
        "units found",
        "in the root",
        "special",
        "fp32",
        "bf16",
        "non-reentrant",
        "re-entrant",
        "losses of DDP",
    ]
    lines = [heads, ["---"] * len(heads)]
    for architecture in ARCHITECTURES:
        name = architecture.name
        found = findings_of(name, "fp32")
        root = found.units[""][0]
        units = ", ".join(f"`{unit}`" for unit in shorten([u for u in found.units if u]))
        lines.append(
            [
                name,
                f"`{found.model_class}`",
                units or "none",
                f"{root} of {found.num_parameters}",
                architecture.note,
                verdict(name, "stages", ["no checkpointing"], ["fp32"]),
                verdict(name, "stages", ["no checkpointing"], ["bf16"]),
                verdict(name, "stages", ["non-reentrant"]),
                verdict(name, "stages", ["re-entrant"]),
                verdict(name, "DDP"),
            ]
        )
    return [f"| {' | '.join(cells)} |" for cells in lines]


def test_the_table_in_the_docs_is_what_was_found():
    _, _, after = PAGE.read_text().partition(BEGIN)
    section, _, _ = after.partition(END)
    written = [line for line in section.splitlines() if line.startswith("|")]
    assert written == rows(), "python tests/test_models.py --write docs/models.md"


def write(page):
    before, begin, after = page.read_text().partition(BEGIN)
    _, end, rest = after.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no section between {BEGIN} and {END}")
    versions = f"With torch {torch.__version__} and transformers {hf.__version__}:"
    section = "\n".join(["", versions, "", *rows(), ""])
    page.write_text(f"{before}{begin}{section}{end}{rest}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--write":
        raise SystemExit(__doc__)
    torch.set_num_threads(1)  # ranks are forks, which own no threads of this process
    write(pathlib.Path(sys.argv[2]))
