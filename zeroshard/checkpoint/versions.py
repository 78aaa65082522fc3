"""A folder of checkpoints: which of them are whole, which is the newest, and how one is added.

Knows files, and no tensors. A checkpoint is written under a name that says that it is unfinished,
and gets its own by one rename, when everything in it is on the disk.
"""

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError

__all__ = [
    "MANIFEST",
    "Damage",
    "Item",
    "check_item",
    "checksum",
    "find",
    "keep_newest",
    "prepare",
    "publish",
    "read_checksums",
    "read_manifest",
]

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
FORMAT, VERSION = "zeroshard", 1
CHECKSUMS = "checksums.json"
LATEST = "latest"
NAME = re.compile(r"step-(\d{12,})(-\d+)?")
UNFINISHED, REMOVED = ".unfinished", ".removed"


class Item(NamedTuple):
    """A range of a file, and the CRC-32 of its bytes."""

    file: str
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True)
class Damage:
    """Why a checkpoint cannot be used, or never was one."""

    path: Path
    reason: str
    was_whole: bool = True

    def __str__(self) -> str:
        return f"{self.path} {self.reason}"


# --- writing; the first rank alone calls these


def prepare(root: Path, step: int) -> Path:
    """Make the folder that a checkpoint is written to, and remove what earlier attempts left."""
    root.mkdir(parents=True, exist_ok=True)
    for left in [*root.glob(f".step-*{UNFINISHED}"), *root.glob(f".step-*{REMOVED}")]:
        _delete(left)
    name, number = _name_of(step), 2
    while (root / name).exists():  # an earlier one of this step, which stays until this is whole
        name, number = f"{_name_of(step)}-{number}", number + 1
    unfinished = root / f".{name}{UNFINISHED}"
    unfinished.mkdir()
    return unfinished


def final_path(unfinished: Path) -> Path:
    """Where a checkpoint will be that is written to what `prepare` made."""
    return unfinished.with_name(unfinished.name.removeprefix(".").removesuffix(UNFINISHED))


def publish(unfinished: Path, manifest: dict[str, Any], items: list[Item]) -> Path:
    """Give a checkpoint that is complete its name, and make it the latest.

    Args:
        unfinished: what `prepare` made, with every file written.
        manifest: what to say about it.
        items: ranges of files with their checksums; other files are summed up here.
    """
    root = unfinished.parent
    files = sorted(file for file in unfinished.rglob("*") if file.is_file())
    names = [file.relative_to(unfinished).as_posix() for file in files]
    sizes = {name: file.stat().st_size for name, file in zip(names, files, strict=True)}
    sums: dict[str, list[tuple[int, int, int]]] = {}
    for item in items:
        sums.setdefault(item.file, []).append((item.offset, item.length, item.crc32))
    for name, file in zip(names, files, strict=True):
        if name not in sums:
            sums[name] = [(0, sizes[name], checksum(file, 0, sizes[name]))]
            _sync(file)
    text = _text_of(sums)
    _write(unfinished / CHECKSUMS, text)
    content = {
        "format": FORMAT,
        "version": VERSION,
        **manifest,
        "serial": 1 + max(_serials(root), default=0),
        "files": {**sizes, CHECKSUMS: len(text)},
        "checksums": zlib.crc32(text.encode()),
    }
    crc32 = zlib.crc32(_text_of(content).encode())
    _write(unfinished / MANIFEST, _text_of({"content": content, "crc32": crc32}))
    for folder in {unfinished, *(file.parent for file in files)}:
        _sync(folder)
    final = final_path(unfinished)
    pointer = root / f".{LATEST}"
    try:  # what takes room comes before the checkpoint appears, so that a full disk leaves none
        _write(pointer, f"{final.name}\n")
        unfinished.rename(final)
    except OSError:
        pointer.unlink(missing_ok=True)
        raise
    _sync(root)
    _point_to(root, pointer)
    for path in _usable(root):
        if path != final and _step_of(path) == _step_of(final):
            _remove(path)
    return _with_plain_name(final, pointer)


def _point_to(root: Path, pointer: Path) -> None:
    """Let `latest` be `pointer`, unless what has that name is not ours: nothing here reads it."""
    latest = root / LATEST
    try:
        said = latest.read_text().strip() if latest.exists() else ""
        if not said or NAME.fullmatch(said):
            pointer.replace(latest)
            _sync(root)
            return
        logger.warning("%s says %r, which is not of ours, and stays as it is", latest, said[:40])
    except (OSError, ValueError) as error:
        logger.warning("%s stays as it is: %s", latest, error)
    pointer.unlink(missing_ok=True)


def _with_plain_name(final: Path, pointer: Path) -> Path:
    """Give the second checkpoint of a step the name of the first, which is gone."""
    plain = final.with_name(_name_of(_step_of(final) or 0))
    if plain == final or plain.exists():
        return final
    try:
        _write(pointer, f"{plain.name}\n")
        final.rename(plain)
    except OSError as error:  # it is whole under this name too
        logger.warning("%s keeps its name: %s", final, error)
        with suppress(OSError):
            pointer.unlink(missing_ok=True)
        return final
    _sync(plain.parent)
    _point_to(plain.parent, pointer)
    return plain


