"""The drop-in AdamW that shards optimizer state and gradients over data-parallel ranks."""

from . import errors
from .checkpoint import load_checkpoint, save_checkpoint
from .config import Precision
from .ema import EMA
from .export import export_weights
from .gather import full_parameters, gather
from .initialise import init_weights
from .memory.plan import plan
from .memory.profile import MemoryProfiler
from .memory.simulate import simulate
from .optimizer import AdamW
from .shard_tensor import ShardTensor
from .weights import load_weights

__all__ = [
    "EMA",
    "AdamW",
    "MemoryProfiler",
    "Precision",
    "ShardTensor",
    "errors",
    "estimate",
    "export_weights",
    "full_parameters",
    "gather",
    "init_weights",
    "load_checkpoint",
    "load_weights",
    "plan",
    "save_checkpoint",
    "simulate",
]
estimate = plan

__version__ = "0.1.0.dev0"
