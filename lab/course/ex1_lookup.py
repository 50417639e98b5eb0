"""Exercise 1: attention is a table that is looked up softly.

A dictionary returns the value whose key equals the query. Attention returns a mean of all values,
in which a value weighs more if its key fits the query better (Vaswani et al. 2017, equation 1):

    s_ij = q_i . k_j / sqrt(D)
    a_ij = exp(s_ij) / sum_m exp(s_im)
    y_i  = sum_j a_ij v_j

Shapes: q (Tq, D), k (T, D), v (T, Dv), s and a (Tq, T), y (Tq, Dv). No function of torch.nn, and no
torch.softmax.

Hint: exp(1000) is infinite. The weights stay the same if you subtract one number from all scores of
a query first: which one?
"""

from torch import Tensor


def mean(v: Tensor) -> Tensor:
    """The mean of the rows of v, (Dv,), by a loop over the rows: all keys fit equally well."""
    raise NotImplementedError


def scores(q: Tensor, k: Tensor) -> Tensor:
    """How well each key fits each query: s, (Tq, T)."""
    raise NotImplementedError


def softmax(s: Tensor) -> Tensor:
    """The weights a of the scores s: each row is positive and sums to 1."""
    raise NotImplementedError


def lookup(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y, (Tq, Dv)."""
    raise NotImplementedError
