"""The examples, started as a user starts them: with tiny sizes, on one rank and on two."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY = (
    *("--layers", "1", "--width", "64", "--batch", "4", "--seq", "32"),
    *("--steps", "12", "--lr", "2e-3", "--validate", "8", "--sample", "8"),
)
TIMEOUT_S = 120  # a start is mostly the import of torch: seconds, or tens of them on a busy machine


def command(*arguments, ranks=1, script=EXAMPLES / "finetune.py", launcher=()):
    if ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [sys.executable, *launcher, str(script), *map(str, arguments)]


def environment(**variables):
    settings = {
        "CUDA_VISIBLE_DEVICES": "",  # exact equality is promised on a CPU
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "error",  # as in this process; torchrun hands it on to its ranks
    }
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return {**inherited, **settings, **variables}


def finetune(*arguments, ranks=1, expect=0, **variables):
    done = subprocess.run(
        command(*arguments, ranks=ranks),
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.fixture
def examples(monkeypatch):
    """Makes the modules beside finetune.py importable, as running it does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def compare(tmp_path, *arguments, ranks):
    """The stages of a comparison as results.json has them."""
    done = finetune("--compare", "--out", tmp_path, *TINY, *arguments, ranks=ranks)
    for expected in ("validation loss after", "stage 2", "results.json"):
        assert expected in done.stdout
    return json.loads((tmp_path / "results.json").read_text())["stages"]


def test_two_ranks_compare_the_stages_on_one_loss_curve(tmp_path):
    ddp, stage1, stage2, stage3 = stages = compare(tmp_path, "--accumulate", 2, ranks=2)
    assert [stage["stage"] for stage in stages] == [0, 1, 2, 3]
    assert stage1["losses"] == stage2["losses"] == stage3["losses"]
    for stage in stages:
        assert stage["world_size"] == 2
        assert len(stage["losses"]) == 12
        assert stage["validation_after"] < stage["validation_before"] - 1
        # torch sums the norms of whole tensors in DDP and of slices here, in fp32: the clipping
        # factor may differ by its last bits, 1e-7, which 12 steps of this size do not amplify.
        assert stage["largest_difference_from_first"] < 1e-4
    parameters = ddp["nbytes"]["parameters"]
    assert ddp["nbytes"]["gradients"] == parameters
    assert ddp["nbytes"]["moments"] == 2 * parameters
    for stage in (stage1, stage2, stage3):  # halves, and slots padded to 256 elements
        assert 1.0 <= stage["nbytes"]["moments"] / parameters < 1.1
    for stage in (stage2, stage3):
        assert 0.5 <= stage["nbytes"]["gradients"] / parameters < 0.55
    assert stage2["nbytes"]["parameters"] / parameters < 1.1
    assert 0.5 <= stage3["nbytes"]["parameters"] / parameters < 0.6
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_world_of_one_trains_as_plain_adamw_does(tmp_path):
    adamw, *others = compare(tmp_path, ranks=1)
    for stage in others:
        assert stage["losses"] == adamw["losses"]
        assert stage["validation_after"] == adamw["validation_after"]


def test_four_ranks_train_as_two_replicas_of_two_shards(tmp_path):
    for stage in (2, 3):
        arguments = ("--stage", stage, "--mesh", "2x2", "--out", tmp_path / str(stage))
        finetune(*arguments, *TINY, "--steps", 4, ranks=4)
    two, three = (
        json.loads((tmp_path / str(stage) / "results.json").read_text())["stages"][0]
        for stage in (2, 3)
    )
    assert two["losses"] == three["losses"]
    assert two["validation_after"] < two["validation_before"]


def test_bf16_trains_on_a_corpus_of_ones_own(tmp_path):
    (tmp_path / "text.txt").write_text("A sentence that comes again and again. " * 200)
    done = finetune(*TINY, "--corpus", tmp_path / "text.txt", "--dtype", "bf16", "--steps", 6)
    assert "step 6/6" in done.stdout
    assert "master, MiB" in done.stdout


