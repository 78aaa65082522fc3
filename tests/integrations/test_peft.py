"""PEFT: adapters trained on a frozen base, switched, merged and saved."""

import contextlib
import io
import pydoc_data.topics

import peft
import pytest
import torch
import torch.distributed as dist
from consumers import Consumer, tried
from models import assert_same, gathered, weights
from ranks import run
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import zeroshard
from zeroshard.checkpoint import load_optimizer, save_optimizer
from zeroshard.errors import ConfigError, ShardTensorError

CONSUMER = Consumer(
    "PEFT",
    "peft",
    use="Build `zeroshard.AdamW(model.parameters(), model=model, stage=...)` after "
    "`get_peft_model`; under stage 3 merge and save inside of `zeroshard.gather(model)`.",
)
STAGES = (1, 2, 3)
TEXT = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama(*, dtype=torch.float32, tied=False):
    """The same small model each time."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).to(dtype)


def mixtral():
    """One whose experts are 3-D parameters."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2))


def lora(**settings):
    targets = ["q_proj", "v_proj", "down_proj"]
    settings = {"target_modules": targets, "task_type": "CAUSAL_LM", **settings}
    return peft.LoraConfig(r=3, lora_alpha=6, **settings)


def adapted(config=None, *, base=None, **settings):
    """The same adapters each time, on a base that they freeze."""
    base = llama() if base is None else base
    torch.manual_seed(1)
    return peft.get_peft_model(base, lora() if config is None else config, **settings)


def adapted_twice():
    """Two adapters, of which "default" is active and trained."""
    model = adapted()
    torch.manual_seed(2)
    model.add_adapter("second", lora(target_modules=["q_proj", "o_proj"]))
    return model


def batches(rank, first, count):
    """Batches of bytes of English text, other ones on each rank."""
    for number in range(first, first + count):
        start = 5000 * rank + 48 * number
        yield TEXT[start : start + 48].view(2, 24)


def trained(model):
    """Names of the parameters that require a gradient."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def adapters(model):
    """Copies of what is trained, whole."""
    whole = weights(model)
    return {name: whole[name] for name in trained(model)}


def build(model, stage, parameters=None, **settings):
    """An optimizer and what to call: torch's and DDP in stage 0, else ours and the model."""
    parameters = list(model.parameters()) if parameters is None else parameters
    settings = {"lr": 1e-2, "weight_decay": 0.1, **settings}
    if stage == 0:
        optimizer = torch.optim.AdamW(parameters, fused=True, **settings)
        return optimizer, DistributedDataParallel(model)
    return zeroshard.AdamW(parameters, model=model, stage=stage, **settings), model


def again(model, forward):
    """What to call once other parameters are trained: DDP has to be built anew."""
    return DistributedDataParallel(model) if forward is not model else model


def train(forward, optimizer, rank, *, first=0, steps=2):
    """Some steps, and the loss of each."""
    losses = []
    for batch in batches(rank, first, steps):
        loss = forward(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {f"loss {first + number}": loss for number, loss in enumerate(losses)}


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=TEXT[:24].view(1, 24)).logits


def same_in_every_stage(scenario, *, stages=STAGES):
    """Run `scenario(stage, rank)` in stage 0, which is DDP, and in others; it returns tensors."""

    def body(rank, world_size):
        expected = scenario(0, rank)
        assert all(value.isfinite().all() for value in expected.values())
        for stage in stages:
            assert_same(scenario(stage, rank), expected, f"stage {stage}")

    run(body, timeout_s=120)


# --- training


@tried(
    "LoRA on a frozen base: losses and adapters are those of DDP with torch's fused AdamW, bit "
    "for bit; the base keeps its weights, has no gradients and no state",
    stages="1, 2, 3",
)
def test_lora_trains_as_under_ddp_and_leaves_the_base_alone():
    def scenario(stage, rank):
        model = adapted()
        before, names = weights(model), trained(model)
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank, steps=5)
        batch = next(batches(rank, 5, 1))
        forward(input_ids=batch, labels=batch).loss.backward()
        for name, p in model.named_parameters():
            assert (p.grad is not None) == (name in names), name
            assert bool(optimizer.state.get(p)) == (name in names), name
        after = weights(model)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed == set(names)
        return found | after

    same_in_every_stage(scenario)


