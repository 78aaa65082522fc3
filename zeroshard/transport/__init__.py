"""The wire: the only package that calls ``torch.distributed``. Knows no parameters.

A transport reduces, gathers and agrees over the ranks of one shard axis. Every operation takes an
`Op` that names it in errors and keeps apart messages that do not belong together.
"""

from .base import Done, Finish, Op, Part, Pending, Then, Transport
from .compose import Replicated, WorldOfOne
from .connect import connect, device_of
from .gloo import Gloo
from .host import HostRanks, host_ranks
from .nccl import Nccl
from .observe import Checked, Counting, Delayed

__all__ = [
    "Checked",
    "Counting",
    "Delayed",
    "Done",
    "Finish",
    "Gloo",
    "HostRanks",
    "Nccl",
    "Op",
    "Part",
    "Pending",
    "Replicated",
    "Then",
    "Transport",
    "WorldOfOne",
    "connect",
    "device_of",
    "host_ranks",
]
