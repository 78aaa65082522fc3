"""The memory of a layout: flat tensors, views of slots and shards, communication buffers.

Decides nothing about when; allocates, hands out views, and counts what is really held.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .formats import Field
from .layout import ArenaPlan, Run
from .ownership import resize, tell

__all__ = ["Arena", "BufferPool", "apart", "on_device", "size_class", "slot_view", "storage_nbytes"]


# NaNs whose quiet bit is not set, which every operation but a copy sets: the first one's bits, and
# how many there are.
SIGNALLING_NANS = {
    "float32": (0x7F800001, 0x3FFFFF),
    "bfloat16": (0x7F81, 0x3F),
    "float16": (0x7C01, 0x1FF),
}


class Arena:
    """The flat memory of one arena on one rank.

    Args:
        plan: the arena's part of the layout.
        world_size: ranks that share it.
        rank: this one.
        sharded: whether the parameters' memory is freed while nobody needs them.

    Attributes:
        parameters: [plan.numel], undefined at first; its views are the parameters. Freeing it and
            allocating it again keeps the storage, so that whatever is a view of it stays one.
        shard: [shard_numel] this rank's parameters, where the arena is sharded; else None.
        is_whole: whether `parameters` has memory and values.
        gradients: [shard_numel] fp32, this rank's averaged gradients, or None before they exist.
            Padding, and the runs of slots without a gradient, are zero.
        fields: the fields of the state.
        state: field name -> [shard_numel / field.per] of the field's dtype.
    """

    def __init__(
        self, plan: ArenaPlan, world_size: int, rank: int, *, sharded: bool = False
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.shard_numel = plan.numel // world_size
        self.device = torch.device(plan.device)
        dtype = getattr(torch, plan.dtype)
        self._whole_is = "unsharded_parameters" if sharded else "parameters"
        self.parameters = tell(
            torch.empty(plan.numel, dtype=dtype, device=self.device), self._whole_is
        )
        self.storage = self.parameters.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.shard = self.allocate(self.shard_numel, plan.dtype, "parameters") if sharded else None
        # One NaN for each slot, which its parameter shows while there is no memory.
        self.placeholders = self.allocate(
            len(plan.slots) if sharded else 0, plan.dtype, "bookkeeping"
        )
        bits = torch.int32 if self.placeholders.itemsize == 4 else torch.int16
        self._nan = self.placeholders.view(bits).clone()
        self._nans_made = 0
        self.replace_placeholders()
        self.is_whole = True
        self.is_reached = sharded is False  # by the backward under way, through its unit's outputs
        self.gradients: Tensor | None = None
        self.generation = 0  # how often the gradient shard was allocated
        self.fields: tuple[Field, ...] = ()
        self.state: dict[str, Tensor] = {}

    def replace_placeholders(self) -> None:
        """Others from now on, whoever still has those from before."""
        first, count = SIGNALLING_NANS[self.plan.dtype]
        self._nan.fill_(first + self._nans_made % count)
        self._nans_made += 1
        self.placeholders = tell(torch.empty_like(self.placeholders), "bookkeeping")
        self.renew_placeholders()

    def renew_placeholders(self) -> None:
        """Let them be NaN again."""
        self.placeholders.view(self._nan.dtype).copy_(self._nan)

    def is_copy_of_placeholder(self, data: Tensor) -> bool:
        """Whether all elements are a present placeholder's; arithmetic makes another NaN of it."""
        return bool((data.view(self._nan.dtype) == self._nan[0]).all())

    def shows_placeholders(self) -> bool:
        """Whether nobody wrote to the placeholders."""
        return self._nan.equal(self.placeholders.view(self._nan.dtype))

    def written_placeholders(self) -> list[bool]:
        """For each slot, whether somebody wrote to its placeholder."""
        return (self._nan != self.placeholders.view(self._nan.dtype)).tolist()

    def allocate(self, numel: int, dtype: str, category: str) -> Tensor:
        """A flat tensor of zeros on the arena's device, for what `category` says."""
        return tell(torch.zeros(numel, dtype=getattr(torch, dtype), device=self.device), category)

    def allocate_gradients(self) -> Tensor:
        """The gradient shard; allocated, and zero, the first time it is asked for."""
        if self.gradients is None:
            self.gradients = self.allocate(self.shard_numel, "float32", "gradients")
            self.generation += 1
        return self.gradients

    def allocate_state(self, fields: Sequence[Field]) -> None:
        """Make the state, all zeros."""
        self.fields = tuple(fields)
        self.state = {
            field.name: self.allocate(self.shard_numel // field.per, field.dtype, field.category)
            for field in fields
        }

    def state_of(self, start: int, stop: int) -> dict[str, Tensor]:
        """The state of elements [start, stop) of the shard; `start` is a multiple of 256."""
        return {
            field.name: self.state[field.name][start // field.per : -(-stop // field.per)]
            for field in self.fields
        }

    def bucket(self, index: int) -> Tensor:
        """[bucket.numel] of the parameters."""
        bucket = self.plan.buckets[index - self.plan.buckets[0].index]
        return self.parameters[bucket.offset : bucket.offset + bucket.numel]

    def own_part(self, index: int) -> Tensor:
        """[bucket.shard_numel] of the whole parameters that this rank's shard of a bucket is of."""
        bucket = self.plan.buckets[index - self.plan.buckets[0].index]
        start = bucket.offset + self.rank * bucket.shard_numel
        return self.parameters[start : start + bucket.shard_numel]

    def parameter_shard(self, index: int) -> Tensor:
        """[bucket.shard_numel] this rank's shard of a bucket, where it is kept."""
        if self.shard is None:
            return self.own_part(index)
        bucket = self.plan.buckets[index - self.plan.buckets[0].index]
        return self.shard[bucket.shard_offset : bucket.shard_offset + bucket.shard_numel]

    def parameter_run(self, run: Run) -> Tensor:
        """[run.numel] one of this rank's runs, where it is kept."""
        if self.shard is None:
            return self.parameters[run.arena_offset : run.arena_offset + run.numel]
        return self.shard[run.shard_offset : run.shard_offset + run.numel]

    def keep_own(self) -> None:
        """Copy this rank's part of the whole parameters into the shard."""
        if self.shard is not None:
            for bucket in self.plan.buckets:
                self.parameter_shard(bucket.index).copy_(self.own_part(bucket.index))

    def contains(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with the whole parameters."""
        if tensor.layout != torch.strided:
            return False
        return 0 <= tensor.data_ptr() - self.storage.data_ptr() < self.storage.nbytes()

    def allocate_whole(self) -> None:
        """Memory for the whole parameters, with undefined content."""
        resize(self.storage, self.nbytes)

    def free_whole(self) -> None:
        """Free the whole parameters; views of them must not be read until they are back."""
        self.is_whole = False
        resize(self.storage, 0)

    def leave_whole(self) -> None:
        """Leave the whole parameters to those who hold views of them; go on in other memory."""
        with torch.inference_mode(False):
            self.parameters = tell(torch.empty_like(self.parameters), self._whole_is)
        self.storage = self.parameters.untyped_storage()

    @property
    def is_borrowed(self) -> bool:
        """Whether NumPy shares the memory, which then cannot be freed."""
        return not self.storage.resizable()

    @property
    def num_holders(self) -> int:
        """How many tensors share the memory of the whole parameters."""
        return int(torch._C._storage_Use_Count(self.storage._cdata))


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor of host values, copied without making the host wait for the device."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def apart(flat: Tensor) -> Tensor:
    """The same memory, kept alive, behind a storage of its own.

    Who saves a state dict takes tensors that share a storage for tied ones, and writes one of them
    (accelerate), or writes all of the storage with each (torch.save).
    """
    if not flat.numel():
        return flat.new_empty(0)
    return torch.from_dlpack(flat)  # type: ignore[attr-defined]


def slot_view(flat: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """`flat` (one slot's elements in storage order) as a tensor of the parameter's shape."""
    return flat.as_strided(shape, stride, flat.storage_offset())


class BufferPool:
    """Communication buffers: lent out, given back, reused by size class, and released together.

    A size is rounded up by at most an eighth, so that the nearly equal pieces of equal buckets
    share buffers: memory that was never touched before costs a page fault for every 4 KiB.

    Args:
        spare: ask transports to do without staging where they can.
    """

    def __init__(self, *, spare: bool = False) -> None:
        self.spare = spare
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        self._lent_nbytes = 0

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of `numel` elements with undefined content."""
        key = (size_class(numel), dtype, device)
        free = self._free.get(key)
        if free:
            whole = free.pop()
        else:
            whole = tell(torch.empty(key[0], dtype=dtype, device=device), "communication")
        self._lent_nbytes += whole.nbytes
        return whole[:numel]

    def give_back(self, buffer: Tensor) -> None:
        """Return a borrowed buffer whose last use has been waited for."""
        whole = buffer._base
        assert whole is not None
        self._lent_nbytes -= whole.nbytes
        self._free.setdefault((whole.numel(), whole.dtype, whole.device), []).append(whole)

    def release(self) -> None:
        """Let go of every buffer that is not lent out."""
        self._free.clear()

    def buffers(self) -> Iterator[Tensor]:
        """Those that are kept for reuse."""
        for free in self._free.values():
            yield from free

    @property
    def nbytes(self) -> int:
        """Bytes lent out or kept for reuse."""
        return self._lent_nbytes + sum(b.nbytes for free in self._free.values() for b in free)


def size_class(numel: int) -> int:
    """`numel` rounded up to a multiple of an eighth of the power of two below it."""
    step = max(1 << max(numel.bit_length() - 4, 0), 64)
    return -(-numel // step) * step


def storage_nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr(), storage.device] = storage.nbytes()
    return sum(storages.values())
