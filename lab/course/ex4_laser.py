"""Exercise 4: LASER, the logarithm of attention over exponentials.

    y_i = log sum_{j <= i} a_ij exp(v_j),   a = the causal softmax of exercise 2

(Duvvuri and Dhillon, arXiv 2411.03493, equation 6.) exp(v) overflows for values above 709 in
float64 (88 in float32). The paper subtracts the largest value of all tokens first: the sum of a
query that sees only small values is then rounded to 0, and its logarithm is -inf. So one large
value of a later token destroys earlier outputs, although it has no weight in them.

Then a prediction. A query sees two values, 5 with the weight a and 0 with the weight 1 - a. For
which a is LASER's gradient with respect to the score of the 5 larger than softmax's? Think first:

    softmax: y = 5 a;   LASER: y = log(a exp(5) + 1 - a);   da / ds = a (1 - a)

Write down a guess for a = 0.01, 0.5 and 0.99, then compute it.

Shapes: q, k (T, D), v (T, Dv), y (T, Dv).

Hint: log(a exp(v)) = log a + v, and torch.logsumexp subtracts the largest term of each sum; the
logarithm of a weight is log_softmax. For the gradients, begin with scores whose softmax is a and
1 - a. You may import exercise 2.
"""

from torch import Tensor


def laser_as_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y, as the equation says, with exp and log. Subtract nothing."""
    raise NotImplementedError


def laser(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y, right for all values up to 1000 and more. T x T x Dv numbers are allowed."""
    raise NotImplementedError


def gradients(a: float) -> tuple[float, float]:
    """dy / ds of softmax and of LASER, s the score of the value 5, as above. Use autograd."""
    raise NotImplementedError


def equal_at() -> float:
    """The weight a, between 0.01 and 0.99, at which both gradients are equal; to 3 digits."""
    raise NotImplementedError
