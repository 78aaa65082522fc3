"""What stands behind a path is complete or not there: written beside, then renamed.

Knows no tensors and no ranks.
"""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigError

__all__ = ["check_output", "remove", "removed_on_error", "replace", "unfinished"]


def check_output(path: Path, dtype: Any, max_file_nbytes: Any, overwrite: bool) -> None:
    """Raise where something may not be written, or not with these options.

    Args:
        path: of a file or folder, resolved.
        dtype: to cast to, or None.
        max_file_nbytes: the largest file.
        overwrite: whether what is there may be replaced; an empty folder always may.

    Raises:
        ConfigError: says which.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    if not isinstance(max_file_nbytes, int) or max_file_nbytes <= 0:
        raise ConfigError(f"max_file_nbytes must be a number of bytes, got {max_file_nbytes!r}")
    if os.path.ismount(path):
        raise ConfigError(
            f"{path} is a mount point, whose name is not ours: pass a path inside of it"
        )
    if Path.cwd().is_relative_to(path):
        raise ConfigError(f"{path} is where this process is, or above it: pass another path")
    if path.exists() and not overwrite and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty: pass overwrite=True, or another path")


def unfinished(path: Path) -> Path:
    """Where to write what will get the name `path`: beside it, so on the same file system."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def removed_on_error(path: Path) -> Iterator[None]:
    """Leave nothing of a file or folder where the body raises."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            remove(path)
        raise


def replace(path: Path, complete: Path) -> None:
    """Give a complete file or folder its final name, in one go; what had it before is removed."""
    if not path.exists():
        complete.rename(path)
        return
    if not _exchange(path, complete):
        before = path.with_name(f".{path.name}.replaced")
        remove(before)
        path.rename(before)
        try:
            complete.rename(path)
        except BaseException:
            before.rename(path)
            raise
        complete = before
    with suppress(OSError):  # the next one removes it
        remove(complete)


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names at once; whether this system and file system can."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = [os.fsencode(path.absolute()) for path in (first, second)]
    return exchange is not None and exchange(here, names[0], here, names[1], swap) == 0
