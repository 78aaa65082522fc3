"""Published models by name: the numbers of their configs. Nothing is downloaded."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from .architectures import Architecture

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published model.

    Attributes:
        architecture: its numbers.
        numel: its published number of parameters.
    """

    architecture: Architecture
    numel: int


def _preset(
    family: str,
    numel: int,
    *sizes: int,
    head_dim: int | None = None,
    experts: tuple[int, int] = (0, 0),
    tied: bool = False,
    bias: bool = False,
) -> Preset:
    """A preset by (hidden, layers, heads, key and value heads, intermediate, vocabulary)."""
    hidden, layers, heads, kv_heads, intermediate, vocab = sizes
    architecture = Architecture(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim,
        intermediate=intermediate,
        vocab=vocab,
        tied=tied,
        positions=1024 if family == "gpt2" else 0,
        experts=experts[0],
        experts_per_token=experts[1],
        attention_bias=bias,
        has_dropout=family == "gpt2",
    )
    return Preset(architecture=architecture, numel=numel)


def _gpt2(numel: int, hidden: int, layers: int, heads: int) -> Preset:
    return _preset("gpt2", numel, hidden, layers, heads, heads, 4 * hidden, 50257, tied=True)


# fmt: off
PRESETS: Mapping[str, Preset] = {
    "gpt2": _gpt2(124_439_808, 768, 12, 12),
    "gpt2-medium": _gpt2(354_823_168, 1024, 24, 16),
    "gpt2-large": _gpt2(774_030_080, 1280, 36, 20),
    "gpt2-xl": _gpt2(1_557_611_200, 1600, 48, 25),
    "llama-2-7b": _preset("llama", 6_738_415_616, 4096, 32, 32, 32, 11008, 32000),
    "llama-2-13b": _preset("llama", 13_015_864_320, 5120, 40, 40, 40, 13824, 32000),
    "llama-2-70b": _preset("llama", 68_976_648_192, 8192, 80, 64, 8, 28672, 32000),
    "llama-3-8b": _preset("llama", 8_030_261_248, 4096, 32, 32, 8, 14336, 128256),
    "llama-3-70b": _preset("llama", 70_553_706_496, 8192, 80, 64, 8, 28672, 128256),
    "llama-3.1-405b": _preset("llama", 405_853_388_800, 16384, 126, 128, 8, 53248, 128256),
    "llama-3.2-1b": _preset("llama", 1_235_814_400, 2048, 16, 32, 8, 8192, 128256, tied=True),
    "llama-3.2-3b": _preset("llama", 3_212_749_824, 3072, 28, 24, 8, 8192, 128256, tied=True),
    "smollm2-135m": _preset("llama", 134_515_008, 576, 30, 9, 3, 1536, 49152, tied=True),
    "mistral-7b": _preset("mistral", 7_248_023_552, 4096, 32, 32, 8, 14336, 32768),
    "qwen2.5-0.5b": _preset(
        "qwen2", 494_032_768, 896, 24, 14, 2, 4864, 151936, tied=True, bias=True),
    "qwen2.5-7b": _preset("qwen2", 7_615_616_512, 3584, 28, 28, 4, 18944, 152064, bias=True),
    "qwen2.5-32b": _preset("qwen2", 32_763_876_352, 5120, 64, 40, 8, 27648, 152064, bias=True),
    "qwen3-0.6b": _preset(
        "qwen3", 596_049_920, 1024, 28, 16, 8, 3072, 151936, head_dim=128, tied=True),
    "qwen3-1.7b": _preset(
        "qwen3", 1_720_574_976, 2048, 28, 16, 8, 6144, 151936, head_dim=128, tied=True),
    "qwen3-4b": _preset(
        "qwen3", 4_022_468_096, 2560, 36, 32, 8, 9728, 151936, head_dim=128, tied=True),
    "qwen3-8b": _preset("qwen3", 8_190_735_360, 4096, 36, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-14b": _preset("qwen3", 14_768_307_200, 5120, 40, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-32b": _preset("qwen3", 32_762_123_264, 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "gemma-2b": _preset(
        "gemma", 2_506_172_416, 2048, 18, 8, 1, 16384, 256000, head_dim=256, tied=True),
    "gemma-7b": _preset(
        "gemma", 8_537_680_896, 3072, 28, 16, 16, 24576, 256000, head_dim=256, tied=True),
    "mixtral-8x7b": _preset(
        "mixtral", 46_702_792_704, 4096, 32, 32, 8, 14336, 32000, experts=(8, 2)),
    "mixtral-8x22b": _preset(
        "mixtral", 140_620_634_112, 6144, 56, 48, 8, 16384, 32000, experts=(8, 2)),
    "qwen3-30b-a3b": _preset(
        "qwen3_moe", 30_532_122_624, 2048, 48, 32, 4, 768, 151936, head_dim=128, experts=(128, 8)),
    "qwen3-235b-a22b": _preset(
        "qwen3_moe", 235_093_634_560, 4096, 94, 64, 4, 1536, 151936, head_dim=128,
        experts=(128, 8)),
}
"""By name. mistral-7b is version 0.3, without a sliding window."""
# fmt: on


def preset(name: str) -> Preset:
    """The model of a name.

    Raises:
        ConfigError: there is none; lists near matches.
    """
    known = {key.lower(): value for key, value in PRESETS.items()}
    wanted = name.lower().replace("_", "-")
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=4, cutoff=0.5)
    near = near or [key for key in known if key.split("-")[0] == wanted.split("-")[0]]
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(PRESETS)}."
    raise ConfigError(
        f"there is no model named {name!r}; {hint} A path to a config.json, or "
        "package.module:function that returns a module, works for any other model"
    )
