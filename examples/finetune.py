"""Train a small language model under DDP + torch's AdamW or under zeroshard, and compare them.

    torchrun --standalone --nproc-per-node=2 examples/finetune.py --compare

The parameter groups, the loop and the clipping are one code for all stages: `assemble` is all that
knows which optimizer it is. docs/finetune.md has the options and more commands.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import cos, pi

import pretrained
import report
import torch
import torch.nn as nn
import torch.nn.functional as F
from corpus import ByteTokenizer, Corpus, read_text
from llama import Llama, LlamaConfig, generate
from options import Options, parse_options
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from world import Interrupt, World, joined_world

import zeroshard

Tokenizer = ByteTokenizer | pretrained.Tokenizer


def new_tokenizer(options: Options) -> Tokenizer:
    return ByteTokenizer() if options.model is None else pretrained.Tokenizer(options.model)


def new_model(options: Options) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(options.seed)
    if options.model is None:
        model = Llama(LlamaConfig(width=options.width, layers=options.layers))
    else:
        model = pretrained.load_model(options.model, options.torch_dtype)
    return model.to(options.torch_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    model: nn.Module
    forward: nn.Module  # the model, or DDP around it
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager]
    memory: Callable[[], dict[str, int]]


def assemble(model: nn.Module, stage: int, options: Options, world: World) -> Trainee:
    """The one place that knows which optimizer is used."""
    groups = parameter_groups(model)
    if stage > 0:
        optimizer = zeroshard.AdamW(
            groups,
            lr=options.lr,
            betas=(0.9, 0.95),
            model=model,
            stage=stage,
            mesh=world.mesh(options.mesh),
            precision=zeroshard.Precision(moments=options.moments),
        )
        return Trainee(
            model=model,
            forward=model,
            optimizer=optimizer,
            no_sync=optimizer.no_sync,
            memory=optimizer.memory,
        )
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
    replica, no_sync = model, nullcontext
    if world.size > 1:
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        no_sync = replica.no_sync
    return Trainee(
        model=model,
        forward=replica,
        optimizer=optimizer,
        no_sync=no_sync,
        memory=lambda: memory_of(model, optimizer),
    )


def parameter_groups(model: nn.Module) -> list[dict]:
    """Matrices decay, norms and biases do not."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def memory_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes of optimizer.memory(), counted on plain tensors. DDP with bucket views keeps the
    gradients in its buckets, so these are counted as gradients and nothing else is held.
    """
    moments = (s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    return {
        "parameters": storage_nbytes(model.parameters()),
        "gradients": storage_nbytes(p.grad for p in model.parameters() if p.grad is not None),
        "master": 0,
        "moments": storage_nbytes(moments),
        "communication": 0,
    }


def storage_nbytes(tensors: Iterable[Tensor]) -> int:
    storages = (t.untyped_storage() for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def warmup_and_cosine(
    steps: int, *, warmup: float = 0.1, floor: float = 0.1
) -> Callable[[int], float]:
    """Factor of the learning rate: up in a line for a tenth of the steps, down along a cosine."""
    rise = max(1, int(steps * warmup))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return floor + (1 - floor) * (1 + cos(pi * (step - rise) / max(1, steps - rise))) / 2

    return factor


def loss_of(forward: Callable, windows: Tensor) -> Tensor:
    logits = logits_of(forward, windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def logits_of(forward: Callable, tokens: Tensor) -> Tensor:
    output = forward(tokens)
    return getattr(output, "logits", output)  # transformers returns them among other things


@torch.no_grad()
def validate(model: nn.Module, windows: Tensor, options: Options, world: World) -> float:
    model.eval()
    losses = [
        loss_of(model, part.to(world.device)).item() * len(part)
        for part in windows.split(options.batch)
    ]
    model.train()
    return world.mean(sum(losses) / len(windows))[0]


def take_step(trainee: Trainee, micro_batches: Sequence[Tensor]) -> Tensor:
    """One optimizer step; the mean loss of this rank's windows."""
    trainee.optimizer.zero_grad()
    losses = []
    count = sum(map(len, micro_batches))
    for index, windows in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else trainee.no_sync():
            loss = loss_of(trainee.forward, windows) / (count / len(windows))
            loss.backward()
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 1.0)
    trainee.optimizer.step()
    return torch.stack(losses).sum()


