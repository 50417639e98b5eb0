"""Exercise 6: decoding keeps what later tokens need, and no more.

A model writes one token at a time. Computing all earlier tokens again for each new one takes n^2
steps; so what later queries need of the past is kept in a cache. How much that is depends on the
attention:

    all keys        keys and values of all tokens       n (D + Dv) numbers
    a window of w   those of the last w tokens          w (D + Dv) numbers
    running sums    S of exercise 5                     D Dv numbers, however long the text is

Each function gets q, k (D,) and v (Dv,) of one new token and the cache that the call before
returned (None at first), and returns (y, cache): y (Dv,) is the new token's row of the full
forward pass; a cache is a tuple of tensors.

Hint: the new token sees itself. After a call, a window's cache holds at most the w tokens that the
next query will see besides its own.
"""

from torch import Tensor


def softmax_step(q: Tensor, k: Tensor, v: Tensor, cache: tuple | None) -> tuple[Tensor, tuple]:
    """One token of exercise 2's causal_attention."""
    raise NotImplementedError


def window_step(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple | None, w: int
) -> tuple[Tensor, tuple]:
    """One token of exercise 3's window_attention."""
    raise NotImplementedError


def sum_step(q: Tensor, k: Tensor, v: Tensor, cache: tuple | None) -> tuple[Tensor, tuple]:
    """One token of exercise 5's z_i = q_i S_i."""
    raise NotImplementedError


def cache_numbers(n: int, D: int, w: int) -> tuple[int, int, int]:
    """How many numbers the three caches hold in memory after n > w tokens, if Dv = D."""
    raise NotImplementedError
