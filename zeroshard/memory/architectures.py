"""Decoders by their numbers: parameters, units and buffers as transformers builds them. No torch.

An architecture is what an HF `config.json` says. The order of parameters is that of the module,
and the units are those that stage 3 would find in it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import ConfigError

__all__ = ["FAMILIES", "Architecture", "buffers_nbytes", "from_config", "parameters", "units"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "qwen3_moe", "gpt2")
"""Values of `model_type` whose activations are known."""


DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "num_experts_per_tok": 2, "num_experts": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "num_experts_per_tok": 8, "num_experts": 128},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
}
"""Numbers that transformers takes where a `config.json` does not name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A causal language model of one of FAMILIES.

    Attributes:
        family: one of FAMILIES.
        hidden, layers, heads, kv_heads, head_dim, intermediate, vocab: as in `config.json`.
        tied: whether the output head is the embedding.
        positions: rows of a learned table of positions; 0 for rotary ones.
        experts: experts of each block, 0 for none; `intermediate` is then the width of one.
        experts_per_token: how many of them a token goes through.
        normalises_router: whether the weights of a token's experts are made to sum to 1.
        attention_bias, output_bias, mlp_bias: of q, k and v; of o; of the feed-forward layers.
        has_dropout: whether dropout is active in training.
        window: tokens of a sliding attention, 0 for none.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    normalises_router: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    has_dropout: bool = False
    window: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                f"the families that can be planned are {', '.join(FAMILIES)}; got {self.family!r}"
            )
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key and value heads: "
                "the second must divide the first"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"a token goes through 1 to {self.experts} of {self.experts} experts, got "
                f"{self.experts_per_token}"
            )

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normalised head by head."""
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def block_prefix(self) -> str:
        """What the names of blocks begin with."""
        return "transformer.h" if self.family == "gpt2" else "model.layers"


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def parameters(architecture: Architecture) -> Shapes:
    """(name, shape) of every parameter, tied ones once, in the order of the module."""
    a = architecture
    if a.family == "gpt2":
        yield "transformer.wte.weight", (a.vocab, a.hidden)
        yield "transformer.wpe.weight", (a.positions, a.hidden)
    else:
        yield "model.embed_tokens.weight", (a.vocab, a.hidden)
    block = list(_gpt2_block(a) if a.family == "gpt2" else _block(a))
    for number in range(a.layers):
        for name, shape in block:
            yield f"{a.block_prefix}.{number}.{name}", shape
    if a.family == "gpt2":
        yield "transformer.ln_f.weight", (a.hidden,)
        yield "transformer.ln_f.bias", (a.hidden,)
    else:
        yield "model.norm.weight", (a.hidden,)
    if not a.tied:
        yield "lm_head.weight", (a.vocab, a.hidden)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _block(a: Architecture) -> Shapes:
    for name, heads in (("q_proj", a.heads), ("k_proj", a.kv_heads), ("v_proj", a.kv_heads)):
        yield from _linear(f"self_attn.{name}", heads * a.head_dim, a.hidden, a.attention_bias)
    yield from _linear("self_attn.o_proj", a.hidden, a.heads * a.head_dim, a.output_bias)
    if a.norms_heads:
        yield "self_attn.q_norm.weight", (a.head_dim,)
        yield "self_attn.k_norm.weight", (a.head_dim,)
    if a.experts:
        router = [("mlp.gate.weight", (a.experts, a.hidden))]
        experts: list[tuple[str, tuple[int, ...]]] = [
            ("mlp.experts.gate_up_proj", (a.experts, 2 * a.intermediate, a.hidden)),
            ("mlp.experts.down_proj", (a.experts, a.hidden, a.intermediate)),
        ]
        yield from [*router, *experts] if a.family == "mixtral" else [*experts, *router]
    else:
        yield from _linear("mlp.gate_proj", a.intermediate, a.hidden, a.mlp_bias)
        yield from _linear("mlp.up_proj", a.intermediate, a.hidden, a.mlp_bias)
        yield from _linear("mlp.down_proj", a.hidden, a.intermediate, a.mlp_bias)
    yield "input_layernorm.weight", (a.hidden,)
    yield "post_attention_layernorm.weight", (a.hidden,)


def _gpt2_block(a: Architecture) -> Shapes:
    """Matrices of GPT-2 are [inputs, outputs]."""
    for name, inputs, outputs in (
        ("ln_1", 0, a.hidden),
        ("attn.c_attn", a.hidden, 3 * a.hidden),
        ("attn.c_proj", a.hidden, a.hidden),
        ("ln_2", 0, a.hidden),
        ("mlp.c_fc", a.hidden, a.intermediate),
        ("mlp.c_proj", a.intermediate, a.hidden),
    ):
        yield f"{name}.weight", (inputs, outputs) if inputs else (outputs,)
        yield f"{name}.bias", (outputs,)


def units(architecture: Architecture) -> tuple[dict[str, str], frozenset[str]]:
    """The unit of each parameter in stage 3, and those units that are lookup tables.

    The rule is that of `zeroshard.units.plan_units`: blocks; tables and the head where nobody
    shares their weight and they are worth a gather of their own.
    """
    a = architecture
    numel = {name: prod(shape) for name, shape in parameters(a)}
    first = f"{a.block_prefix}.0."
    little = sum(count for name, count in numel.items() if name.startswith(first)) / 10
    tables = ["transformer.wte", "transformer.wpe", "model.embed_tokens"]
    shared = {tables[0], tables[2]} if a.tied else set()
    own = {
        name
        for name in (*tables, "lm_head")
        if name not in shared and numel.get(f"{name}.weight", 0) >= max(little, 1)
    }
    unit_of = {}
    for name in numel:
        module = name.rpartition(".")[0]
        if name.startswith(f"{a.block_prefix}."):
            unit_of[name] = ".".join(name.split(".")[:3])
        else:
            unit_of[name] = module if module in own else ""
    # Gemma's table is no plain nn.Embedding.
    return unit_of, frozenset() if a.family == "gemma" else frozenset(own.intersection(tables))


def buffers_nbytes(architecture: Architecture) -> int:
    """Bytes of the model's buffers, which are fp32."""
    if architecture.family == "gpt2":
        return 0
    scale = 4 if architecture.family == "gemma" else 0
    return 2 * 4 * (architecture.head_dim // 2) + scale


def from_config(config: Mapping[str, Any]) -> Architecture:
    """An architecture from the content of a `config.json`.

    Raises:
        ConfigError: a model type whose shape is not known, or numbers that are missing or
            impossible.
    """
    family = str(config.get("model_type"))
    if family == "gpt2":
        return _from_gpt2(config)
    config = {**DEFAULTS.get(family, {}), **config}
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and no "
                "head_dim is given"
            )
        head_dim = hidden // heads
    is_moe = family in ("mixtral", "qwen3_moe")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            "a model in which only some blocks have experts (mlp_only_layers, decoder_sparse_step) "
            "cannot be planned from its config: pass package.module:function"
        )
    bias = bool(config.get("attention_bias"))
    uses_window = family == "mistral" or config.get("use_sliding_window") or family == "mixtral"
    width = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    experts = config.get("num_local_experts", config.get("num_experts"))
    return Architecture(
        family=family,
        hidden=hidden,
        layers=_number(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_number({"num_key_value_heads": heads, **_given(config)}, "num_key_value_heads"),
        head_dim=head_dim,
        intermediate=_number(config, width),
        vocab=_number(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family == "gemma")),
        experts=(experts or 0) if is_moe else 0,
        experts_per_token=_number(config, "num_experts_per_tok") if is_moe else 0,
        normalises_router=family != "qwen3_moe" or bool(config.get("norm_topk_prob")),
        attention_bias=family == "qwen2" or bias,
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias")) and family == "llama",
        window=(config.get("sliding_window") or 0) if uses_window else 0,
    )


def _from_gpt2(config: Mapping[str, Any]) -> Architecture:
    hidden, heads = _number(config, "n_embd"), _number(config, "n_head")
    if hidden % heads:
        raise ConfigError(f"n_embd {hidden} is not a multiple of n_head {heads}")
    return Architecture(
        family="gpt2",
        hidden=hidden,
        layers=_number(config, "n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=config.get("n_inner") or 4 * hidden,
        vocab=_number(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=_number(config, "n_positions"),
        has_dropout=bool(config.get("resid_pdrop", 0.1) or config.get("embd_pdrop", 0.1)),
    )


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "nothing" if value is None else repr(value)
        raise ConfigError(
            f"a config of a {config.get('model_type', 'causal language')} model must give {name} "
            f"as a whole number of at least 1, got {found}"
        )
    return value
