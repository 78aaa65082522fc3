"""Text to token windows: what is trained on and what is held out. No model and no ranks."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


def read_text(files: tuple[Path, ...]) -> str:
    """The files joined, or, without any, the prose of Python's own language reference."""
    if files:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


class ByteTokenizer:
    """A vocabulary of 256 that needs no file."""

    def encode(self, string: str) -> Tensor:
        """[length] int64."""
        return torch.frombuffer(bytearray(string.encode()), dtype=torch.uint8).long()

    def decode(self, tokens: Tensor) -> str:
        return bytes(tokens.tolist()).decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    training: Tensor  # [length] int64
    held_out: Tensor  # [length] int64, the end of the text

    @staticmethod
    def split(tokens: Tensor, *, seq: int, held_out: float = 0.1) -> "Corpus":
        """Keep the last tenth for validation. Both parts must hold a window of `seq` + 1 tokens."""
        cut = len(tokens) - max(int(len(tokens) * held_out), seq + 1)
        if cut < seq + 1:
            raise ValueError(
                f"a corpus must have at least {2 * (seq + 1)} tokens at --seq {seq}, "
                f"got {len(tokens)}: give more text or a smaller --seq"
            )
        return Corpus(training=tokens[:cut], held_out=tokens[cut:])

    def batches(self, *, batch: int, seq: int, seed: int, rank: int, world_size: int) -> "Batches":
        """`batch` is the number of windows that one rank gets."""
        return Batches(self.training, batch, seq, seed, rank, world_size)

    def validation(self, *, windows: int, seq: int, rank: int, world_size: int) -> Tensor:
        """[n, seq + 1]: this rank's part of `windows` windows spread evenly over the held-out text.

        Each rank gets the same number, at least one, so that a mean of means is the mean.
        """
        per_rank = max(1, windows // world_size)
        last = len(self.held_out) - seq - 1
        starts = torch.linspace(0, last, per_rank * world_size).long()[rank::world_size]
        return self.held_out[starts[:, None] + torch.arange(seq + 1)]


class Batches:
    """Endless [batch, seq + 1] windows of a text.

    All ranks draw the same global batch and take their part of it, so no two ranks train on the
    same windows. Which windows come next is the state of the generator alone: other ranks, in
    another number, go on from it without leaving out a window or taking one twice.
    """

    def __init__(
        self, tokens: Tensor, batch: int, seq: int, seed: int, rank: int, world_size: int
    ) -> None:
        self.tokens, self.seq = tokens, seq
        self.rank, self.shape = rank, (world_size, batch)
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Tensor:
        last = len(self.tokens) - self.seq
        starts = torch.randint(last, self.shape, generator=self.generator)[self.rank]
        return self.tokens[starts[:, None] + torch.arange(self.seq + 1)]

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])
