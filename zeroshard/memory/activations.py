"""What a forward leaves for backward, in bytes, by formulas. No tensors.

The formulas are keyed to an implementation: transformers' decoders in eager PyTorch, attention by
`scaled_dot_product_attention` with a kernel that keeps queries, keys, values, its output and one
fp32 number a token and head (flash), experts by grouped matrix products, no attention mask but that
of a sliding window. In fp32 with heads that share keys a GPU has no such kernel, and all scores are
kept. Each row says what is kept and of which dtype; the tests count the same on real models.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .architectures import Architecture

__all__ = ["Activations", "Kept", "activations_of", "has_mask", "keeps_scores", "kept_by_block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One kind of tensor that a forward leaves for backward.

    Attributes:
        what: in words.
        numel: elements for each token.
        itemsize: bytes of one.
    """

    what: str
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes for each token."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of a forward, for given numbers of tokens.

    Attributes:
        block: what one block leaves.
        recomputed: what a recomputation of it makes beside its input.
        block_input: the input of a block, which is all that checkpointing leaves of it.
        around: what the model leaves outside of blocks and of the loss.
        around_checkpointed: what it holds on to beside, for recomputations.
        head_input: the part of `around` that is freed before backward comes to the last block.
        last_output: the part of that which the last block made: its output, where the last norm
            makes no copy of it.
        behind: what a block's backward makes before the first matrix has its gradient.
        working: what it makes when that is there.
        norm_gone: what of the block is freed when backward is within the norm before the
            feed-forward part.
        norm_working: what it makes there: RMSNorm's steps, in fp32.
        scores_gone: what of it is freed when attention without a fused kernel is at its largest; 0
            with one.
        scores_working: what its backward makes there.
        experts_gone: what of the block is freed when all matrices of its experts have their
            gradients; 0 without experts.
        experts_working: what its backward makes by then.
        gradient: the gradient of a block's output.
        inputs: the batch: token ids and labels.
        logits: logits, behind the head, of the model's dtype.
        loss_forward: what forward holds at the loss, logits included.
        loss_kept: what of it is left when forward has returned.
        loss_backward: the most that backward holds until it comes to the head.
        logits_gradient: the gradient of the logits, which the head's backward reads.
    """

    block: int
    recomputed: int
    block_input: int
    around: int
    around_checkpointed: int
    head_input: int
    last_output: int
    behind: int
    working: int
    norm_gone: int
    norm_working: int
    scores_gone: int
    scores_working: int
    experts_gone: int
    experts_working: int
    gradient: int
    inputs: int
    logits: int
    loss_forward: int
    loss_kept: int
    loss_backward: int
    logits_gradient: int


def keeps_scores(
    architecture: Architecture, itemsize: int, *, seq: int, on_gpu: bool = True
) -> bool:
    """Whether attention has no fused kernel: flash has none of fp32, the other of shared keys.

    Where there is a mask, transformers repeats the keys.
    """
    shares_keys = architecture.kv_heads != architecture.heads
    is_masked = has_mask(architecture, seq=seq, on_gpu=on_gpu)
    return on_gpu and itemsize == 4 and shares_keys and not is_masked


def has_mask(architecture: Architecture, *, seq: int, on_gpu: bool = True) -> bool:
    """Whether transformers makes a mask: where the attention slides over less than the sequence."""
    return on_gpu and 0 < architecture.window <= seq


def kept_by_block(
    architecture: Architecture, itemsize: int, *, seq: int, on_gpu: bool = True
) -> Iterator[Kept]:
    """What one block leaves for each token.

    Args:
        architecture: the model's numbers.
        itemsize: bytes of an element of the model's dtype.
        seq: tokens of a sequence, which matters where scores are kept.
        on_gpu: where a dropout mask is of one byte, and means are fp32; on a CPU both are of the
            model's dtype.
    """
    a = architecture
    if a.family == "gpt2":
        yield from _gpt2_block(a, itemsize, on_gpu=on_gpu)
        return
    for where in ("attention", "feed-forward"):
        yield from _norm(a, itemsize, f"norm before the {where}")
    if a.norms_heads:
        for what, heads in (("queries", a.heads), ("keys", a.kv_heads)):
            yield Kept(what=f"{what}, fp32", numel=heads * a.head_dim, itemsize=4)
            yield Kept(what=f"{what}, normalised", numel=heads * a.head_dim, itemsize=itemsize)
            yield Kept(what=f"their norms, {what}", numel=heads, itemsize=4)
    if keeps_scores(a, itemsize, seq=seq, on_gpu=on_gpu):
        yield Kept(what="queries, keys, values, output", numel=4 * a.heads * a.head_dim,
                   itemsize=itemsize)  # fmt: skip
        yield Kept(what="scores", numel=a.heads * seq, itemsize=4)
    else:
        yield from _attention(a, itemsize)
    if has_mask(a, seq=seq, on_gpu=on_gpu):
        more = a.heads - a.kv_heads
        yield Kept(what="keys and values, repeated", numel=2 * more * a.head_dim, itemsize=itemsize)
        yield Kept(what="mask, added to scores", numel=seq, itemsize=itemsize)
    if a.experts:
        yield from _experts(a, itemsize)
    else:
        yield Kept(what="gate, its activation, up, product", numel=4 * a.intermediate,
                   itemsize=itemsize)  # fmt: skip


def _norm(a: Architecture, itemsize: int, what: str) -> Iterator[Kept]:
    """RMSNorm computes in fp32: its input's copy, the normalised input, the output, the norm."""
    normalised = 4 if a.family == "gemma" else itemsize
    yield Kept(what=f"{what}: input, fp32", numel=a.hidden, itemsize=4)
    yield Kept(what=f"{what}: normalised", numel=a.hidden, itemsize=normalised)
    yield Kept(what=f"{what}: output", numel=a.hidden, itemsize=itemsize)
    yield Kept(what=f"{what}: norm of a token", numel=1, itemsize=4)


