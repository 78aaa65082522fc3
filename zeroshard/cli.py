"""The command line: parse, call, print. Knows nothing else."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .checkpoint.convert import FORMATS, convert
from .cli_doctor import add_doctor
from .cli_measure import add_profile, add_simulate
from .cli_memory import add_plan
from .errors import ZeroShardError

__all__ = ["main"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EVERY_S = 1.0  # between two lines of progress

Report = Callable[[int, int], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; wrong usage exits the process with 2.

    Args:
        arguments: of it; None: those of the process.

    Returns:
        0, 1 where it failed, with a line on stderr that says why, or 130 after Ctrl-C.
    """
    chosen = _parser().parse_args(arguments)
    try:
        chosen.run(chosen)
    except (ZeroShardError, OSError) as error:
        said = " ".join(str(error).split()).replace("overwrite=True", "--overwrite")
        print(f"zeroshard {chosen.command}: {said}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"zeroshard {chosen.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroshard", description="What goes with zeroshard.AdamW.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser(
        "convert",
        help="write a checkpoint in another format",
        description="Write a checkpoint in another format, without a GPU and in bounded memory.",
        allow_abbrev=False,
    )
    command.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a folder that save_checkpoint wrote, or one of torch.distributed.checkpoint or "
        "DeepSpeed, or a file of torch.save",
    )
    command.add_argument("out", metavar="OUT", help="a folder; for torch a file")
    command.add_argument(
        "--to",
        required=True,
        choices=FORMATS,
        help="safetensors: weights for from_pretrained; torch: one file, and dcp: a folder, of "
        "model and optimizer",
    )
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the weights, as they are by default; fp32 gives exact masters, if there are any",
    )
    command.add_argument("--overwrite", action="store_true", help="replace what is at OUT")
    command.set_defaults(run=_convert)
    add_plan(commands)
    add_simulate(commands)
    add_profile(commands)
    add_doctor(commands)
    return parser


def _convert(chosen: argparse.Namespace) -> None:
    with _progress(f"{chosen.checkpoint} -> {chosen.out}") as report:
        convert(
            chosen.checkpoint,
            chosen.out,
            chosen.to,
            dtype=DTYPES[chosen.dtype] if chosen.dtype else None,
            overwrite=chosen.overwrite,
            on_progress=report,
        )
    print(f"wrote {chosen.out}")


@contextmanager
def _progress(what: str) -> Iterator[Report]:
    """A bar where rich is installed and somebody looks, else a line now and then; on stderr."""
    try:
        from rich import progress
    except ImportError:
        yield _lines(what)
        return
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str) -> Report:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY_S or done == total:
            last = now
            print(f"{what}: {_size(done)} of {_size(total)}", file=sys.stderr)

    return report


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
