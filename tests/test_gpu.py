"""What a GPU makes slow or breaks, as far as that can be seen without one. TEST_DEVICE=cuda: training runs on a GPU.

The device `meta` stands for a GPU: code that is not for a CPU runs there, without data, so that whatever needs a number
on the host (for which a GPU's host would wait) is an error.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE, ROOT

from experiments.forms import breaks, waits
from model import ATTENTION, GPT, GPTConfig
from scripts import first_gpu_run as first
from training.distributed import shared, whole

SIZES = {"block_size": 320, "vocab_size": 11, "n_layer": 1, "n_head": 4, "n_embd": 32}
KINDS = {
    "short, long, differential": {"heads": "SSLL", "window": 50, "differential": True},
    "long": {"position": "rope", "conv": 4, "qk_norm": "l2", "decay": "learned", "activation_checkpointing": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("core", ATTENTION)
def test_no_host_waits_and_the_graph_is_one(core, kind, monkeypatch):
    """Except for LASER's fast form, which looks at the range of the values (fast.laser_by_exp)."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # meta has none
    gpt = GPT(GPTConfig(attention=core, **SIZES, **KINDS[kind])).to("meta")
    x = torch.empty(2, SIZES["block_size"], dtype=torch.long, device="meta")
    if core == "laser":
        with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
            gpt(x, x)
        return
    gpt(x, x)[1].backward()
    assert all(p.grad.is_meta for p in gpt.parameters())
    assert breaks(gpt, x) == 0


