"""The machine: cores and memory, of it and of our cgroup, shared memory, limits, network."""

import os
import pathlib
import platform
import socket
import struct
import sys

from .facts import Facts, collect, read

__all__ = ["limits", "machine", "network"]

ROOT = pathlib.Path("/")
NO_LIMIT = 1 << 60  # cgroups of the first version say so with a number
SIOCGIFADDR = 0x8915


def machine(root: pathlib.Path = ROOT) -> Facts:
    """Cores, memory and shared memory."""
    return collect(
        {
            "host": socket.gethostname,
            "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
            "libc": lambda: " ".join(platform.libc_ver()).strip() or None,
            "container": lambda: _container(root),
            "processor": lambda: _field(root / "proc/cpuinfo", "model name"),
            "cores": os.cpu_count,
            "cores_for_us": lambda: len(os.sched_getaffinity(0)),
            "cores_of_cgroup": lambda: _cpus_of_cgroup(root),
            "memory_nbytes": lambda: _meminfo(root, "MemTotal"),
            "memory_free_nbytes": lambda: _meminfo(root, "MemAvailable"),
            "memory_of_cgroup_nbytes": lambda: _memory_of_cgroup(root)[0],
            "memory_used_by_cgroup_nbytes": lambda: _memory_of_cgroup(root)[1],
            "swap_nbytes": lambda: _meminfo(root, "SwapTotal"),
            "shared_memory_nbytes": lambda: _shared_memory(root).f_blocks * _block(root),
            "shared_memory_free_nbytes": lambda: _shared_memory(root).f_bavail * _block(root),
        }
    )


def _field(path: pathlib.Path, name: str) -> str | None:
    for line in (read(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _meminfo(root: pathlib.Path, name: str) -> int | None:
    value = _field(root / "proc/meminfo", name)
    return None if value is None else int(value.split()[0]) * 1024


def _shared_memory(root: pathlib.Path) -> os.statvfs_result:
    return os.statvfs(root / "dev/shm")


def _block(root: pathlib.Path) -> int:
    return _shared_memory(root).f_frsize


def _container(root: pathlib.Path) -> str | None:
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    return "apptainer" if (root / ".singularity.d").exists() else None


# --- cgroups


def _folders(root: pathlib.Path, controller: str) -> list[pathlib.Path]:
    """The folders of our cgroup and of those around it, for a controller.

    Inside of a container the path may be that of the host, of which only the top is to be seen.
    """
    folders = []
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" and not names:
            top = root / "sys/fs/cgroup"
        elif controller in names.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = top / path.strip("/").replace("..", "")
        folders += [f for f in (inner, *inner.parents) if f == top or top in f.parents]
    return folders


def _cpus_of_cgroup(root: pathlib.Path) -> float | None:
    """How many cores the cgroup may use; None without a limit."""
    allowed = []
    for folder in _folders(root, "cpu"):
        both = read(folder / "cpu.max")
        quota = both.split()[0] if both else read(folder / "cpu.cfs_quota_us")
        period = both.split()[1] if both else read(folder / "cpu.cfs_period_us")
        if quota and period and quota not in ("max", "-1"):
            allowed.append(int(quota) / int(period))
    return min(allowed, default=None)


def _memory_of_cgroup(root: pathlib.Path) -> tuple[int | None, int | None]:
    """The lowest limit on our memory, and how much is used of it; None without a limit."""
    found: list[tuple[int, int | None]] = []
    for folder in _folders(root, "memory"):
        limit = read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")
        used = read(folder / "memory.current") or read(folder / "memory.usage_in_bytes")
        if limit and limit != "max" and int(limit) < NO_LIMIT:
            found.append((int(limit), int(used) if used else None))
    return min(found, key=lambda pair: pair[0], default=(None, None))


# --- limits


def limits() -> Facts:
    """What the shell calls ulimit: soft / hard."""
    import resource

    def limit(name: str) -> dict[str, int | None]:
        soft, hard = resource.getrlimit(getattr(resource, name))
        unlimited = resource.RLIM_INFINITY
        return {
            "soft": None if soft == unlimited else soft,
            "hard": None if hard == unlimited else hard,
        }

    return collect(
        {
            "memlock": lambda: limit("RLIMIT_MEMLOCK"),
            "nofile": lambda: limit("RLIMIT_NOFILE"),
            "nproc": lambda: limit("RLIMIT_NPROC"),
            "core": lambda: limit("RLIMIT_CORE"),
            "address_space": lambda: limit("RLIMIT_AS"),
            "stack": lambda: limit("RLIMIT_STACK"),
        }
    )


# --- network


def network(root: pathlib.Path = ROOT) -> Facts:
    """Interfaces by name, InfiniBand, and which interface the host's name leads gloo to."""
    return collect(
        {
            "interfaces": lambda: _interfaces(root),
            "host_name_leads_to": _interface_of_host,
            "infiniband": lambda: _infiniband(root),
        }
    )


def _interfaces(root: pathlib.Path) -> dict[str, str]:
    found = {}
    for _, name in sorted(socket.if_nameindex()):
        state = read(root / "sys/class/net" / name / "operstate") or "unknown"
        has_address = "with IPv4" if _address(name) else "without IPv4"
        found[name] = f"{'up' if state == 'unknown' and _address(name) else state}, {has_address}"
    return found


def _address(interface: str) -> str | None:
    """The IPv4 address of an interface."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def _interface_of_host() -> str:
    """Where gloo listens unless it is told; names only, for addresses are nobody's business."""
    host = socket.gethostname()
    try:
        entries = socket.getaddrinfo(host, None)
    except OSError:
        return "nothing"
    addresses = {str(entry[4][0]) for entry in entries}
    names = [name for _, name in socket.if_nameindex() if _address(name) in addresses]
    if not names and any(a.startswith("127.") or a == "::1" for a in addresses):
        names = ["lo"]
    return ", ".join(names) or "an address of no interface here"


def _infiniband(root: pathlib.Path) -> dict[str, str] | None:
    folder = root / "sys/class/infiniband"
    if not folder.is_dir():
        return None
    found = {}
    for port in sorted(folder.glob("*/ports/*")):
        state = (read(port / "state") or "unknown").split(":")[-1].strip().lower()
        rate = read(port / "rate") or "rate unknown"
        found[f"{port.parent.parent.name}:{port.name}"] = f"{state}, {rate}"
    return found or None
