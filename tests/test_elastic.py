"""examples/finetune.py goes on from its checkpoints: after kills, and at other numbers of ranks."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import run

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STEPS = 48
OPTIONS = (
    *("--layers", 1, "--width", 64, "--seq", 32, "--lr", 1e-3, "--sample", 0),
    *("--steps", STEPS, "--global-batch", 12, "--validate", 12, "--checkpoint-every", 4),
)
# Other ranks sum the gradients in another order. Sums of 12 x 32 tokens then differ by about
# sqrt(384) * 2**-24 = 1.2e-6 of themselves, and so do AdamW's updates, which are at most the
# learning rate in each of 70 000 elements. With a gradient of norm 1 a step so moves the loss by at
# most 1e-3 * sqrt(70 000) * 1.2e-6 = 3e-7, and 48 steps by 1.5e-5. (Measured: 5e-7.)
ATOL = 1.5e-5
TIMEOUT_S = 60


# --------------------------------------------------------------- without a launcher, on forks


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    """Makes the modules beside finetune.py importable, as running it does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


class StopAfter:
    """As Ctrl-C on the first rank in a given step of this process; 0: never."""

    def __init__(self, rank, steps):
        self.rank, self.left = rank, steps

    @property
    def pressed(self):
        self.left -= 1
        return self.rank == 0 and self.left == 0


