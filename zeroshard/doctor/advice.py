"""From facts to what is wrong with them. Pure: looks at nothing but the facts."""

from collections.abc import Callable, Iterator, Mapping

from .diagnosis import Advice
from .facts import Facts, find

__all__ = ["advise"]

All = Mapping[str, Facts]

LEAST_SHARED_MEMORY = 1 << 30
FEW_FILES = 1024  # the default of many systems
OLDEST_TORCH = (2, 10)


def advise(facts: All) -> list[Advice]:
    """What is wrong, faults first."""
    found: list[Advice] = []
    for rule in RULES:
        found += rule(facts)
    return sorted(found, key=lambda advice: not advice.is_fault)


def _text(facts: All, section: str, name: str) -> str | None:
    value: str | None = find(facts, section, name, str)
    return value


def _number(facts: All, section: str, name: str) -> int | None:
    value: int | None = find(facts, section, name, int)
    return value


def _of_environment(facts: All, name: str) -> int | None:
    value = _text(facts, "environment", name)
    return int(value) if value is not None and value.isdigit() else None


def _has_gpu(facts: All) -> bool:
    return bool(_number(facts, "GPUs", "seen_by_torch"))


def _shared_memory(facts: All) -> Iterator[Advice]:
    total = _number(facts, "machine", "shared_memory_nbytes")
    if total is not None and total < LEAST_SHARED_MEMORY:
        yield Advice(
            what=f"/dev/shm has {total / 2**20:.0f} MiB; NCCL and the workers of data loaders "
            "share memory there, and end in 'Bus error' or 'No space left on device'",
            remedy="start the container with --shm-size=16g or --ipc=host; in Kubernetes mount an "
            "emptyDir with medium: Memory at /dev/shm",
        )
        return
    free = _number(facts, "machine", "shared_memory_free_nbytes")
    if total and free is not None and free < total / 10:
        yield Advice(
            what=f"/dev/shm is full to {100 * (1 - free / total):.0f} %",
            remedy="delete what processes that are gone left there (ls -l /dev/shm)",
        )


def _limits(facts: All) -> Iterator[Advice]:
    memlock: dict[str, int | None] = find(facts, "limits", "memlock", dict) or {}
    soft = memlock.get("soft")
    if soft is not None and find(facts, "network", "infiniband", dict):
        yield Advice(
            what=f"memlock is limited to {soft / 1024:.0f} KiB, and NCCL must lock the memory that "
            "InfiniBand reads",
            remedy="ulimit -l unlimited before the launcher; in docker --ulimit memlock=-1; under "
            "a service manager LimitMEMLOCK=infinity",
        )
    nofile: dict[str, int | None] = find(facts, "limits", "nofile", dict) or {}
    soft = nofile.get("soft")
    many = _has_gpu(facts) or (_of_environment(facts, "WORLD_SIZE") or 1) > 1
    if soft is not None and soft <= FEW_FILES and many:
        yield Advice(
            what=f"a process may have {soft} files open; every connection between ranks is one, "
            "and so is every tensor that a data loader's worker hands over",
            remedy="ulimit -n 65536 before the launcher",
        )


def _launcher(facts: All) -> Iterator[Advice]:
    world_size = _of_environment(facts, "WORLD_SIZE")
    if world_size is None or world_size < 2:
        return
    missing = [
        name
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")
        if _text(facts, "environment", name) is None
    ]
    if missing:
        yield Advice(
            what=f"WORLD_SIZE is {world_size} and {', '.join(missing)} is not set, so that no "
            "process group can be made",
            remedy="start with torchrun, or unset WORLD_SIZE for a single process",
            is_fault=True,
        )


def _threads(facts: All) -> Iterator[Advice]:
    local = _of_environment(facts, "LOCAL_WORLD_SIZE") or 1
    if local > 1 and _text(facts, "environment", "OMP_NUM_THREADS") is None:
        yield Advice(
            what=f"{local} ranks share this host and OMP_NUM_THREADS is not set, so that each "
            "starts as many threads as there are cores",
            remedy=f"set OMP_NUM_THREADS to the number of cores divided by {local}",
        )
    threads = _number(facts, "torch", "threads")
    allowed: float | None = find(facts, "machine", "cores_of_cgroup", float)
    if threads is not None and allowed is not None and threads > max(allowed, 1) + 0.5:
        yield Advice(
            what=f"torch uses {threads} threads and the cgroup allows {allowed:g} cores, so that "
            "they take turns",
            remedy=f"OMP_NUM_THREADS={max(int(allowed), 1)}",
        )