# ------------------------------------------------------------------------------------- Ctrl-C

ENDLESS = (*TINY, "--steps", 100_000)

# Runs finetune.py on each rank, sends SIGINT to the second alone once it is handled, and writes
# down what each rank left with.
ONE_RANK_INTERRUPTED = f"""
import os, runpy, signal, sys, threading, time
from pathlib import Path

def interrupt():
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(0.01)
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGINT)

if os.environ["RANK"] == "1":
    threading.Thread(target=interrupt, daemon=True).start()
sys.path.insert(0, {str(EXAMPLES)!r})
try:
    runpy.run_path({str(EXAMPLES / "finetune.py")!r}, run_name="__main__")
except SystemExit as leaving:
    Path(__file__).with_name("rank" + os.environ["RANK"]).write_text(str(leaving.code))
"""


def interrupted_at_first_step(arguments):
    """Start, send SIGINT as soon as a step is printed, and wait: exit code and outputs."""
    process = subprocess.Popen(
        arguments,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("  step"):
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, "".join(lines) + stdout, stderr


def test_ctrl_c_leaves_one_rank_cleanly():
    code, stdout, stderr = interrupted_at_first_step(command(*ENDLESS))
    assert code == 130
    assert "stopped by Ctrl-C in stage 2, after step" in stdout
    assert stderr == ""


def test_ctrl_c_given_to_torchrun_leaves_all_ranks_cleanly():
    code, stdout, stderr = interrupted_at_first_step(command(*ENDLESS, "--compare", ranks=2))
    assert code != 0
    assert "stopped by Ctrl-C in stage 0, DDP, after step" in stdout
    # torchrun reports the signal it got with a traceback of its own, and none is ours.
    assert "finetune.py" not in stderr
    assert "SIGKILL" not in stderr


def test_ctrl_c_on_one_rank_stops_the_other(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(ONE_RANK_INTERRUPTED)
    done = subprocess.run(
        command(*ENDLESS, ranks=2, script=script),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped by Ctrl-C in stage 2, after step" in done.stdout
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["130", "130"]


# ------------------------------------------------------------------------------ pretrained models

# As much of transformers as pretrained.py calls.
STAND_IN = """
from types import SimpleNamespace
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        assert self.config.use_cache is False
        return SimpleNamespace(logits=self.head(self.embed(tokens)))

class AutoModelForCausalLM:
    def from_pretrained(pretrained_model_name_or_path, *, dtype, local_files_only):
        return Model().to(dtype)

class AutoTokenizer:
    def __call__(self, text):
        return {"input_ids": list(text.encode())}

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")

    def from_pretrained(pretrained_model_name_or_path, *, local_files_only):
        return AutoTokenizer()
"""


def test_a_pretrained_model_trains_through_transformers(tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    done = finetune(
        *("--model", tmp_path, "--lr", 1e-2, "--prompt", "While", "--out", tmp_path),
        PYTHONPATH=str(tmp_path),
    )
    (stage,) = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert stage["validation_after"] < stage["validation_before"]
    assert "\nWhile" in done.stdout


def test_a_missing_package_is_named_with_the_command(examples, monkeypatch, tmp_path, capsys):
    import options
    import pretrained

    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SystemExit):
        options.parse_options(["--model", str(tmp_path / "model.gguf")])
    assert "pip install transformers gguf accelerate" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ the parts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--width", "100"], "--width must be a multiple of 64, got 100"),
        (["--corpus", "nowhere.txt"], "there is no file nowhere.txt"),
        (["--model", "nowhere"], "there is no nowhere"),
        (["--global-batch", "0"], "must be a multiple of the number of ranks, got 0 for 1"),
        (["--global-batch", "8", "--accumulate", "2"], "leave --accumulate out"),
        (
            ["--checkpoint-dir", "runs", "--stage", "0"],
            "--checkpoint-dir is for one run of stage 1",
        ),
        (["--checkpoint-dir", "runs", "--compare"], "--checkpoint-dir is for one run of stage 1"),
        (["--checkpoint-every", "0"], "--checkpoint-every must be at least 1, got 0"),
        (["--mesh", "2x3"], "--mesh 2x3 is for 6 ranks, got 1"),
        (["--mesh", "two"], "argument --mesh: invalid mesh_of value: 'two'"),
    ],
)
def test_wrong_options_are_refused(examples, capsys, arguments, message):
    import options

    with pytest.raises(SystemExit):
        options.parse_options(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_cannot_see_what_it_predicts(examples, tied):
    from llama import Llama, LlamaConfig

    torch.manual_seed(0)
    model = Llama(LlamaConfig(width=64, layers=2, tied=tied))
    tokens = torch.randint(256, (2, 10))
    changed = tokens.clone()
    changed[:, 6:] = 255 - changed[:, 6:]
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_attention_scores_depend_on_distance_alone(examples):
    from llama import LlamaConfig, rotary_angles, rotate

    torch.manual_seed(0)
    rotary = rotary_angles(12, LlamaConfig(), torch.device("cpu"))
    q, k = torch.randn(2, 64)
    scores = rotate(q.expand(12, 64), rotary) @ rotate(k.expand(12, 64), rotary).T
    for distance in range(3):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)


def test_ranks_share_out_the_windows_and_none_is_held_out(examples):
    from corpus import Corpus

    corpus = Corpus.split(torch.arange(1000), seq=9)
    assert corpus.training.max() < corpus.held_out.min()
    halves = [
        next(corpus.batches(batch=3, seq=9, seed=0, rank=rank, world_size=2)) for rank in (0, 1)
    ]
    assert halves[0].shape == (3, 10)
    assert not torch.equal(*halves)
    held_out = [corpus.validation(windows=8, seq=9, rank=r, world_size=2) for r in (0, 1)]
    together = torch.cat(held_out)[:, 0].sort().values
    whole = corpus.validation(windows=8, seq=9, rank=0, world_size=1)[:, 0]
    assert torch.equal(together, whole)


def test_a_corpus_too_short_for_a_window_is_refused(examples):
    from corpus import Corpus

    with pytest.raises(ValueError, match="at least 66 tokens at --seq 32, got 65"):
        Corpus.split(torch.arange(65), seq=32)
    assert len(Corpus.split(torch.arange(66), seq=32).held_out) == 33


def test_the_table_needs_no_rich(examples, monkeypatch, capsys):
    import report

    for name in ("rich.console", "rich.table", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    report.print_table([["2 ranks", "a", "b"], ["loss", "1.25", "10.5"]])
    assert capsys.readouterr().out == "2 ranks     a     b\nloss     1.25  10.5\n"
    assert report.rich_bar() is None


def tiny_pretrained(folder):
    """A folder that `from_pretrained` reads: a tiny Llama, and a tokenizer of single bytes."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{letter: n for n, letter in enumerate(alphabet, start=1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_pretrained_model_goes_from_meta_to_an_export_that_generates(tmp_path):
    folder = tiny_pretrained(tmp_path / "model")
    arguments = ("--model", folder, "--out", tmp_path, "--steps", 30, "--seq", 32, "--lr", 1e-2)
    done = subprocess.run(
        command(*arguments, ranks=2, script=EXAMPLES / "finetune_pretrained.py"),
        env={**environment(HF_HUB_OFFLINE="1"), "PYTHONWARNINGS": ""},  # transformers has its own
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[2]) for line in done.stdout.splitlines() if "held-out" in line]
    assert losses[1] < losses[0] - 1
    assert "after:" in done.stdout
    exported = sorted(path.name for path in (tmp_path / "exported").iterdir())
    assert "model.safetensors" in exported
    assert not (tmp_path / ".exported.partial").exists()