def train(world_size, *arguments, stop_after=0):
    """Train on forked ranks; the losses, those of validation included."""
    import finetune
    from options import parse_options
    from world import World

    def body(rank, world_size):
        options = parse_options([str(a) for a in (*OPTIONS, *arguments)])
        world = World(rank=rank, size=world_size, device=torch.device("cpu"))
        corpus = finetune.Corpus.split(
            finetune.new_tokenizer(options).encode(finetune.read_text(())), seq=options.seq
        )
        stop = StopAfter(rank, stop_after)
        _, result = finetune.train(options.stage, corpus, options, world, stop)
        return result.losses, result.validation_before, result.validation_after

    results = run(body, world_size)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def uninterrupted():
    """What two ranks that nobody disturbs come to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return train(2)


def assert_near(found, uninterrupted):
    (losses, *validations), (expected, *expected_validations) = found, uninterrupted
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=ATOL, rel=0)
    assert validations == pytest.approx(expected_validations, abs=ATOL, rel=0)


def test_another_number_of_ranks_goes_on_with_the_next_windows():
    from corpus import Corpus

    corpus = Corpus.split(torch.arange(1000), seq=9)

    def batches(world_size):
        part = {"batch": 12 // world_size, "seq": 9, "seed": 0, "world_size": world_size}
        return [corpus.batches(rank=rank, **part) for rank in range(world_size)]

    expected = [next(batch) for batch in batches(1) for _ in range(8)]
    found, state = [], None
    for world_size in (4, 2, 3, 1):
        ranks = batches(world_size)
        for batch in ranks:
            if state is not None:
                batch.load_state_dict(state)
        found += [torch.cat([next(batch) for batch in ranks]) for _ in range(2)]
        state = ranks[-1].state_dict()
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_ctrl_c_the_same_number_of_ranks_goes_on_bit_for_bit(stage, tmp_path, uninterrupted):
    arguments = ("--stage", stage, "--checkpoint-dir", tmp_path)
    losses, _, after = train(2, *arguments, stop_after=13)
    assert (len(losses), after) == (13, None)
    saved = sorted(path.name for path in tmp_path.glob("step-*"))
    assert saved == ["step-000000000012", "step-000000000013"]  # --keep is 2
    assert train(2, *arguments) == uninterrupted
    assert train(2, *arguments) == uninterrupted  # there is nothing left to do


def test_four_two_and_three_ranks_of_other_stages_go_on_with_one_curve(tmp_path, uninterrupted):
    arguments = ("--checkpoint-dir", tmp_path)
    train(4, *arguments, "--stage", 1, stop_after=17)
    train(2, *arguments, "--stage", 3, stop_after=14)
    assert_near(train(3, *arguments, "--stage", 2), uninterrupted)


# -------------------------------------------------------------------------- started by torchrun


class Torchrun:
    """One torchrun and the ranks that it has at the moment. All of them are killed in the end."""

    def __init__(self, folder, *launcher, name="torchrun"):
        self.checkpoints, self.out = folder / "checkpoints", folder / "out"
        self.log = folder / f"{name}.log"
        arguments = (*OPTIONS, "--checkpoint-dir", self.checkpoints, "--out", self.out)
        command = ("-m", "torch.distributed.run", *launcher, EXAMPLES / "finetune.py", *arguments)
        hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                env={
                    **{name: value for name, value in os.environ.items() if name not in hidden},
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                    "LOGLEVEL": "INFO",  # torchrun's
                    # Else new ranks may meet addresses that killed ones left (pytorch#135712).
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def ranks(self):
        """Process ids by rank."""
        found = {}
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # what ends while it is looked at
                for pid in map(int, children.read_text().split()):
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    rank = dict(entry.split(b"=", 1) for entry in environment if entry).get(b"RANK")
                    if rank is not None:
                        found[int(rank)] = pid
        return found

    def kill(self):
        """As a machine that loses power."""
        ranks = self.ranks()
        self.process.kill()
        self.process.wait()
        for pid in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def text(self):
        return self.log.read_text()

    def wait_for(self, condition, what):
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := condition()):
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what} in {TIMEOUT_S} s:\n{self.text()}"
            time.sleep(0.002)
        return found

    def newest(self):
        """The step of the newest checkpoint, 0 where there is none."""
        steps = [int(path.name.split("-")[1]) for path in self.checkpoints.glob("step-*")]
        return max(steps, default=0)

    def kill_a_rank(self, rank, *, after):
        """At any moment once there is a checkpoint of step `after` or a later one."""
        self.wait_for(lambda: self.newest() >= after, f"checkpoint of step {after}")
        time.sleep(random.uniform(0, 0.1))
        os.kill(self.ranks()[rank], signal.SIGKILL)

    def kill_a_rank_that_saves(self, rank, *, after):
        """While a checkpoint is written that can not be completed without this rank."""

        def is_caught():
            if self.newest() < after or not self.unfinished():
                return False
            pid = self.ranks()[rank]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.1)
            if self.unfinished():
                os.kill(pid, signal.SIGKILL)
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        self.wait_for(is_caught, f"save after step {after}")

    def unfinished(self):
        return list(self.checkpoints.glob(".step-*.unfinished"))

    def ends_with(self, *codes):
        code = self.process.wait(timeout=TIMEOUT_S)
        assert code in codes, self.text()

    def result(self):
        (stage,) = json.loads((self.out / "results.json").read_text())["stages"]
        return stage["losses"], stage["validation_before"], stage["validation_after"]


def standalone(ranks, restarts):
    return "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"


def test_torchrun_restarts_killed_ranks_and_the_losses_are_the_same_bits(tmp_path, uninterrupted):
    ranks, steps = random.choices((0, 1), k=2), (random.randrange(4, 16), random.randrange(20, 32))
    print(f"ranks {ranks} are killed after steps {steps}")
    with Torchrun(tmp_path, *standalone(2, restarts=2)) as torchrun:
        torchrun.kill_a_rank(ranks[0], after=steps[0])
        torchrun.kill_a_rank_that_saves(ranks[1], after=steps[1])
        torchrun.ends_with(0)
        assert torchrun.text().count("goes on after step") == 2
        assert torchrun.result() == uninterrupted
        assert not torchrun.unfinished()


def test_machines_come_and_go_and_four_two_and_three_ranks_go_on(tmp_path, uninterrupted):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    launcher = (
        *("--nnodes=1:2", "--max-restarts=3", "--local-addr=localhost", "--rdzv-id=here"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"),
    )
    settings = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=6"

    def machine(name, ranks):
        settled = f"--rdzv-conf={settings},is_host={name == 'first'}"
        return Torchrun(tmp_path, *launcher, settled, f"--nproc-per-node={ranks}", name=name)

    def checkpoint_of(*machines):
        step = machines[0].newest()
        machines[0].wait_for(lambda: machines[0].newest() > step, f"save by {len(machines)}")

    with machine("first", 2) as first:
        with machine("lost", 2) as lost:
            lost.wait_for(lambda: 3 in lost.ranks(), "four ranks")
            checkpoint_of(first, lost)
        checkpoint_of(first)
        stopped = first.ranks()[0]
        os.kill(stopped, signal.SIGSTOP)  # else training, so short, ends before the next comes
        with machine("next", 1) as following:
            first.wait_for(lambda: "Detected 1 new nodes" in first.text(), "another machine")
            os.kill(stopped, signal.SIGCONT)
            first.ends_with(0)
            following.ends_with(0)
        resumed = first.text().count("goes on after") + following.text().count("goes on after")
        assert resumed >= 2
        assert '"world_size": 3' in (tmp_path / "out" / "results.json").read_text()
        assert_near(first.result(), uninterrupted)
