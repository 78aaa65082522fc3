"""A pretrained causal language model and its tokenizer, read from disk through transformers."""

import os
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor


def missing_packages(source: Path) -> list[str]:
    """What `source` needs and this Python lacks: gguf files need two packages more."""
    needed = ["transformers"] + (["gguf", "accelerate"] if source.suffix == ".gguf" else [])
    return [name for name in needed if find_spec(name) is None]


def location(source: Path) -> dict[str, str]:
    """Arguments of from_pretrained for a folder, or for one .gguf file in a folder."""
    if source.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    return {"pretrained_model_name_or_path": str(source)}


def one_voice() -> AbstractContextManager:
    """All ranks load: what loading writes, bars and warnings, is shown for the first rank only."""
    return nullcontext() if os.environ.get("RANK", "0") == "0" else redirect_stderr(StringIO())


class Tokenizer:
    """The model's own, with the two methods that the training needs."""

    def __init__(self, source: Path) -> None:
        with one_voice():
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(
                **location(source), local_files_only=True
            )

    def encode(self, string: str) -> Tensor:
        """[length] int64."""
        return torch.tensor(self._tokenizer(string)["input_ids"])

    def decode(self, tokens: Tensor) -> str:
        return self._tokenizer.decode(tokens.tolist())

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


def load_model(source: Path, dtype: torch.dtype) -> nn.Module:
    with one_voice():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            **location(source), dtype=dtype, local_files_only=True
        )
    model.config.use_cache = False  # whole windows are trained on: cached keys would only cost
    return model