@tried("an optimizer that is given the trained parameters only", stages="1, 2, 3")
def test_the_frozen_base_may_be_left_out_of_the_optimizer():
    def scenario(stage, rank):
        model = adapted()
        ours = [p for p in model.parameters() if p.requires_grad]
        optimizer, forward = build(model, stage, ours)
        return train(forward, optimizer, rank) | weights(model)

    same_in_every_stage(scenario)


def _trainable_tokens():
    return lora(trainable_token_indices={"embed_tokens": [10, 32, 101]})


TASK = {"task_type": "CAUSAL_LM"}
TWO = {"target_modules": ["q_proj", "down_proj"], **TASK}
KINDS = {
    "DoRA": lambda: adapted(lora(use_dora=True)),
    "rank-stabilised": lambda: adapted(lora(use_rslora=True)),
    "embedding": lambda: adapted(lora(target_modules=["embed_tokens", "q_proj"])),
    "head": lambda: adapted(lora(target_modules=["lm_head", "q_proj"])),
    "saved modules": lambda: adapted(lora(modules_to_save=["lm_head", "norm"])),
    "saved table": lambda: adapted(lora(modules_to_save=["embed_tokens", "lm_head"])),
    "biases": lambda: adapted(lora(bias="lora_only", lora_bias=True)),
    "tied": lambda: adapted(base=llama(tied=True)),
    "tied embedding": lambda: adapted(
        lora(target_modules=["embed_tokens", "q_proj"]), base=llama(tied=True)
    ),
    "tied saved table": lambda: adapted(
        lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True), base=llama(tied=True)
    ),
    "tied trainable tokens": lambda: adapted(_trainable_tokens(), base=llama(tied=True)),
    "experts": lambda: adapted(
        lora(
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
        base=mixtral(),
    ),
    "IA3": lambda: adapted(peft.IA3Config(feedforward_modules=["down_proj"], **TWO)),
    "prompt": lambda: adapted(peft.PromptTuningConfig(num_virtual_tokens=4, **TASK)),
    "prefix": lambda: adapted(peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK)),
    "p-tuning": lambda: adapted(
        peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, **TASK)
    ),
    "VeRA": lambda: adapted(peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], **TASK)),
    "LoHa": lambda: adapted(peft.LoHaConfig(r=2, **TWO)),
    "OFT": lambda: adapted(peft.OFTConfig(oft_block_size=4, **TWO)),
    "norms": lambda: adapted(peft.LNTuningConfig(target_modules=["norm"], **TASK)),
}


@tried(
    "DoRA, rank-stabilised LoRA, LoRA on embeddings, on the head, on experts' 3-D parameters, with "
    "biases, on tied models; "
    "`modules_to_save`, also of tied tables; IA3, prompt, prefix and p-tuning, VeRA, LoHa, OFT, "
    "LayerNorm tuning: bit for bit as under DDP",
    stages="1, 2, 3",
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_trains_as_under_ddp(kind):
    def scenario(stage, rank):
        model = KINDS[kind]()
        before = adapters(model)
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank)
        after = weights(model)
        assert any(not torch.equal(after[name], value) for name, value in before.items())
        return found | after

    same_in_every_stage(scenario)


# PEFT reads the weight of an embedding itself, without calling the embedding.
READERS = {
    "trainable tokens": _trainable_tokens,
    "DoRA": lambda: lora(target_modules=["embed_tokens", "q_proj"], use_dora=True),
}


