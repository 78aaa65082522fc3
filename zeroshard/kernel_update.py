"""AdamW in one launch over all of an arena's shards: by Triton, or by its twin in torch.

A table of rows says where each slot's elements lie, a table of scalars what to do to each slot, so
that param groups, parameters and buckets make no launch of their own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .formats import Format
from .layout import BLOCK, Layout
from .storage import Arena, on_device
from .triton_kernels.adamw import LEAST_EPS, ROW_BLOCKS, ROW_COLUMNS, Scalars, State, adamw_

__all__ = ["KernelUpdater", "SlotScalars", "first_blocks", "plan_rows"]

ROUNDING_SEED = 0x5EED
"""Of stochastic rounding. The same in every run and on every rank, so that replicas round alike."""

LAUNCHES = 4
"""In how many launches an arena is updated whose buckets are gathered afterwards: the gather of the
first ones goes on while the others are updated."""


def first_blocks(param_groups: Sequence[Mapping[str, Any]]) -> dict[nn.Parameter, int]:
    """Model space: each parameter's first block of 256, in the order of the param groups.

    The order is the user's, so it knows neither stage nor ranks. Frozen parameters count too.
    """
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    ends = accumulate(-(-parameter.numel() // BLOCK) for parameter in parameters)
    return dict(zip(parameters, [0, *ends], strict=False))


def plan_rows(
    layout: Layout, buckets: Iterable[int], rank: int, first_block: Sequence[int], *, sharded: bool
) -> tuple[list[list[int]], dict[int, tuple[int, int]]]:
    """The chunk table of a rank's shards, in units of 256 elements.

    Args:
        layout: who owns what.
        buckets: the buckets of one arena.
        rank: whose shards.
        first_block: [slots] the first block of each slot in model space.
        sharded: whether parameters lie like the state, or in the whole arena.

    Returns:
        Rows as `adamw_` takes them, and for each bucket its first row and the one after its last.
    """
    rows: list[list[int]] = []
    rows_of: dict[int, tuple[int, int]] = {}
    for bucket in buckets:
        first = len(rows)
        for slot in layout.slots_of_bucket[bucket]:
            for run in layout.runs_of_rank(rank)[slot]:
                if run.bucket != bucket:
                    continue
                parameter = run.shard_offset if sharded else run.arena_offset
                key = first_block[slot] + run.slot_offset // BLOCK
                num_blocks = -(-run.numel // BLOCK)  # the padding of the last one is zero
                for block in range(0, num_blocks, ROW_BLOCKS):
                    offsets = [run.shard_offset // BLOCK + block, parameter // BLOCK + block]
                    length = min(ROW_BLOCKS, num_blocks - block)
                    rows.append([*offsets, length, slot, key + block])
        rows_of[bucket] = (first, len(rows))
    return rows, rows_of


class SlotScalars:
    """What the update does to each slot: hyperparameters, bias corrections, flags.

    Attributes:
        table: [slots, 12] fp32, see `Scalars`; of the last `refresh`.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.table = torch.empty(0, len(Scalars._fields), device=device)
        self._options = torch.empty(0, dtype=torch.float64, device=device)
        self._known: list[Options] = []

    def plan(self, group_of: Mapping[int, int]) -> None:
        """Update the slots in `group_of` (slot -> number of its param group) and no other."""
        slots = range(self.num_slots)
        device = self.table.device
        self._group_of = on_device([group_of.get(s, 0) for s in slots], torch.int64, device)
        self._used = on_device([float(s in group_of) for s in slots], torch.float32, device)

    def refresh(
        self, param_groups: Sequence[Mapping[str, Any]], counts: Tensor, found_inf: Tensor | None
    ) -> None:
        """Make the table of a step.

        Bias corrections and complements are computed in fp64 and rounded once: in fp32, 1 - beta2
        would be off by 1e-5 of itself. No value comes to the host.

        Args:
            param_groups: torch's param groups.
            counts: [slots] fp32: how many updates each slot will have had.
            found_inf: [1] fp32; where it is 1 nothing is stored. None: always store.
        """
        options = self._options_of(param_groups).index_select(0, self._group_of)
        by_slot = Options(*options.unbind(1))
        steps = counts.double()
        taken = steps.clamp(min=1)  # a slot that is not updated may have had none
        corrections = 1 - options[:, :2] ** taken[:, None]
        first, second = corrections.unbind(1)
        live = self._used if found_inf is None else self._used * (1 - found_inf)
        columns = Scalars(
            sign=by_slot.sign,
            lr_decay=by_slot.lr * by_slot.weight_decay,
            beta1=by_slot.beta1,
            one_minus_beta1=by_slot.one_minus_beta1,
            beta2=by_slot.beta2,
            one_minus_beta2=by_slot.one_minus_beta2,
            step_size=by_slot.lr / first,
            correction=second.rsqrt(),
            eps=by_slot.eps,
            # [Note: bound of an update]
            bound=(second * (1 - by_slot.ratio**taken) / by_slot.one_minus_ratio).sqrt()
            * by_slot.bound,
            step=steps,
            live=live.double(),
        )
        self.table = torch.stack(columns, dim=1).float()

    def _options_of(self, param_groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """[groups, options] fp64; copied to the device only where something changed."""
        known = [_options_on_host(group) for group in param_groups]
        if known != self._known:
            flat = [0.0 if value is None else value for values in known for value in values]
            device = self.table.device
            self._options = on_device(flat, torch.float64, device).view(len(known), -1)
            self._known = known
        for number, group in enumerate(param_groups):
            if known[number].lr is None:  # read where it is
                self._options[number, Options._fields.index("lr")] = group["lr"]
        return self._options


class Options(NamedTuple):
    """What a param group says, and what follows from it alone; a column of fp64 each."""

    beta1: Any
    beta2: Any
    one_minus_beta1: Any
    one_minus_beta2: Any
    lr: Any  # None: a tensor on the device
    weight_decay: Any
    eps: Any
    sign: Any
    ratio: Any
    one_minus_ratio: Any
    bound: Any


def _options_on_host(group: Mapping[str, Any]) -> Options:
    """[Note: bound of an update].

    What |update| of exact AdamW cannot exceed, by Cauchy-Schwarz: m is a sum of (1-b1) b1^i g_i and
    v one of (1-b2) b2^i g_i^2, so m^2 / v is at most (1-b1)^2 / (1-b2) times the sum of
    (b1^2 / b2)^i over i < t. Moments of 8 bits can make it larger, where an m was rounded up and
    its v down. Betas that change between steps make it a little too small. The bias correction of m
    is not in it: the step size has that.
    """
    lr = group["lr"]
    beta1, beta2 = map(float, group["betas"])
    # With beta2 = 0 there is no bound after the first step: a power of 1e300 is infinite.
    ratio = beta1**2 / beta2 if beta2 else float(beta1 > 0) * 1e300
    if abs(ratio - 1) < 1e-7:
        ratio = 1 + 1e-7  # where the sum is a quotient, and a little larger
    return Options(
        beta1=beta1,
        beta2=beta2,
        one_minus_beta1=1 - beta1,
        one_minus_beta2=1 - beta2,
        lr=None if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr),
        weight_decay=float(group["weight_decay"]),
        eps=max(float(group["eps"]), LEAST_EPS),
        sign=-1.0 if group["maximize"] else 1.0,
        ratio=ratio,
        one_minus_ratio=1 - ratio,
        bound=(1 - beta1) / math.sqrt(1 - beta2),
    )


