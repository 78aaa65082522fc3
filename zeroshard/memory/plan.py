"""`plan`: a model, the user's choices and a batch -> a Report, by arithmetic alone."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..config import Options, Precision
from ..errors import ConfigError
from ..layout import ITEMSIZE
from .activations import Activations, activations_of, has_mask, keeps_scores
from .architectures import Architecture
from .models import ModelShape, shape_of
from .moments import CHECKPOINTING, Step, after_forward, moments_of
from .schema import CATEGORIES, POINTS, Report
from .states import Planned, States

__all__ = ["Batch", "plan", "report_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one backward is of.

    Attributes:
        seq: tokens of a sequence.
        micro_batch: sequences of a backward on one rank.
        checkpointing: "none", or "block": every block is recomputed in backward.
    """

    seq: int
    micro_batch: int = 1
    checkpointing: str = "none"

    def __post_init__(self) -> None:
        for name in ("seq", "micro_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        check_checkpointing(self.checkpointing)


def check_checkpointing(checkpointing: str) -> None:
    """Raise if this is no way to checkpoint activations."""
    if checkpointing not in CHECKPOINTING:
        raise ConfigError(
            f"checkpointing must be one of {', '.join(CHECKPOINTING)}; got {checkpointing!r}"
        )


def plan(
    model: str | Path | nn.Module | Architecture | ModelShape,
    *,
    world_size: int = 1,
    stage: int = 2,
    precision: Precision | None = None,
    seq: int | None = None,
    micro_batch: int = 1,
    checkpointing: str = "none",
    dtype: str | None = None,
    bucket_mb: float = 25,
    reshard_after_forward: bool = True,
    units: Sequence[type[nn.Module] | str] | None = None,
    transport: str = "nccl",
    process_group: bool | None = None,
    rank: int = 0,
) -> Report:
    """What one rank will hold, without building anything: no weights, no device, no network.

    States (parameters, gradients, masters, moments) are exact, padding included. Activations are
    those of transformers' decoders; see docs/memory.md.

    Args:
        model: a preset's name ("llama-3-8b"), a path to a `config.json`, "package.module:function"
            that returns a module, or a module, which may be on the meta device.
        world_size: ranks that share the states.
        stage: 1, 2 or 3.
        precision: see `Precision`.
        seq: tokens of a sequence. None: states and gradients only.
        micro_batch: sequences of one backward on one rank.
        checkpointing: "none", or "block": every block is recomputed in backward.
        dtype: of the parameters: "bf16", "fp16" or "fp32". None: bf16, and for a module its own.
        bucket_mb: see `zeroshard.AdamW`, as the next two.
        reshard_after_forward: stage 3: whether units are freed between forward and backward.
        units: stage 3: what is gathered together; for modules.
        transport: "nccl", or "gloo" for ranks on CPUs.
        process_group: whether there is one. None: with more than one rank.
        rank: whose memory it is; ranks differ by padding, and by a few buffers with gloo.

    Raises:
        ConfigError: there is no such model, or numbers are impossible.
    """
    began = time.monotonic()
    options = Options(
        stage=stage,
        bucket_mb=bucket_mb,
        precision=precision if precision is not None else Precision(),
        reshard_after_forward=reshard_after_forward,
        units=None if units is None else tuple(units),
    )
    # Checked without a sequence too.
    batch = Batch(
        seq=1 if seq is None else seq, micro_batch=micro_batch, checkpointing=checkpointing
    )
    planned = Planned(
        shape=shape_of(model, dtype=dtype, units=units),
        options=options,
        world_size=world_size,
        process_group=world_size > 1 if process_group is None else process_group,
        transport=transport,
        rank=rank,
    )
    return report_of(States(planned), None if seq is None else batch, began=began)


def report_of(states: States, batch: Batch | None, *, began: float | None = None) -> Report:
    """The report of a batch on planned states.

    Args:
        states: what is planned.
        batch: of a backward; None: states and gradients only.
        began: when the planning began, by `time.monotonic`.

    Raises:
        ConfigError: the batch is impossible for the model.
    """
    step = Step(
        states=states,
        activations=_activations(states.planned, batch),
        checkpoints=batch is not None and batch.checkpointing == "block",
    )
    moments = list(moments_of(step))
    points = {**states.points, "after_forward": after_forward(step)}
    points = {name: points[name] for name in POINTS}
    everything = [*points.values(), *(moment.categories for moment in moments)]
    maxima = {
        name: max(held.get(name, 0) for held in everything)
        for name in CATEGORIES
        if any(held.get(name) for held in everything)
    }
    return Report(
        source="plan",
        configuration=_configuration(states.planned, batch),
        peak=max(moments, key=lambda moment: moment.total),
        points=points,
        maxima=maxima,
        notes=_notes(states, batch, step.activations),
        seconds=None if began is None else time.monotonic() - began,
    )


def _dtypes(planned: Planned) -> set[str]:
    cast = planned.options.precision.param_dtype is not None
    found = {spec.dtype for spec in planned.shape.trained}
    return {"bfloat16" if cast and dtype == "float32" else dtype for dtype in found}


def _activations(planned: Planned, batch: Batch | None) -> Activations | None:
    architecture, dtypes = planned.shape.architecture, _dtypes(planned)
    if batch is None or architecture is None or len(dtypes) > 1:
        return None
    if 0 < architecture.positions < batch.seq:
        raise ConfigError(
            f"{planned.shape.name} has {architecture.positions} learned positions, so that a "
            f"sequence of {batch.seq} tokens is impossible: pass at most {architecture.positions}"
        )
    (dtype,) = dtypes
    itemsize = ITEMSIZE[dtype]
    return activations_of(
        architecture,
        itemsize,
        seq=batch.seq,
        micro_batch=batch.micro_batch,
        on_gpu=planned.transport != "gloo",
    )


def _configuration(planned: Planned, batch: Batch | None) -> Mapping[str, Any]:
    precision = planned.options.precision
    values: dict[str, Any] = {
        "model": planned.shape.name,
        "parameters": planned.shape.numel,
        "dtype": ", ".join(sorted(_dtypes(planned))),
        "world_size": planned.world_size,
        "stage": asdict(planned.options)["stage"],
        "bucket_mb": planned.options.bucket_mb,
        "master": precision.master,
        "moments": precision.moments,
        "reduce": precision.reduce,
        "transport": planned.transport if planned.world_size > 1 else "none",
    }
    if batch is not None:
        values |= {
            "seq": batch.seq,
            "micro_batch": batch.micro_batch,
            "checkpointing": batch.checkpointing,
        }
    return values


def _notes(states: States, batch: Batch | None, activations: Activations | None) -> list[str]:
    shape = states.planned.shape
    notes = list(shape.notes)
    if batch is None:
        notes.append("No sequence length was given, so that activations are left out.")
    elif activations is None and not notes:
        notes.append("Activations are known for models of one dtype only, and are left out.")
    elif activations is not None:
        notes.append(
            "Activations are those of transformers' decoders with a flash attention kernel, "
            "without an attention mask; the loss is computed from labels by the model, whose "
            "output is dropped before backward."
        )
    architecture = shape.architecture
    if activations is not None and architecture is not None and batch is not None:
        on_gpu = states.planned.transport != "gloo"
        if has_mask(architecture, seq=batch.seq, on_gpu=on_gpu):
            notes.append(
                f"The attention slides over {architecture.window} tokens: for longer sequences "
                "transformers makes a mask, which grows with the square of the sequence."
            )
        itemsize = ITEMSIZE[next(iter(_dtypes(states.planned)))]
        if keeps_scores(architecture, itemsize, seq=batch.seq, on_gpu=on_gpu):
            notes.append(
                "In fp32 a GPU has no fused kernel for heads that share keys: attention keeps all "
                "scores, which grow with the square of the sequence."
            )
        if architecture.experts:
            notes.append("Experts are computed by grouped matrix products.")
    if states.planned.process_group:
        notes.append(
            "Communication is that of gradients that come in the reverse order of the module's."
        )
    notes.append(
        "The peak is of what is requested: the driver's memory, and what torch's allocator "
        "reserves beside, come on top."
    )
    return notes
