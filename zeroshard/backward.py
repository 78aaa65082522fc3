"""The state of one backward that synchronises, and what the ranks agree on at its end."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from .imitation import acts_as_gpu
from .layout import Layout, ParamSpec
from .storage import on_device
from .transport import Op, Transport

__all__ = ["Backward", "unreached"]


class Backward:
    """One outermost backward that synchronises, from its first gradient to its end."""

    def __init__(
        self, layout: Layout, order: Sequence[int], task: int | None, round_number: int
    ) -> None:
        self.layout, self.round = layout, round_number
        self.arrived: dict[int, Tensor] = {}  # slot -> this rank's full gradient, until launched
        self.late: dict[int, Tensor] = {}  # the same, when its bucket had been launched already
        self.missing = [len(slots) for slots in layout.slots_of_bucket]
        self.waiting = deque(order)  # buckets to launch, in the order that all ranks keep
        self.ready: list[int] = []  # buckets in the order in which they became complete here
        self.unlaunched = [len(buckets) for buckets in layout.buckets_of_slot]
        self.launched: set[int] = set()  # slots of which a part was launched, zeros included
        self.carries: dict[int, bool] = {}  # slot -> adds to an earlier gradient
        self.renewed: set[int] = set()  # buckets whose shard was overwritten, not added to
        self.is_whole = True  # goes through all buckets
        self.task = task  # the outermost graph task, once it is known

    def agree_on_use(
        self, transport: Transport, device: torch.device, may_be_late: bool
    ) -> tuple[list[bool], list[bool]]:
        """Which slots any rank has a gradient of, and which any rank has a late one of.

        The host reads the answer only where it must: a rank with all gradients knows who is used,
        and none is late where no backward ran inside of another.
        """
        slots = range(len(self.layout.slots))
        late = [slot in self.late for slot in slots] if self.late else [False] * len(slots)
        mine = [slot in self.arrived or late[slot] for slot in slots]
        bits = on_device([*mine, *late], torch.uint8, device)
        transport.all_reduce(bits, "max", op=Op("use of parameters", round=self.round)).wait()
        if acts_as_gpu(device) and all(mine) and not may_be_late:
            return mine, late
        said = [bool(bit) for bit in bits.tolist()]
        return said[: len(slots)], said[len(slots) :]

    def agree_on_order(self, transport: Transport, device: torch.device) -> list[int]:
        """The order in which buckets became complete on the first rank, incomplete ones last."""
        order = dict.fromkeys([*self.ready, *range(len(self.layout.buckets))])
        said = on_device(list(order), torch.int64, device)
        transport.broadcast(said, op=Op("launch order", round=self.round)).wait()
        return [int(bucket) for bucket in said.tolist()]


def unreached(spec: ParamSpec) -> str:
    """What to say of a gradient that came past the outputs of its unit."""
    return (
        f"backward reached {spec.name!r} without coming through an output of its unit "
        f"{spec.unit or '(root)'!r}, so that its parameters were not gathered and the gradients "
        "are wrong. Return tensors in tuples, lists, dicts or dataclasses, and compute with a "
        "module's parameters in its own forward only"
    )