class KernelUpdater:
    """The update of one arena's shards on this rank, by `adamw_`.

    Args:
        arena: the memory.
        layout: who owns what.
        fmt: how the state is stored.
        scalars: what to do to each slot.
        first_block: [slots] the first block of each slot in model space.
        gathers: whether buckets are gathered after their update.
    """

    takes_coefficient = True

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        fmt: Format,
        scalars: SlotScalars,
        first_block: Sequence[int],
        *,
        gathers: bool,
    ) -> None:
        self.arena, self.format, self.scalars = arena, fmt, scalars
        buckets = [bucket.index for bucket in arena.plan.buckets]
        sharded = arena.shard is not None
        rows, self.rows_of = plan_rows(layout, buckets, arena.rank, first_block, sharded=sharded)
        padded = [value for row in rows for value in row + [0] * (ROW_COLUMNS - len(row))]
        self.rows = on_device(padded, torch.int32, arena.device).view(-1, ROW_COLUMNS)
        self.num_launches = LAUNCHES if gathers and not sharded else 1
        self._one = torch.ones(1, device=arena.device)

    def plan(self, group_of: Mapping[int, int], buckets: Sequence[int]) -> list[list[int]]:
        """What to update in one go each.

        Args:
            group_of: slot -> number of its param group, for slots that have a gradient.
            buckets: those of the arena in which a slot has a gradient, in order.

        Returns:
            The same buckets, cut into lists; one is what `update` takes.
        """
        size = max(-(-len(buckets) // self.num_launches), 1)
        return [list(buckets[start : start + size]) for start in range(0, len(buckets), size)]

    def update(
        self,
        buckets: Sequence[int],
        param_groups: Sequence[dict[str, Any]],
        found_inf: Tensor | None,
        coefficient: Tensor | None,
    ) -> None:
        """Update this rank's shards of some of the buckets, in place.

        Args:
            buckets: a list that `plan` made; what lies between them is left alone by its scalars.
            param_groups: in the scalars already.
            found_inf: the same.
            coefficient: [1] fp32, what gradients are multiplied by; None: 1.
        """
        first, stop = self.rows_of[buckets[0]][0], self.rows_of[buckets[-1]][1]
        parameters = self.arena.parameters if self.arena.shard is None else self.arena.shard
        gradients = self.arena.allocate_gradients()
        state = self.arena.state
        anything = gradients  # in the place of what the format does not have
        tensors = State(
            grad=gradients,
            param=parameters,
            master=state.get("master", state.get("remainder", anything)),
            exp_avg=state["exp_avg"],
            exp_avg_sq=state["exp_avg_sq"],
            exp_avg_scale=state.get("exp_avg_scale", anything),
            exp_avg_sq_scale=state.get("exp_avg_sq_scale", anything),
        )
        adamw_(
            tensors,
            self.rows,
            self.scalars.table,
            self._one if coefficient is None else coefficient,
            first,
            stop - first,
            ROUNDING_SEED,
            self.format.master if self.format.master != "param" else "none",
            self.format.moments,
        )

    def forget_gradients(self) -> None:
        """Nothing is kept of a gradient shard."""
