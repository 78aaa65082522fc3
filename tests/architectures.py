"""Tiny models of many architectures, built from their configs, and one loop that trains them.

No tests, and no network: weights are drawn from a seed, batches too. Dropout stays as each config
has it; the generator is seeded before every forward, so that runs to be compared draw the same.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from models import gathered, is_sharded
from torch import nn
from torch.utils.checkpoint import checkpoint

# Read when transformers is imported; it has advice for every tiny config.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Older ones call modules and that method by other names.
hf = pytest.importorskip("transformers", minversion="5.24")

VOCABULARY, WIDTH, TOKENS, STEPS = 96, 32, 8, 4
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
# Special tokens must lie inside of the small vocabulary.
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**TEXT, **SPECIAL, "num_key_value_heads": 2, "use_cache": False}


def tokens(generator):
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)


def pixels(generator):
    return torch.randn(2, 3, 16, 16, generator=generator)


def next_token_loss(forward, generator, dtype):
    ids = tokens(generator)
    return forward(input_ids=ids, labels=ids).loss


def translation_loss(forward, generator, dtype):
    return forward(input_ids=tokens(generator), labels=tokens(generator)).loss


def hidden_state_loss(forward, generator, dtype):
    hidden = forward(input_ids=tokens(generator)).last_hidden_state
    return (hidden.float() - 1).square().mean()


def image_loss(forward, generator, dtype):
    labels = torch.randint(10, (2,), generator=generator)
    return forward(pixel_values=pixels(generator).to(dtype), labels=labels).loss


def channels_last_loss(forward, generator, dtype):
    images = pixels(generator).to(dtype, memory_format=torch.channels_last)
    return F.cross_entropy(forward(images).float(), torch.randint(10, (2,), generator=generator))


class Bottleneck(nn.Module):
    """The residual block of a ResNet, with the layout of torchvision's."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn3(self.conv3(out)) + shortcut)


class ResNet(nn.Module):
    """Two stages of two blocks each, in sequences, as torchvision has them."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Bottleneck(8, 4, 1), Bottleneck(16, 4, 1))
        self.layer2 = nn.Sequential(Bottleneck(16, 8, 2), Bottleneck(32, 8, 1))
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


def checkpoint_by_transformers(model, use_reentrant):
    """Its layers checkpoint what happens inside of their call: hooks of modules run outside."""
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})


def checkpoint_calls_of(kind):
    """As `checkpoint(module, x)` in a forward: hooks of modules run again in the recomputation."""

    def enable(model, use_reentrant):
        class Checkpointed(kind):
            def __call__(self, *args, **options):
                call = functools.partial(super().__call__, **options)
                return checkpoint(call, *args, use_reentrant=use_reentrant)

        Checkpointed.__name__ = kind.__name__  # which units= may give
        for module in model.modules():
            if type(module) is kind:
                module.__class__ = Checkpointed

    return enable


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of the table.

    Attributes:
        name: as people call it.
        build: makes the model in fp32 from torch's generator.
        units: the units that stage 3 should find beside the root, see `shorten`.
        note: what is special about its parameters.
        loss: (forward, generator, dtype) -> the loss of a batch drawn from the generator.
        checkpoint: (model, use_reentrant) -> turns activation checkpointing on.
        unused: parameters without gradient.
        told: units for one more run of stage 3 that is told them.
    """

    name: str
    build: Callable[[], nn.Module]
    units: str
    note: str = ""
    loss: Callable = next_token_loss
    checkpoint: Callable = checkpoint_by_transformers
    unused: tuple[str, ...] = ()
    told: tuple[str, ...] = ()