def _torch(facts: All) -> Iterator[Advice]:
    version = _text(facts, "torch", "version") or ""
    release = version.split("+")[0].split(".")[:2]
    if all(part.isdigit() for part in release) and tuple(map(int, release)) < OLDEST_TORCH:
        yield Advice(
            what=f"torch is {version}",
            remedy="zeroshard needs torch >= " + ".".join(map(str, OLDEST_TORCH)),
            is_fault=True,
        )
    present = find(facts, "GPUs", "device_files", list) or _text(facts, "GPUs", "driver")
    if not present or find(facts, "GPUs", "usable", bool):
        return
    is_for_cpu = _text(facts, "torch", "cuda") == "not built in" and not _text(
        facts, "torch", "hip"
    )
    if is_for_cpu:
        yield Advice(
            what="there is a GPU, and this torch was built for CPUs only",
            remedy="install a build for it, with the command that pytorch.org gives for the "
            "driver's version of CUDA or ROCm",
        )
    elif not _has_gpu(facts):
        yield Advice(
            what="there is a GPU that torch does not see",
            remedy="look at CUDA_VISIBLE_DEVICES; then whether the driver is new enough for CUDA "
            f"{_text(facts, 'torch', 'cuda') or _text(facts, 'torch', 'hip')}",
        )


def _triton(facts: All) -> Iterator[Advice]:
    if not _has_gpu(facts):
        return
    packages = facts.get("packages", {})
    if "triton" not in packages and "pytorch-triton-rocm" not in packages:
        yield Advice(
            what="triton is not installed, so that updates on a GPU run in torch operations, which "
            "read and write the state several times",
            remedy="pip install triton",
        )
        return
    for device, said in facts.get("triton", {}).items():
        if device.startswith("cuda") and said != "compiles and runs":
            yield Advice(
                what=f"triton on {device} {said}",
                remedy="it needs a C compiler (CC), a cache to write to (TRITON_CACHE_DIR) and a "
                "version that goes with torch's; until then updates run in torch operations",
            )


def _backends(facts: All) -> Iterator[Advice]:
    compiled = find(facts, "torch", "backends", list)
    if compiled is None:
        return
    if "gloo" not in compiled:
        yield Advice(
            what="this torch was built without gloo, which carries gradients on CPUs and "
            "checkpoints everywhere",
            remedy="install one of pytorch.org's builds",
            is_fault=True,
        )
    if "nccl" not in compiled and _has_gpu(facts):
        yield Advice(
            what="this torch was built without NCCL, so that GPUs cannot train together",
            remedy="install one of pytorch.org's builds for Linux",
        )


def _network(facts: All) -> Iterator[Advice]:
    interfaces: dict[str, str] = find(facts, "network", "interfaces", dict) or {}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = _text(facts, "environment", variable)
        if not wanted or not interfaces or wanted.startswith("^"):
            continue
        is_exact = variable.startswith("GLOO") or wanted.startswith("=")
        for name in wanted.lstrip("=").split(","):
            there = name in interfaces if is_exact else any(i.startswith(name) for i in interfaces)
            if not there:
                yield Advice(
                    what=f"{variable} names {name!r}, and the interfaces are "
                    f"{', '.join(interfaces)}",
                    remedy="name one of these, or unset it",
                    is_fault=True,
                )
    leads_to = _text(facts, "network", "host_name_leads_to")
    ranks = _of_environment(facts, "WORLD_SIZE") or 1
    several_hosts = ranks > (_of_environment(facts, "LOCAL_WORLD_SIZE") or ranks)
    if leads_to is None or _text(facts, "environment", "GLOO_SOCKET_IFNAME"):
        return
    if leads_to in ("lo", "nothing") and several_hosts:
        yield Advice(
            what=f"the host's name leads to {leads_to}, where other hosts do not find gloo",
            remedy="set GLOO_SOCKET_IFNAME to an interface that they reach: "
            + ", ".join(name for name in interfaces if name != "lo"),
            is_fault=True,
        )


def _slow(facts: All) -> Iterator[Advice]:
    reasons = {
        "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
        "ZEROSHARD_DEBUG": "the ranks compare every operation, and every operation is looked at",
        "NCCL_P2P_DISABLE": "GPUs do not copy to each other directly",
        "NCCL_SHM_DISABLE": "ranks of a host talk through sockets",
        "NCCL_IB_DISABLE": "hosts talk through sockets, not InfiniBand",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the driver",
    }
    for name, reason in reasons.items():
        value = _text(facts, "environment", name)
        if value not in (None, "", "0"):
            yield Advice(what=f"{name}={value}: {reason}", remedy="unset it for speed")
    if (_text(facts, "environment", "TORCH_DISTRIBUTED_DEBUG") or "").upper() == "DETAIL":
        yield Advice(
            what="TORCH_DISTRIBUTED_DEBUG=DETAIL: torch compares every collective",
            remedy="unset it for speed",
        )
    if _text(facts, "environment", "TRITON_INTERPRET") not in (None, "", "0") and _has_gpu(facts):
        yield Advice(
            what="TRITON_INTERPRET is set, so that kernels do not run on the GPU",
            remedy="unset it",
            is_fault=True,
        )


RULES: tuple[Callable[[All], Iterator[Advice]], ...] = (
    _launcher,
    _torch,
    _backends,
    _network,
    _triton,
    _shared_memory,
    _limits,
    _threads,
    _slow,
)