@tried("trainable tokens, and DoRA on embeddings, which read the table itself", stages="1, 2, 3")
@pytest.mark.parametrize("kind", READERS)
def test_adapters_that_read_the_weight_of_an_embedding_find_it_whole(kind):
    def scenario(stage, rank):
        model = adapted(READERS[kind]())
        optimizer, forward = build(model, stage)
        return train(forward, optimizer, rank) | weights(model)

    same_in_every_stage(scenario)


@tried(
    "AdaLoRA: its allocator multiplies parameters with gradients, so keep DDP around the model "
    "(stage 1: only optimizer state is sharded)",
    stages="1 inside of DDP",
    result="works; without DDP the allocator raises and names `full_tensor()`",
)
def test_adalora_works_inside_of_ddp_and_its_allocator_raises_without():
    def adalora():
        config = peft.AdaLoraConfig(
            total_step=9, tinit=1, tfinal=2, deltaT=2, init_r=4, target_r=2, **TWO
        )
        return adapted(config)

    def scenario(stage, rank):
        model = adalora()
        optimizer, forward = build(model, stage)
        forward = DistributedDataParallel(model) if stage else forward
        found = {}
        for number in range(5):
            batch = next(batches(rank, number, 1))
            loss = forward(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            model.base_model.update_and_allocate(number)
            optimizer.zero_grad()
            found[f"loss {number}"] = loss.detach()
        after = weights(model)
        assert any((value == 0).any() for name, value in after.items() if "lora_E" in name)
        return found | after

    def body(rank, world_size):
        expected = scenario(0, rank)
        with pytest.warns(UserWarning, match="DistributedDataParallel"):
            assert_same(scenario(1, rank), expected, "inside of DDP")
        model = adalora()
        build(model, 2)
        for batch in batches(rank, 0, 1):
            model(input_ids=batch, labels=batch).loss.backward()
        with pytest.raises(ShardTensorError, match="full_tensor"):
            model.base_model.update_and_allocate(0)

    run(body)


@tried("both kinds of activation checkpointing on a frozen base", stages="1, 2, 3")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_train_their_adapters(reentrant):
    def scenario(stage, rank):
        model = adapted()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        optimizer, forward = build(model, stage)
        return train(forward, optimizer, rank) | weights(model)

    same_in_every_stage(scenario)


@tried("fp32 adapters on a bf16 base (`autocast_adapter_dtype`): bit for bit", stages="1, 2, 3")
def test_fp32_adapters_on_a_bf16_base_train_as_under_ddp():
    def scenario(stage, rank):
        model = adapted(base=llama(dtype=torch.bfloat16))
        kinds = {p.dtype for p in model.parameters() if p.requires_grad}
        assert kinds == {torch.float32}
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank, steps=4)
        if stage:
            assert optimizer.memory()["master"] == 0
            moments = {optimizer.state[p]["exp_avg"].dtype for p in optimizer.state}
            assert moments == {torch.float32}
        return found | weights(model)

    same_in_every_stage(scenario)


@tried(
    "bf16 adapters: they get an exact fp32 master, which torch's AdamW does not keep",
    stages="1, 2, 3",
)
def test_bf16_adapters_are_updated_in_fp32():
    def gradients_of_all_ranks(model):
        """The average over two ranks, [] fp32: the sum of two bf16 values, halved."""
        found = {}
        for name, p in model.named_parameters():
            if p.grad is not None:
                both = [torch.empty_like(p.grad) for _ in range(2)]
                dist.all_gather(both, p.grad)
                found[name] = (both[0].float() + both[1].float()) / 2
        return found

    def bf16():
        return adapted(base=llama(dtype=torch.bfloat16), autocast_adapter_dtype=False)

    def reference(rank):
        """torch's AdamW on fp32 copies, of which the model gets the roundings."""
        model = bf16()
        masters = {n: p.detach().float() for n, p in model.named_parameters() if p.requires_grad}
        for master in masters.values():
            master.requires_grad_()
        optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.1, fused=True)
        found = {}
        for number, batch in enumerate(batches(rank, 0, 4)):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            for name, gradient in gradients_of_all_ranks(model).items():
                masters[name].grad = gradient
            optimizer.step()
            model.zero_grad()
            for name, master in masters.items():
                model.get_parameter(name).data.copy_(master.detach())
            found[f"loss {number}"] = loss.detach()
        return found | weights(model)

    def body(rank, world_size):
        expected = reference(rank)
        for stage in STAGES:
            model = bf16()
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            optimizer, forward = build(model, stage)
            found = train(forward, optimizer, rank, steps=4) | weights(model)
            assert_same(found, expected, f"stage {stage}")
            assert optimizer.memory()["master"] > 0

    run(body)