@pytest.mark.parametrize("core", ATTENTION)
def test_compiled_is_the_same(core):
    """On a CPU, up to the code that torch.compile would generate, which takes too long for a test."""
    gpt, x = GPT(GPTConfig(attention=core, **SIZES, decay="learned")), torch.randint(11, (2, SIZES["block_size"]))
    expected = torch.autograd.grad(gpt(x, x)[1], [*gpt.parameters()])
    torch._dynamo.reset()
    compiled = torch.compile(gpt, backend="aot_eager", fullgraph=core != "laser")
    for ours, theirs in zip(torch.autograd.grad(compiled(x, x)[1], [*gpt.parameters()]), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-7


@pytest.mark.slow
def test_the_graph_with_kernels_is_one_and_copies_no_input():
    """As torch.compile sees it with a GPU."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", os.path.join(ROOT, "tests", "graphs.py")]
    got = subprocess.run(command, capture_output=True, text=True, env=env)
    assert got.returncode == 0, got.stderr
    rows = [line.split() for line in got.stdout.splitlines()]
    count = {core: sum(row[0] == core for row in rows) for core in ATTENTION}
    assert (count["softmax"], count["laser"], count["beta"]) == (4, 9, 7)
    inputs = {"softmax": set("qkvg"), "laser": {*"qkv", "wide", "shift"}, "beta": {*"qkvy"}}
    for core, kernel, written in rows:
        read = inputs[core] - ({"y"} if kernel == "beta_forward_kernel" else set())
        assert not read & set(written.split(",")), (core, kernel)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_process_alone(kind):
    """DDP and FSDP2 with one process: the loss and the gradients of the model itself."""
    device = "cpu" if DEVICE == "cpu" else "cuda:0"
    gpt, x = GPT(GPTConfig(**SIZES)).to(device), torch.randint(11, (2, SIZES["block_size"])).to(device)
    loss = gpt(x, x)[1]
    expected = torch.autograd.grad(loss, [*gpt.parameters()])
    backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = shared(gpt, kind, device, torch.float32)
        same = model(x, x)[1]
        same.backward()
        assert same.item() == pytest.approx(loss.item(), abs=1e-6)
        for p, g in zip(gpt.parameters(), expected, strict=True):
            assert (whole(p.grad) - g).norm() <= 1e-5 * g.norm() + 1e-7
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(DEVICE == "cpu", reason="the host of a CPU never waits for it")
def test_a_training_step_does_not_wait(train):
    """20 steps more are no wait more."""
    counts = []
    for n in (10, 30):
        flags = ("--eval_interval=1000", "--log_interval=1", "--dtype=bfloat16", f"--max_iters={n}")
        counts.append(waits(lambda flags=flags: train(*flags)))
    assert counts[0] == counts[1]


# -----------------------------------------------------------------------------
# scripts/first_gpu_run.py


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """commands(tiny) -> (part, name, what python gets) of all its commands, with their folders in tmp_path."""
    monkeypatch.setattr(first, "out", str(tmp_path))
    monkeypatch.setattr(first, "out_dir", str(tmp_path / "runs"))

    def commands(tiny: bool) -> list[tuple[str, str, list[str]]]:
        monkeypatch.setattr(first, "tiny", tiny)
        groups = ((part, group) for part, make in first.PARTS.items() for group in make())
        return [(part, name, command.argv) for part, group in groups for name, command in group.items()]

    return commands


@pytest.mark.slow
def test_a_rehearsal_of_the_first_half_hour(commands, run, data):
    """Its commands work in small; here in one process, one after another, on a text that is there."""
    small = commands(tiny=True)
    assert [name for _, name, _ in small] == [
        "kernels", "forms of softmax", "bench", "gpt2", "shakespeare", "shakespeare", "softmax", "beta", "LS", "long",
        "tests", "float16", "stopped", "resumed",
    ]  # fmt: skip
    for _, name, (script, *flags) in small:
        if script == "train.py":
            flags += [f"--dataset={data}"] + {"stopped": ["--max_iters=3"], "resumed": ["--max_iters=5"]}.get(name, [])
        if script != "-m":
            code, out, err = run(script, *flags)
            assert code == 0, (name, err)
            assert name != "resumed" or "step 5: train loss" in out


def test_the_commands_of_the_first_half_hour(commands, run):
    """In full size their flags are right; what then needs a GPU says so. A part takes nine minutes at most."""
    for _, name, (script, *flags) in commands(tiny=False):
        if script == "-m":
            files, names = [flag for flag in flags if flag.endswith(".py")], flags[-1].split(" or ")
            found = [re.findall(r"def (test_\w+)", open(os.path.join(ROOT, file)).read()) for file in files]
            assert all(any(name in test for tests in found for test in tests) for name in names)
        elif script == "train.py" and name in ("LS", "beta", "stopped"):  # those with flags of their own
            code, out, err = run(script, *flags, "--init_from=scratch", "--device=cpu", "--dry_run")
            assert code == 0 and "FLOPs: " in out, (name, err)
        elif name.startswith("forms of ") and name != "forms of softmax":  # which has the same flags
            assert flags[0] == f"--only={name.removeprefix('forms of ')}"
        elif script == "experiments/forms.py":
            code, out, err = run(script, *flags, "--budget=0", "--device=cpu")
            assert code == 0 and out.count("left out (--budget)") == 3, err
        elif script != "train.py":
            code, _, err = run(script, *flags)
            assert code == 2 and re.search("needs a CUDA GPU|sees 0 cuda devices", err), err
    for make in first.PARTS.values():
        assert sum(max(c.seconds for c in group.values()) + first.PATIENCE for group in make()) <= 540


def test_a_command_that_ends_or_is_ended(monkeypatch):
    """By itself, with an error, at its limit, and if it does not react."""
    monkeypatch.setattr(first, "PATIENCE", 0.5)
    line = "step 3: train loss 2.5000, val loss 2.7500"
    ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); "
    scripts = [f"print({line!r})", "1 / 0", "import time; time.sleep(60)", f"{ignoring}time.sleep(60)"]
    log, found = io.StringIO(), [first.Command(["-c", script], 3.0) for script in scripts]
    threads = [threading.Thread(target=c.run, args=("name", log, threading.Lock())) for c in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [c.result["code"] for c in found] == [0, 1, -15, -9]
    assert [first.in_words(c.result).split()[0] for c in found] == ["done", "FAILED", "stopped", "stopped"]
    assert found[0].result["losses"] == [{"s": pytest.approx(0, abs=3), "iter": 3, "train": 2.5, "val": 2.75}]
    assert "ZeroDivisionError" in found[1].result["last lines"][-1] and line in log.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_first_half_hour_without_a_gpu(run):
    code, _, err = run("scripts/first_gpu_run.py")
    assert code == 2 and "there is no CUDA GPU here" in err
