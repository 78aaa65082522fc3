"""GPUs, the links between them, and whether Triton runs on them."""

import itertools
import os
import pathlib
from typing import Any

import torch

from ..triton_kernels.launch import launch, target_of
from .facts import Facts, collect, first_line, output_of, read

__all__ = ["gpus", "triton"]

tl: Any = None

ROOT = pathlib.Path("/")
QUERY = "index,memory.total,memory.used,utilization.gpu,ecc.errors.uncorrected.volatile.total"


def gpus(root: pathlib.Path = ROOT) -> Facts:
    """The GPUs that torch sees, and traces of those that it does not."""
    return collect(
        {
            "driver": lambda: _driver(root),
            "driver_cuda": lambda: _smi("--query-gpu=driver_version"),
            "device_files": lambda: _device_files(root),
            "seen_by_torch": torch.cuda.device_count,
            "usable": torch.cuda.is_available,
            "devices": _devices,
            "in_use": lambda: _smi(f"--query-gpu={QUERY}"),
            "peer_access": _peer_access,
            "links": _links,
        }
    )


def _driver(root: pathlib.Path) -> str | None:
    said = read(root / "proc/driver/nvidia/version")
    if said:
        return said.splitlines()[0].removeprefix("NVRM version:").strip()
    return "amdgpu" if (root / "dev/kfd").exists() else None


def _device_files(root: pathlib.Path) -> list[str] | None:
    names = [p.name for p in (root / "dev").glob("nvidia[0-9]*")]
    names += ["kfd"] if (root / "dev/kfd").exists() else []
    return sorted(names) or None


def _smi(query: str) -> list[str] | None:
    said = output_of("nvidia-smi", query, "--format=csv,noheader")
    return None if said is None else [line.strip() for line in said.splitlines() if line.strip()]


def _devices() -> list[dict[str, Any]] | None:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_nbytes": properties.total_memory,
                "capability": target_of(torch.device("cuda", index)),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found or None


def _peer_access() -> str | list[str] | None:
    """Which GPUs cannot read each other's memory."""
    pairs = list(itertools.combinations(range(torch.cuda.device_count()), 2))
    if not pairs:
        return None
    without = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return ["not between", *without] if without else "between all"


def _links() -> list[str] | None:
    if torch.cuda.device_count() < 2:
        return None
    said = output_of("nvidia-smi", "topo", "-m")
    if said is None:
        return None
    lines = [
        line.replace("\033[4m", "").replace("\033[0m", "").rstrip() for line in said.splitlines()
    ]
    rows = [line.expandtabs(8) for line in lines if line.lstrip().startswith(("GPU", "NIC"))]
    return rows or None


def triton() -> Facts:
    """Whether Triton compiles and runs a kernel on each GPU, and interprets one on the CPU."""
    facts = collect({f"cuda:{i}": lambda i=i: _compiles(i) for i in range(_count())})  # type: ignore[misc]
    return {**facts, **collect({"interpreter": _interprets})}


def _count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _compiles(index: int) -> str:
    one = torch.zeros(1, device=f"cuda:{index}")
    try:
        launch("probe", 1, (one,), (), (), num_warps=1)
    except Exception as error:  # of whatever kind: an old GPU, no C compiler, a broken installation
        return f"does not run: {type(error).__name__}: {first_line(error)}"
    return "compiles and runs" if float(one) == 1 else "gives wrong results"


def _interprets() -> str:
    """Run a kernel in Triton's interpreter, as this project's tests do."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton asks for when it decorates
    try:
        import triton
        import triton.language

        globals()["tl"] = triton.language  # where a kernel looks for it
        kernel = triton.jit(_store_one)
        one = torch.zeros(1)
        kernel[(1,)](one)
    except ImportError as error:
        return f"not possible: {error}"
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return "works" if float(one) == 1 else "gives wrong results"


def _store_one(out):  # type: ignore[no-untyped-def]
    tl.store(out, 1.0)