class Quantised(nn.Module):
    """A frozen linear map in 8-bit codes with one scale for each row."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scale).round().add(128).to(torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        return x @ ((self.codes.float() - 128) * self.scale).T


@tried("frozen weights that are quantised (uint8 parameters) stay as they are", stages="1, 2, 3")
def test_quantised_weights_stay_whole_and_are_not_touched():
    def scenario(stage, rank):
        base = llama()
        for layer in base.model.layers:
            layer.mlp.gate_proj = Quantised(layer.mlp.gate_proj)
        model = adapted(base=base)
        codes = {
            n: (p, p.data_ptr(), p.clone()) for n, p in model.named_parameters() if "codes" in n
        }
        assert len(codes) == 2
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank) | weights(model)
        for name, (parameter, data_ptr, values) in codes.items():
            assert model.get_parameter(name) is parameter
            assert parameter.data_ptr() == data_ptr
            assert torch.equal(parameter, values)
        return found

    same_in_every_stage(scenario)


def padded(parameters):
    return sum(-(-p.numel() // 256) * 256 for p in parameters)


@tried(
    "memory: gradients and state of the adapters alone; stage 3 shards the base as well",
    stages="1, 2, 3",
)
def test_a_frozen_base_costs_neither_gradients_nor_state():
    def body(rank, world_size):
        for stage in STAGES:
            model = adapted()
            every = sum(p.numel() for p in model.parameters())
            ours = sum(p.numel() for p in model.parameters() if p.requires_grad)
            assert ours < every / 8
            optimizer, forward = build(model, stage)
            train(forward, optimizer, rank, steps=1)
            for batch in batches(rank, 1, 1):
                forward(input_ids=batch, labels=batch).loss.backward()
            held = optimizer.memory()
            # Each parameter begins at a multiple of 256 elements, each arena (one for the trained
            # and one for the frozen parameters of a unit) is a multiple of 512 at two ranks.
            arenas = 5 if stage == 3 else 1
            trained_shard = 2 * padded(p for p in model.parameters() if p.requires_grad)
            every_shard = 2 * padded(model.parameters())
            rest = 2 * 256 * arenas
            assert trained_shard <= held["gradients"] <= trained_shard + rest
            assert 2 * trained_shard <= held["moments"] <= 2 * (trained_shard + rest)
            assert held["master"] == 0
            if stage == 3:
                assert every_shard <= held["parameters"] <= every_shard + 2 * rest
                assert held["parameters"] < 0.6 * 4 * every
            else:
                whole = 2 * trained_shard  # of the base there is nothing that is ours
                assert whole <= held["parameters"] <= whole + 2 * rest
                assert held["unsharded_parameters"] == 0

    run(body)


@tried("`get_nb_trainable_parameters`, `print_trainable_parameters`", stages="1, 2, 3")
def test_parameters_are_counted_rightly():
    def body(rank, world_size):
        for stage in STAGES:
            for kind in (adapted, KINDS["saved modules"], KINDS["prompt"]):
                model = kind()
                expected = model.get_nb_trainable_parameters()
                assert 0 < expected[0] < expected[1]
                optimizer, forward = build(model, stage)
                assert model.get_nb_trainable_parameters() == expected
                train(forward, optimizer, rank, steps=1)
                assert model.get_nb_trainable_parameters() == expected
                said = io.StringIO()
                with contextlib.redirect_stdout(said):
                    model.print_trainable_parameters()
                assert f"trainable params: {expected[0]:,} || all params: {expected[1]:,}" in (
                    said.getvalue()
                )

    run(body)


# --- what is trained changes


@tried(
    "two adapters, `set_adapter` in the middle of training and back (the optimizer has "
    "`model.parameters()`)",
    stages="1, 2, 3",
)
def test_switching_the_trained_adapter_is_as_under_ddp():
    def scenario(stage, rank):
        model = adapted_twice()
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank)
        for first, name in ((2, "second"), (4, "default"), (6, "second")):
            before = weights(model)
            model.set_adapter(name)
            forward = again(model, forward)
            found |= train(forward, optimizer, rank, first=first)
            after = weights(model)
            for key in after:
                moved = not torch.equal(before[key], after[key])
                assert moved == (f".{name}." in key), f"{key} while {name} is trained"
        return found | after

    same_in_every_stage(scenario)


@tried("`delete_adapter` of the one that is not trained any more", stages="1, 2, 3")
def test_a_deleted_adapter_does_not_disturb_the_other():
    def scenario(stage, rank):
        model = adapted_twice()
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank)
        model.set_adapter("second")
        model.delete_adapter("default")
        forward = again(model, forward)
        return found | train(forward, optimizer, rank, first=2) | weights(model)

    same_in_every_stage(scenario)


@tried("unfreezing a layer of the base in the middle of training", stages="1, 2, 3")
def test_an_unfrozen_layer_is_trained():
    def scenario(stage, rank):
        model = adapted()
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank)
        before = weights(model)
        layer = model.get_submodule("base_model.model.model.layers.1")
        layer.requires_grad_(True)
        forward = again(model, forward)
        found |= train(forward, optimizer, rank, first=2)
        after = weights(model)
        prefix = "base_model.model.model.layers.1."
        assert all(not torch.equal(before[n], after[n]) for n in after if n.startswith(prefix))
        return found | after

    same_in_every_stage(scenario)


@tried(
    "adapters that are added after the optimizer was built",
    stages="1, 2, 3",
    result="refused: `step()` raises, since nothing that it has is trained any more",
)
def test_adapters_that_the_optimizer_does_not_have_are_never_left_untrained_silently():
    def body(rank, world_size):
        for stage in STAGES:
            base = llama()
            optimizer, _ = build(base, stage)
            model = adapted(base=base)
            with pytest.raises(ConfigError, match="optimizer"):
                train(model, optimizer, rank, steps=1)

            # The first adapter alone is in the optimizer, and frozen by the switch.
            model = adapted()
            ours = [p for p in model.parameters() if p.requires_grad]
            optimizer, _ = build(model, stage, ours)
            model.add_adapter("second", lora())
            train(model, optimizer, rank, steps=1)
            model.set_adapter("second")
            with pytest.raises(ConfigError, match="optimizer"):
                train(model, optimizer, rank, steps=1)

    run(body)


@tried(
    "adapters that are added after the optimizer was built, then `optimizer.add_param_group`",
    stages="1, 2; 3 refused",
)
def test_adapters_that_are_added_later_train_in_a_group_of_their_own():
    def scenario(stage, rank):
        base = llama()
        optimizer, _ = build(base, stage)
        model = adapted(base=base)
        later = [p for p in model.parameters() if p.requires_grad]
        optimizer.add_param_group({"params": later})
        return train(again(model, None if stage == 0 else model), optimizer, rank) | weights(model)

    same_in_every_stage(scenario, stages=(1, 2))

    def body(rank, world_size):
        base = llama()
        optimizer, _ = build(base, 3)
        model = adapted(base=base)
        later = [p for p in model.parameters() if p.requires_grad]
        with pytest.raises(ConfigError, match=r"lora_A.* is in none of the model's"):
            optimizer.add_param_group({"params": later})
        # As it says: with the complete module the optimizer can be built anew.
        optimizer.close()
        optimizer, _ = build(model, 3)
        before = adapters(model)
        train(model, optimizer, rank)
        after = adapters(model)
        assert any(not torch.equal(after[name], value) for name, value in before.items())

    run(body)


# --- merging


@tried(
    "`merge_adapter` and `unmerge_adapter` in the middle of training, under stage 3 inside of "
    "`zeroshard.gather(model)`",
    stages="1, 2, 3",
)
@pytest.mark.parametrize("safe", [False, True])
def test_merged_and_unmerged_adapters_train_on(safe):
    def scenario(stage, rank):
        model = adapted()
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank)
        before = weights(model)
        with gathered(model):
            model.merge_adapter(safe_merge=safe)
        merged = weights(model)
        name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
        assert not torch.equal(merged[name], before[name])
        found["logits"] = logits_of(model)
        with gathered(model):
            model.unmerge_adapter()
        found |= train(forward, optimizer, rank, first=2)
        return found | {f"merged {key}": value for key, value in merged.items()} | weights(model)

    same_in_every_stage(scenario)


@tried(
    "`merge_adapter` outside of `zeroshard.gather`",
    stages="3",
    result="refused: torch raises (PEFT, with `safe_merge=True`); the weights are what they were",
)
@pytest.mark.parametrize("safe", [False, True])
def test_sharded_weights_are_not_merged_into(safe):
    def body(rank, world_size):
        model = adapted()
        optimizer, forward = build(model, 3)
        train(forward, optimizer, rank)
        before = weights(model)
        with pytest.raises(
            (RuntimeError, ValueError), match=r"single memory location|NaNs detected"
        ):
            model.merge_adapter(safe_merge=safe)
        assert_same(weights(model), before, "the weights")
        with zeroshard.gather(model):
            model.merge_adapter(safe_merge=safe)
            model.unmerge_adapter()
        train(forward, optimizer, rank)

    run(body)


@tried(
    "`merge_and_unload` in the middle of training (stage 3: inside of `zeroshard.gather(model)`), "
    "then a new optimizer for the merged model",
    stages="1, 2, 3",
)
def test_a_merged_model_trains_on_with_a_new_optimizer():
    def scenario(stage, rank, closes=False):
        model = adapted()
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank)
        with gathered(model):
            merged = model.merge_and_unload()
        assert type(merged) is LlamaForCausalLM
        if closes:
            optimizer.close()
        merged.requires_grad_(True)
        optimizer, forward = build(merged, stage)
        found |= train(forward, optimizer, rank, first=2)
        assert weights(merged).keys() == weights(llama()).keys()
        return found | weights(merged)

    def body(rank, world_size):
        expected = scenario(0, rank)
        for stage in STAGES:
            assert_same(scenario(stage, rank), expected, f"stage {stage}")
            assert_same(scenario(stage, rank, closes=True), expected, f"stage {stage}, closed")

    run(body)


@tried(
    "`disable_adapter` (a reference model, as for DPO) in the middle of training", stages="1, 2, 3"
)
def test_a_disabled_adapter_leaves_the_base_and_training_goes_on():
    def scenario(stage, rank):
        plain = logits_of(llama())
        model = adapted()
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank)
        with model.disable_adapter():
            assert torch.equal(logits_of(model), plain)
        assert not torch.equal(logits_of(model), plain)
        for number, batch in enumerate(batches(rank, 2, 2)):
            with torch.no_grad(), model.disable_adapter():
                reference = model(input_ids=batch).logits
            logits = forward(input_ids=batch).logits
            loss = (logits - reference.detach() - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[f"distance {number}"] = loss.detach()
        return found | weights(model)

    same_in_every_stage(scenario)


# --- saving and loading


SAVED = {
    "LoRA": adapted,
    "saved modules": KINDS["saved modules"],
    "DoRA": KINDS["DoRA"],
    "IA3": KINDS["IA3"],
    "prompt": KINDS["prompt"],
    "two adapters": adapted_twice,
}


def saved_files(path):
    return sorted(path.rglob("adapter_model.*"))


def check_saved(path, model):
    """What lies in `path` gives the model's logits again, on any rank."""
    dist.barrier()
    logits = logits_of(model)
    fresh = peft.PeftModel.from_pretrained(llama(), path)
    assert_same({"": logits_of(fresh)}, {"": logits}, f"logits of {path.name}")
    with gathered(model):
        expected = peft.get_peft_model_state_dict(model)
        assert_same(peft.get_peft_model_state_dict(fresh), expected, path.name)
    dist.barrier()


