"""Checks of a model, new or trained. One that fails a gate is not worth its training."""

import copy
import warnings
from typing import NamedTuple

import torch

from attention.cache import Context
from model import GPT
from training.run import change_by_later_tokens

LEAK = 1e-9  # in float64, where rounding is 1e-13; as training.run.LEAK in float32
ROUNDING = 1e-3  # largest error of a cached logit, as a share of the logits' spread
INPUTS = {"zeros": 0.0, "inputs": 1.0, "large inputs": 100.0}  # times those of a norm


class Check(NamedTuple):
    what: str
    ok: bool
    found: str = ""

    def __str__(self) -> str:
        return f"{self.what} ok" if self.ok else f"{self.what}: FAILS, {self.found}"


def later_tokens(gpt: GPT) -> Check:
    """A gate: the logits do not change with later tokens, in float64."""
    change = change_by_later_tokens(copy.deepcopy(gpt).double())
    found = f"logits change with later tokens by {change:.1g} of their spread"
    return Check("no later token seen", change <= LEAK, found)


def gradients(gpt: GPT) -> Check:
    """A gate: gradients of the first layer are finite on zeros, on ties and on large inputs."""
    T = gpt.config.block_size
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, T, gpt.config.n_embd, generator=random)
    two = x[:, torch.randint(2, (T,), generator=random)]  # each token is one of two
    layer = gpt.transformer.h[0].attn.train()
    for case, inputs in {"ties": two, **{name: n * x for name, n in INPUTS.items()}}.items():
        inputs = inputs.requires_grad_()
        with warnings.catch_warnings(action="ignore"):  # LASER's, that large inputs are slow
            y = layer(inputs, Context())
        wanted = [inputs, *layer.parameters()]
        grads = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
        if not all(g.isfinite().all() for g in (y, *grads) if g is not None):
            return Check("gradients finite", False, f"not on {case}")
    return Check("gradients finite", True)


@torch.no_grad()
def cached(gpt: GPT) -> str:
    """What is wrong with text in pieces, with a cache; empty: it has the whole text's logits."""
    T = gpt.config.block_size
    random = torch.Generator().manual_seed(0)
    idx = torch.randint(gpt.config.vocab_size, (2, T), generator=random)
    gpt = copy.deepcopy(gpt).eval()
    for p in gpt.parameters():  # zeros, as --zero_init's, would hide what a layer does
        p += 0.02 * torch.randn(p.shape, generator=random)
    logits = gpt(idx, idx)[0]
    cache = gpt.new_cache()
    pieces = idx.split([T - T // 2, *[1] * (T // 2)], dim=1)
    in_pieces = torch.cat([gpt(x, x, cache=cache)[0] for x in pieces], dim=1)
    error = ((in_pieces - logits).abs().max() / logits.std()).item()
    if error <= ROUNDING:
        return ""
    return f"with a cache its logits differ by {error:.1g} of their spread"


@torch.no_grad()
def bfloat16_error(gpt: GPT, idx: torch.Tensor) -> float:
    """The error of a model's logits under autocast, as a share of their spread."""
    gpt.eval()
    exact = gpt(idx, idx)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = gpt(idx, idx)[0].float()
    return ((logits - exact).square().mean().sqrt() / exact.std()).item()
