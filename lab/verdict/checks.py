"""Checks of a model, new or trained: a model that fails one is not worth its training."""

from typing import NamedTuple

import torch

from attention.cache import Context
from model import GPT
from training.run import LEAK, change_by_later_tokens

ROUNDING = 1e-3  # largest error of a cached logit, as a share of the logits' spread


class Check(NamedTuple):
    what: str
    ok: bool
    found: str = ""

    def __str__(self) -> str:
        if self.ok:
            return f"{self.what} {self.found} ok".replace("  ", " ")
        return f"{self.what}: FAILS, {self.found}"


def later_tokens(gpt: GPT) -> Check:
    """The logits do not change with later tokens."""
    change = change_by_later_tokens(gpt)
    if change <= LEAK:
        return Check("no later token seen", True)
    found = f"logits change with later tokens by {change:.1g} of their spread"
    return Check("no later token seen", False, found)


@torch.no_grad()
def cached(gpt: GPT) -> Check:
    """Text in pieces, with a cache, has the logits of the whole text."""
    T = gpt.config.block_size
    idx = torch.randint(gpt.config.vocab_size, (2, T), generator=torch.Generator().manual_seed(0))
    gpt.eval()
    logits = gpt(idx, idx)[0]
    cache = gpt.new_cache()
    pieces = idx.split([T - T // 2, *[1] * (T // 2)], dim=1)
    in_pieces = torch.cat([gpt(x, x, cache=cache)[0] for x in pieces], dim=1)
    error = ((in_pieces - logits).abs().max() / logits.std()).item()
    return Check("cached = uncached", error <= ROUNDING, f"{error:.0e}")


def gradients(gpt: GPT) -> Check:
    """Gradients of the first layer are finite on zeros, on ties and where scores are large."""
    T = gpt.config.block_size
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, T, gpt.config.n_embd, generator=random)
    two = x[:, torch.randint(2, (T,), generator=random)]  # each token is one of two
    layer = gpt.transformer.h[0].attn.train()
    for case, inputs in {"zeros": 0 * x, "ties": two, "large scores": 1e4 * x}.items():
        inputs = inputs.requires_grad_()
        y = layer(inputs, Context())
        wanted = [inputs, *layer.parameters()]
        grads = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
        if not all(g.isfinite().all() for g in (y, *grads) if g is not None):
            return Check("gradients finite", False, f"not on {case}")
    return Check("gradients finite", True)


@torch.no_grad()
def bfloat16_error(gpt: GPT, idx: torch.Tensor) -> float:
    """The error of a model's logits under autocast, as a share of their spread."""
    gpt.eval()
    exact = gpt(idx, idx)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = gpt(idx, idx)[0].float()
    return ((logits - exact).square().mean().sqrt() / exact.std()).item()
