"""From the name of a model to one that can be run: what a simulation calls."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .architectures import Architecture
from .models import DTYPES, function_of
from .presets import preset

__all__ = ["Workload", "config_of", "workload_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and what it is trained with.

    Attributes:
        name: for people.
        model: builds the model.
        batch: gives a batch of one micro-batch; to be called after `model`.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]


def workload_of(
    model: str,
    *,
    seq: int | None,
    micro_batch: int = 1,
    dtype: str | None = None,
    checkpointing: str = "none",
) -> Workload:
    """What to train for the name of a model.

    Args:
        model: a preset's name, a path to a `config.json` or to a folder with one, or
            "package.module:function", which returns a module, or a module and a function that
            gives a batch.
        seq: tokens of a sequence; not needed where there is such a function.
        micro_batch: sequences of a batch.
        dtype: "bf16", "fp16" or "fp32". None: bf16, and for a module its own.
        checkpointing: "block": every block of a model of transformers is recomputed in backward.

    Raises:
        ConfigError: there is no such model, transformers is missing, or it is not known what the
            batch is.
    """
    if ":" in model and not Path(model).exists():
        return _of_function(model, seq, micro_batch, dtype, checkpointing)
    if seq is None:
        raise ConfigError(f"to simulate {model}, its sequence length is needed: --seq 4096")
    path = Path(model)
    if path.is_dir() and (path / "config.json").exists():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        settings = _read(path)
    else:
        settings = config_of(preset(model).architecture)
    settings.use_cache = False

    def build() -> nn.Module:
        transformers = _transformers(f"build {model}")
        stored = getattr(torch, DTYPES[dtype or "bf16"])
        built = transformers.AutoModelForCausalLM.from_config(settings, dtype=stored)
        built.loss_type = "ForCausalLM"  # which not every class says, and transformers then warns
        return _prepared(built, model, checkpointing)

    vocab = settings.vocab_size
    return Workload(name=model, model=build, batch=lambda: _tokens(vocab, micro_batch, seq))


def _of_function(
    text: str, seq: int | None, micro_batch: int, dtype: str | None, checkpointing: str
) -> Workload:
    function = function_of(text)
    batches: list[Callable[[], Any]] = []

    def build() -> nn.Module:
        built = function()
        batches.clear()
        if isinstance(built, tuple) and len(built) == 2 and callable(built[1]):
            built, batch = built
            batches.append(batch)
        if not isinstance(built, nn.Module):
            raise ConfigError(
                f"{text} must return a torch.nn.Module, or one and a function that gives a batch; "
                f"got {type(built).__name__}"
            )
        if not batches:
            vocab = getattr(getattr(built, "config", None), "vocab_size", None)
            if vocab is None or seq is None:
                raise ConfigError(
                    f"it is not known what a batch of {text} is: let it return the module and a "
                    "function that gives a batch" + (", or pass --seq" if vocab is not None else "")
                )
            batches.append(lambda: _tokens(vocab, micro_batch, seq))
        if dtype is not None:
            built = built.to(getattr(torch, DTYPES[dtype]))
        return _prepared(built, text, checkpointing)

    return Workload(name=text, model=build, batch=lambda: batches[0]())


def _prepared(model: nn.Module, name: str, checkpointing: str) -> nn.Module:
    if checkpointing == "block":
        # transformers renames it, and keeps the old name for a while.
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
            model, "gradient_checkpointing_enable", None
        )
        if enable is None:
            raise ConfigError(
                f"{name} is no model of transformers, so that checkpointing cannot be switched on "
                "from outside: do so in the function, and leave --checkpointing out"
            )
        enable()
    return model.train()


def _tokens(vocab: int, micro_batch: int, seq: int) -> Mapping[str, torch.Tensor]:
    ids = torch.randint(vocab, (micro_batch, seq))
    return {"input_ids": ids, "labels": ids}


def _transformers(what: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"to {what}, transformers is needed: pip install transformers. Or pass "
            "package.module:function, which builds any model, or use zeroshard plan"
        ) from None
    return transformers


def _read(path: Path) -> Any:
    try:
        values = json.loads(path.read_text())
        kind = values.pop("model_type")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is not a readable config.json: {error!r}") from error
    transformers = _transformers(f"build the model of {path}")
    try:
        return transformers.AutoConfig.for_model(kind, **values)
    except Exception as error:
        raise ConfigError(f"transformers does not know the model of {path}: {error}") from error


def config_of(architecture: Architecture) -> Any:
    """The configuration of transformers with an architecture's numbers.

    Raises:
        ConfigError: transformers is missing.
    """
    a = architecture
    values: dict[str, Any]
    if a.family == "gpt2":
        values = {
            "n_embd": a.hidden,
            "n_layer": a.layers,
            "n_head": a.heads,
            "n_positions": a.positions,
            "n_inner": a.intermediate,
        }
    else:
        values = {
            "hidden_size": a.hidden,
            "num_hidden_layers": a.layers,
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "intermediate_size": a.intermediate,
            "max_position_embeddings": 2**20,  # a number; nothing is made of that size
        }
    if a.experts:
        values |= {
            "moe_intermediate_size": a.intermediate,
            "num_local_experts" if a.family == "mixtral" else "num_experts": a.experts,
            "num_experts_per_tok": a.experts_per_token,
            "norm_topk_prob": a.normalises_router,
        }
    if a.family in ("mistral", "mixtral"):
        values["sliding_window"] = a.window or None
    values |= {"vocab_size": a.vocab, "tie_word_embeddings": a.tied}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    return _transformers("build a published model").AutoConfig.for_model(a.family, **values)