@tried(
    "`save_pretrained` (stage 3: inside of `zeroshard.gather(model)`), in safetensors or not: "
    "`PeftModel.from_pretrained` gives the same logits; adapters of every rank, no matter which "
    "rank saves",
    stages="1, 2, 3",
)
@pytest.mark.parametrize("kind", SAVED)
def test_saved_adapters_are_complete(kind, tmp_path):
    def body(rank, world_size):
        for stage in STAGES:
            for safe in (True, False) if kind == "saved modules" else (True,):
                model = SAVED[kind]()
                optimizer, forward = build(model, stage)
                train(forward, optimizer, rank)
                path = tmp_path / f"{stage}-{safe}"
                with zeroshard.gather(model):
                    if rank == 1:
                        model.save_pretrained(path, safe_serialization=safe)
                check_saved(path, model)
                for file in saved_files(path):
                    held = load_file(file) if safe else torch.load(file)
                    assert all(value.isfinite().all() for value in held.values())
                train(forward, optimizer, rank, first=2)

    run(body)


@tried(
    "`save_pretrained` outside of `zeroshard.gather`",
    stages="1, 2, 3",
    result="works in stages 1 and 2; stage 3 refuses and names `zeroshard.gather`, and leaves no "
    "file of adapters",
)
@pytest.mark.parametrize("safe", [True, False])
def test_sharded_adapters_are_saved_whole_or_not_at_all(safe, tmp_path):
    def body(rank, world_size):
        for stage in STAGES:
            model = KINDS["saved modules"]()
            optimizer, forward = build(model, stage)
            train(forward, optimizer, rank)
            path = tmp_path / str(stage)
            settings = {"is_main_process": rank == 0, "safe_serialization": safe}
            if stage < 3:
                model.save_pretrained(path, **settings)
                check_saved(path, model)
                continue
            if rank == 0:
                with pytest.raises(ShardTensorError, match=r"zeroshard\.gather"):
                    model.save_pretrained(path, **settings)
                assert not [file for file in saved_files(path) if file.suffix == ".safetensors"]
            train(forward, optimizer, rank, first=2)

    run(body)


