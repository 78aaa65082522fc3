"""torch itself: what is asked and logged of gradients, and the hooks that watch them."""

import math

import pytest
import torch
import torch.distributed as dist
from consumers import Consumer, tried
from ranks import run
from torch import nn
from torch_script import STAGES, Reader, same_as_ddp, start

from zeroshard.errors import ShardTensorError

CONSUMER = Consumer("PyTorch", "torch", use="`zeroshard.AdamW(model, lr=...)`, without DDP")

ALL = "1, 2, 3"
inf = math.inf


def wide():
    """Matrices of several blocks of 256 elements, so that both ranks hold a part of each."""
    return Reader(width=40, depth=1)


# Ours adds blocks of 256 elements in fp32 and the rest in fp64; torch adds 32 chains in parallel,
# here of at most 256 * 40 / 32 = 320 elements. Each addition rounds by 2**-24 of the sum at most,
# so that either is within 320 * 2**-24 of the sum of magnitudes.
SUMMED = 2e-5

# What scripts, callbacks and dashboards ask of p.grad, and whether the answer may be rounded
# otherwise than on the whole tensor.
ASKED = {
    "norm().item()": (lambda g: g.norm().item(), True),
    "data.norm(2)": (lambda g: g.detach().data.norm(2), True),
    "norm(p=1)": (lambda g: g.norm(p=1), True),
    "norm(inf)": (lambda g: g.norm(inf), False),
    "torch.norm": (lambda g: torch.norm(g, 2.0), True),
    "linalg.vector_norm": (lambda g: torch.linalg.vector_norm(g), True),
    "linalg.matrix_norm": (lambda g: torch.linalg.norm(g), True),
    "float().norm()": (lambda g: g.float().norm(), True),
    "mean": (lambda g: g.mean(), True),
    "mean of a power": (lambda g: g.pow(2).mean().sqrt(), True),
    "sum of squares": (lambda g: (g * g).sum(), True),
    "abs().mean()": (lambda g: g.abs().mean().item(), True),
    "abs().max()": (lambda g: g.abs().max(), False),
    "min and max": (lambda g: torch.stack([g.min(), g.max()]), False),
    "amax": (lambda g: g.amax(), False),
    "isfinite().all()": (lambda g: torch.isfinite(g).all(), False),
    "isnan().any()": (lambda g: torch.isnan(g).any().item(), False),
    "number of zeros": (lambda g: (g == 0).sum(), False),
    "share of zeros": (lambda g: (g == 0).float().mean(), False),
    "count_nonzero": (lambda g: torch.count_nonzero(g), False),
    "share of a sign": (lambda g: (g > 0).float().mean(), False),
    "cpu().abs().max()": (lambda g: g.cpu().abs().max(), False),
    "numel, bytes, shape": (lambda g: [g.numel(), g.element_size(), *g.shape, len(g)], False),
    "dtype and device": (lambda g: [g.dtype, g.device, g.type(), g.is_sparse, g.ndim], False),
    "a formatted norm": (lambda g: float(f"{g.norm():.6e}"), True),
}

REFUSED = {
    "std": lambda g: g.std(),
    "var": lambda g: g.var(),
    "std_mean": lambda g: torch.std_mean(g),
    "median": lambda g: g.median(),
    "quantile": lambda g: g.quantile(0.9),
    "histc": lambda g: g.histc(bins=64),
    "histogram": lambda g: torch.histogram(g, 64),
    "numpy": lambda g: g.cpu().numpy(),
    "tolist": lambda g: g.tolist(),
    "flatten": lambda g: g.flatten(),
    "view": lambda g: g.view(-1),
    "norm of rows": lambda g: g.norm(dim=-1),
    "sum of columns": lambda g: g.sum(0),
    "the first element": lambda g: g[0],
    "a mask": lambda g: g[g > 0],
    "topk": lambda g: g.topk(1),
    "argmax": lambda g: g.argmax(),
    "singular values": lambda g: torch.linalg.svdvals(g),
    "cat": lambda g: torch.cat([g, g]),
    "stack": lambda g: torch.stack([g, g]),
    "cosine similarity": lambda g: torch.cosine_similarity(g, g, dim=0),
    "a product with the parameter's shape": lambda g: g * torch.ones(g.shape),
    "an update by hand": lambda g: torch.ones(g.shape).add_(g, alpha=-0.1),
    "noise": lambda g: g.add_(torch.randn_like(g)),
    "all_reduce by hand": lambda g: dist.all_reduce(g),
}


def asked_of(gradients):
    return {
        (name, what): (ask(grad), rounded)
        for name, grad in gradients.items()
        for what, (ask, rounded) in ASKED.items()
    }


@tried("What is logged of `p.grad`: norms, mean, extremes, finiteness, zeros, shapes", stages=ALL)
def test_what_is_logged_of_gradients_is_that_of_the_whole_gradient():
    def body(rank, world_size):
        reference = start(0, make=wide)
        reference.backward(rank, 0)
        expected = asked_of({n: p.grad for n, p in reference.model.named_parameters()})
        for stage in STAGES:
            script = start(stage, make=wide)
            script.backward(rank, 0)
            found = asked_of({n: p.grad for n, p in script.model.named_parameters()})
            for key, (value, rounded) in expected.items():
                got = found[key][0]
                where = f"stage {stage}: {key}"
                if rounded:
                    size = float(reference.model.get_parameter(key[0]).grad.abs().mean())
                    wanted = pytest.approx(float(value), rel=SUMMED, abs=SUMMED * size)
                    assert float(got) == wanted, where
                elif isinstance(value, torch.Tensor):
                    assert type(got) is torch.Tensor, where
                    assert torch.equal(got, value), where
                else:
                    assert got == value, where

    run(body)


