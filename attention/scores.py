"""Scores, masks, and the driver that calls a definition of model.py with queries, keys and values.

Shapes: B batch, H heads, D width of queries and keys, Dv width of values, T keys, Tq queries. The
queries belong to the last Tq of the T tokens. In training Tq = T.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# A decorator: torch.compile leaves the function as it is. torch.compiler.disable does the same, but
# it imports all of torch.compile at once, and that takes longer than all other imports of this
# project together. PyTorch itself uses this one.
uncompiled: Callable = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or x itself in float64: scores and sums are computed in this precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def distances(Tq: int, T: int, device: torch.device) -> Tensor:
    """i - j of query i and key j, (Tq, T). The queries belong to the last Tq tokens."""
    i = torch.arange(T - Tq, T, device=device)
    j = torch.arange(T, device=device)
    return i[:, None] - j


def visible(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """True where query i sees key j, (Tq, T): 0 <= i - j <= window; without a window, j <= i."""
    distance = distances(q.shape[-2], k.shape[-2], q.device)
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance <= window)


def scores(q: Tensor, k: Tensor, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """s = scale q k^T + bias, (B, H, Tq, T), not masked, in float32 or wider, also under autocast.

    scale: 1 / sqrt(D) if None. bias: broadcasts to s.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        s = at_least_float32(q) @ at_least_float32(k).mT * scale
    return s if bias is None else s + bias


class learned(float):
    """b=learned(x) among a definition's arguments: a trained scalar per head, which begins as x.

    The definition gets it as (H, 1, 1).
    """


class of_token(float):
    """f=of_token(x) among a definition's arguments: a number of each token, per head of keys.

    It is a trained linear function of the token's input to the layer, which begins as x. The
    definition gets it as (B, H, T, 1), a number for each key.
    """


@functools.cache
def learned_of(definition: Callable, family: type = learned) -> dict[str, float]:
    """The learned scalars of a definition, or its numbers of a token: {name: its first value}."""
    arguments = inspect.signature(definition).parameters.values()
    return {x.name: float(x.default) for x in arguments if isinstance(x.default, family)}


@functools.cache
def has_argument(definition: Callable, argument: str) -> bool:
    """Whether a definition has an argument of this name, such as drop or fade."""
    return argument in inspect.signature(definition).parameters


def plain_form(definition: Callable) -> Callable:
    """The attention that a definition f(s, seen, v) describes, as attend(q, k, v, ...) -> y.

    q (B, H, Tq, D), k (B, H, T, D) and v (B, H, T, Dv) give y (B, H, Tq, Dv), in v's precision.
    Fast forms have the same arguments, as far as they can take them:
      window: query i sees key j where 0 <= i - j <= window; None: where j <= i
      seen: a mask in place of the window's, broadcasts to (B, H, Tq, T)
      scale, bias: see scores()
      decay: (H, 1, 1), or what broadcasts to (B, H, 1, 1), at least 0: each weight is multiplied by
        exp(-decay (i - j)) before the weights are divided by their sum or norm; a definition
        without `fade` gets lower scores instead, which is the same for exp(s)
      dropout: the probability with which `drop` drops a weight
      around: around(definition) is the function that runs in its place
      learned_scalars: (H, 1, 1) each, by name; a missing one is what it begins as
    After its D dimensions k may have the numbers of its tokens (positions.TokenNumbers), which so
    go with their keys everywhere; without them they are what they begin as.
    Under autocast scores, softmax and norms are in float32, and products with v in its precision.
    Raises ValueError for a definition that returns another shape.
    """
    names = inspect.signature(definition).parameters

    def plain(
        q, k, v, *, window=None, seen=None, scale=None, bias=None, decay=None, dropout=0.0,
        around=None, **learned_scalars,
    ):  # fmt: skip
        k, numbers = split_numbers(k, q.shape[-1], definition)
        s = scores(q, k, scale, bias)
        if seen is None:
            seen = visible(q, k, window)
        distance = None
        if decay is not None:
            distance = distances(q.shape[-2], k.shape[-2], q.device)
            if "fade" not in names:
                s = s - decay * distance.abs()

        arguments = {name: s.new_full((1, 1, 1), x) for name, x in learned_of(definition).items()}
        arguments |= numbers | learned_scalars
        if "fade" in names:
            arguments["fade"] = functools.partial(faded, decay=decay, distance=distance)
        if "drop" in names:
            arguments["drop"] = lambda weights: F.dropout(weights, dropout)
        if "q" in names:
            arguments["q"] = at_least_float32(q)
        if "k" in names:
            arguments["k"] = at_least_float32(k)

        run = definition if around is None else around(definition)
        y = run(s, seen, at_least_float32(v), **arguments)
        expected = (*q.shape[:-1], v.shape[-1])
        if y.shape != expected:
            raise ValueError(
                f"this attention gave {tuple(y.shape)} for s {tuple(s.shape)} and v "
                f"{tuple(v.shape)}, not {expected}"
            )
        return y.to(v.dtype)

    return plain


def split_numbers(k: Tensor, D: int, definition: Callable) -> tuple[Tensor, dict[str, Tensor]]:
    """k (B, H, T, D) and the numbers of its tokens by name, (B, H, T, 1) each, from both in one.

    Each number stands in k in two parts, which sum to it: first the first parts of all numbers.
    """
    starts = learned_of(definition, of_token)
    if k.shape[-1] > D:
        high, low = at_least_float32(k[..., D:]).chunk(2, dim=-1)
        numbers = (high + low).split(1, dim=-1)
    else:
        numbers = [at_least_float32(torch.full_like(k[..., :1], x)) for x in starts.values()]
    return k[..., :D], dict(zip(starts, numbers, strict=False))


def faded(x: Tensor, decay: Tensor | None, distance: Tensor | None) -> Tensor:
    """Weights x (B, H, Tq, T), multiplied by exp(-decay (i - j)) if there is a decay."""
    return x if decay is None else x * (-decay * distance.abs()).exp()