@tried(
    "`zeroshard.export_weights(model, path)`, one unit at a time, instead of `save_pretrained`",
    stages="1, 2, 3",
)
@pytest.mark.parametrize("kind", ["LoRA", "saved modules", "DoRA", "IA3", "two adapters"])
def test_exported_adapters_are_those_that_peft_saves(kind, tmp_path):
    def body(rank, world_size):
        for stage in STAGES:
            model = SAVED[kind]()
            optimizer, forward = build(model, stage)
            train(forward, optimizer, rank)
            path, other = tmp_path / f"{stage}", tmp_path / f"{stage}-peft"
            zeroshard.export_weights(model, path)
            with zeroshard.gather(model):
                model.save_pretrained(other, is_main_process=rank == 0)
            check_saved(path, model)
            for file in saved_files(other):
                exported = load_file(path / file.relative_to(other))
                assert_same(exported, load_file(file), f"{file.name} in stage {stage}")

    run(body)


@tried(
    "`save_pretrained` of a prompt outside of `zeroshard.gather`: it is computed by a forward, so "
    "under stage 3 every rank has to call it",
    stages="1, 2, 3",
)
def test_a_prompt_is_saved_where_every_rank_calls(tmp_path):
    def body(rank, world_size):
        for stage in STAGES:
            model = KINDS["prompt"]()
            optimizer, forward = build(model, stage)
            train(forward, optimizer, rank)
            path = tmp_path / str(stage)
            model.save_pretrained(path, is_main_process=rank == 0)
            check_saved(path, model)

    run(body)


