"""What a definition does, found out by trying it on fixed inputs, in float64 on the CPU."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from attention.fast import CHUNK, in_blocks
from attention.scores import plain_form

WINDOW = 20  # of the short heads that are tried
# Short heads are compared for so many queries: a definition may need T x T numbers for each.
LAST = 16


def fixed_inputs(tokens: int) -> tuple:
    """q, k (1, 2, T, 4) and v (1, 2, T, 3) in float64, which look random. Scores go up to 50.

    T: tokens, but enough for blocks, and 1024 at most.
    """
    T = max(2 * CHUNK + 2, min(tokens, 1024))
    x = torch.arange(1, 22 * T + 1, dtype=torch.float64, device="cpu").square().mul(0.37).sin()
    q, k, v = x.split((8 * T, 8 * T, 6 * T))
    return 10 * q.view(1, 2, T, 4), 3 * k.view(1, 2, T, 4), v.view(1, 2, T, 3)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal but for the rounding of float64."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-9 * b.abs().max().clamp(min=1))


@functools.cache
def linear_in_values(definition: Callable) -> bool:
    """Whether y is linear in v, as an attention must be for values by distance (`far`)."""
    plain = plain_form(definition)
    q, k, v = fixed_inputs(1)
    other = v.flip(-2)
    return alike(plain(q, k, v + other), plain(q, k, v) + plain(q, k, other))


@functools.cache
def is_row_local(definition: Callable, tokens: int) -> bool:
    """Whether an output depends only on its query and on the keys and values that the query sees.

    It is tried with a part of the queries, and without all later tokens, for several cuts.
    """
    plain = plain_form(definition)
    q, k, v = fixed_inputs(tokens)
    T = q.shape[2]
    y = plain(q, k, v)
    for cut in (25, T // 2, *range(T - 8, T)):
        rows = slice(max(0, cut - CHUNK), cut)  # the last queries before the cut
        if not alike(plain(q[:, :, rows], k[:, :, :cut], v[:, :, :cut]), y[:, :, rows]):
            return False
    return True


@functools.cache
def works_in_blocks(definition: Callable, tokens: int) -> bool:
    """Whether short heads in blocks of a text give the same as short heads on the whole text."""
    plain = plain_form(definition)
    q, k, v = fixed_inputs(tokens)
    expected = plain(q[:, :, -LAST:], k, v, window=WINDOW)
    return alike(in_blocks(plain)(q, k, v, window=WINDOW)[:, :, -LAST:], expected)
