"""The heads of a layer in two groups, short and long: which heads of q, k and v belong to each group."""

from collections.abc import Callable, Sequence

import torch

from attention.forms import fast_form, unchanged
from attention.scores import takes
from attention.sums import SUMS


class HeadGroup:
    """Query heads of a layer that share a window, and the heads of keys and values that they need.

    heads: their numbers. window: None for long heads. name, definition: their attention. schemes: the positions.Schemes
    that act on their q and k. n_query: how many query heads in a row share one head of keys and values (1 without
    grouped queries). n_map: 2 with differential attention, where heads 2i and 2i + 1 are two maps of one head: they
    have a key each and one value together; else 1. width: D, of a head.

    core is the form of the attention that runs; sums its kind of running sums, if a cache can keep these (sums.py).
    """

    def __init__(
        self, heads: list[int], window: int | None, name: str, definition: Callable, schemes: Sequence = (), *,
        n_query: int = 1, n_map: int = 1, width: int = 1,
    ):  # fmt: skip
        values = [h // n_map // n_query for h in heads]
        keys = [n_map * value + h % n_map for h, value in zip(heads, values, strict=True)]
        self.heads, self.window, self.name, self.definition, self.schemes = heads, window, name, definition, schemes
        self.q, self.k, self.v = index(heads), index(sorted(set(keys))), index(sorted(set(values)))
        self.k_of = [sorted(set(keys)).index(key) for key in keys]  # for each query head: which of the keys
        self.v_of = [sorted(set(values)).index(value) for value in values]
        self.core = fast_form(name, definition)
        self.fades = any(takes(definition, name) for name in ("fade", "q", "k"))  # whether ALiBi gives it a decay
        self.widths = width, n_map * width  # of a key and of a value
        summed = window is None and not any(scheme.biased for scheme in schemes) and unchanged(name, definition)
        self.sums = SUMS.get(name) if summed else None

    def take(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The group's heads of a layer's q (B, H, T, D), k (B, G, T, D) and v (B, G / n_map, T, n_map D)."""
        return taken(q, self.q), taken(k, self.k), taken(v, self.v)

    def share(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for each query head of the group, from those that `take` gave."""
        return per_head(k, self.k_of), per_head(v, self.v_of)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings) -> torch.Tensor:
        """y (B, H, T, Dv) of the group's heads, from what `take` gave."""
        return self.core(q, *self.share(k, v), **settings)


def inverse_of(letters: str) -> list[int] | None:
    """The place of each head after the short ones were put first; None if no head has moved."""
    order = [h for kind in "SL" for h, letter in enumerate(letters) if letter == kind]
    return None if order == sorted(order) else [order.index(h) for h in range(len(letters))]


def index(heads: list[int]) -> slice | list[int]:
    """The heads as a slice if they are neighbours, else as a list: x[slice] is a view, x[list] is a copy."""
    together = heads == list(range(heads[0], heads[-1] + 1))
    return slice(heads[0], heads[-1] + 1) if together else heads


def taken(x: torch.Tensor, heads: slice | list[int]) -> torch.Tensor:
    """These heads of x (B, H, T, D). For all heads, x itself: even a slice of everything costs a backward pass."""
    return x if heads == slice(0, x.shape[1]) else x[:, heads]


def per_head(x: torch.Tensor, of: list[int]) -> torch.Tensor:
    """(B, H, T, D): for each query head h the head of[h] of x (B, G, T, D)."""
    if x.shape[1] == 1 < len(of):  # MQA: a view, so that decoding copies no keys and values
        return x.expand(-1, len(of), -1, -1)
    n = len(of) // x.shape[1]
    if of == [g for g in range(x.shape[1]) for _ in range(n)]:
        return x if n == 1 else x.repeat_interleave(n, dim=1)
    return x[:, of]