def multitask_prompt():
    config = peft.MultitaskPromptTuningConfig(num_virtual_tokens=4, num_tasks=2, **TASK)
    return adapted(config)


def prompt_that_is_not_trained():
    model = KINDS["prompt"]()
    model.peft_config["default"].inference_mode = True
    model.prompt_encoder.requires_grad_(False)
    model.get_submodule("base_model.model.layers.1").requires_grad_(True)
    return model


# PEFT takes their file from the parameters themselves, not from a state dict.
@tried(
    "multitask prompts, and prompts in inference mode: `save_pretrained`, whose file PEFT takes "
    "from the parameters themselves, outside and inside of `zeroshard.gather(model)`",
    stages="1, 2, 3",
)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", [multitask_prompt, prompt_that_is_not_trained])
def test_prompts_are_never_saved_as_placeholders(kind, inside, tmp_path):
    def body(rank, world_size):
        for stage in STAGES:
            model = kind()
            optimizer, _ = build(model, stage)
            more = {"task_ids": torch.tensor([0, 1])} if kind is multitask_prompt else {}
            for batch in batches(rank, 0, 2):
                model(input_ids=batch, labels=batch, **more).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            path = tmp_path / str(stage)
            with zeroshard.gather(model) if inside else contextlib.nullcontext():
                model.save_pretrained(path, is_main_process=rank == 0)
            dist.barrier()
            prompts = {n: v for n, v in weights(model).items() if n.startswith("prompt_encoder.")}
            held = load_file(path / "adapter_model.safetensors")
            assert len(held) == len(prompts)
            for name, value in held.items():
                assert any(torch.equal(value, other) for other in prompts.values()), name

    run(body)


