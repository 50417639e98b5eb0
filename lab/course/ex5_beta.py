"""Exercise 5: beta by running sums, forward in linear time, and one backward pass by hand.

    y_i = sum_{j <= i} s_ij v_j / (1 + ||s_i||),   ||s_i||^2 = sum_{j <= i} s_ij^2

(A post of dscamiss: github.com/dscamiss/blog.) There is no exponential, so the sums over j can be
taken before the query is known. With q already divided by sqrt(D), s_ij = q_i . k_j and

    sum_j s_ij v_j = q_i S_i,        S_i = sum_{j <= i} k_j v_j^T   (D, Dv)
    sum_j s_ij^2   = q_i G_i q_i^T,  G_i = sum_{j <= i} k_j k_j^T   (D, D)

Then the backward pass of z_i = q_i S_i alone. Given dz, the gradient of a loss by z:

    dq_i = S_i dz_i        and dk_j, dv_j are sums over the queries i >= j: find them

Shapes: q, k (T, D), v (T, Dv), y and z (T, Dv).

Hint: S_i = S_{i-1} + k_i v_i^T, so a loop over tokens is enough. For the gradients, go through the
tokens backwards, with one running sum of q_i dz_i^T.
"""

from torch import Tensor


def beta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y, without any tensor of T x T numbers. Divide q by sqrt(D) yourself."""
    raise NotImplementedError


def sum_backward(q: Tensor, k: Tensor, v: Tensor, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of z_i = q_i S_i, q as it is. No autograd, and no T x T numbers."""
    raise NotImplementedError
