"""Python, torch and other packages, and the environment variables that change what they do."""

import importlib.metadata
import os
import pathlib
import platform
import sys
from collections.abc import Mapping

import torch

from ..transport.installed import compiled_backends, nccl_version
from .facts import Facts, collect

__all__ = ["VARIABLES", "environment", "packages", "python", "torch_build", "versions"]

PACKAGES = (
    "zeroshard",
    "torch",
    "triton",
    "pytorch-triton-rocm",
    "numpy",
    "safetensors",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "lightning",
    "pytorch-lightning",
    "deepspeed",
    "bitsandbytes",
    "flash-attn",
    "xformers",
    "rich",
    "matplotlib",
    "tensorboard",
    "wandb",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "TP_SOCKET_IFNAME",
)
"""Variables that may differ between ranks."""

OF_ALL_RANKS = (
    "ZEROSHARD_DEBUG",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "GOMP_CPU_AFFINITY",
    "CUDA_DEVICE_ORDER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_LOGS",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_CUDA_EVENT_CACHE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_HIGH_PRIORITY",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_USE_COMM_NONBLOCKING",
    "NCCL_ALGO",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BUFFSIZE",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_TIMEOUT",
    "NCCL_LAUNCH_MODE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_TOPO_FILE",
    "GLOO_DEVICE_TRANSPORT",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "HF_HUB_OFFLINE",
    "HF_HUB_ENABLE_HF_TRANSFER",
    "TOKENIZERS_PARALLELISM",
    "PYTHONHASHSEED",
    "PYTHONOPTIMIZE",
    "PYTHONPATH",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "MALLOC_ARENA_MAX",
)
"""Variables that are usually the same on all ranks."""

VARIABLES = (*OF_A_RANK, *OF_ALL_RANKS)
PREFIXES = ("TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "ZEROSHARD_", "CUDA_", "OMP_", "TRITON_")
LONGEST = 160


def python() -> Facts:
    """The interpreter."""
    return collect(
        {
            "version": lambda: f"{platform.python_implementation()} {platform.python_version()}",
            "executable": lambda: _without_home(sys.executable),
            "optimised": lambda: sys.flags.optimize or None,
        }
    )


def packages() -> Facts:
    """Versions of packages, none of which is imported."""
    return collect({name: lambda name=name: _version(name) for name in PACKAGES})  # type: ignore[misc]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> Facts:
    """What torch was built for, and with."""
    return collect(
        {
            "version": lambda: str(torch.__version__),
            "commit": lambda: str(torch.version.git_version)[:12],
            "cuda": lambda: torch.version.cuda or "not built in",
            "hip": lambda: torch.version.hip,
            "backends": lambda: [
                name for name, is_there in compiled_backends().items() if is_there
            ],
            "nccl": lambda: nccl_version() or "not built in",
            "cudnn": lambda: torch.backends.cudnn.version(),
            "processor_capability": torch.backends.cpu.get_cpu_capability,
            "threads": torch.get_num_threads,
            "debug_build": lambda: True if torch.version.debug else None,
        }
    )


def versions() -> dict[str, str]:
    """What should be the same on all ranks."""
    facts = {"Python": platform.python_version(), **packages()}
    facts["torch"] = str(torch.__version__)
    facts["CUDA"] = torch.version.cuda or torch.version.hip
    facts.update(collect({"NCCL": nccl_version}))
    wanted = ("Python", "zeroshard", "torch", "CUDA", "NCCL", "triton", "transformers")
    return {name: str(facts[name]) for name in wanted if facts.get(name) is not None}


def environment(variables: Mapping[str, str] | None = None) -> Facts:
    """Variables of a known list; of others only how many there are, for they may hold secrets."""
    given = os.environ if variables is None else variables
    facts: Facts = {name: _shown(name, given[name]) for name in VARIABLES if name in given}
    others = [n for n in given if n.startswith(PREFIXES) and n not in VARIABLES]
    if others:
        facts["not_shown"] = len(others)
    return facts


def _shown(name: str, value: str) -> str:
    value = "".join(c if c.isprintable() else "?" for c in value)
    value = (
        value.replace(str(pathlib.Path.home()), "~") if len(str(pathlib.Path.home())) > 1 else value
    )
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}... ({len(value)} characters)"


def _without_home(path: str) -> str:
    home = str(pathlib.Path.home())
    return path.replace(home, "~", 1) if len(home) > 1 and path.startswith(home) else path