def _attention(a: Architecture, itemsize: int) -> Iterator[Kept]:
    yield Kept(what="queries and output", numel=2 * a.heads * a.head_dim, itemsize=itemsize)
    yield Kept(what="keys and values", numel=2 * a.kv_heads * a.head_dim, itemsize=itemsize)
    yield Kept(what="log of the sum of exponentials", numel=a.heads, itemsize=4)


def _experts(a: Architecture, itemsize: int) -> Iterator[Kept]:
    """Every token goes through `k` experts, so that rows are copied `k` times."""
    k = a.experts_per_token
    weight = 4 if a.family == "mixtral" else itemsize
    yield Kept(what="router: probabilities", numel=a.experts, itemsize=4)
    if a.normalises_router:
        yield Kept(what="router: chosen ones and their sum", numel=k + 1, itemsize=4)
    yield Kept(what="router: which experts", numel=k, itemsize=8)
    yield Kept(what="order of rows by expert", numel=3 * k, itemsize=8)
    yield Kept(what="weights of rows", numel=k, itemsize=weight)
    yield Kept(what="rows before and after", numel=2 * k * a.hidden, itemsize=itemsize)
    yield Kept(what="gate and up, activation, product", numel=4 * k * a.intermediate,
               itemsize=itemsize)  # fmt: skip


def _gpt2_block(a: Architecture, itemsize: int, *, on_gpu: bool) -> Iterator[Kept]:
    yield Kept(what="norms: inputs and outputs", numel=4 * a.hidden, itemsize=itemsize)
    yield Kept(
        what="norms: means and deviations of a token", numel=4, itemsize=4 if on_gpu else itemsize
    )
    yield Kept(what="queries, keys, values, output", numel=4 * a.hidden, itemsize=itemsize)
    yield Kept(what="log of the sum of exponentials", numel=a.heads, itemsize=4)
    yield Kept(what="feed-forward, steps of gelu", numel=5 * a.intermediate, itemsize=itemsize)
    if a.has_dropout:
        yield Kept(what="dropout masks", numel=2 * a.hidden, itemsize=1 if on_gpu else itemsize)


def _flat(a: Architecture, *, on_gpu: bool) -> int:
    """Bytes that a block keeps whatever the number of tokens."""
    gains = 2 * 4 * a.hidden if a.family == "gemma" else 0  # 1 + the weight of each norm, fp32
    state = 24 if on_gpu else 0  # of the random numbers that attention might drop by
    return gains + state + 4 * a.experts  # where each expert's rows end


def _head_input(a: Architecture, itemsize: int, tokens: int, *, on_gpu: bool) -> int:
    """What the last norm leaves."""
    if a.family == "gpt2":
        return tokens * (2 * a.hidden * itemsize + 2 * (4 if on_gpu else itemsize))
    kept = sum(kept.nbytes for kept in _norm(a, itemsize, "last norm"))
    return tokens * kept + (4 * a.hidden if a.family == "gemma" else 0)


def _working(a: Architecture, itemsize: int) -> tuple[int, int]:
    """Bytes for each token that a block's backward makes where it may be at its largest.

    Behind the experts, if there are any: rows' gradients, unsorted, sorted and weighted. Within the
    feed-forward part, where the last matrix has its gradient: those of the gate's activation, of
    up, and of their product, while the product itself, and the rows behind, are freed.
    """
    incoming, k = a.hidden * itemsize, a.experts_per_token
    if a.experts:
        behind = 3 * k * a.hidden * (4 if a.family == "mixtral" else itemsize)
        return incoming + behind, incoming + k * (2 * a.intermediate - a.hidden) * itemsize
    return incoming, incoming + 2 * a.intermediate * itemsize


