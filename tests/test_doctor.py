"""`zeroshard doctor`: what it finds, what it says of it, and that nothing odd stops it."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
import torch
from ranks import run

from zeroshard import cli, cli_doctor
from zeroshard.doctor import Advice, Diagnosis, examination, examine, ranks
from zeroshard.doctor import machine as machine_module
from zeroshard.doctor.advice import RULES, advise
from zeroshard.doctor.facts import Unknown, collect, within
from zeroshard.doctor.machine import machine, network
from zeroshard.doctor.software import OF_ALL_RANKS, VARIABLES, environment
from zeroshard.errors import CommunicationError
from zeroshard.transport import self_test
from zeroshard.transport.meeting import Meeting

GIB = 2**30
OF_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture
def alone(monkeypatch):
    """No launcher, whatever started the tests."""
    for name in (*OF_LAUNCHERS, "TORCHELASTIC_USE_AGENT_STORE", "ZEROSHARD_DEBUG"):
        monkeypatch.delenv(name, raising=False)


# --- what is found


def test_a_report_for_programs_holds_every_section(alone, capsys):
    code = 0
    try:
        cli.main(["doctor", "--json"])
    except SystemExit as left:
        code = left.code
    report = json.loads(capsys.readouterr().out)
    faults = [advice for advice in report["advice"] if advice["is_fault"]]
    assert (code, report["is_sound"]) == ((1, False) if faults else (0, True))
    assert list(report["facts"]) == list(examination.SECTIONS)
    facts = report["facts"]
    assert facts["torch"]["version"] == torch.__version__
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["machine"]["cores"] == os.cpu_count()
    assert facts["machine"]["host"] == socket.gethostname()
    assert "gloo" in facts["torch"]["backends"]
    assert "ranks" not in facts


def test_the_backends_are_those_that_training_uses(alone):
    facts = examine().facts["zeroshard uses"]
    if facts["device"] == "cpu":
        assert facts["transport"] == "none in a single process; gloo with several"
        twin = {"fp32": "torch fused", "bf16": "torch twin", "int8": "torch twin"}
        assert facts["update_of_float32"] == facts["update_of_bfloat16"] == twin
    else:
        assert facts["transport"] == "none in a single process; nccl with several"
        assert set(facts["update_of_bfloat16"]) == {"fp32", "bf16", "int8"}


def test_a_report_for_people_is_grouped_and_aligned():
    facts = {
        "machine": {"cores": 4, "memory_nbytes": 3 * GIB, "is_virtual": True},
        "limits": {"nofile": {"soft": 1024, "hard": None}},
        "environment": {"NCCL_DEBUG": "INFO"},
        "GPUs": {"devices": [{"name": "A", "memory_nbytes": GIB}, {"name": "B"}]},
        "links": {},
    }
    advice = [
        Advice(what="it is broken", remedy="mend it", is_fault=True),
        Advice(what="it is slow", remedy="wait"),
    ]
    assert Diagnosis(facts=facts, advice=advice).to_text() == (
        "machine\n"
        "  cores                     4\n"
        "  memory                    3.00 GiB\n"
        "  is virtual                yes\n"
        "\n"
        "limits\n"
        "  nofile                    1024 (at most unlimited)\n"
        "\n"
        "environment\n"
        "  NCCL_DEBUG                INFO\n"
        "\n"
        "GPUs\n"
        "  devices                   name A, memory 1.00 GiB\n"
        "                            name B\n"
        "\n"
        "links\n"
        "  nothing\n"
        "\n"
        "1 fault, 1 warning\n"
        "  FAULT: it is broken: mend it\n"
        "  warning: it is slow: wait"
    )


def test_what_cannot_be_found_out_is_said_to_be_unknown(alone, monkeypatch, capsys):
    def broken(*_, **__):
        raise OSError("an odd machine\nwith a second line")

    for owner, name in (
        (socket, "gethostname"),
        (socket, "if_nameindex"),
        (os, "statvfs"),
        (os, "sched_getaffinity"),
        (torch.cuda, "device_count"),
        (torch.cuda, "is_available"),
        (torch, "get_num_threads"),
        (machine_module, "read"),
    ):
        monkeypatch.setattr(owner, name, broken)
    found = examine()
    json.dumps(found.to_json())
    expected = "unknown: OSError: an odd machine"
    assert found.facts["machine"]["host"] == expected
    assert found.facts["machine"]["shared_memory_nbytes"] == expected
    assert found.facts["machine"]["memory_nbytes"] == expected
    assert found.facts["network"]["interfaces"] == expected
    assert found.facts["GPUs"]["seen_by_torch"] == expected
    assert found.facts["zeroshard uses"] == {"all of it": expected}
    assert found.facts["Python"]["version"].endswith(sys.version.split()[0])
    assert found.is_sound
    assert "host                      unknown: OSError: an odd machine\n" in found.to_text()


def test_a_section_that_hangs_is_left_behind():
    begun = time.monotonic()
    facts = within(lambda: collect({"slow": lambda: time.sleep(30)}), patience_s=0.1)
    assert time.monotonic() - begun < 5
    assert facts == {"all of it": "unknown: no answer within 0 s"}


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


CGROUPS = {
    "second version, own namespace": {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
    },
    "second version, the limits of a folder above": {
        "proc/self/cgroup": "0::/pods/one\n",
        "sys/fs/cgroup/pods/one/memory.max": f"{5 * GIB}\n",
        "sys/fs/cgroup/pods/one/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/pods/memory.max": f"{3 * GIB}\n",
        "sys/fs/cgroup/pods/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/pods/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    },
    "first version": {
        "proc/self/cgroup": "4:memory:/docker/one\n1:cpu,cpuacct:/docker/one\n0::/\n",
        "sys/fs/cgroup/memory/docker/one/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/docker/one/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/docker/one/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu/docker/one/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    },
    "first version, seen from inside of a container": {
        "proc/self/cgroup": "4:memory:/docker/one\n1:cpu:/docker/one\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    },
}


@pytest.mark.parametrize("files", CGROUPS.values(), ids=CGROUPS)
def test_the_limits_of_a_cgroup_are_found(files, tmp_path):
    write(tmp_path, files)
    facts = machine(tmp_path)
    assert facts["memory_of_cgroup_nbytes"] == 3 * GIB
    assert facts["memory_used_by_cgroup_nbytes"] == GIB
    assert facts["cores_of_cgroup"] == 1.5


def test_a_machine_without_any_of_these_files_has_no_such_facts(tmp_path):
    facts = machine(tmp_path)
    assert not {"memory_nbytes", "memory_of_cgroup_nbytes", "cores_of_cgroup"} & set(facts)
    assert facts["shared_memory_nbytes"].startswith("unknown: FileNotFoundError")
    write(tmp_path, {"proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n"})
    assert machine(tmp_path)["memory_nbytes"] == 2048 * 1024
    assert machine(tmp_path)["memory_free_nbytes"] == 1024 * 1024


def test_infiniband_is_found(tmp_path):
    port = "sys/class/infiniband/mlx5_0/ports/1"
    write(tmp_path, {f"{port}/state": "4: ACTIVE\n", f"{port}/rate": "400 Gb/sec (4X NDR)\n"})
    assert network(tmp_path)["infiniband"] == {"mlx5_0:1": "active, 400 Gb/sec (4X NDR)"}
    assert "infiniband" not in network(tmp_path / "proc")


def test_only_variables_of_a_known_list_are_shown(alone, monkeypatch):
    secrets = ("WANDB_API_KEY", "HF_TOKEN", "NCCL_SECRET", "TORCH_TOKEN", "AWS_SECRET_ACCESS_KEY")
    for name in secrets:
        monkeypatch.setenv(name, f"hunter2-{name}")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{pathlib.Path.home()}/lib\n" + "x" * 500)
    found = examine()
    for report in (found.to_text(), json.dumps(found.to_json())):
        assert "hunter2" not in report
        assert not any(name in report for name in secrets)
    facts = found.facts["environment"]
    assert facts["NCCL_DEBUG"] == "INFO"
    assert facts["LD_LIBRARY_PATH"].startswith("~/lib?x")
    assert facts["LD_LIBRARY_PATH"].endswith("x... (506 characters)")
    assert facts["not_shown"] >= 2
    assert not any(
        word in name for name in VARIABLES for word in ("TOKEN_", "KEY", "SECRET", "PASS")
    )
    assert environment({"RANK": "3", "OTHER": "1"}) == {"RANK": "3"}


# --- what is said of it

GPU = {"GPUs": {"seen_by_torch": 8, "usable": True}, "packages": {"triton": "3.9"}}
ADVICE = {
    "little shared memory": (
        {"machine": {"shared_memory_nbytes": 64 * 2**20}},
        "/dev/shm has 64 MiB",
        "--shm-size",
        False,
    ),
    "full shared memory": (
        {"machine": {"shared_memory_nbytes": 8 * GIB, "shared_memory_free_nbytes": GIB // 8}},
        "/dev/shm is full to 98 %",
        "delete",
        False,
    ),
    "memlock with InfiniBand": (
        {
            "limits": {"memlock": {"soft": 65536, "hard": 65536}},
            "network": {"infiniband": {"mlx5_0:1": "active"}},
        },
        "memlock is limited to 64 KiB",
        "--ulimit memlock=-1",
        False,
    ),
    "few files": (
        {"limits": {"nofile": {"soft": 1024, "hard": None}}, **GPU},
        "1024 files open",
        "ulimit -n",
        False,
    ),
    "no launcher": (
        {"environment": {"WORLD_SIZE": "8", "RANK": "0"}},
        "WORLD_SIZE is 8 and MASTER_ADDR, MASTER_PORT is not set",
        "torchrun",
        True,
    ),
    "threads of many ranks": (
        {"environment": {"LOCAL_WORLD_SIZE": "8"}},
        "8 ranks share this host and OMP_NUM_THREADS is not set",
        "OMP_NUM_THREADS",
        False,
    ),
    "threads in a cgroup": (
        {"torch": {"threads": 64}, "machine": {"cores_of_cgroup": 2.0}},
        "64 threads and the cgroup allows 2 cores",
        "OMP_NUM_THREADS=2",
        False,
    ),
    "old torch": ({"torch": {"version": "2.9.1+cu128"}}, "torch is 2.9.1+cu128", "2.10", True),
    "torch for CPUs": (
        {"torch": {"cuda": "not built in"}, "GPUs": {"device_files": ["nvidia0"], "usable": False}},
        "this torch was built for CPUs only",
        "pytorch.org",
        False,
    ),
    "a GPU that is not seen": (
        {"torch": {"cuda": "13.0"}, "GPUs": {"driver": "550", "usable": False, "seen_by_torch": 0}},
        "torch does not see",
        "CUDA 13.0",
        False,
    ),
    "no triton": (
        {"GPUs": GPU["GPUs"], "packages": {"torch": "2.13"}},
        "triton is not installed",
        "pip install triton",
        False,
    ),
    "triton does not run": (
        {**GPU, "triton": {"cuda:0": "does not run: RuntimeError: no C compiler"}},
        "triton on cuda:0 does not run: RuntimeError: no C compiler",
        "CC",
        False,
    ),
    "no gloo": ({"torch": {"backends": ["mpi"]}}, "without gloo", "install", True),
    "no NCCL": ({"torch": {"backends": ["gloo"]}, **GPU}, "without NCCL", "install", False),
    "no such interface": (
        {
            "environment": {"GLOO_SOCKET_IFNAME": "eth7"},
            "network": {"interfaces": {"lo": "up", "eth0": "up"}},
        },
        "GLOO_SOCKET_IFNAME names 'eth7', and the interfaces are lo, eth0",
        "unset",
        True,
    ),
    "loopback between hosts": (
        {
            "environment": {
                "WORLD_SIZE": "16",
                "LOCAL_WORLD_SIZE": "8",
                "RANK": "0",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
                "OMP_NUM_THREADS": "1",
            },
            "network": {"host_name_leads_to": "lo", "interfaces": {"lo": "up", "eth0": "up"}},
        },
        "the host's name leads to lo",
        "eth0",
        True,
    ),
    "a slow variable": (
        {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
        "CUDA_LAUNCH_BLOCKING=1",
        "unset",
        False,
    ),
    "details": (
        {"environment": {"TORCH_DISTRIBUTED_DEBUG": "detail"}},
        "TORCH_DISTRIBUTED_DEBUG",
        "unset",
        False,
    ),
    "interpreted": (
        {"environment": {"TRITON_INTERPRET": "1"}, **GPU},
        "TRITON_INTERPRET",
        "unset",
        True,
    ),
}


@pytest.mark.parametrize(("facts", "what", "remedy", "is_fault"), ADVICE.values(), ids=ADVICE)
def test_what_is_wrong_is_one_sentence_with_a_remedy(facts, what, remedy, is_fault):
    (advice,) = advise(facts)
    assert what in advice.what
    assert remedy in advice.remedy
    assert advice.is_fault is is_fault
    assert Diagnosis(facts=facts, advice=[advice]).is_sound is not is_fault


SOUND = {
    "machine": {"shared_memory_nbytes": 8 * GIB, "shared_memory_free_nbytes": 7 * GIB},
    "limits": {"memlock": {"soft": None, "hard": None}, "nofile": {"soft": 65536, "hard": 65536}},
    "network": {
        "infiniband": {"mlx5_0:1": "active"},
        "interfaces": {"lo": "up", "eth0": "up"},
        "host_name_leads_to": "eth0",
    },
    "torch": {
        "version": "2.13.0+cu130",
        "cuda": "13.0",
        "backends": ["gloo", "nccl"],
        "threads": 1,
    },
    "triton": {"cuda:0": "compiles and runs", "interpreter": "works"},
    "environment": {
        **dict.fromkeys(("WORLD_SIZE", "RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE"), "8"),
        "MASTER_ADDR": "host",
        "OMP_NUM_THREADS": "8",
        "NCCL_SOCKET_IFNAME": "eth",
        "ZEROSHARD_DEBUG": "0",
    },
    **GPU,
}


def test_a_sound_machine_gets_no_advice_and_unknown_facts_are_no_reason_for_any():
    assert advise(SOUND) == []
    assert advise({}) == []
    for stand_in in (Unknown("why"), None, "text", 0.5, [], {}):
        odd = {
            s: dict.fromkeys(names, stand_in) for s, names in SOUND.items() if s != "environment"
        }
        for facts in (odd, {**odd, "environment": dict.fromkeys(VARIABLES, Unknown("why"))}):
            for rule in RULES:
                assert all(isinstance(advice, Advice) for advice in rule(facts))
    unknown = {s: {"all of it": Unknown("no answer within 4 s")} for s in SOUND}
    assert advise(unknown) == []


def test_a_fault_is_exit_1_and_a_warning_is_not(alone, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor"])
    assert left.value.code == 1
    out, _ = capsys.readouterr()
    assert "FAULT: WORLD_SIZE is 4 and RANK, MASTER_ADDR, MASTER_PORT is not set" in out
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert cli.main(["doctor"]) == 0
    assert "  warning: CUDA_LAUNCH_BLOCKING=1: the host waits" in capsys.readouterr().out


def test_an_impossible_timeout_is_refused(alone, capsys):
    assert cli.main(["doctor", "--timeout", "-1"]) == 1
    assert capsys.readouterr().err == "zeroshard doctor: --timeout must be above 0, got -1\n"


# --- the ranks


def card(device="cuda:0", host="one", **versions):
    return {
        "host": host,
        "device": device,
        "visible": "",
        "versions": {"torch": "2.13", **versions},
        "environment": {"NCCL_DEBUG": "INFO"},
    }


def test_ranks_that_are_alike_are_no_reason_for_advice():
    assert ranks.compare({0: card(), 1: card("cuda:1"), 2: card(host="two")}) == []


@pytest.mark.parametrize(
    ("cards", "what", "is_fault"),
    [
        (
            {0: card(), 1: card("cuda:1", torch="2.12"), 2: card("cuda:2")},
            "torch differs between ranks (ranks 0, 2: 2.13; rank 1: 2.12)",
            True,
        ),
        (
            {0: card(Python="3.11.1"), 1: card("cuda:1", Python="3.11.2")},
            "Python differs between ranks (rank 0: 3.11.1; rank 1: 3.11.2)",
            False,
        ),
        (
            {0: card(triton="3.9"), 1: card("cuda:1")},
            "triton differs between ranks (rank 0: 3.9; rank 1: none)",
            True,
        ),
        (
            {0: card(), 1: {**card("cuda:1"), "environment": {}}},
            "the variable NCCL_DEBUG differs between ranks (rank 0: INFO; rank 1: none)",
            False,
        ),
        (
            {0: card(), 1: card("cpu"), 2: card("cpu")},
            "some ranks have a GPU and others do not (rank 0: cuda; ranks 1, 2: cpu)",
            True,
        ),
        (
            {0: card(), 1: card(), 2: card(host="two")},
            "ranks 0, 1 have the same GPU, cuda:0 of one, which NCCL refuses",
            True,
        ),
    ],
)
def test_what_differs_between_ranks_is_named_by_rank(cards, what, is_fault):
    (advice,) = ranks.compare(cards)
    assert advice.what == what
    assert advice.is_fault is is_fault


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def examined(prepare=None, world_size=3, timeout_s=2.0, **variables):
    """What `zeroshard doctor` prints and exits with on each rank, without torchrun's store.

    Args:
        prepare: called with each rank before; True leaves the rank out.
        world_size: number of ranks.
        timeout_s: the command's patience.
        variables: of the environment.
    """

    def body(rank, _):
        if prepare is not None and prepare(rank):
            return None
        ended = []
        ranks.Ranks.end = lambda self, code: ended.append(self.is_stuck)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(["doctor", "--json", "--timeout", str(timeout_s)])
            except SystemExit as left:
                code = left.code
        return code, out.getvalue(), err.getvalue(), any(ended)

    launcher = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "LOCAL_WORLD_SIZE": world_size,
        "TORCHELASTIC_USE_AGENT_STORE": None,
        "TORCHELASTIC_RESTART_COUNT": None,
        "CUDA_VISIBLE_DEVICES": "",
    }
    return run(body, world_size, process_group=False, **launcher, **variables)


def report_of(results):
    """The one report, and that only the first rank gave one."""
    assert all(result is None or result[1] == "" for result in results[1:])
    return json.loads(results[0][1])


def faults_of(results):
    return [a["what"] for a in report_of(results)["advice"] if a["is_fault"]]


def test_ranks_that_work_are_reported_once_with_every_operation():
    results = examined(ZEROSHARD_DEBUG=0)
    report = report_of(results)
    assert [(code, err, is_stuck) for code, _, err, is_stuck in results] == [(0, "", False)] * 3
    assert report["is_sound"]
    facts = report["facts"]["ranks"]
    assert facts["how_many"] == 3
    assert list(facts["where"].values()) == ["rank 0 on cpu, rank 1 on cpu, rank 2 on cpu"]
    assert facts["gloo_right"] == (
        "all-reduce, broadcast, reduce-scatter, reduce-scatter in bf16, all-gather, send and "
        "receive, objects"
    )
    assert facts["gloo_all-gather"].endswith(" by the fastest")
    assert float(facts["gloo_all-gather"].split()[0]) > 0


def test_a_single_rank_of_a_launcher_is_examined_too():
    (result,) = examined(world_size=1)
    facts = report_of([result])["facts"]["ranks"]
    assert result[0] == 0
    assert facts["gloo_right"].startswith("all-reduce, broadcast, reduce-scatter")


def test_a_rank_that_does_not_come_is_named():
    results = examined(lambda rank: rank == 1, timeout_s=0.5)
    assert [result and result[0] for result in results] == [1, None, 1]
    (fault,) = faults_of(results)
    assert fault.startswith("rank 1 did not answer within 0.5 s; the others are on ")


def test_a_first_rank_that_does_not_come_is_said_by_the_others():
    """With a store of its own, as torchrun has it; else nobody reaches anybody."""
    results = examined(lambda rank: rank == 0, timeout_s=0.5)
    for result in results[1:]:
        code, out, err, _ = result
        assert (code, out) == (1, "")
        assert "reaches nobody at MASTER_ADDR=127.0.0.1" in err
        assert err.count("\n") == 1


def test_a_wrong_result_is_a_fault_of_the_ranks_that_got_it():
    def adds_one(rank):
        if rank == 1:
            plain = self_test._values
            self_test._values = lambda other, numel: plain(other, numel) + (other == 1)

    results = examined(adds_one)
    assert [code for code, *_ in results] == [1, 1, 1]
    faults = faults_of(results)
    assert (
        "the self-test failed on ranks 0, 2 in all-reduce (gloo): element 0 should be 3.0 and "
        in (faults[0])
    )
    facts = report_of(results)["facts"]["ranks"]
    assert facts["gloo_right"] == "broadcast, objects"


def test_a_rank_that_hangs_is_told_where_it_stands():
    def hangs(rank):
        if rank == 1:
            plain = self_test._operations

            def operations(*arguments):
                for name, operation in plain(*arguments):
                    yield name, (lambda: time.sleep(60)) if name == "broadcast" else operation

            self_test._operations = operations

    results = examined(hangs, timeout_s=0.5)
    assert [(code, is_stuck) for code, _, _, is_stuck in results] == [(1, True)] * 3
    faults = faults_of(results)
    assert any("1" in fault and "stood at broadcast (gloo)" in fault for fault in faults)


def test_another_version_on_a_rank_is_named():
    def has_another(rank):
        plain = ranks.versions
        if rank == 2:
            ranks.versions = lambda: {**plain(), "torch": "2.12.0"}

    results = examined(has_another)
    assert [code for code, *_ in results] == [1, 1, 1]
    (fault,) = faults_of(results)
    expected = f"torch differs between ranks (ranks 0, 1: {torch.__version__}; rank 2: 2.12.0)"
    assert fault == expected


def test_nobody_at_the_address_is_an_error_that_says_so(monkeypatch):
    launcher = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in launcher.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(CommunicationError, match=r"rank 1 reaches nobody at MASTER_ADDR=127\.0"):
        Meeting(0.3)


def test_under_torchrun_one_report_is_printed(alone):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "zeroshard", "doctor", "--json", "--timeout", "60"],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    report = json.loads(done.stdout)
    assert done.returncode == (not report["is_sound"])
    assert report["facts"]["ranks"]["how_many"] == 2
    assert report["facts"]["ranks"]["gloo_right"].endswith("objects")


def test_every_variable_is_listed_once_and_advice_cannot_change():
    assert len(set(VARIABLES)) == len(VARIABLES)
    assert set(OF_ALL_RANKS) < set(VARIABLES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Advice(what="a", remedy="b").what = "c"
    assert cli_doctor.PATIENCE_S > 0
