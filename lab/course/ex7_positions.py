"""Exercise 7: how does attention know the order of the tokens?

Exercise 2's attention gives the same result if earlier tokens change places. Three remedies:

    sinusoids  p[2m] = sin(pos / 10000^(2m / C)), p[2m + 1] = cos of it, added to the embedding
               (Vaswani et al. 2017, section 3.5; m = 0, ..., C / 2 - 1)
    RoPE       the pair of dimensions 2m, 2m + 1 of q and k is turned by the angle
               pos / 10000^(2m / D), anticlockwise (Su et al. 2021, section 3.4.2)
    ALiBi      slope (i - j) is subtracted from each score (Press et al. 2021)

RoPE turns each token by its own position, and yet scores depend on the distance alone: show it with
numbers. ALiBi needs no change of attention: two more dimensions of q and k are enough, so that
q' . k' = q . k - slope (i - j).

Hint: (a, b) turned by an angle t is (a cos t - b sin t, a sin t + b cos t). For ALiBi, write
-slope (i - j) as a sum of two products, each of a number of i and a number of j.
"""

from torch import Tensor


def sinusoids(T: int, C: int) -> Tensor:
    """p of the positions 0 to T - 1: (T, C)."""
    raise NotImplementedError


def rope(x: Tensor) -> Tensor:
    """x (T, D), each row turned by its position 0, ..., T - 1."""
    raise NotImplementedError


def scores_by_position(q: Tensor, k: Tensor, T: int) -> Tensor:
    """s (T, T): the score of one q (D,) at position i with one k (D,) at position j, with rope.

    Not divided by sqrt(D). Look at it: what is the same along its diagonals?
    """
    raise NotImplementedError


def with_alibi(q: Tensor, k: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """q' and k', both (T, D + 2), whose products are q_i . k_j - slope (i - j)."""
    raise NotImplementedError
