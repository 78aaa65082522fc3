"""The drop-in AdamW that shards optimizer state and gradients over data-parallel ranks."""

from . import errors
from .config import Precision
from .gather import gather
from .optimizer import AdamW
from .shard_tensor import ShardTensor

__all__ = ["AdamW", "Precision", "ShardTensor", "errors", "gather"]
__version__ = "0.1.0.dev0"
