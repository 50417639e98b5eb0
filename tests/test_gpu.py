"""What a GPU makes slow or breaks, as far as that can be seen without one. TEST_DEVICE=cuda: training runs on a GPU.

The device `meta` stands for a GPU: code that is not for a CPU runs there, without data, so that whatever needs a number
on the host (for which a GPU's host would wait) is an error.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, ROOT

from model import ATTENTION, GPT, GPTConfig
from training.distributed import data_parallel

SIZES = {"block_size": 320, "vocab_size": 11, "n_layer": 1, "n_head": 4, "n_embd": 32}
KINDS = {
    "short, long, differential": {"heads": "SSLL", "window": 50, "differential": True},
    "long": {"position": "rope", "conv": 4, "qk_norm": "l2", "per_dim_temperature": True, "decay": "learned",
             "activation_checkpointing": True},
}  # fmt: skip


def breaks(model: GPT, x: torch.Tensor) -> int:
    """How often torch.compile would interrupt the graph of the model's loss."""
    torch._dynamo.reset()
    return torch._dynamo.explain(lambda x: model(x, x)[1])(x).graph_break_count


def waits(f: Callable) -> int:
    """How often the host waits for the GPU during f()."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            f()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in found)


@pytest.mark.parametrize(("core", "kind"), [*zip(ATTENTION, itertools.cycle(KINDS), strict=False)])
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
    assert (count["softmax"], count["laser"], count["beta"]) == (8, 18, 7)
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
        model = data_parallel(gpt, kind, device, torch.float32)
        same = model(x, x)[1]
        same.backward()
        assert same.item() == pytest.approx(loss.item(), abs=1e-6)
        for p, g in zip(gpt.parameters(), expected, strict=True):
            assert ((p.grad.full_tensor() if kind == "fsdp" else p.grad) - g).norm() <= 1e-5 * g.norm() + 1e-7
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(DEVICE == "cpu", reason="the host of a CPU never waits for it")
def test_a_training_step_does_not_wait(train):
    """20 steps more are no wait more."""
    counts = []
    for n in (10, 30):
        flags = ("--eval_interval=1000", "--log_interval=1000", "--dtype=bfloat16", f"--max_iters={n}")
        counts.append(waits(lambda flags=flags: train(*flags)))
    assert counts[0] == counts[1]