def _norm_working(a: Architecture, itemsize: int) -> tuple[int, int]:
    """Bytes for each token of a block that are gone within its second norm, and that this makes."""
    incoming = a.hidden * itemsize
    if a.family == "gpt2":  # one kernel
        return 0, incoming
    normalised_and_output = 2 * a.hidden * itemsize
    return _feed_forward(a, itemsize) + normalised_and_output, incoming + 5 * 4 * a.hidden


def _feed_forward(a: Architecture, itemsize: int) -> int:
    rows = max(a.experts_per_token, 1)
    return (4 * rows * a.intermediate + (2 * rows * a.hidden if a.experts else 0)) * itemsize


def _scores_working(a: Architecture, itemsize: int, seq: int) -> tuple[int, int]:
    """The same within attention without a fused kernel, where scores have their gradients."""
    heads = a.heads * a.head_dim * itemsize
    gone = _feed_forward(a, itemsize) + 3 * a.hidden * itemsize + 2 * heads
    return gone, a.hidden * itemsize + 2 * heads + 2 * 4 * a.heads * seq


def activations_of(
    architecture: Architecture,
    itemsize: int,
    *,
    seq: int,
    micro_batch: int,
    on_gpu: bool = True,
) -> Activations:
    """The bytes of a forward and a backward on a batch.

    Args:
        architecture: the model's numbers.
        itemsize: bytes of an element of the model's dtype.
        seq: tokens of a sequence.
        micro_batch: sequences of a backward.
        on_gpu: see `kept_by_block`.
    """
    a, tokens = architecture, seq * micro_batch
    block = sum(kept.nbytes for kept in kept_by_block(a, itemsize, seq=seq, on_gpu=on_gpu))
    head_input = _head_input(a, itemsize, tokens, on_gpu=on_gpu)
    block_input = tokens * a.hidden * itemsize
    keeps_input = itemsize == 4 or a.family == "gpt2"  # where the first norm makes no copy of it
    angles = 0 if a.family == "gpt2" else 2 * seq * a.head_dim * itemsize
    positions = 8 * seq  # one row for all sequences of the batch
    mask = seq * seq if has_mask(a, seq=seq, on_gpu=on_gpu) else 0  # of one sequence
    embedded = tokens * a.hidden * (1 if on_gpu else itemsize) if a.has_dropout else 0
    copy = 0 if itemsize == 4 else 4 * a.vocab * tokens
    fp32 = 4 * a.vocab * tokens
    # Shifted by one behind a padding; of one sequence that is a view of the padded ones.
    padded, shifted = 8 * (tokens + micro_batch), 8 * tokens if micro_batch > 1 else 0
    scalars = 2 * 4  # the loss, and the number of labels or the loss's gradient
    behind, working = _working(a, itemsize)
    norm_gone, norm_working = _norm_working(a, itemsize)
    scores_gone, scores_working = (
        _scores_working(a, itemsize, seq)
        if keeps_scores(a, itemsize, seq=seq, on_gpu=on_gpu)
        else (0, 0)
    )
    rows, wide = (a.experts_per_token * size * itemsize for size in (a.hidden, a.intermediate))
    return Activations(
        block=block * tokens + _flat(a, on_gpu=on_gpu),
        recomputed=block * tokens + _flat(a, on_gpu=on_gpu) - (block_input if keeps_input else 0),
        block_input=block_input,
        around=head_input + angles + embedded + (positions if a.family == "gpt2" else 0),
        around_checkpointed=0 if a.family == "gpt2" else positions + mask,
        head_input=head_input,
        last_output=block_input if keeps_input else 0,
        behind=behind * tokens,
        working=working * tokens,
        norm_gone=norm_gone * tokens,
        norm_working=norm_working * tokens,
        scores_gone=scores_gone * tokens,
        scores_working=scores_working * tokens,
        experts_gone=(rows + 4 * wide) * tokens if a.experts else 0,
        experts_working=(a.hidden * itemsize + rows + 2 * wide) * tokens if a.experts else 0,
        gradient=a.hidden * itemsize * tokens,
        inputs=2 * 8 * tokens,
        logits=tokens * a.vocab * itemsize,
        loss_forward=tokens * a.vocab * itemsize + copy + fp32 + padded + shifted + scalars,
        loss_kept=fp32 + (shifted or padded) + scalars,
        loss_backward=3 * fp32 + scalars,
        logits_gradient=tokens * a.vocab * itemsize,
    )
