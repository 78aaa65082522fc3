"""Tiny models of many families, whose memory is simulated and measured."""

import functools
import gc
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import peft
import ranks
import torch
import transformers
from torch import nn

import zeroshard
from zeroshard.memory.profile import MemoryProfiler
from zeroshard.memory.simulate import loss_of, simulate

SIZES = {
    "num_hidden_layers": 2,
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

LETS_GO_S = 0.02
"""In which gloo's thread, which needs the interpreter for it, lets go of what it has sent."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model in one setting.

    Attributes:
        model: builds it.
        batch: makes a batch for it.
        options: of the optimizer.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    stage: int = 3
    world_size: int = 2
    micro_batches: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


def measured(case: Case) -> dict[str, Any]:
    """What the profiler says of two real steps, as JSON."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = zeroshard.AdamW(model, stage=case.stage, **case.options)
    gc.disable()  # as in a simulation; this is a rank, which ends soon
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(2):
            for _ in range(case.micro_batches):
                loss_of(model, case.batch()).backward()
            time.sleep(LETS_GO_S)
            optimizer.step()
            optimizer.zero_grad()
    report = profiler.report().to_json()
    optimizer.close()
    return report


def simulated(case: Case, rank: int = 0, device: str = "cpu") -> dict[str, Any]:
    """What a simulation says of the same, as JSON."""
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
    """What every rank measures of each of the cases; one that fails gives a traceback."""

    def work(rank: int, _: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, case in cases.items():
            try:
                found[name] = measured(case)
            except Exception:
                found[name] = traceback.format_exc()
            gc.collect()
        return found

    by_rank = ranks.run(work, world_size, timeout_s=240)
    return {name: [found[name] for found in by_rank] for name in cases}


def compared(measurement: Mapping[str, Any], simulation: Mapping[str, Any]) -> list[str]:
    """In what two reports differ: points, maxima and the peak, to the byte."""
    tables = {"maxima": (measurement["maxima"], simulation["maxima"])}
    tables["peak"] = (measurement["peak"]["categories"], simulation["peak"]["categories"])
    for point in {**measurement["points"], **simulation["points"]}:
        tables[point] = (measurement["points"].get(point), simulation["points"].get(point))
    found = [
        f"{table}, {category}: measured {(first or {}).get(category)}, "
        f"simulated {(second or {}).get(category)}"
        for table, (first, second) in tables.items()
        for category in {**(first or {}), **(second or {})}
        if (first or {}).get(category) != (second or {}).get(category)
    ]
    for name in ("total", "phase", "where", "step"):
        if measurement["peak"][name] != simulation["peak"][name]:
            found.append(
                f"peak, {name}: {measurement['peak'][name]!r}, not {simulation['peak'][name]!r}"
            )
    return found


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
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "re-entrant"})
    return model.train()


