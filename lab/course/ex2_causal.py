"""Exercise 2: no token may see a later one.

A language model predicts token i + 1 from the tokens up to i. So query i may use only the keys
j <= i (Vaswani et al. 2017, section 3.2.3):

    a_ij = exp(s_ij) / sum_{m <= i} exp(s_im)   for j <= i,   and 0 for j > i

A mistake here is not seen in training: the loss even falls, since the model copies the answer. It
is found by a test. Output i may not depend on the query, the key or the value of a later token, so
these gradients must be exactly 0.

Shapes: q, k (T, D), v (T, Dv), y (T, Dv).

Hint: masked scores become -inf before the softmax. The test must find three attentions: in the
first only query 6 sees token 7; in the second later keys count in the sum of the weights; the third
subtracts a millionth of the mean of all queries from each. So look at every row, and at the
gradients of q, k and v.
"""

from collections.abc import Callable

from torch import Tensor


def seen(T: int) -> Tensor:
    """True where query i may use key j: (T, T)."""
    raise NotImplementedError


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y, (T, Dv). From here on you may use torch.softmax."""
    raise NotImplementedError


def sees_later(attend: Callable) -> bool:
    """Whether any output of attend(q, k, v) depends on a later token.

    Try it on random q, k and v of 8 tokens, with gradients.
    """
    raise NotImplementedError