@tried(
    "resuming: `from_pretrained(..., is_trainable=True)` and `load_optimizer` continue bit for bit",
    stages="1, 2, 3",
)
def test_training_resumes_from_saved_adapters(tmp_path):
    def body(rank, world_size):
        for stage in STAGES:
            model = KINDS["saved modules"]()
            optimizer, forward = build(model, stage)
            train(forward, optimizer, rank)
            path = tmp_path / str(stage)
            with zeroshard.gather(model):
                model.save_pretrained(path, is_main_process=rank == 0)
            save_optimizer(path / "optimizer", model, optimizer)
            dist.barrier()
            expected = train(forward, optimizer, rank, first=2) | weights(model)

            model = peft.PeftModel.from_pretrained(llama(), path, is_trainable=True)
            optimizer, forward = build(model, stage)
            load_optimizer(path / "optimizer", model, optimizer)
            found = train(forward, optimizer, rank, first=2) | weights(model)
            assert_same(found, expected, f"stage {stage}")

    run(body)


@tried("`set_peft_model_state_dict` into a model that is being trained", stages="1, 2, 3")
def test_loaded_adapters_take_effect():
    def scenario(stage, rank):
        model = KINDS["saved modules"]()
        with gathered(model):
            kept = peft.get_peft_model_state_dict(model)
            kept = {name: value.clone() for name, value in kept.items()}
        before = logits_of(model)
        optimizer, forward = build(model, stage)
        found = train(forward, optimizer, rank)
        assert not torch.equal(logits_of(model), before)
        peft.set_peft_model_state_dict(model, kept)
        assert torch.equal(logits_of(model), before)
        return found | train(forward, optimizer, rank, first=2) | weights(model)

    same_in_every_stage(scenario)