ARCHITECTURES = [
    Architecture(
        name="Llama",
        build=lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
        units="model.embed_tokens, model.layers.0-1, lm_head",
        note="grouped-query attention",
    ),
    Architecture(
        name="Llama, tied",
        build=lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=True)),
        units="model.layers.0-1",
        note="head tied to the embedding",
    ),
    Architecture(
        name="Qwen3",
        build=lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=8)),
        units="model.embed_tokens, model.layers.0-1, lm_head",
        note="norms of queries and keys",
    ),
    Architecture(
        name="Mixtral",
        build=lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**DECODER, num_local_experts=8, output_router_logits=True)
        ),
        units="model.layers.0-1",
        note="3-D expert tensors, beside which the embedding is small; loss of the router",
    ),
    Architecture(
        name="Qwen3-MoE",
        build=lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(
                **DECODER,
                head_dim=8,
                moe_intermediate_size=16,
                num_experts=4,
                num_experts_per_tok=2,
                decoder_sparse_step=2,
            )
        ),
        units="model.embed_tokens, model.layers.0-1, lm_head",
        note="3-D expert tensors; every second layer is dense",
    ),
    Architecture(
        name="GPT-OSS",
        build=lambda: hf.GptOssForCausalLM(
            hf.GptOssConfig(**DECODER, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
        ),
        units="model.embed_tokens, model.layers.0-1, lm_head",
        note="3-D expert tensors and their biases; attention sinks",
    ),
    Architecture(
        name="Gemma3",
        build=lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=4)
        ),
        units="model.layers.0-1",
        note="head tied to the embedding, which is a subclass that scales",
    ),
    Architecture(
        name="GPT-2",
        build=lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=WIDTH,
                n_layer=2,
                n_head=4,
                n_positions=32,
                use_cache=False,
                **SPECIAL,
            )
        ),
        units="transformer.h.0-1",
        note="head tied to the embedding; transposed weights; dropout",
    ),
    Architecture(
        name="T5",
        build=lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCABULARY,
                d_model=WIDTH,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=1,
                use_cache=False,
            )
        ),
        units="encoder.block.0-1, decoder.block.0-1",
        note="one table for encoder, decoder and head; first blocks have position biases; dropout",
        loss=translation_loss,
    ),
    Architecture(
        name="ViT",
        build=lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=WIDTH,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=16,
                patch_size=4,
                num_labels=10,
            )
        ),
        units="vit.embeddings, vit.layers.0-1",
        note="4-D convolution; parameters held by the embedding module itself",
        loss=image_loss,
    ),
    Architecture(
        name="BERT",
        build=lambda: hf.BertModel(hf.BertConfig(**TEXT, pad_token_id=0)),
        units="embeddings, encoder.layer.0-1",
        note="pooler without gradient; dropout",
        loss=hidden_state_loss,
        unused=("pooler.dense.weight", "pooler.dense.bias"),
    ),
    Architecture(
        name="ALBERT",
        build=lambda: hf.AlbertForMaskedLM(
            hf.AlbertConfig(
                **{**TEXT, **SPECIAL, "num_hidden_layers": 6, "max_position_embeddings": 24},
                embedding_size=16,
                num_hidden_groups=1,
            )
        ),
        units="",
        note="one block runs six times; head tied to the embedding",
        checkpoint=checkpoint_calls_of(hf.models.albert.modeling_albert.AlbertLayerGroup),
        told=("AlbertLayerGroup",),
    ),
    Architecture(
        name="ResNet",
        build=lambda: ResNet().to(memory_format=torch.channels_last),
        units="",
        note="BatchNorm; channels_last",
        loss=channels_last_loss,
        checkpoint=checkpoint_calls_of(Bottleneck),
        told=("Bottleneck",),
    ),
]


def built(architecture, dtype):
    """The model as every run begins with it."""
    torch.manual_seed(0)
    return architecture.build().to(dtype).train()


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a run leaves, on one rank."""

    losses: list[float]
    whole: list[str]  # parameters of several elements that are not sharded, after the last step
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def train(model, optimizer, architecture, dtype, rank, *, forward=None, steps=STEPS):
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        torch.manual_seed(1000 * rank + step)  # what dropout draws
        loss = architecture.loss(forward or model, generator, dtype)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    whole = [n for n, p in model.named_parameters() if p.numel() > 1 and not is_sharded(p)]
    with gathered(model):
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    return Training(losses=losses, whole=whole, parameters=parameters, buffers=buffers)