def _name_of(step: int) -> str:
    return f"step-{step:012d}"


def keep_newest(root: Path, number: int) -> None:
    """Remove all whole checkpoints but the newest ones. Damaged ones stay, for somebody to see."""
    for path in _usable(root)[number:]:
        _remove(path)


def _remove(path: Path) -> None:
    doomed = path.with_name(f".{path.name}{REMOVED}")
    try:
        path.rename(doomed)  # at once, so that half of it is never found
    except OSError as error:
        logger.warning("%s stays, since it cannot be removed: %s", path, error)
    else:
        _delete(doomed)


def _delete(path: Path) -> None:
    """Free the room of what is no checkpoint; not a reason to lose a new one."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s stays, since it cannot be removed: %s", path, error)


def _text_of(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading


def find(path: Path) -> tuple[list[Path], list[Damage]]:
    """The checkpoints in a folder that look whole, the newest first, and what else is there.

    `path` may be one of them too.
    """
    is_ours = any((path / name).exists() for name in (MANIFEST, CHECKSUMS))
    is_dcp = (path / ".metadata").exists()
    alone = is_ours or (NAME.fullmatch(path.name) and not is_dcp)
    return _sorted_out([path] if alone else _children(path))


def _usable(root: Path) -> list[Path]:
    """The checkpoints in a folder that look whole, the newest first."""
    return _sorted_out(_named(root))[0]


def _sorted_out(candidates: Iterable[Path]) -> tuple[list[Path], list[Damage]]:
    damages, whole = [], []
    for candidate in candidates:
        found = _look_at(candidate)
        if isinstance(found, Damage):
            damages.append(found)
        else:
            whole.append((found["serial"], candidate))
    return [candidate for _, candidate in sorted(whole, reverse=True)], damages


def read_manifest(path: Path) -> dict[str, Any]:
    """What was said about a checkpoint when it was written.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    file = path / MANIFEST
    try:
        said = json.loads(file.read_text())
        content = said["content"]
        is_sound = zlib.crc32(_text_of(content).encode()) == said["crc32"]
        serial, files = content["serial"], content["files"]
        is_sound &= isinstance(serial, int) and isinstance(files, dict)
        kind = (content["format"], content["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error
    if not is_sound:
        raise CheckpointError(f"{file} is damaged: its checksum does not fit")
    if kind != (FORMAT, VERSION):
        raise CheckpointError(
            f"{file} is of format {kind[0]!r}, version {kind[1]!r}, and this reads {FORMAT!r}, "
            f"version {VERSION}: use the zeroshard that wrote it, or a newer one"
        )
    manifest: dict[str, Any] = content
    return manifest


def read_checksums(path: Path) -> dict[tuple[str, int], Item]:
    """The checksums of a checkpoint, by file and where in it their ranges begin.

    Raises:
        CheckpointError: they cannot be read, or are damaged.
    """
    file, wanted = path / CHECKSUMS, read_manifest(path)["checksums"]
    try:
        text = file.read_text()
        is_sound = zlib.crc32(text.encode()) == wanted
        sums = json.loads(text) if is_sound else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error
    if not is_sound:
        raise CheckpointError(f"{file} is damaged: its checksum does not fit")
    return {(name, s[0]): Item(name, *s) for name, entries in sums.items() for s in entries}


def check_item(folder: Path, item: Item) -> None:
    """Compare a range of a file with its checksum.

    Raises:
        CheckpointError: they differ.
    """
    file = folder / item.file
    try:
        found = checksum(file, item.offset, item.length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if found != item.crc32:
        raise CheckpointError(
            f"{file} is damaged: bytes {item.offset} to {item.offset + item.length} are not those "
            "that were written"
        )


def checksum(file: Path, offset: int, length: int) -> int:
    """CRC-32 of a range of a file."""
    crc = 0
    with file.open("rb") as stream:
        stream.seek(offset)
        while length > 0:
            piece = stream.read(min(length, 1 << 20))
            if not piece:
                break
            crc = zlib.crc32(piece, crc)
            length -= len(piece)
    return crc


def _look_at(path: Path) -> Damage | dict[str, Any]:
    """What a checkpoint says about itself, or what is wrong with its files' names and sizes."""
    if path.name.endswith(UNFINISHED):
        return Damage(path, "was not written to the end", was_whole=False)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Damage(path, f"cannot be used: {error}")
    for name, nbytes in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return Damage(file, "is missing")
        if file.stat().st_size != nbytes:
            return Damage(file, f"has {file.stat().st_size} bytes, and was written with {nbytes}")
    return manifest


def _step_of(path: Path) -> int | None:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _children(root: Path) -> list[Path]:
    """Every checkpoint in a folder, and what was going to be one."""
    if not root.is_dir():
        return []
    unfinished = [path for path in root.iterdir() if path.match(f".step-*{UNFINISHED}")]
    return sorted([*_named(root), *unfinished])


def _named(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        if _step_of(path) is not None and path.is_dir():
            yield path


def _serials(root: Path) -> Iterator[int]:
    """The serial number of each checkpoint whose manifest can be read."""
    for path in _named(root):
        with suppress(CheckpointError):
            yield read_manifest(path)["serial"]
