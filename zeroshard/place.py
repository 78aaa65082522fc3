"""Where one parameter lives: its slot of an arena, and what its `.data` is now."""

import weakref

from torch import Tensor, nn

from .layout import Layout, Slot
from .shard_tensor import Slices
from .storage import Arena, apart, slot_view

__all__ = ["Place"]


class Place:
    """Where one parameter lives: its slot of an arena, and what its `.data` is now.

    Attributes:
        local_range: [start, stop) of the arena's shard.
        view: of the arena's whole parameters; readable while these have memory.
        placeholder: what `.data` is while they have none: one NaN with strides of 0, which keeps
            shape and dtype and refuses most writes. None where the arena is never freed.
        data_ptr: of what `.data` should be.
        is_hidden: whether that is the placeholder.
        version: of the parameter, when it was looked at last.
    """

    __slots__ = (
        "_apart",
        "arena",
        "data_ptr",
        "is_hidden",
        "local_range",
        "number",
        "parameter",
        "placeholder",
        "placeholder_ptr",
        "slices",
        "slot",
        "version",
        "view",
    )

    def __init__(self, parameter: nn.Parameter, slot: Slot, arena: Arena, layout: Layout) -> None:
        self.parameter, self.slot, self.arena = parameter, slot, arena
        self.slices = Slices.of_slot(layout, slot.index)
        self.local_range = layout.local_range(slot.index, arena.rank)
        self.view = slot_view(self.flat, slot.spec.shape, slot.spec.stride)
        self._apart: weakref.ref[Tensor] | None = None
        self.placeholder: Tensor | None = None
        self.placeholder_ptr = 0
        if arena.shard is not None:
            self.number = arena.plan.slots.index(slot)
            self.renew_placeholder(arena.placeholders)
        self.show()
        self.version = parameter._version

    @property
    def name(self) -> str:
        """The parameter's name in the module, or in the param groups."""
        return self.slot.spec.name

    @property
    def flat(self) -> Tensor:
        """[slot.numel] of the arena's whole parameters."""
        return self.arena.parameters[self.slot.offset : self.slot.offset + self.slot.numel]

    def apart(self) -> Tensor:
        """The whole parameter behind a storage of its own, one for all who have it at a time."""
        flat = None if self._apart is None else self._apart()
        if flat is None or flat.data_ptr() != self.flat.data_ptr():
            flat = apart(self.flat)
            self._apart = weakref.ref(flat)
        return slot_view(flat, self.slot.spec.shape, self.slot.spec.stride)

    def renew_placeholder(self, elements: Tensor) -> None:
        """Show one of `elements` (NaN) from now on, whoever still shows the one before."""
        shape = self.slot.spec.shape
        start = elements.storage_offset() + self.number
        self.placeholder = elements.as_strided(shape, (0,) * len(shape), start)
        self.placeholder_ptr = self.placeholder.data_ptr()

    def renew_view(self) -> None:
        """The arena's whole parameters are in another storage now."""
        self.view = slot_view(self.flat, self.slot.spec.shape, self.slot.spec.stride)

    def show(self) -> None:
        """Let the parameter be the view of its slot."""
        self.parameter.data = self.view
        self.data_ptr = self.view.data_ptr()
        self.is_hidden = False

    def hide(self) -> None:
        """Let the parameter be its placeholder."""
        assert self.placeholder is not None
        self.parameter.data = self.placeholder
        self.data_ptr = self.placeholder_ptr
        self.is_hidden = True