MOE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ATTENTION_16 = {"head_dim": 16}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def batch_of(
    sequences: int = 2,
    length: int = 32,
    *,
    mask: str = "none",
) -> dict[str, torch.Tensor]:
    """Random tokens, which are their own labels, with a mask: "none", "ones" or "padding"."""
    tokens = torch.randint(3, 300, (sequences, length))
    batch = {"input_ids": tokens, "labels": tokens}
    if mask != "none":
        batch["attention_mask"] = torch.ones_like(tokens)
    if mask == "padding":
        batch["attention_mask"][0, : length // 4] = 0
    return batch


def with_adapters(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of which only low-rank adapters are trained."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(of_config("Llama", dtype=dtype), config)


def with_frozen_parameters() -> nn.Module:
    """A model whose embedding and first block are not trained."""
    model = of_config("Llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def of_kind(name: str, **settings: Any) -> nn.Module:
    """Any other model of transformers with random weights."""
    config = getattr(transformers, f"{name.split('For')[0].removesuffix('Model')}Config")
    return getattr(transformers, name)(config(**settings)).train()


class Convolutions(nn.Module):
    """A small network for images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GroupNorm(8, 64),
            nn.SiLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(images)), labels)


class Encoder(nn.Module):
    """torch's own transformer encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.encoder(inputs).square().mean()


class Recurrent(nn.Module):
    """A recurrent network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(320, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 320)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(input_ids))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())


def _encoded(names: str, shape: tuple[int, ...]) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 300, (2, 32))
        return {names: torch.randn(shape), "labels": tokens}

    return make


F = functools.partial

FAMILIES = {
    "llama": Case(model=F(of_config, "Llama"), batch=batch_of),
    "qwen3": Case(model=F(of_config, "Qwen3", **ATTENTION_16), batch=batch_of, stage=2),
    "gpt2": Case(model=F(of_config, "GPT2", **NO_DROPOUT), batch=batch_of, stage=1),
    "gemma3": Case(
        model=F(of_config, "Gemma3Text", sliding_window=16, **ATTENTION_16), batch=batch_of
    ),
    "mistral": Case(model=F(of_config, "Mistral"), batch=batch_of, stage=2),
    "mixtral": Case(model=F(of_config, "Mixtral", **MOE), batch=batch_of),
    "qwen3-moe": Case(
        model=F(of_config, "Qwen3Moe", **MOE, **ATTENTION_16), batch=batch_of, stage=1
    ),
    "gpt-oss": Case(model=F(of_config, "GptOss", **MOE, **ATTENTION_16), batch=batch_of),
    "phi3": Case(model=F(of_config, "Phi3"), batch=batch_of, stage=2),
    "olmo2": Case(model=F(of_config, "Olmo2"), batch=batch_of, stage=1),
    "gpt-neox": Case(model=F(of_config, "GPTNeoX"), batch=batch_of),
}
"""Decoders, which are simulated to the byte."""

SETTINGS = {
    "re-entrant checkpointing": Case(
        model=F(of_config, "Llama", checkpointing="re-entrant"), batch=batch_of
    ),
    "checkpointing": Case(model=F(of_config, "Llama", checkpointing="new"), batch=batch_of),
    "checkpointing, stage 1": Case(
        model=F(of_config, "Qwen3", checkpointing="new", **ATTENTION_16), batch=batch_of, stage=1
    ),
    "bf16": Case(
        model=F(of_config, "Llama", dtype=torch.bfloat16), batch=F(batch_of, 1, 16), stage=3
    ),
    "bf16, int8 moments": Case(
        model=F(of_config, "Llama", dtype=torch.bfloat16),
        batch=F(batch_of, 1, 16),
        stage=2,
        options={"precision": zeroshard.Precision(moments="int8")},
    ),
    "a mask of ones": Case(
        model=F(of_config, "Llama"), batch=F(batch_of, mask="ones"), world_size=1
    ),
    "padding": Case(model=F(of_config, "Llama"), batch=F(batch_of, mask="padding"), stage=2),
    "dropout": Case(model=F(of_config, "GPT2"), batch=batch_of, world_size=1, stage=2),
    "adapters": Case(model=with_adapters, batch=batch_of, stage=3),
    "adapters, stage 1": Case(model=with_adapters, batch=batch_of, stage=1, world_size=1),
    "frozen parameters": Case(model=with_frozen_parameters, batch=batch_of),
    "tied embeddings": Case(
        model=F(of_config, "Llama", tie_word_embeddings=True), batch=batch_of, world_size=3
    ),
    "two micro-batches": Case(
        model=F(of_config, "Llama"), batch=batch_of, micro_batches=2, stage=2, world_size=3
    ),
    "two micro-batches, stage 3": Case(
        model=F(of_config, "Llama"), batch=batch_of, micro_batches=2, world_size=1
    ),
    "clipping": Case(
        model=F(of_config, "Llama"), batch=batch_of, options={"max_grad_norm": 1.0}, world_size=3
    ),
}

OTHERS = {
    "bert": Case(
        model=F(
            of_kind,
            "BertForMaskedLM",
            vocab_size=320,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=96,
        ),
        batch=F(batch_of, mask="padding"),
    ),
    "t5": Case(
        model=F(
            of_kind,
            "T5ForConditionalGeneration",
            vocab_size=320,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        batch=batch_of,
        stage=2,
    ),
    "vit": Case(
        model=F(
            of_kind,
            "ViTForImageClassification",
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=96,
            image_size=32,
            patch_size=8,
        ),
        batch=lambda: {
            "pixel_values": torch.randn(2, 3, 32, 32),
            "labels": torch.tensor([0, 1]),
        },
        stage=1,
    ),
    "whisper": Case(
        model=F(
            of_kind,
            "WhisperForConditionalGeneration",
            vocab_size=320,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_source_positions=32,
            max_target_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        batch=_encoded("input_features", (2, 80, 64)),
    ),
    "convolutions": Case(
        model=Convolutions,
        batch=lambda: (torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])),
        stage=2,
    ),
    "encoder": Case(model=Encoder, batch=lambda: torch.randn(2, 32, 64)),
    "lstm": Case(
        model=Recurrent,
        batch=batch_of,
        stage=1,
    ),
}
"""What is no decoder."""
