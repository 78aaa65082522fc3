"""Models that can be built on the meta device, and files of weights as others write them."""

import ctypes
import datetime
import gc
import json
import multiprocessing
import os
import pathlib
import pickle
import signal
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import gathered
from ranks import run
from torch import nn

VOCABULARY = 29
WIDTH = 12


class Table(nn.Module):
    """A table that no file holds, as of rotary embeddings: computed from sizes, in place."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("speed", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        place = torch.arange(len(self.speed), dtype=torch.float32)
        self.speed.copy_(1.0 / 10.0 ** (place / len(self.speed)))


class Block(nn.Module):
    """Sizes that divide nothing: 3-D, 0-dim, two elements, none, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 3)
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH, bias=False)
        self.table = Table(WIDTH)
        self.experts = nn.Parameter(torch.empty(3, WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.empty(()))
        self.pair = nn.Parameter(torch.empty(2))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        # Computed by the same function as the parameters: filling one must not reset the others.
        self.register_buffer("sign", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.experts, std=0.2)
        nn.init.ones_(self.gain)
        nn.init.uniform_(self.pair, -0.5, 0.5)
        nn.init.zeros_(self.calls)
        sign = 1.0 - 2.0 * (torch.arange(WIDTH) % 2)
        self.sign = sign.to(self.sign.dtype)  # a new tensor in its place

    def forward(self, x):
        y = self.down(F.silu(self.up(self.norm(x)))) * self.table.speed.to(x.dtype)
        for expert in self.experts:
            y = y + torch.tanh(x @ expert) * self.sign.to(x.dtype)
        return x + self.gain * y + self.pair.sum() + self.empty.sum()


class Assorted(nn.Module):
    """A next-letter model of every kind of parameter and buffer; `reset_parameters` fills each."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.stem = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, letters):
        x = self.embed(letters)
        seen = self.stem(x.reshape(-1, 3, 2, 2)).mean((1, 2, 3))
        x = x + self.frozen(x) + seen.view(*letters.shape, 1)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.head(x)


def assorted_batches(rank, count=4):
    generator = torch.Generator().manual_seed(500 + rank)
    return [torch.randint(VOCABULARY, (3, 7), generator=generator) for _ in range(count)]


def on_meta(build, *args, **options):
    with torch.device("meta"):
        return build(*args, **options)


def some_values(model, seed=0):
    """A state dict for the model with values that no initialisation gives, all fp32 bits used."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            drawn = 0.3 * torch.randn(value.shape, generator=generator)
            # A variance must be positive; the rest may be anything.
            state[name] = drawn.abs() + 0.1 if name.endswith("running_var") else drawn
        else:
            state[name] = torch.randint(1, 99, value.shape, generator=generator)
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state[name] = state[shared.setdefault(parameter, name)]
    return state


def converted(state, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


def write_file(path, state):
    """One safetensors file."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.clone().contiguous() for k, v in state.items()}, path, {"format": "pt"})
    return path


def write_folder(folder, state):
    """A directory with one file, as `save_pretrained` writes a small model."""
    write_file(folder / "model.safetensors", state)
    return folder


def write_shards(folder, state, count=3):
    """A directory with an index and its files; neighbours are in different files."""
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {key: names[i % count] for i, key in enumerate(state)}
    for name in names:
        write_file(folder / name, {k: v for k, v in state.items() if weight_map[k] == name})
    total = sum(v.numel() * v.element_size() for v in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_export(folder):
    """What an exported directory holds, read as its format says and checked against it.

    Returns the tensors by name and the names of the files that hold them.
    """
    from safetensors import safe_open

    folder = pathlib.Path(folder)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    index_path = folder / "model.safetensors.index.json"
    tensors, places = {}, {}
    for name in files:
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}, f"{name}: metadata {file.metadata()}"
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                assert key not in tensors, f"{key} is in {places.get(key)} and in {name}"
                tensors[key], places[key] = file.get_tensor(key), name
    if len(files) == 1 and not index_path.exists():
        assert files[0] in ("model.safetensors", "adapter_model.safetensors"), files
    else:
        count = len(files)
        assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        index = json.loads(index_path.read_text())
        assert index["weight_map"] == places
        nbytes = sum(v.numel() * v.element_size() for v in tensors.values())
        assert index["metadata"]["total_size"] == nbytes
    return tensors, files


def everything(model):
    """Copies of all full parameters and all buffers, each once. Communicates under stage 3."""
    with gathered(model):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found | {name: b.detach().clone() for name, b in model.named_buffers()}


def assert_without_values(parameters, what):
    """They are on a real device, have their shapes and read as NaN."""
    for name, p in parameters:
        assert p.device.type == "cpu", f"{what}: {name} is on {p.device}"
        assert p.detach().isnan().all(), f"{what}: {name} has values"


def llama_config(kind, **settings):
    """A tiny config of that kind; most kinds of decoders have these sizes."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 37,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    return kind(**{**sizes, **settings})


STAGES = (1, 2, 3)


def in_every_stage(body, world_size=2, *, alone=False):
    """Runs `body(rank, world_size, stage)` for each stage, on the same ranks: starting them costs.

    Returns the results of each rank by stage. `alone` is one process without a process group.
    """

    def each(rank, world_size):
        results = {}
        for stage in STAGES:
            try:
                results[stage] = body(rank, world_size, stage)
            except BaseException as error:
                raise AssertionError(f"stage {stage}: {error}") from error
        return results

    each.__qualname__ = body.__qualname__
    if alone:
        return run(each, 1, process_group=False, WORLD_SIZE=None)
    return run(each, world_size)


class Outcome:
    """How one rank ended: its result or error, and after how many seconds. None: it was killed."""

    def __init__(self, path, exit_code):
        self.exit_code = exit_code
        self.answered = path.exists()
        self.result = self.error = self.elapsed_s = None
        if self.answered:
            self.result, self.error, self.elapsed_s = pickle.loads(path.read_bytes())


def outcomes(function, folder, world_size=2, *, patience_s=5.0, timeout_s=25.0):
    """Like `ranks.run`, for ranks that are killed: says how each ended, and raises nothing.

    Args:
        function: called with rank and world size; its result is pickled.
        folder: an empty directory for the store and the results.
        patience_s: timeout of the process group.
        timeout_s: after this the ranks that are left are killed.
    """
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")

    def body(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        torch.set_num_threads(1)
        gc.freeze()  # as in `ranks.run`: what came with the fork need not be walked
        began, result, error = time.monotonic(), None, None
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=patience_s),
            )
            began = time.monotonic()
            result = function(rank, world_size)
        except BaseException:
            error = traceback.format_exc()
        report = pickle.dumps((result, error, time.monotonic() - began))
        (folder / f"rank-{rank}.part").write_bytes(report)
        (folder / f"rank-{rank}.part").rename(folder / f"rank-{rank}")
        os._exit(0)

    processes = [context.Process(target=body, args=(rank,)) for rank in range(world_size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return [Outcome(folder / f"rank-{r}", p.exitcode) for r, p in enumerate(processes)]


# What Python reports before it touches the file system; a rename is also that of os.replace.
FILE_EVENTS = {
    "open",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "shutil.move",
    "shutil.rmtree",
}


def watch_files(under, action):
    """Calls `action(seen)` before this process touches a path below `under`.

    Returns the list `seen` of all such touches. A process cannot take this back: call it in a rank.
    """
    seen = []

    def hook(event, args):
        if event in FILE_EVENTS and any(str(under) in str(argument) for argument in args[:2]):
            seen.append((event, *map(str, args[:2])))
            action(seen)

    sys.addaudithook(hook)
    return seen


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def give_memory_back_at_once():
    """Lets glibc return every block from 128 KiB on: else free blocks count as resident."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 128 * 1024)  # M_MMAP_THRESHOLD, which is then fixed


class Peaks(threading.Thread):
    """A context that samples the resident memory of this process; Linux only.

    Attributes:
        anonymous: by how many bytes memory that is no file's went up at most.
        mapped: the same for pages of files, which the system may take back.
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.anonymous = self.mapped = 0
        self._ended = threading.Event()

    def __enter__(self):
        self._before = self._now()
        self.start()
        return self

    def __exit__(self, *exception):
        self._ended.set()
        self.join()

    def run(self):
        while not self._ended.wait(1e-3):
            now = self._now()
            self.anonymous = max(self.anonymous, now[0] - self._before[0])
            self.mapped = max(self.mapped, now[1] - self._before[1])

    @staticmethod
    def _now():
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return [1024 * int(found[key].split()[0]) for key in ("RssAnon", "RssFile")]
