"""Presets against what was published, and against the modules that transformers builds."""

import json
import math

import pytest
import torch

from zeroshard.errors import ConfigError
from zeroshard.memory import architectures
from zeroshard.memory.building import config_of
from zeroshard.memory.models import shape_of
from zeroshard.memory.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_was_published(name):
    found = architectures.parameters(PRESETS[name].architecture)
    assert sum(math.prod(shape) for _, shape in found) == PRESETS[name].numel
    assert shape_of(name).numel == PRESETS[name].numel


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_module_that_transformers_builds(name):
    """Names, shapes, order, units and buffers; blocks beyond the third repeat the others."""
    transformers = pytest.importorskip("transformers")
    architecture = PRESETS[name].architecture
    few = {f: getattr(architecture, f) for f in architecture.__dataclass_fields__} | {"layers": 3}
    architecture = architectures.Architecture(**few)
    config = config_of(architecture)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    built, planned = shape_of(module), shape_of(architecture, dtype="fp32")
    assert built.trained == tuple(_on_meta(spec) for spec in planned.trained)
    assert built.lookups == planned.lookups
    assert built.buffers_nbytes == planned.buffers_nbytes
    assert built.architecture == architecture


def _on_meta(spec):
    values = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return type(spec)(**{**values, "device": "meta"})


def test_names_are_found_in_either_case_and_near_matches_are_listed():
    assert preset("Llama-3-8B") is PRESETS["llama-3-8b"]
    assert preset("llama_3_70b") is PRESETS["llama-3-70b"]
    with pytest.raises(ConfigError, match=r"did you mean .*mixtral-8x7b"):
        preset("mixtral-7b")
    with pytest.raises(ConfigError, match=r"did you mean .*qwen3-8b"):
        preset("qwen3-9b")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral"])
def test_what_a_config_leaves_out_is_what_transformers_takes(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = {"model_type": family, "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 97}
    config |= {"num_attention_heads": 32, "intermediate_size": 128, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(str(tmp_path))
        )
    assert shape_of(tmp_path).architecture == shape_of(module).architecture
    assert shape_of(tmp_path).numel == shape_of(module).numel


def test_attention_without_a_kernel_is_not_planned_as_if_it_had_one():
    transformers = pytest.importorskip("transformers")
    config = config_of(PRESETS["qwen3-0.6b"].architecture)
    for implementation, is_known in (("sdpa", True), ("eager", False)):
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=implementation
            )
        assert (shape_of(module).architecture is not None) is is_known
