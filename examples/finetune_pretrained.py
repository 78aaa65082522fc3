"""A pretrained model from the meta device to exported weights, never whole on any rank.

    torchrun --standalone --nproc-per-node=2 examples/finetune_pretrained.py --model DIR_OR_GGUF

Built on the meta device, its weights streamed into stage 3, fine-tuned with activation
checkpointing, exported unit by unit, and read back by transformers alone, which generates with it.
docs/pretrained.md has the commands and what a run printed.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
import torch.distributed as dist
from corpus import Corpus, read_text
from pretrained import Tokenizer, load_model, one_voice
from world import World, joined_world

import zeroshard


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder, or a .gguf file")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--corpus", type=Path, nargs="*", default=[], help="text files")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2, help="windows per rank")
    parser.add_argument("--seq", type=int, default=128, help="tokens per window")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--prompt", default="The with statement is used to")
    parser.add_argument("--sample", type=int, default=30, help="tokens to generate")
    return parser.parse_args()


def say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def converted(source: Path, out: Path, world: World) -> Path:
    """A folder of safetensors: `source`, or what the first rank makes of a .gguf file, once."""
    if source.suffix != ".gguf":
        return source
    folder = out / "converted"
    if world.rank == 0 and not (folder / "config.json").exists():
        save_plain(load_model(source, torch.float32), folder)
        Tokenizer(source).save(folder)
    if world.size > 1:
        dist.barrier()
    return folder


def save_plain(model: torch.nn.Module, folder: Path) -> None:
    """As `save_pretrained`, which refuses what came from a .gguf file, though it is plain fp32."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)


def build(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The architecture alone: no element of it is in memory."""
    with one_voice(), torch.device("meta"):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    model.activation_checkpointing_enable()
    return model.train()


def anonymous_mib() -> float:
    """Memory that this process has for itself now; mapped files are not counted."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return float("nan")


def train(model: torch.nn.Module, optimizer, corpus: Corpus, args, world: World) -> None:
    batches = corpus.batches(
        batch=args.batch, seq=args.seq, seed=0, rank=world.rank, world_size=world.size
    )
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        window = next(batches)
        loss = model(input_ids=window, labels=window).loss  # transformers shifts the labels
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        (mean,) = world.mean(loss.detach())
        say(world, f"step {step:3}  loss {mean:.4f}  {time.perf_counter() - started:.1f} s")


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, corpus: Corpus, args, world: World) -> float:
    """Over one window of each rank, from the text that is not trained on."""
    model.eval()
    start = world.rank * (args.seq + 1)
    window = corpus.held_out[start : start + args.seq + 1][None]
    (loss,) = world.mean(model(input_ids=window, labels=window).loss)
    model.train()
    return loss


def generate(folder: Path, tokenizer: Tokenizer, args) -> str:
    """What plain transformers says with the weights in `folder`."""
    with torch.no_grad():
        model = load_model(folder, torch.float32)
        prompt = tokenizer.encode(args.prompt)[None]
        tokens = model.generate(prompt, max_new_tokens=args.sample, do_sample=False, use_cache=True)
    return tokenizer.decode(tokens[0])


def main() -> None:
    args = parse()
    with joined_world() as world:
        folder = converted(args.model, args.out, world)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
        tokenizer = Tokenizer(folder)
        corpus = Corpus.split(tokenizer.encode(read_text(tuple(args.corpus))), seq=args.seq)

        before = anonymous_mib()
        model = build(folder, dtype)
        optimizer = zeroshard.AdamW(model, lr=args.lr, betas=(0.9, 0.95), stage=3)
        numel = sum(parameter.numel() for parameter in model.parameters())
        say(world, f"{numel / 1e6:.1f} M parameters, {world.size} ranks, stage 3, {args.dtype}")
        started = time.perf_counter()
        zeroshard.load_weights(model, folder)
        held = sum(optimizer.memory()[name] for name in ("parameters", "master", "moments"))
        say(
            world,
            f"loaded in {time.perf_counter() - started:.1f} s; this rank keeps "
            f"{held / 2**20:.0f} MiB of parameters and state, and its memory grew by "
            f"{anonymous_mib() - before:.0f} MiB",
        )
        say(world, f"held-out loss {held_out_loss(model, corpus, args, world):.4f}")
        train(model, optimizer, corpus, args, world)
        say(world, f"held-out loss {held_out_loss(model, corpus, args, world):.4f}")

        started = time.perf_counter()
        zeroshard.export_weights(model, args.out / "exported", overwrite=True)
        say(world, f"exported in {time.perf_counter() - started:.1f} s to {args.out / 'exported'}")
    if world.rank == 0:
        print("before:", generate(folder, tokenizer, args))
        print("after: ", generate(args.out / "exported", tokenizer, args))


if __name__ == "__main__":
    main()
