"""What a GPU makes slow or breaks, as far as it shows without one. TEST_DEVICE=cuda: with one.

The device `meta` stands for a GPU. Code that is not for a CPU runs there, without data: whatever
needs a number on the host, for which the host would wait, is an error.
"""

import contextlib
import copy
import gc
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, legal, pairwise, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from attention.cache import run_definitions, why_it_ends
from model import ATTENTION, GPT, GPTConfig
from parts import POSITION
from training.distributed import data_parallel

SIZES = {"block_size": 320, "vocab_size": 11, "n_layer": 1, "n_head": 4, "n_embd": 32}
SHORT = {"heads": "SSSL", "window": 50, "decay": "alibi"}
LONG = {
    "position": "rope",
    "conv": 4,
    "qk_norm": "rmsnorm",
    "decay": "alibi",
    "activation_checkpointing": True,
}
choices = [*zip(ATTENTION, itertools.cycle((SHORT, LONG))), ("laser", SHORT)]
beside = parametrize("core, choices", choices)


def config(core: str, **choices: object) -> GPTConfig:
    return GPTConfig(**SIZES, attention=core, **choices)


def batch() -> torch.Tensor:
    return torch.randint(11, (2, SIZES["block_size"]))


def assert_same_gradients(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7


@pytest.fixture
def meta(monkeypatch) -> str:
    """The device meta, which has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    return "meta"


@beside
def test_no_host_waits_and_the_graph_is_one(core, choices, meta):
    gpt = GPT(config(core, **choices)).to(meta)
    x = batch().to(meta)
    gpt(x, x)[1].backward()
    assert all(p.grad.is_meta for p in gpt.parameters())
    torch._dynamo.reset()
    assert torch._dynamo.explain(lambda x: gpt(x, x)[1])(x).graph_break_count == 0


class NoFloat64(TorchDispatchMode):
    """Some devices (MPS) have no float64: an operation that makes one outside the CPU fails."""

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type != "cpu":
                assert x.dtype != torch.float64, f
        return out


def is_legal(core, position, decay) -> bool:
    return legal(config, core, position=position, decay=decay)


@parametrize(
    "core, position, decay",
    pairwise(ATTENTION, POSITION, ["none", "alibi"], legal=is_legal),
)
def test_no_float64_outside_the_cpu(core, position, decay, meta, monkeypatch):
    """Neither in a new model, nor in training, nor in decoding, past block_size if it can."""
    monkeypatch.setattr(torch, "is_grad_enabled", lambda: True)  # LASER does not wait then
    with NoFloat64(), torch.device(meta):
        gpt = GPT(config(core, position=position, decay=decay))
        x = torch.zeros(2, SIZES["block_size"], dtype=torch.long)
        gpt(x, x)[1].backward()
        gpt.eval()
        cache = gpt.new_cache(None if why_it_ends(gpt) else 330)
        gpt(x[:, :-1], cache=cache)
        while cache.length < cache.capacity:
            gpt(x[:, :1], cache=cache)


@beside
def test_compiled_is_the_same(core, choices):
    """On a CPU, without the code that torch.compile would generate: that takes too long."""
    gpt = GPT(config(core, **choices))
    x = batch()
    expected = torch.autograd.grad(gpt(x, x)[1], [*gpt.parameters()])
    torch._dynamo.reset()
    compiled = torch.compile(gpt, backend="aot_eager", fullgraph=True)
    ours = torch.autograd.grad(compiled(x, x)[1], [*gpt.parameters()])
    assert_same_gradients(ours, expected)


def loss_and_gradients_alone(gpt: GPT, x: torch.Tensor, kind: str) -> tuple:
    """Those of the model in a group of one process, and nothing that holds the group."""
    model = data_parallel(gpt, kind, x.device.type, torch.float32)
    loss = model(x, x)[1]
    loss.backward()
    gradients = [p.grad.full_tensor() if kind == "fsdp" else p.grad for p in gpt.parameters()]
    return loss.item(), gradients


@parametrize("kind", ["ddp", "fsdp"])
def test_a_process_alone(kind):
    """DDP and FSDP2 with one process: the loss and the gradients of the model itself."""
    device = "cpu" if DEVICE == "cpu" else "cuda:0"
    gpt = GPT(config("softmax")).to(device)
    x = batch().to(device)
    loss = gpt(x, x)[1]
    expected = torch.autograd.grad(loss, [*gpt.parameters()])
    backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        same, ours = loss_and_gradients_alone(gpt, x, kind)
    finally:
        gc.collect()  # it frees DDP, which may wait forever once its group is gone
        dist.destroy_process_group()
    assert same == pytest.approx(loss.item(), abs=1e-6)
    assert_same_gradients(ours, expected)


def waits(f: Callable) -> int:
    """How often the host waits for the GPU during f()."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            f()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


@pytest.mark.skipif(DEVICE == "cpu", reason="these forms are a GPU's")
@parametrize("core", ["softmax", "laser"])
@parametrize(
    "choices", [{}, {"heads": "SSSS", "window": 50}, {"heads": "SSLL", "position": "alibi"}]
)
@parametrize("dtype", [torch.bfloat16, torch.float16])
@parametrize("compiled", [False, True])
def test_forms_in_16_bits(core, choices, dtype, compiled):
    """The gradients of a model are those of its definitions in float32, but for the rounding."""
    gpt = GPT(config(core, **choices)).cuda()
    plain = copy.deepcopy(gpt)
    run_definitions(plain)
    x = batch().cuda()
    exact = torch.autograd.grad(plain(x, x)[1], [*plain.parameters()])
    torch._dynamo.reset()
    model = torch.compile(gpt) if compiled else gpt
    with torch.autocast("cuda", dtype):
        loss = model(x, x)[1]
    scale = 2.0**13 if dtype == torch.float16 else 1.0
    ours = torch.autograd.grad(scale * loss, [*gpt.parameters()])
    for a, b in zip(ours, exact, strict=True):
        assert (a / scale - b).norm() <= 0.05 * b.norm() + 1e-7


@pytest.mark.skipif(DEVICE == "cpu", reason="the host of a CPU never waits for it")
def test_a_training_step_does_not_wait(train):
    """20 steps more are no wait more."""
    flags = "--eval_interval=1000 --log_interval=1000 --dtype=bfloat16"
    short, long = (waits(lambda n=n: train(flags, f"--max_iters={n}")) for n in (10, 30))
    assert short == long
