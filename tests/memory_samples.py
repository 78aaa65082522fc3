"""Reports as training makes them: a forward and a backward through blocks, and a step."""

from zeroshard.memory.schema import Peak, Report, Sample

MIB = 2**20


class Recorder:
    """Counts what is held, and keeps a sample of every change."""

    def __init__(self, **held):
        self.held = dict(held)
        self.samples = []

    def change(self, phase, where, **nbytes):
        for name, change in nbytes.items():
            self.held[name] = self.held.get(name, 0) + change
        self.samples.append(
            Sample(
                at=len(self.samples),
                phase=phase,
                where=where,
                categories={name: held for name, held in self.held.items() if held},
            )
        )


def sawtooth(stage=3, world_size=8, blocks=32, events=8, source="simulate", **configuration):
    """One rank's report of a model of `blocks` blocks, in a step of about 4 * blocks * events."""
    unit = 417 * MIB + 7
    whole = unit * blocks
    share = whole // world_size
    r = Recorder(
        parameters=share if stage == 3 else whole,
        buffers=MIB // 2 + 3,
        master=share,
        moments=4 * share,
        bookkeeping=12345,
    )
    r.change("data", "", inputs=64 * 1024)
    saved = 310 * MIB
    held_back = unit if stage == 3 else 0
    for block in range(blocks):
        forward(r, f"layers.{block}", events, saved, held_back)
    head = ("forward", "lm_head")
    for _ in range(3):
        r.change(*head, logits_and_loss=501 * MIB)
    r.change("backward", "lm_head", temporary=501 * MIB)
    r.change("backward", "lm_head", temporary=-501 * MIB, logits_and_loss=-1503 * MIB)
    part = share // blocks
    kept = unit if stage == 1 else part  # of a gradient, until backward ends
    for block in reversed(range(blocks)):
        backward(r, f"layers.{block}", events, saved, held_back, unit, kept)
    if kept != part:
        r.change("reduce", "", gradients=blocks * (part - kept))
    r.change("step", "", temporary=share // 2)
    r.change("step", "", temporary=-(share // 2))
    r.change("gather", "", communication=unit)
    r.change("gather", "", communication=-unit)
    highest = max(r.samples, key=lambda sample: sample.total)
    maxima = {n: max(s.categories.get(n, 0) for s in r.samples) for n in r.held}
    return Report(
        source=source,
        configuration={
            "model": "llama-2-7b",
            "stage": stage,
            "world_size": world_size,
            **configuration,
        },
        peak=Peak(
            of="requested",
            step=2,
            phase=highest.phase,
            where=highest.where,
            categories=highest.categories,
        ),
        points={
            "constructed": {n: r.held[n] for n in ("parameters", "master", "moments")},
            "after_step": dict(r.samples[-1].categories),
        },
        maxima=maxima,
        timeline=r.samples,
        notes=["Attention is counted as CUDA's flash kernel makes it."],
        seconds=3.25,
    )


def forward(r, where, events, saved, held_back):
    if held_back:
        r.change("forward", where, unsharded_parameters=held_back)
    for event in range(events):
        r.change("forward", where, temporary=(35 + event) * MIB)
        r.change("forward", where, activations=saved // events)
        r.change("forward", where, temporary=-(35 + event) * MIB)
    if held_back:
        r.change("forward", where, unsharded_parameters=-held_back)


def backward(r, where, events, saved, held_back, unit, kept):
    if held_back:
        r.change("backward", where, unsharded_parameters=held_back)
    for _ in range(events):
        r.change("backward", where, temporary=90 * MIB)
        r.change("backward", where, activations=-(saved // events))
        r.change("backward", where, temporary=-90 * MIB)
    r.change("backward", where, gradients=unit)
    r.change("reduce", where, communication=unit)
    r.change("reduce", where, communication=-unit, gradients=kept - unit)
    if held_back:
        r.change("backward", where, unsharded_parameters=-held_back)
