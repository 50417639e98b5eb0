"""Scores and masks, and the driver that makes a definition of model.py a function of queries, keys and values.

Shapes: B batch, H heads, D width of queries and keys, Dv width of values, T keys, Tq queries: those of the last Tq of
the T tokens. In training Tq = T.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# A decorator: torch.compile leaves the function as it is. torch.compiler.disable does the same, but it imports all of
# torch.compile at once, which takes longer than everything else that this project imports; PyTorch itself uses this.
uncompiled: Callable = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or x itself in float64: the precision in which scores and sums are computed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def distances(Tq: int, T: int, device: torch.device) -> Tensor:
    """i - j of query i and key j, (Tq, T). The queries are those of the last Tq tokens."""
    return torch.arange(T - Tq, T, device=device)[:, None] - torch.arange(T, device=device)


def visible(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """True where query i sees key j, (Tq, T): 0 <= i - j <= window, or j <= i without a window."""
    distance = distances(q.shape[-2], k.shape[-2], q.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance <= window)


def scores(q: Tensor, k: Tensor, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """s = scale q k^T + bias, (B, H, Tq, T), not masked, in float32 or wider, also under autocast.

    scale: 1 / sqrt(D) if None. bias: broadcasts to s.
    """
    with torch.autocast(q.device.type, enabled=False):
        s = at_least_float32(q) @ at_least_float32(k).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return s if bias is None else s + bias


class learned(float):
    """b=learned(x) in a definition's arguments: a trained number for each head, (H, 1, 1), which begins as x."""


@functools.cache
def learned_of(definition: Callable) -> dict[str, float]:
    """What each of a definition's learned numbers begins as, by name."""
    arguments = inspect.signature(definition).parameters.values()
    return {x.name: float(x.default) for x in arguments if isinstance(x.default, learned)}


@functools.cache
def takes(definition: Callable, argument: str) -> bool:
    """Whether a definition has this argument: `drop` if it can drop weights, `fade` if a decay multiplies them."""
    return argument in inspect.signature(definition).parameters


def plain_form(definition: Callable) -> Callable:
    """The function of q, k and v that a definition f(s, seen, v) describes: attend(q, k, v, ...) -> y (B, H, Tq, Dv).

    q (B, H, Tq, D), k (B, H, T, D), v (B, H, T, Dv); y is in v's precision. The arguments of attend, which the fast
    forms have too:
      window: key j is seen by query i where 0 <= i - j <= window; None: where j <= i
      scale, bias: see `scores`
      decay: (H, 1, 1) or what broadcasts to (B, H, 1, 1), at least 0: weights are multiplied by exp(-decay (i - j))
        before they are divided by their sum or norm; a definition without `fade` gets lower scores instead
      dropout: the probability that a weight is dropped, for a definition with `drop`
      far (n, Dv): is added to the values by distance, v_j + far[min(i - j, n - 1)] (Shaw et al. 2018, equation 3); the
        definition must be linear in its values
      numbers: the definition's learned numbers, (H, 1, 1) each; one that is not given is what it begins as
    Only the plain form has `seen` (broadcasts to (B, H, Tq, T)): a mask of one's own, in the place of the window.
    Under autocast the scores are in float32, and so are softmax and norms; the products with v are in its precision.
    """
    drops, fades = takes(definition, "drop"), takes(definition, "fade")
    wants = [name for name in ("q", "k") if takes(definition, name)]

    def plain(q, k, v, *, window=None, seen=None, scale=None, bias=None, decay=None, dropout=0.0, far=None, **numbers):
        s = scores(q, k, scale, bias)
        more = {name: s.new_full((1, 1, 1), x) for name, x in learned_of(definition).items()} | numbers
        distance = None if decay is None and far is None else distances(q.shape[-2], k.shape[-2], q.device)
        if decay is not None and not fades:
            s = s - decay * distance.abs()
        if fades:
            more["fade"] = lambda x: x if decay is None else x * (-decay * distance.abs()).exp()
        if drops:
            more["drop"] = lambda x: F.dropout(x, dropout)
        for name in wants:
            more[name] = at_least_float32({"q": q, "k": k}[name])
        values = at_least_float32(v) if far is None else with_one_hot(v)
        y = definition(s, visible(q, k, window) if seen is None else seen, values, **more)
        if y.shape != (*q.shape[:-1], values.shape[-1]):
            shapes = f"{tuple(y.shape)} for s {tuple(s.shape)} and v {tuple(values.shape)}"
            raise ValueError(f"this attention gave {shapes}, not {(*q.shape[:-1], values.shape[-1])}")
        if far is not None:  # what an attention makes of one-hot values is its weights
            y, weights = y[..., : v.shape[-1]], y[..., v.shape[-1] :]
            at = distance.clamp(0, len(far) - 1).expand_as(weights)
            y = y + weights.new_zeros(*weights.shape[:-1], len(far)).scatter_add(-1, at, weights) @ far.to(y.dtype)
        return y.to(v.dtype)

    return plain


def with_one_hot(v: Tensor) -> Tensor:
    """[v | I], (B, H, T, Dv + T), in float32 or wider."""
    one_hot = torch.eye(v.shape[-2], device=v.device, dtype=v.dtype).expand(*v.shape[:-1], -1)
    return at_least_float32(torch.cat((v, one_hot), dim=-1))