@tried(
    "What needs single elements of `p.grad`: `std`, histograms, rows, `numpy()`",
    stages=ALL,
    result="refused: the error names `p.grad.full_tensor()`, which answers",
)
def test_what_a_slice_cannot_say_is_refused_and_the_remedy_answers():
    def body(rank, world_size):
        reference = start(0, make=wide)
        reference.backward(rank, 0)
        for stage in STAGES:
            script = start(stage, make=wide)
            script.backward(rank, 0)
            matrices = [(n, p) for n, p in script.model.named_parameters() if p.ndim == 2]
            for name, p in matrices:
                for what, ask in REFUSED.items():
                    where = f"stage {stage}: {what} of {name}"
                    with pytest.raises(ShardTensorError) as caught:
                        pytest.fail(f"{where} is {ask(p.grad)}")
                    assert ".full_tensor()" in str(caught.value), where
                whole, wanted = p.grad.full_tensor(), reference.model.get_parameter(name).grad
                assert torch.equal(whole.histc(bins=64), wanted.histc(bins=64))
                assert torch.equal(whole.std(), wanted.std())

    run(body)


@tried("Loops over layers that log norms, `torch.nn.utils.get_total_norm`", stages=ALL)
def test_norms_by_layer_make_up_the_global_norm():
    def norms(model):
        by_layer = {}
        for name, p in model.named_parameters():
            if p.grad is not None:
                layer = name.rsplit(".", 1)[0]
                by_layer[layer] = by_layer.get(layer, 0.0) + p.grad.data.norm(2).item() ** 2
        by_layer = {layer: square**0.5 for layer, square in by_layer.items()}
        stacked = torch.stack([p.grad.detach().norm(2) for p in model.parameters()]).norm(2)
        by_torch = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        return {**by_layer, "all": stacked.item(), "by torch": by_torch.item()}

    def body(rank, world_size):
        reference = start(0, make=wide)
        reference.backward(rank, 0)
        expected = norms(reference.model)
        for stage in STAGES:
            script = start(stage, make=wide)
            script.backward(rank, 0)
            assert norms(script.model) == pytest.approx(expected, rel=SUMMED), f"stage {stage}"

    run(body)


@tried("Watchers: histograms of gradients from hooks on parameters, as W&B's `watch`", stages=ALL)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_parameters_watch_gradients_as_under_ddp(when):
    """`watch` hooks tensors: there a gradient is still this rank's own and whole, as under DDP."""

    def body(rank, world_size):
        def play(script):
            noted = {}

            def watch():
                for name, p in script.model.named_parameters():
                    p.register_hook(lambda grad, name=name: look(name, grad))

            def look(name, grad):
                flat = grad.data.reshape(-1)
                assert type(flat) is torch.Tensor
                noted[f"{name} {len(noted)}"] = torch.histc(flat[flat.isfinite()], bins=16)

            watch()
            script.train(rank, range(2))
            assert len(noted) == 2 * len(list(script.model.parameters()))
            return noted

        same_as_ddp(play)

    def before(rank, world_size):
        seen = {}

        def watched():
            model = Reader()
            for name, p in model.named_parameters():
                p.register_hook(lambda grad, name=name: seen.update({name: grad.histc(bins=16)}))
            return model

        def play(script):
            script.train(rank, range(2))
            noted = dict(seen)
            seen.clear()
            return noted

        same_as_ddp(play, make=watched)

    run(before if when == "before" else body)


@tried("Hooks on modules and on accumulation; a hook that scales a gradient", stages=ALL)
def test_hooks_of_every_kind_see_and_change_what_they_do_under_ddp():
    def body(rank, world_size):
        def play(script):
            noted = {}

            def note(what, *tensors):
                for tensor in tensors:
                    if tensor is not None:
                        assert type(tensor) is torch.Tensor, what
                        noted[f"{len(noted)} {what}"] = tensor.detach().clone()

            blocks = script.model.blocks
            blocks[0].register_full_backward_hook(
                lambda module, inputs, outputs: note("into and out of a block", *inputs, *outputs)
            )
            blocks[1].widen.register_full_backward_hook(
                lambda module, inputs, outputs: note("of a layer", *inputs, *outputs)
            )
            blocks[1].narrow.weight.register_hook(lambda grad: grad * 0.5)
            blocks[0].norm.bias.register_hook(lambda grad: note("of a bias", grad))
            for step in range(3):
                script.train(rank, [step])
            return noted

        same_as_ddp(play)

    run(body)


@tried("`register_post_accumulate_grad_hook` that reads and changes `p.grad`", stages=ALL)
def test_hooks_after_accumulation_have_the_gradient_of_their_rank_as_under_ddp():
    def body(rank, world_size):
        def play(script):
            noted = {}

            def look(p, name):
                noted[f"{len(noted)} {name}"] = p.grad.clone()
                p.grad.mul_(0.5)

            for name, p in script.model.named_parameters():
                p.register_post_accumulate_grad_hook(lambda p, name=name: look(p, name))
            script.train(rank, range(2))
            return noted

        same_as_ddp(play)

    run(body)


@tried("A gradient that is kept (`grads.append(p.grad)`) over the next steps", stages=ALL)
def test_a_gradient_that_is_kept_keeps_its_values():
    def body(rank, world_size):
        def play(script):
            kept = []
            for step in range(4):
                script.backward(rank, step)
                kept.append({name: p.grad for name, p in script.model.named_parameters()})
                script.optimizer.step()
                script.optimizer.zero_grad()
            noted = {}
            for step, grads in enumerate(kept):
                for name, grad in grads.items():
                    whole = grad if script.stage == 0 else grad.full_tensor()
                    noted[f"step {step}: {name}"] = whole.clone()
            return noted

        same_as_ddp(play)

    run(body)
