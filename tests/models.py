"""Small models, their references in plain torch, and comparisons that say what differs.

Two kinds of model, for two kinds of oracle. `Letters` is a realistic network: at two ranks its
training is compared bit for bit with DDP. `LinearForm` has gradients that are given integers, so
every order of summation gives the same bits and any number of ranks can be compared bit for bit
with one plain AdamW on the averaged gradient. `SplitForm` is the same with units for stage 3.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard

VOCABULARY = 31


class Feed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width + 3)
        self.narrow = nn.Linear(2 * width + 3, width, bias=False)

    def forward(self, x):
        return x + self.narrow(F.silu(self.widen(self.norm(x))))


class Experts(nn.Module):
    """Three experts in one 3-D parameter, mixed by a soft gate."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.weight = nn.Parameter(0.2 * torch.randn(3, width, width))

    def forward(self, x):
        each = torch.einsum("btw,ewv->btev", x, self.weight)
        return x + (each * self.gate(x).softmax(-1).unsqueeze(-1)).sum(-2)


class Letters(nn.Module):
    """A next-letter model: tied weights, a 3-D and a 0-dim parameter, sizes that divide nothing."""

    def __init__(self, width=18):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Feed(width), Experts(width), Feed(width)])
        self.head = nn.Linear(width, VOCABULARY)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, letters):
        x = self.embed(letters)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.gain


