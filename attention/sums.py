"""beta and beta_squared in linear time: exactly, since all they need of the past is a few sums.

Shapes are those of scores.py: q, k (B, H, T, D), v (B, H, T, Dv). The tokens are cut into n chunks
of c. Within a chunk the scores are computed as in the definition. All earlier chunks enter through
their sums, the state. Read beta first, then linear_attention, which calls it, then beta_squared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.fast import general_form, recompute
from attention.scores import at_least_float32, faded, unrolls

TOKENS_KEPT = 65_536  # of a longer text the backward pass computes each such part again


def beta(q, k, v, decay, state):
    """(y, state) of y = s / (1 + ||s||) v (a post of dscamiss 2024), for q and k in chunks.

    q, k (B, H, n, c, D), q scaled; v (B, H, n, c, Dv); y as v. With s_j = q . k_j:

        sum_j s_j v_j = q S,              S = sum_j k_j^T v_j
        ||s||^2 = sum_j s_j^2 = q G q^T,  G = sum_j k_j^T k_j

    so the state [S | G], (B, H, D, Dv + D), holds all of the past. A decay (H, 1, 1) multiplies the
    scores, so S fades by gamma for each token, and G by gamma^2. decay and state may be None.

    Rounding errors are relative to ||q|| ||k||. Where ||s|| is a hundred times smaller (similar
    keys, and a query almost orthogonal to them), four digits of a float32 are right; with the
    definition, six are.
    """
    Dv = v.shape[-1]

    # one sum for both: that of k^T [v | k]
    w = torch.cat((v, k), dim=-1)  # (B, H, n, c, Dv + D)
    power = F.pad(q.new_ones(Dv), (0, q.shape[-1]), value=2.0)
    past, state = _earlier_chunks(q, k, w, decay, power, state)
    y, qG = past.split((Dv, q.shape[-1]), dim=-1)

    # the keys of a query's own chunk
    s = _within_chunk(q @ k.mT, decay)  # (B, H, n, c, c)
    y = y + s @ v
    square = (qG * q).sum(-1, keepdim=True) + s.square().sum(-1, keepdim=True)
    return y / (1 + square.clamp(min=1e-12).sqrt()), state  # rounding may make a square negative


def _earlier_chunks(q, k, w, decay, power, state):
    """(q_i . sum of k_j^T w_j over the chunks before i's, (B, H, n, c, E); the state after all).

    q, k (B, H, n, c, F), w (B, H, n, c, E), state (B, H, F, E) or None. A decay multiplies column e
    by gamma^(power_e (i - j)), gamma = exp(-decay): from key j to the end of its chunk, over whole
    chunks, and from there to query i. Each of these factors is at most 1, so nothing overflows.
    """
    c = k.shape[-2]
    gamma = None
    if decay is not None:
        rate = -decay[:, None] * power  # (H, 1, 1, E)
        place = torch.arange(c, device=q.device)[:, None]
        w = w * (rate * (c - 1 - place)).exp()
        gamma = (rate[:, 0] * c).exp()  # (H, 1, E)

    # the sum of each chunk, and the state before it
    own = k.mT @ w  # (B, H, n, F, E)
    start = torch.zeros_like(own[:, :, 0]) if state is None else state
    if unrolls(q):
        before = torch.cat((start[:, :, None], own), dim=2)
        before = before.cumsum(2) if gamma is None else _faded_cumsum(before, gamma)
        before, state = before.split((own.shape[2], 1), dim=2)
        state = state[:, :, 0]
    else:  # cumsum over a middle dimension takes several times as long
        before = []
        state = start
        for chunk in own.unbind(2):
            before.append(state)
            state = state + chunk if gamma is None else torch.addcmul(chunk, state, gamma)
        before = torch.stack(before, dim=2)

    past = q @ before
    if decay is not None:
        past = past * (rate * (place[: q.shape[-2]] + 1)).exp()
    return past, state


def _faded_cumsum(x, gamma):
    """The sums over a <= b of gamma^(b - a) x_a, x (B, H, n, F, E), in log2(n) steps."""
    step = 1
    while step < x.shape[2]:
        earlier = x[:, :, :-step] * gamma[:, None] ** step
        x = torch.cat((x[:, :, :step], x[:, :, step:] + earlier), dim=2)
        step *= 2
    return x


def _within_chunk(weights, decay):
    """Weights (B, H, n, c or 0, c) without those of later keys, faded by a decay."""
    return faded(weights.tril(), None if decay is None else decay[:, None])


# -----------------------------------------------------------------------------
# any number of tokens


def linear_attention(
    sums: "Sums", q, k, v, *, scale=None, decay=None, state=None
) -> tuple[Tensor, Tensor]:
    """(y, state) of T tokens after those of the state; sums: BETA or BETA_SQUARED.

    q (B, H, T, D), not scaled. decay (H, 1, 1) or None. state (B, H, F, E), the sums over the
    tokens before, or None; gradients flow through both states. Without queries, q (B, H, 0, D), the
    state alone. Computed in float32 or wider, also under autocast. y is in v's precision.
    """
    T, D = k.shape[-2:]
    with torch.autocast(q.device.type, enabled=False):
        q = at_least_float32(q) * (scale or D**-0.5)
        k = at_least_float32(k)
        values = at_least_float32(v)
        if decay is not None:
            decay = decay.to(q.dtype)

        if not q.shape[2]:
            return v, sums.run(*(x[:, :, None] for x in (q, k, values)), decay, state)[1]

        # whole chunks, at most TOKENS_KEPT tokens at once; what is left is a chunk of its own
        c = sums.chunk(D)
        whole = T // c * c
        step = TOKENS_KEPT // c * c
        sizes = [n for n in (*[step] * (whole // step), whole % step, T - whole) if n]

        run = sums.run
        if T > TOKENS_KEPT:
            run = partial(recompute, run)
        outputs = []
        for part in zip(*(x.split(sizes, dim=2) for x in (q, k, values)), strict=True):
            chunks = [x.unflatten(2, (-1, min(c, x.shape[2]))) for x in part]
            y, state = run(*chunks, decay, state)
            outputs.append(y.flatten(2, 3))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return y.to(v.dtype), state


def by_sums(sums: "Sums", definition: Callable) -> Callable:
    """The code of long heads by running sums.

    The definition runs for few tokens, for fewer queries than keys, and while weights are dropped.
    """
    general = general_form(definition)

    def attend(q, k, v, *, dropout=0.0, **settings):  # scale, decay
        Tq, D = q.shape[-2:]
        if k.shape[-2] == Tq >= sums.linear_from(D) and not dropout:
            return linear_attention(sums, q, k, v, **settings)[0]
        return general(q, k, v, dropout=dropout, **settings)

    return attend


# -----------------------------------------------------------------------------
# beta squared


def beta_squared(q, k, v, decay, state):
    """(y, state) of y = s^2 / (1 + sum s^2) v (ours), for q and k in chunks as those of `beta`.

    This is linear attention over products of two features, since

        (q . k)^2 = sum_a<=b m_ab q_a q_b k_a k_b,   m = 1 if a = b, else 2

    With f(k) the D (D + 1) / 2 products of a key, the state is the sum of f(k_j)^T [v_j | 1],
    (B, H, D (D + 1) / 2, Dv + 1).
    """
    D = q.shape[-1]
    a, b = torch.triu_indices(D, D, device=q.device)
    m = 1.0 + (a < b)
    w = F.pad(v, (0, 1), value=1.0)  # (B, H, n, c, Dv + 1)
    past, state = _earlier_chunks(m * Products.apply(q), Products.apply(k), w, decay, 1.0, state)

    weights = _within_chunk((q @ k.mT).square(), decay)  # (B, H, n, c, c)
    y = past + weights @ w
    return y[..., :-1] / (1 + y[..., -1:]), state


class Products(torch.autograd.Function):
    """x_a x_b for all a <= b: (..., D) -> (..., D (D + 1) / 2).

    In slices: autograd's own backward pass takes several times as long.
    """

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.cat([x[..., a : a + 1] * x[..., a:] for a in range(x.shape[-1])], dim=-1)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        D = x.shape[-1]
        dx = torch.zeros_like(x)
        for a, d in enumerate(dy.split([D - a for a in range(D)], dim=-1)):
            dx[..., a:].addcmul_(x[..., a : a + 1], d)
            dx[..., a] += (d * x[..., a:]).sum(-1)
        return dx


# -----------------------------------------------------------------------------


@dataclass
class Sums:
    """An attention by running sums, for heads that are D wide."""

    run: Callable  # (q, k, v, decay, state) -> (y, state): beta or beta_squared
    chunk: Callable  # D -> the tokens of a chunk
    linear_from: Callable  # D -> the tokens from which it is faster than the definition, on a CPU
    tokens: Callable  # D -> the tokens whose keys and values are as many numbers as the state


BETA = Sums(
    run=beta,
    chunk=lambda D: max(32, D),
    linear_from=lambda D: 256,
    tokens=lambda D: D,
)
BETA_SQUARED = Sums(
    run=beta_squared,
    chunk=lambda D: 4 * D,
    linear_from=lambda D: max(256, 24 * D),
    tokens=lambda D: (D + 1) ** 2 / 4,
)
