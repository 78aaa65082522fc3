"""The command line of finetune.py as one frozen object, checked before any rank waits."""

import os
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

import pretrained
import torch

# A pretrained model is two orders of magnitude larger than ours.
SMALL = {"steps": 200, "batch": 4, "seq": 96, "lr": 6e-4, "validate": 64, "sample": 240}
PRETRAINED = {"steps": 20, "batch": 1, "seq": 128, "lr": 5e-5, "validate": 8, "sample": 40}

AT_LEAST_1 = ("steps", "batch", "seq", "accumulate", "layers", "width", "validate")
AT_LEAST_1 += ("checkpoint_every", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    stage: int
    compare: bool
    steps: int
    batch: int  # windows per rank and micro-batch
    global_batch: int | None = None  # windows per step, over all ranks
    seq: int  # tokens per window
    lr: float  # the highest, after warm-up
    accumulate: int  # micro-batches per step
    dtype: str
    moments: str
    seed: int
    layers: int
    width: int
    validate: int  # held-out windows, over all ranks
    checkpoint_every: int  # steps
    keep: int  # checkpoints
    sample: int  # tokens generated at the end
    prompt: str
    mesh: tuple[int, int] | None = None  # replicas x shards
    corpus: tuple[Path, ...] = ()
    model: Path | None = None
    out: Path | None = None
    checkpoint_dir: Path | None = None

    def windows(self, world_size: int) -> int:
        """What one rank takes in a step, `batch` at once."""
        if self.global_batch is None:
            return self.accumulate * self.batch
        return self.global_batch // world_size

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    @property
    def stages(self) -> tuple[int, ...]:
        return (0, 1, 2, 3) if self.compare else (self.stage,)


def parse_options(arguments: list[str] | None = None) -> Options:
    parser = ArgumentParser(description="Train a small language model; compare ZeRO stages.")
    add = parser.add_argument
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="0: DDP + torch.optim.AdamW")
    add("--compare", action="store_true", help="stages 0 to 3 in turn from the same seed")
    add("--mesh", type=mesh_of, metavar="RxS", help="R replicas, each sharded over S ranks")
    add("--steps", type=int, help=default_of("steps"))
    add("--batch", type=int, help=f"windows per rank and micro-batch {default_of('batch')}")
    add("--global-batch", type=int, metavar="N", help="windows per step, over all ranks")
    add("--seq", type=int, help=f"tokens per window {default_of('seq')}")
    add("--lr", type=float, help=f"learning rate after warm-up {default_of('lr')}")
    add("--accumulate", type=int, default=1, help="micro-batches per step")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the parameters")
    add("--moments", choices=("fp32", "bf16", "int8"), default="fp32", help="of zeroshard's AdamW")
    add("--seed", type=int, default=0)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256, help="a multiple of 64")
    add("--validate", type=int, help=f"windows held out, over all ranks {default_of('validate')}")
    add("--sample", type=int, help=f"tokens generated at the end {default_of('sample')}")
    add("--prompt", default="The ", help="what the generated text begins with")
    add("--corpus", type=Path, nargs="+", default=(), metavar="FILE", help="text to train on")
    add("--model", type=Path, metavar="DIR_OR_GGUF", help="a pretrained model for transformers")
    add("--out", type=Path, metavar="DIR", help="write results.json and results.png there")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="save there, and go on from there")
    add("--checkpoint-every", type=int, default=50, metavar="STEPS", help="(default 50)")
    add("--keep", type=int, default=2, metavar="N", help="checkpoints that stay (default 2)")
    given = vars(parser.parse_args(arguments))
    sizes = SMALL if given["model"] is None else PRETRAINED
    chosen = {name: value for name, value in given.items() if value is not None}
    options = Options(**{**sizes, **chosen, "corpus": tuple(given["corpus"])})
    if problem := problem_of(options):
        parser.error(problem)
    return options


def mesh_of(text: str) -> tuple[int, int]:
    """2x4 -> (2, 4): replicas and shards."""
    replicas, shards = text.split("x")
    return int(replicas), int(shards)


def default_of(name: str) -> str:
    return f"(default {SMALL[name]}, with --model {PRETRAINED[name]})"


def problem_of(options: Options) -> str | None:
    """What makes a run impossible, said before any rank waits for another."""
    for name in AT_LEAST_1:
        if getattr(options, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}"
    if options.sample < 0 or not options.prompt:
        return "--sample must not be negative, and --prompt not empty"
    if options.checkpoint_dir is not None and 0 in options.stages:
        return "--checkpoint-dir is for one run of stage 1, 2 or 3, not of stage 0 or --compare"
    if options.checkpoint_dir is not None and options.checkpoint_dir.is_file():
        return f"--checkpoint-dir: {options.checkpoint_dir} is a file"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if options.global_batch is not None:
        if options.accumulate > 1:
            return "--global-batch says how much is accumulated: leave --accumulate out"
        if options.global_batch < 1 or options.global_batch % world_size:
            return (
                "--global-batch must be a multiple of the number of ranks, "
                f"got {options.global_batch} for {world_size}"
            )
    if options.mesh is not None and options.mesh[0] * options.mesh[1] != world_size:
        replicas, shards = options.mesh
        return f"--mesh {replicas}x{shards} is for {replicas * shards} ranks, got {world_size}"
    if options.width % 64:
        return f"--width must be a multiple of 64, got {options.width}"
    for path in options.corpus:
        if not path.is_file():
            return f"--corpus: there is no file {path}"
    if options.model is None:
        return None
    if not options.model.exists():
        return f"--model: there is no {options.model}"
    if missing := pretrained.missing_packages(options.model):
        return f"--model {options.model} needs more packages: pip install {' '.join(missing)}"
    return None
