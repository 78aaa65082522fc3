"""Runs a function on several ranks, each a fork of this process with a gloo process group.

A fork costs 0.2 s where a fresh interpreter pays for importing torch, and it takes closures and the
warning filters of the running test along. In return the calling process must have neither threads
nor a process group of its own.
"""

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import tempfile
import time
import traceback

import torch
import torch._dynamo  # torch's optimizers import it on first use: here once, not in every rank
import torch.distributed as dist
import torch.distributed.tensor


def run(function, world_size=2, *, timeout_s=60.0, process_group=True, **environment):
    """Calls `function(rank, world_size)` on every rank and returns the results by rank.

    Args:
        function: any callable, closures included; its result is pickled.
        world_size: number of ranks, also where there is no process group.
        timeout_s: after this the ranks that have not answered are killed. Collectives time out
            after half of it, so that the code under test meets its own timeout first.
        process_group: False leaves `torch.distributed` uninitialised.
        environment: variables to set in the ranks; None unsets.

    Raises:
        AssertionError: with the traceback of the rank that failed first, or the names of the ranks
            that did not answer and where they stood.
    """
    __tracebackhide__ = True
    name = getattr(function, "__qualname__", repr(function))
    options = {"timeout_s": timeout_s, "process_group": process_group, "environment": environment}
    with _started(function, world_size, options) as (processes, connections, folder):
        return _collect(name, processes, connections, folder, timeout_s)


def run_until_killed(function, victims, world_size=2, *, delay_s=None, grace_s=0.0, timeout_s=30.0):
    """Calls `function(rank, world_size, tell)` on ranks, and kills all of them with SIGKILL.

    That is how a launcher ends a job of which one rank was lost.

    Args:
        function: any callable; what it gives to `tell` is known here even of a rank that died.
        victims: the ranks that are killed first.
        delay_s: how long after each rank has told its first item; None: a rank kills itself.
        grace_s: for how long the others outlive them.
        timeout_s: after this, what has not ended is an error.

    Returns:
        What each rank told, by rank. All of them may have come to the end of the function.

    Raises:
        AssertionError: with the traceback of a rank that failed while all were alive.
    """
    __tracebackhide__ = True
    told = [[] for _ in range(world_size)]
    options = {"timeout_s": timeout_s, "process_group": True, "environment": {}, "tells": True}
    with _started(function, world_size, options) as (processes, connections, _):
        deadline, end = time.monotonic() + timeout_s, None
        waiting = dict(enumerate(connections))
        while waiting and all(process.is_alive() for process in processes):
            if end is None and delay_s is not None and all(told):
                end = time.monotonic() + delay_s
            now = time.monotonic()
            assert now < deadline, f"no rank was killed in {timeout_s} s"
            if end is not None and now >= end:
                break
            ends = [*waiting.values(), *(process.sentinel for process in processes)]
            multiprocessing.connection.wait(ends, (deadline if end is None else end) - now)
            _take(waiting, told, processes)
        for rank in victims:
            processes[rank].kill()
        time.sleep(grace_s)
        for process in processes:
            process.kill()
            process.join()
        while any(connection.poll() for connection in waiting.values()):
            _take(waiting, told, processes)
    return told


def _take(waiting, told, processes):
    """Receives what ranks tell, and lets go of those that have nothing more to say."""
    __tracebackhide__ = True
    for rank, connection in list(waiting.items()):
        if not connection.poll():
            continue
        try:
            succeeded, item = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            del waiting[rank]
            continue
        if succeeded is None:
            told[rank].append(item)
            continue
        del waiting[rank]
        # After a death the others fail, as they should; they may know of it before we do.
        sentinels = [process.sentinel for process in processes]
        if not succeeded and not multiprocessing.connection.wait(sentinels, 2.0):
            raise AssertionError(f"rank {rank} failed\n{item}")


@contextlib.contextmanager
def _started(function, world_size, options):
    """Starts the ranks, and ends them in any case."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        folder = pathlib.Path(folder)
        processes, connections = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(function, rank, world_size, theirs, folder),
                    kwargs=options,
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            yield processes, connections, folder
        finally:
            for process, connection in zip(processes, connections, strict=True):
                connection.close()
                process.kill()
                process.join()


def _serve(
    function,
    rank,
    world_size,
    connection,
    folder,
    *,
    timeout_s,
    process_group,
    environment,
    tells=False,
):
    """The life of one rank: report the result or the traceback, then wait to be ended."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    for key, value in environment.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = str(value)
    torch.set_num_threads(1)
    # What came with the fork is shared with the parent and stays: no collection need walk it.
    gc.freeze()
    # A rank that hangs is killed: let it first leave word of where it stands.
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=stack)
    try:
        if process_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout_s / 2),
            )
        more = (lambda item: connection.send_bytes(pickle.dumps((None, item))),) if tells else ()
        report = pickle.dumps((True, function(rank, world_size, *more)))
    except BaseException:
        report = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(report)
    # Sockets stay open until every rank has reported: a peer still at work must meet a timeout,
    # not a closed connection.
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(0)


def _collect(name, processes, connections, folder, timeout_s):
    __tracebackhide__ = True
    results = {}
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(connections))
    while waiting:
        ends = [*waiting.values(), *(processes[rank].sentinel for rank in waiting)]
        ready = multiprocessing.connection.wait(ends, max(0.0, deadline - time.monotonic()))
        for rank, connection in list(waiting.items()):
            if connection not in ready and processes[rank].sentinel not in ready:
                continue
            try:
                succeeded, result = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join()
                code = processes[rank].exitcode
                message = f"{name}: rank {rank} died with exit code {code} before it answered"
                raise AssertionError(message) from None
            if not succeeded:
                raise AssertionError(f"{name}: rank {rank} failed\n{result}")
            results[rank] = result
            del waiting[rank]
        if not ready and waiting:
            stacks = [f"rank {rank}:\n{(folder / f'stack-{rank}').read_text()}" for rank in waiting]
            raise AssertionError(
                f"{name}: ranks {sorted(waiting)} did not answer in {timeout_s} s\n"
                + "\n".join(stacks)
            )
    return [results[rank] for rank in range(len(connections))]