def train(
    stage: int, corpus: Corpus, options: Options, world: World, interrupt: Interrupt
) -> tuple[nn.Module, report.Run]:
    gc.collect()  # what an earlier stage left in reference cycles must not count against this one
    model = new_model(options).to(world.device)
    trainee = assemble(model, stage, options, world)
    factor = warmup_and_cosine(options.steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainee.optimizer, factor)
    part = {"seq": options.seq, "rank": world.rank, "world_size": world.size}
    windows_per_step = options.windows(world.size)
    batches = corpus.batches(batch=windows_per_step, seed=options.seed, **part)
    held_out = corpus.validation(windows=options.validate, **part)
    run = report.Run(
        stage=stage,
        world_size=world.size,
        device=world.device.type,
        steps=options.steps,
        numel=sum(p.numel() for p in model.parameters()),
        validation_before=validate(model, held_out, options, world),
        nbytes=report.by_category(trainee.memory()),
    )
    kept = {"model": model, "optimizer": trainee.optimizer, "scheduler": scheduler}
    kept |= {"batches": batches, "run": run}
    folder, keep = options.checkpoint_dir, options.keep
    if folder is not None:
        try:
            zeroshard.load_checkpoint(folder, **kept, missing_ok=True)
        except zeroshard.errors.CheckpointError as error:  # on every rank
            sys.exit(f"finetune.py: {error}" if world.rank == 0 else 1)
    tokens = windows_per_step * options.seq * world.size
    with report.progress(run, tokens, shown=world.rank == 0) as show:
        for step in range(len(run.losses) + 1, options.steps + 1):
            windows = next(batches).to(world.device)
            started = time.perf_counter()
            loss = take_step(trainee, windows.split(options.batch))
            # The ranks notice Ctrl-C at different moments: they stop where all know of it.
            loss, pressed = world.mean(loss, interrupt.pressed)
            run.record(loss, time.perf_counter() - started, trainee.memory())
            scheduler.step()
            show()
            is_last = step == options.steps or pressed > 0
            if folder is not None and (is_last or step % options.checkpoint_every == 0):
                # Training goes on while it is written. Nothing would wait for the last one.
                zeroshard.save_checkpoint(folder, **kept, step=step, keep=keep, blocking=is_last)
            if pressed:
                return model, run
    run.validation_after = validate(model, held_out, options, world)
    return model, run


def sample(model: nn.Module, tokenizer: Tokenizer, options: Options) -> str:
    """The prompt, continued by the model."""
    model.eval()
    prompt = tokenizer.encode(options.prompt).to(next(model.parameters()).device)
    return tokenizer.decode(
        generate(
            lambda tokens: logits_of(model, tokens),
            prompt,
            count=options.sample,
            context=options.seq,
            seed=options.seed,
        )
    )


def main() -> int:
    options = parse_options()
    interrupt = Interrupt()
    tokenizer = new_tokenizer(options)
    try:
        corpus = Corpus.split(tokenizer.encode(read_text(options.corpus)), seq=options.seq)
    except ValueError as error:
        sys.exit(f"finetune.py: {error}")
    with joined_world() as world:
        runs, model = [], None
        for stage in options.stages:
            model = None  # frees the stage before
            model, run = train(stage, corpus, options, world, interrupt)
            runs.append(run)
            if not run.is_finished:
                break
        if world.rank == 0:
            report.conclude(runs, options)
        # Only the first rank writes text, so the others bring it every parameter first.
        sharded = run.stage > 0 and world.size > 1
        with zeroshard.gather(model) if sharded else nullcontext():
            if world.rank == 0 and run.is_finished and options.sample:
                interrupt.release()
                print(f"\n{sample(model, tokenizer, options)}")
    return 0 if run.is_finished else 130


if __name__ == "__main__":
    sys.exit(main())
