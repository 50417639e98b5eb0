"""Scores, masks, and the driver that calls a definition of model.py with queries, keys and values.

Shapes: B batch, H heads, D width of queries and keys, Dv width of values, T keys, Tq queries. The
queries belong to the last Tq of the T tokens.
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
uncompiled = torch._disable_dynamo

# MKL chooses the code of these functions at their first call. If two threads make that call at the
# same time, one of them may get less exact code, of which four digits are right: PyTorch's issue
# 188792. So this file makes the first call of each, in one thread.
for name in "cos erf exp log sin sqrt tanh".split():
    getattr(torch, name)(torch.ones(1))


def unrolls(x: Tensor) -> bool:
    """Whether many small steps cost more than a few large ones: on a GPU, or under torch.compile.

    A GPU takes as long to start a step as to do it; torch.compile would unroll a loop.
    """
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or x itself in float64: scores and sums are computed in this precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# -----------------------------------------------------------------------------
# which keys a query sees, and its scores


def distances(Tq: int, T: int, device: torch.device) -> Tensor:
    """i - j of query i and key j, (Tq, T). The queries belong to the last Tq tokens."""
    i = torch.arange(T - Tq, T, device=device)
    j = torch.arange(T, device=device)
    return i[:, None] - j


def visible(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """True where query i sees key j, (Tq, T): 0 <= i - j <= window; without a window, j <= i."""
    j = torch.arange(k.shape[-2], device=q.device)
    i = j[-q.shape[-2] :, None]  # the queries belong to the last tokens
    earlier = j <= i
    return earlier if window is None else earlier & (i - window <= j)


def scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """s = scale q k^T, (B, H, Tq, T), not masked, in float32 or wider, also under autocast.

    scale: 1 / sqrt(D) if None.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = k[..., : q.shape[-1]]  # without the numbers of tokens
    with torch.autocast(q.device.type, enabled=False):
        return at_least_float32(q) * scale @ at_least_float32(k).mT


def faded(x: Tensor, decay: Tensor | None) -> Tensor:
    """Weights x (B, H, Tq, T), multiplied by exp(-decay (i - j)); without a decay, x itself."""
    if decay is None:
        return x
    distance = distances(*x.shape[-2:], x.device)
    return x * (-decay * distance.abs()).exp()


# -----------------------------------------------------------------------------
# what a definition asks for


class learned(float):
    """b=learned(x) among a definition's arguments: a trained scalar per head, which begins as x.

    The definition gets it as (H, 1, 1).
    """


class of_token(float):
    """f=of_token(x) among a definition's arguments: a number of each key's token, for each head.

    It is a trained linear function of the token's input to the layer, which begins as x. The
    definition gets it as (B, H, T, 1), or with of_token(x, width=n) as (B, H, T, n).
    """

    def __new__(cls, start: float, width: int = 1):
        number = super().__new__(cls, start)
        number.width = width
        return number


@functools.cache
def asked_by(definition: Callable, family: type) -> dict[str, float]:
    """The arguments of a definition whose default is a `learned` or an `of_token`, by name."""
    arguments = inspect.signature(definition).parameters.values()
    return {x.name: x.default for x in arguments if isinstance(x.default, family)}


@functools.cache
def has_argument(definition: Callable, argument: str) -> bool:
    """Whether a definition has an argument of this name, such as drop or fade."""
    return argument in inspect.signature(definition).parameters


# -----------------------------------------------------------------------------
# the driver


def plain_form(definition: Callable) -> Callable:
    """The attention that a definition f(s, seen, v) describes, as attend(q, k, v, ...) -> y.

    q (B, H, Tq, D), k (B, H, T, D) and v (B, H, T, Dv) give y (B, H, Tq, Dv), in v's precision.
    After its D dimensions k may have the numbers of its tokens (of_token), which so go with their
    keys everywhere; without them they are what they begin as. By name:
      window: query i sees key j where 0 <= i - j <= window; None: where j <= i
      scale: of the scores; None: 1 / sqrt(D)
      decay: (H, 1, 1), or what broadcasts to (B, H, 1, 1), at least 0: each weight is multiplied by
        exp(-decay (i - j)) before the weights are divided by their sum or norm; a definition
        without `fade` gets lower scores instead, which is the same for exp(s)
      dropout: the probability with which `drop` drops a weight
      learned scalars: (H, 1, 1) each; a missing one is what it begins as
    Scores, softmax and norms are in float32 under autocast, and products with v in its precision.
    Raises ValueError for a definition that returns another shape.
    """

    run = caller(definition)

    def plain(q, k, v, *, window=None, scale=None, **settings):  # decay, dropout, learned scalars
        s = scores(q, k, scale)
        y = run(s, visible(q, k, window), q, k, v, **settings)

        expected = (*q.shape[:-1], v.shape[-1])
        if y.shape != expected:
            raise ValueError(
                f"this attention gave {tuple(y.shape)} for s {tuple(s.shape)} and v "
                f"{tuple(v.shape)}, not {expected} (in decoding s has one query for many keys)"
            )
        return y.to(v.dtype)

    return plain


def caller(definition: Callable) -> Callable:
    """run(s, seen, q, k, v, ...) -> y of a definition, which gets what it asks for.

    s and seen: as model.py says. All others: as in plain_form.
    """
    names = inspect.signature(definition).parameters
    scalars = asked_by(definition, learned)
    of_tokens = asked_by(definition, of_token)

    def run(s, seen, q, k, v, *, decay=None, dropout=0.0, **learned_scalars):
        # trained numbers, or what they begin as
        arguments = {name: s.new_full((1, 1, 1), x) for name, x in scalars.items()}
        arguments |= learned_scalars
        end = q.shape[-1]
        for name, x in of_tokens.items():
            number = k[..., end : end + x.width]
            end += number.shape[-1]
            arguments[name] = number if number.numel() else s.new_full((*k.shape[:-1], x.width), x)
        k = k[..., : q.shape[-1]]

        if "drop" in names:
            arguments["drop"] = lambda weights: F.dropout(weights, dropout)
        if "q" in names:
            arguments["q"] = at_least_float32(q)
        if "k" in names:
            arguments["k"] = at_least_float32(k)

        # a decay fades weights, or lowers scores
        if "fade" in names:
            arguments["fade"] = functools.partial(faded, decay=decay)
        elif decay is not None:
            s = s - decay * distances(*s.shape[-2:], s.device).abs()
        return definition(s, seen, at_least_float32(v), **arguments)

    return run
