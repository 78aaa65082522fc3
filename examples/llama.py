"""A Llama-style decoder: RMSNorm, rotary positions, causal attention, SwiGLU. No training here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    vocab: int = 256
    width: int = 256
    layers: int = 4
    head_width: int = 64
    tied: bool = True
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.width % self.head_width or self.head_width % 2:
            raise ValueError(
                f"width must be a multiple of head_width, and head_width even, "
                f"got width {self.width} and head_width {self.head_width}"
            )

    @property
    def hidden(self) -> int:
        """Width of the SwiGLU: 8/3 of the model's, so that its three matrices cost what two of 4x
        would, in multiples of 32.
        """
        return -(-self.width * 8 // (3 * 32)) * 32


def rotary_angles(length: int, config: LlamaConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [length, head_width] each, fp32.

    Computed per forward and not kept in a buffer: there is no maximum length and nothing that a
    checkpoint or a meta-device construction could leave uninitialised.
    """
    channel = torch.arange(0, config.head_width, 2, device=device, dtype=torch.float32)
    frequency = config.rotary_base ** (-channel / config.head_width)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (t.to(x.dtype) for t in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, -1, self.head_width))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head_width]
        attended = F.scaled_dot_product_attention(
            rotate(q, rotary), rotate(k, rotary), v, is_causal=True
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        residual = 0.02 / (2 * self.config.layers) ** 0.5  # 2 additions to the residual per block
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(
                    p, std=residual if name.endswith(("out.weight", "down.weight")) else 0.02
                )

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] token numbers to [batch, length, vocab] logits."""
        x = self.embed(tokens)
        rotary = rotary_angles(tokens.shape[1], self.config, tokens.device)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Tensor,  # [length] int64
    *,
    count: int,
    context: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> Tensor:
    """The prompt and `count` sampled tokens after it, each drawn from the last `context` tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(count):
        logits = logits_of(tokens[None, -context:])[0, -1]
        probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)))
    return tokens