def letters(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return Letters().to(dtype)


def letter_batches(rank, count=6):
    generator = torch.Generator().manual_seed(1000 + rank)
    return [torch.randint(VOCABULARY, (3, 8), generator=generator) for _ in range(count)]


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def decay_groups(model):
    """The two param_groups of most training scripts: decay for matrices, none for the rest."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr": 4e-3},
    ]


def train(model, optimizer, batches, *, forward=None, backwards=1):
    for batch in batches:
        for _ in range(backwards):
            loss_of(forward or model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def train_with_ddp(rank, *, steps=5, groups=decay_groups, **options):
    """The reference: DDP and torch's fused AdamW."""
    model = letters()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(groups(model), **{"lr": 1e-2, "fused": True, **options})
    return train(model, optimizer, letter_batches(rank)[:steps], forward=replica)


class LinearForm(nn.Module):
    """The sum of <parameter, coefficient>: the gradient of a parameter is its coefficient."""

    def __init__(self, shapes, dtype=torch.float32, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator)
            setattr(self, name, nn.Parameter(values.to(dtype)))

    def forward(self, coefficients):
        terms = [(getattr(self, name).float() * c).sum() for name, c in coefficients.items()]
        return torch.stack(terms).sum()


class Part(LinearForm):
    """Adds its terms to what it is given, so that every rank's backward goes through it."""

    def forward(self, x, coefficients):
        terms = [(getattr(self, name).float() * c).sum() for name, c in coefficients.items()]
        return torch.stack([x, *terms]).sum()


class SplitForm(nn.Module):
    """The parameters of a `LinearForm` by twos in parts, which are units, the last two in the root.

    Every parameter has the values it has in a `LinearForm` and can be read as an attribute of this
    module too; its name begins with that of its part.
    """

    def __init__(self, shapes, dtype=torch.float32, seed=0):
        super().__init__()
        values = dict(LinearForm(shapes, dtype, seed).named_parameters())
        names = list(shapes)
        pairs = [names[at : at + 2] for at in range(0, len(names) - 2, 2)]
        self.parts = nn.ModuleList(Part({}) for _ in pairs)
        for part, pair in zip(self.parts, pairs, strict=True):
            for name in pair:
                setattr(part, name, values.pop(name))
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            for part in super().__getattr__("parts"):
                if name in part._parameters:
                    return part._parameters[name]
            raise

    def forward(self, coefficients):
        x = torch.zeros((), requires_grad=True)
        for index, part in enumerate(self.parts):
            prefix = f"parts.{index}."
            own = {n[len(prefix) :]: c for n, c in coefficients.items() if n.startswith(prefix)}
            x = part(x, own)
        rest = {name: c for name, c in coefficients.items() if "." not in name}
        terms = [(getattr(self, name).float() * c).sum() for name, c in rest.items()]
        return torch.stack([x, *terms]).sum()


def attribute(name):
    """The name of a parameter without that of its module."""
    return name.rpartition(".")[2]


def name_of(model, name):
    """The full name of the parameter that is called `name` in its module."""
    return next(full for full, _ in model.named_parameters() if attribute(full) == name)


# Empty, 0-dim, single, fewer elements than ranks, one block of 256 exactly, several and a bit.
SHAPES = {
    "matrix": (37, 29),
    "empty": (0, 3),
    "scalar": (),
    "single": (1,),
    "pair": (2,),
    "block": (16, 16),
    "experts": (3, 11, 13),
    "bias": (23,),
}


def coefficients(model, rank, world_size, draw=0, names=None):
    """Integer gradients of one backward on one rank, none of them zero; `names` are attributes.

    They are multiples of `world_size`, below 256 in magnitude: their sum and average over ranks
    are exact in every order, and with a few draws in 16 bits too.
    """
    generator = torch.Generator().manual_seed(7919 * draw + rank)
    result = {}
    for name, parameter in model.named_parameters():
        size = torch.randint(1, 5, parameter.shape, generator=generator)
        sign = 2 * torch.randint(0, 2, parameter.shape, generator=generator) - 1
        if names is None or attribute(name) in names:
            result[name] = (world_size * size * sign).float()
    return result


def averaged(parts, world_size):
    """The average over ranks of gradients given as one dict per rank and backward; {} adds none."""
    total = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return {name: value / world_size for name, value in total.items()}


def plain_step(model, optimizer, gradients):
    """One step of a plain optimizer on given gradients; a missing name means no gradient."""
    for name, parameter in model.named_parameters():
        value = gradients.get(name)
        parameter.grad = None if value is None else value.to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()


def is_sharded(parameter):
    """Whether all its elements are one, as of a parameter that stage 3 holds elsewhere."""
    return parameter.numel() > 1 and not any(parameter.stride())


def gathered(model):
    """A context in which parameters are whole; it does nothing where they are anyway."""
    if any(is_sharded(p) for p in model.parameters()):
        return zeroshard.gather(model)
    return contextlib.nullcontext()


def weights(model):
    """Copies of the full parameters. Communicates under stage 3."""
    with gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def writing(model):
    """A context in which a write to a parameter is allowed and takes effect, in every stage."""
    if any(is_sharded(p) for p in model.parameters()):
        return zeroshard.gather(model, writeback=True)
    return contextlib.nullcontext()


def full_gradients(model):
    """p.grad of every parameter as a plain tensor, None where there is none. Communicates."""
    found = {}
    for name, p in model.named_parameters():
        whole = getattr(p.grad, "full_tensor", None)
        found[name] = p.grad if whole is None else whole()
    return found


def assert_same(got, expected, what):
    """Two dicts of tensors hold the same bits (NaN equals NaN)."""
    assert got.keys() == expected.keys(), f"{what}: {got.keys()} instead of {expected.keys()}"
    for name, value in got.items():
        wanted = expected[name]
        if value is None or wanted is None:
            assert value is wanted, f"{what}: {name} is {value}, expected {wanted}"
            continue
        assert value.shape == wanted.shape, f"{what}: {name} has shape {tuple(value.shape)}"
        assert value.dtype == wanted.dtype, f"{what}: {name} has dtype {value.dtype}"
        if not torch.equal(value.isnan(), wanted.isnan()):
            raise AssertionError(f"{what}: {name} has NaN in other places")
        different = (value != wanted) & ~value.isnan()
        if different.any():
            worst = (value - wanted)[different].abs().max().item()
            count = int(different.sum())
            of = f"{count} of {value.numel()} elements, by up to {worst:.3e}"
            raise AssertionError(f"{what}: {name} differs in {of}")


def assert_close(got, expected, what, *, atol):
    """Two dicts of tensors differ by at most `atol`; say beside the call how it is derived."""
    assert got.keys() == expected.keys(), f"{what}: {got.keys()} instead of {expected.keys()}"
    for name, value in got.items():
        wanted = expected[name]
        assert value.shape == wanted.shape, f"{what}: {name} has shape {tuple(value.shape)}"
        if value.numel():
            worst = (value.double() - wanted.double()).abs().max().item()
            assert worst <= atol, f"{what}: {name} is off by {worst:.3e}, allowed {atol:.3e}"


def assert_ranks_agree(tensors, what):
    """Every rank of the default process group holds the same bits."""
    for name, value in tensors.items():
        mine = value.detach().contiguous().clone()
        if not mine.numel():
            continue
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(mine, first), f"{what}: {name} differs between ranks"


class Twin:
    """A `LinearForm` under zeroshard beside its copy under torch's fused AdamW on one process.

    The copy is given the exact average of all ranks' gradients, so both must hold the same bits at
    every world size. Under stage 3 both are of the form that has units, and the module is given.
    """

    def __init__(self, rank, world_size, *, shapes=None, groups=None, settings=None, **ours):
        shapes = SHAPES if shapes is None else shapes
        settings = {"lr": 1e-2, "weight_decay": 0.1, **(settings or {})}
        self.rank, self.world_size = rank, world_size
        form = SplitForm if ours.get("stage") == 3 else LinearForm
        self.model, self.plain_model = form(shapes), form(shapes)
        if ours.get("stage") == 3:
            ours = {"model": self.model, **ours}
        select = groups or (lambda model: list(model.parameters()))
        self.optimizer = zeroshard.AdamW(select(self.model), **settings, **ours)
        self.plain = torch.optim.AdamW(select(self.plain_model), fused=True, **settings)

    def backward(self, draw, names_by_rank=None, *, backward=None):
        """One backward on every rank, of the names that `names_by_rank(rank)` gives, or of all."""
        parts = []
        for rank in range(self.world_size):
            names = None if names_by_rank is None else names_by_rank(rank)
            parts.append(coefficients(self.model, rank, self.world_size, draw, names))
        loss = self.model(parts[self.rank])
        loss.backward() if backward is None else backward(loss)
        self.expect(averaged(parts, self.world_size))

    def expect(self, gradients):
        """Adds to the gradients of the copy."""
        for name, value in gradients.items():
            parameter = self.plain_model.get_parameter(name)
            if parameter.requires_grad:
                old = parameter.grad
                parameter.grad = value.clone() if old is None else old + value

    def step(self, **options):
        self.optimizer.step()
        self.plain.step()
        self.zero_grad(**options)

    def zero_grad(self, **options):
        self.optimizer.zero_grad(**options)
        self.plain.zero_grad(**options)

    def check(self, what):
        assert_same(weights(self.model), weights(self.plain_model), what)

    def check_gradients(self, what):
        plain = {name: p.grad for name, p in self.plain_model.named_parameters()}
        assert_same(full_gradients(self.model), plain, what)
