"""The whole AdamW step on flat state in one pass: any number of parameters in one launch.

The kernel and its torch twin do the same operations in the same order and round each one once, so
they agree bit for bit.

Source: Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations  # `tl` is not imported

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .cast import (
    join,
    join_master,
    random_words,
    random_words_twin,
    round_nearest,
    round_nearest_twin,
    round_stochastic,
    round_stochastic_twin,
    split,
    split_master,
    upcast,
)
from .launch import is_available, kernel, launch, sizes_for, target_of
from .quantize import (
    BLOCK,
    decode_first,
    decode_first_twin,
    decode_second,
    decode_second_twin,
    encode_first,
    encode_first_twin,
    encode_second,
    encode_second_twin,
    exact_sqrt,
)

if TYPE_CHECKING:
    import triton.language as tl

__all__ = [
    "BLOCK",
    "LEAST_EPS",
    "ROW_BLOCKS",
    "ROW_COLUMNS",
    "Scalars",
    "State",
    "adamw_",
    "adamw_kernel",
    "adamw_twin",
    "launch_adamw",
]

ROW_BLOCKS = 64  # the most blocks in a row of the chunk table
ROW_COLUMNS = 8
"""A row of the chunk table, int32 in units of 256 elements: offset in the state and the gradient,
offset in the parameters, length, slot, index of the first block in model space; three unused."""

LARGEST_V = 2.0**127  # of 8-bit moments
LEAST_EPS = 2.0**-75
"""Less than the square root of any fp32 number above 0. With eps = 0 a padding element, and one
that has never seen a gradient, would divide 0 by 0."""


class Scalars(NamedTuple):
    """The columns of the table of scalars, fp32, with one row for each slot."""

    sign: Tensor  # 1, or -1 where a group maximizes
    lr_decay: Tensor  # lr * weight_decay
    beta1: Tensor
    one_minus_beta1: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    step_size: Tensor  # lr / (1 - beta1^t)
    correction: Tensor  # 1 / sqrt(1 - beta2^t)
    eps: Tensor  # above 0, see `LEAST_EPS`
    bound: Tensor  # what |m / root of v| cannot exceed, v unbiased; for 8-bit moments
    step: Tensor  # t
    live: Tensor  # 1, or 0 where nothing may be stored


class State(NamedTuple):
    """The flat tensors of one arena on one rank; those that a format lacks may be anything.

    Attributes:
        grad: [n] fp32, bf16 or fp16.
        param: [m] fp32, bf16 or fp16; rows say where the n elements lie in it.
        master: [n] fp32 master, or int16 remainder.
        exp_avg: [n] fp32, bf16 or int8 codes.
        exp_avg_sq: [n] fp32, bf16 or uint8 codes.
        exp_avg_scale: [n / 256] fp32.
        exp_avg_sq_scale: [n / 256] fp32.
    """

    grad: Tensor
    param: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_scale: Tensor


@kernel
def read_weight(x, extra, PARAM: tl.constexpr, MASTER: tl.constexpr):
    """The fp32 weights of parameters and what their master adds."""
    if MASTER == "split":
        weight = join(x, extra)
    elif MASTER == "fp32":
        weight = extra
    elif PARAM == "bf16":
        weight = upcast(x)
    else:
        weight = x.to(tl.float32)
    return weight


@kernel
def store_weight(weight, param, master, mask, PARAM: tl.constexpr, MASTER: tl.constexpr):
    """Store fp32 weights as parameters and masters."""
    if MASTER == "split":
        high, low = split(weight)
        tl.store(master, low, mask=mask)
        tl.store(param, high, mask=mask)
    else:
        if MASTER == "fp32":
            tl.store(master, weight, mask=mask)
        if PARAM == "bf16":
            tl.store(param, round_nearest(weight), mask=mask)
        else:
            tl.store(param, weight.to(param.dtype.element_ty), mask=mask)


@kernel
def store_codes(codes, scale, to, scale_to, mask, scale_mask):
    """Store an 8-bit moment and the scales of its blocks."""
    tl.store(to, codes, mask=mask)
    tl.store(scale_to, scale, mask=scale_mask)


@kernel
def adamw_kernel(
    grad,  # [n] GRAD; bf16 as int16 bits, here and below
    param,  # [m] PARAM
    master,  # [n] fp32 or int16, as MASTER says
    exp_avg,  # [n] fp32, int16 bits of bf16, or int8, as MOMENTS says
    exp_avg_sq,  # [n] the same, or uint8
    exp_avg_scale,  # [n / 256] fp32
    exp_avg_sq_scale,  # [n / 256] fp32
    rows,  # [rows, 8] int32
    scalars,  # [slots, 12] fp32
    coefficient,  # [1] fp32: what gradients are multiplied by
    first_row,
    seed,
    GRAD: tl.constexpr,  # "fp32", "bf16", "fp16"
    PARAM: tl.constexpr,  # "fp32", "bf16", "fp16"
    MASTER: tl.constexpr,  # "none", "split", "fp32"
    MOMENTS: tl.constexpr,  # "fp32", "bf16", "int8"
    ROW_BLOCKS: tl.constexpr,
    VECTORS: tl.constexpr,  # how often a program does BLOCK elements
    BLOCK: tl.constexpr,
):
    """One program updates VECTORS * BLOCK elements of a row."""
    VECTOR_BLOCKS: tl.constexpr = BLOCK // 256
    PROGRAM_BLOCKS: tl.constexpr = VECTORS * VECTOR_BLOCKS
    PROGRAMS: tl.constexpr = ROW_BLOCKS // PROGRAM_BLOCKS  # of one row
    program = tl.program_id(0)
    row = rows + (first_row + program // PROGRAMS).to(tl.int64) * 8
    part = (program % PROGRAMS) * PROGRAM_BLOCKS
    state_block = tl.load(row).to(tl.int64) + part
    param_block = tl.load(row + 1).to(tl.int64) + part
    length = tl.load(row + 2) - part
    slot = scalars + tl.load(row + 3).to(tl.int64) * 12
    multiplier = tl.load(coefficient) * tl.load(slot)
    lr_decay = tl.load(slot + 1)
    beta1, one_minus_beta1 = tl.load(slot + 2), tl.load(slot + 3)
    beta2, one_minus_beta2 = tl.load(slot + 4), tl.load(slot + 5)
    step_size, correction, eps = tl.load(slot + 6), tl.load(slot + 7), tl.load(slot + 8)
    live = tl.load(slot + 11).to(tl.int32)
    if MOMENTS == "int8":
        bound = tl.load(slot + 9)
    elif MOMENTS == "bf16":
        step = tl.load(slot + 10).to(tl.int32)
        key = (tl.load(row + 4).to(tl.int64) + part) * 256
    for vector in tl.static_range(VECTORS):
        if MOMENTS == "int8":
            block = tl.arange(0, VECTOR_BLOCKS)[:, None] + vector * VECTOR_BLOCKS
            index = block * 256 + tl.arange(0, 256)[None, :]
            at_block = state_block + block
        else:
            index = tl.arange(0, BLOCK) + vector * BLOCK
        here = index < length * 256
        at = state_block * 256 + index
        at_param = param_block * 256 + index

        # All of the state is asked for before anything waits for a scalar: `live` gates stores.
        g = tl.load(grad + at, mask=here, other=0)
        x = tl.load(param + at_param, mask=here, other=0)
        m = tl.load(exp_avg + at, mask=here, other=0)
        v = tl.load(exp_avg_sq + at, mask=here, other=0)
        extra = tl.load(master + at, mask=here, other=0) if MASTER != "none" else x
        if GRAD == "bf16":
            g = upcast(g)
        g = g.to(tl.float32)
        x = read_weight(x, extra, PARAM, MASTER)
        if MOMENTS == "bf16":
            m, v = upcast(m), upcast(v)
        elif MOMENTS == "int8":
            m_scale = tl.load(exp_avg_scale + at_block, mask=block < length, other=0)
            v_scale = tl.load(exp_avg_sq_scale + at_block, mask=block < length, other=0)
            m, v = decode_first(m, m_scale), decode_second(v, v_scale)

        g = tl.where(g == 0, 0.0, g * multiplier)  # so that 0 * NaN leaves padding alone
        x = x - lr_decay * x
        m = beta1 * m + one_minus_beta1 * g
        v = beta2 * v + one_minus_beta2 * g * g
        if MOMENTS == "int8":  # a square that overflows would make NaN of its block; 2^127 does not
            overflows = (v > 1.7014118346046923e38) & (tl.abs(g) < float("inf"))
            v = tl.where(overflows, 1.7014118346046923e38, v)
        root_v = tl.sqrt_rn(v)
        update = tl.div_rn(m, root_v * correction + eps)
        if MOMENTS == "int8":
            update = tl.where(update < -bound, -bound, update)
            update = tl.where(update > bound, bound, update)
        x = x - step_size * update

        store = index < length * live * 256
        store_weight(x, param + at_param, master + at, store, PARAM, MASTER)
        if MOMENTS == "fp32":
            tl.store(exp_avg + at, m, mask=store)
            tl.store(exp_avg_sq + at, v, mask=store)
        elif MOMENTS == "bf16":
            words = random_words(seed, step, key + vector * BLOCK, BLOCK)
            tl.store(exp_avg + at, round_stochastic(m, words & 0xFFFF), mask=store)
            tl.store(exp_avg_sq + at, round_stochastic(v, (words >> 16) & 0xFFFF), mask=store)
        else:
            blocks = block < length * live
            codes, scale = encode_first(m)
            store_codes(codes, scale, exp_avg + at, exp_avg_scale + at_block, store, blocks)
            codes, scale = encode_second(root_v)
            store_codes(codes, scale, exp_avg_sq + at, exp_avg_sq_scale + at_block, store, blocks)


def adamw_(
    state: State,
    rows: Tensor,
    scalars: Tensor,
    coefficient: Tensor,
    first_row: int,
    num_rows: int,
    seed: int,
    master: str,
    moments: str,
) -> None:
    """One AdamW step on rows of flat state, in place, in one launch; without Triton, the twin.

    Args:
        state: the tensors.
        rows: [rows, 8] int32, the chunk table, see `ROW_COLUMNS`.
        scalars: [slots, 12] fp32, see `Scalars`.
        coefficient: [1] fp32: what gradients are multiplied by. A zero gradient stays zero.
        first_row: the first row to update.
        num_rows: how many.
        seed: of stochastic rounding.
        master: "none", "split" or "fp32".
        moments: "fp32", "bf16" (stochastic rounding) or "int8".
    """
    if is_available(state.grad.device):
        launch_adamw(state, rows, scalars, coefficient, first_row, num_rows, seed, master, moments)
    else:
        adamw_twin(state, rows, scalars, coefficient, first_row, num_rows, seed, master, moments)


def launch_adamw(
    state: State,
    rows: Tensor,
    scalars: Tensor,
    coefficient: Tensor,
    first_row: int,
    num_rows: int,
    seed: int,
    master: str,
    moments: str,
) -> None:
    """`adamw_` by Triton, or by its interpreter."""
    sizes = sizes_for(moments, target_of(state.grad.device))
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    dtypes = names[state.grad.dtype], names[state.param.dtype]
    launch(
        "adamw_kernel",
        num_rows * (ROW_BLOCKS * BLOCK // sizes.program_numel),
        (*state, rows, scalars, coefficient),
        (first_row, seed),
        (*dtypes, master, moments, ROW_BLOCKS, sizes.vectors, sizes.block),
        sizes.num_warps,
    )


def adamw_twin(
    state: State,
    rows: Tensor,
    scalars: Tensor,
    coefficient: Tensor,
    first_row: int,
    num_rows: int,
    seed: int,
    master: str,
    moments: str,
) -> None:
    """`adamw_` in torch, row by row."""
    by_slot = [Scalars(*slot.unbind()) for slot in scalars.unbind()]
    for start, param_start, length, slot, key, *_ in rows[first_row:][:num_rows].tolist():
        if by_slot[slot].live:
            here = State(
                *(tensor[start * BLOCK :][: length * BLOCK] for tensor in state[:1]),
                *(tensor[param_start * BLOCK :][: length * BLOCK] for tensor in state[1:2]),
                *(tensor[start * BLOCK :][: length * BLOCK] for tensor in state[2:5]),
                *(tensor[start:][:length] for tensor in state[5:]),
            )
            _update(here, by_slot[slot], coefficient, seed, key * BLOCK, master, moments)


def _update(
    state: State,
    values: Scalars,
    coefficient: Tensor,
    seed: int,
    key: int,
    master: str,
    moments: str,
) -> None:
    """Update all of `state`, which belongs to one slot; `key` is its first element's index."""
    g = state.grad.float()
    if master == "split":
        x = torch.empty_like(g)
        join_master(state.param, state.master, x)
    else:
        x = (state.master if master == "fp32" else state.param).float()
    if moments == "int8":
        m = decode_first_twin(state.exp_avg, state.exp_avg_scale)
        v = decode_second_twin(state.exp_avg_sq, state.exp_avg_sq_scale)
    else:
        m, v = state.exp_avg.float(), state.exp_avg_sq.float()

    g = torch.where(g == 0, 0.0, g * (coefficient * values.sign))
    x = x - values.lr_decay * x
    m = values.beta1 * m + values.one_minus_beta1 * g
    v = values.beta2 * v + values.one_minus_beta2 * g * g
    if moments == "int8":
        v = torch.where((v > LARGEST_V) & g.isfinite(), LARGEST_V, v)
    root_v = exact_sqrt(v)
    update = m / (root_v * values.correction + values.eps)
    if moments == "int8":
        update = torch.where(update < -values.bound, -values.bound, update)
        update = torch.where(update > values.bound, values.bound, update)
    x = x - values.step_size * update

    if master == "split":
        split_master(x, state.param, state.master)
    else:
        if master == "fp32":
            state.master.copy_(x)
        state.param.copy_(round_nearest_twin(x) if state.param.dtype == torch.bfloat16 else x)
    if moments == "int8":
        encode_first_twin(m, state.exp_avg, state.exp_avg_scale)
        encode_second_twin(root_v, state.exp_avg_sq, state.exp_avg_sq_scale)
    elif moments == "bf16":
        words = random_words_twin(seed, int(values.step), key, g.numel(), g.device)
        state.exp_avg.copy_(round_stochastic_twin(m, words & 0xFFFF))
        state.exp_avg_sq.copy_(round_stochastic_twin(v, (words >> 16) & 0xFFFF))
    else:
        state.exp_avg.copy_(m)
        state.exp_avg_sq.copy_(v)
