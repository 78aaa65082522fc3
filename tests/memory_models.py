"""Tiny models of many families, and the settings in which their memory is simulated and measured."""

import functools
import gc
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ranks
import torch
import transformers
from torch import nn

import zeroshard
from zeroshard.memory.profile import MemoryProfiler
from zeroshard.memory.simulate import loss_of, simulate

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model in one setting.

    Attributes:
        model: builds it.
        batch: makes a batch for it.
        options: of the optimizer.
        share: of a total, by which a simulation may differ from a measurement.
        why: they differ.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    stage: int = 3
    world_size: int = 2
    micro_batches: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    share: float = 0.0
    why: str = ""


def measured(case: Case, _rank: int = 0) -> dict[str, Any]:
    """What the profiler says of two real steps, as JSON."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = zeroshard.AdamW(model, stage=case.stage, **case.options)
    gc.disable()
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(2):
            for _ in range(case.micro_batches):
                loss_of(model, case.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = profiler.report().to_json()
    optimizer.close()
    return report


def simulated(case: Case, rank: int = 0, device: str = "cpu") -> dict[str, Any]:
    """What a simulation says of the same."""
    torch.manual_seed(0)
    return simulate(
        case.model,
        case.batch,
        world_size=case.world_size,
        rank=rank,
        stage=case.stage,
        device=device,
        micro_batches=case.micro_batches,
        **case.options,
    ).to_json()


def measure_all(cases: Mapping[str, Case], world_size: int) -> dict[str, list[Any]]:
    """What every rank measures of each case that has that many; a case that fails says why."""
    chosen = {name: case for name, case in cases.items() if case.world_size == world_size}

    def work(rank: int, _: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, case in chosen.items():
            try:
                found[name] = measured(case)
            except Exception:
                found[name] = traceback.format_exc()
            gc.collect()
        return found

    by_rank = ranks.run(work, world_size, timeout_s=240)
    return {name: [found[name] for found in by_rank] for name in chosen}


# --- models


def of_config(
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    checkpointing: str = "",
    **settings: Any,
) -> nn.Module:
    """A causal language model of a family, with random weights."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "re-entrant"})
    return model.train()
