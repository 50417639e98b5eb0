"""A GPT whose causal self-attention is pluggable: the whole model, read from top to bottom.

Shapes: B batch, T time, C n_embd, H query heads, G key/value heads, D head dim, V vocabulary. Attention is
(B, H, T, D) everywhere.

1. ATTENTION: the cores, one function each. A new attention is one function and one line in this table
   (and its definition, one line in ONE_QUERY, which the tests and bench.py hold it against).
2. QK_NORM, POSITION, NORM, WHERE, ACTIVATION: the choices among like things, a line each.
3. GPTConfig: every choice, and which of them go together.
4. CausalSelfAttention, MLP, Block, GPT: GPT-2, where the choices are made.

Sources: softmax, "Attention Is All You Need" (Vaswani et al. 2017); LASER, "LASER: Attention with
Exponential Transformation" (Duvvuri and Dhillon); long and short heads, "Short-Range Dependency Effects on
Transformer Instability and a Decomposed Attention Solution" (LS-attention); beta, the blog post that
replaces softmax by s / (1 + ||s||) in nanoGPT. The papers of the other choices stand beside them.
"""

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from configurator import NotInstalled, UserError

# -----------------------------------------------------------------------------
# Attention cores. f(q, k, v, *, window=None, scale=None, bias=None) -> y, causal:
#   q (B, H, Tq, D), k (B, H, T, D), v (B, H, T, Dv), y (B, H, Tq, Dv). In training Tq = T; fewer queries are
#     those of the last Tq of the T tokens, as in decoding
#   window: key j is seen by query i where 0 <= i - j <= window, window + 1 keys; None: all up to i
#   scale: of the scores, 1 / sqrt(D) if None
#   bias: added to the scaled scores; a tensor that broadcasts to (B, H, Tq, T), or a ByDistance
# A core that can drop attention weights takes `dropout` as well, the probability, 0.0 by default.
# Positions that a core cannot take are refused in GPTConfig: Shaw's want one that is linear in its values.
# Raises ValueError for shapes that do not match, a window below 0, and (on a CPU) values that are not finite.


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is where it is float64: the precision of attention's statistics."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def visible(Tq: int, T: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where query i, of the last Tq of T tokens, sees key j: 0 <= i - j <= window. (Tq, T)."""
    distance = torch.arange(T - Tq, T, device=device)[:, None] - torch.arange(T, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance <= window)


def scaled(q: torch.Tensor, scale: float | None) -> torch.Tensor:
    """scale q, in float32 or wider: queries whose products with the keys are the scores."""
    return at_least_float32(q) * (q.shape[-1] ** -0.5 if scale is None else scale)


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x (..., T, D) with rows of zeros after its last. None cost nothing, where F.pad would copy."""
    return F.pad(x, (0, 0, 0, rows)) if rows else x


def scores(q: torch.Tensor, k: torch.Tensor, scale: float | None, bias: torch.Tensor | None) -> torch.Tensor:
    """s = scale q k^T + bias, unmasked, in float32 or wider also under autocast: (B, H, Tq, T)."""
    with torch.autocast(q.device.type, enabled=False):
        s = at_least_float32(q) @ at_least_float32(k).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return s if bias is None else s + bias


class ByDistance:
    """A bias that depends on how far key j lies behind query i: values[..., min(i - j, n - 1)].

    values (B or 1, H, Tq or 1, n): numbers for each distance, and maybe each query, not for each pair of
    tokens. v (n, Dv), if given, is added to the values of the keys in the same way, for a core that is linear
    in them: y_i = sum_j w_ij (v_j + v[min(i - j, n - 1)]).
    """

    def __init__(self, values: torch.Tensor, v: torch.Tensor | None = None):
        self.values, self.v = values, v

    def per_query(self, f: Callable) -> "ByDistance":
        """The same with f(values), where there is a row for each query."""
        return self if self.values.shape[-2] == 1 else ByDistance(f(self.values), self.v)

    def dense(self, Tq: int, T: int) -> torch.Tensor:
        """(B or 1, H, Tq, T), for the last Tq of T tokens; a number for i < j means nothing."""
        x = self.values[..., :T]
        x = torch.cat((x[..., -1:].expand(*x.shape[:-1], T - x.shape[-1]), x.flip(-1)), dim=-1)
        # Row i now ends with distance 0, which key i has. Rows of T + 1 numbers that are read T at a time move
        # one step to the right each, which is where it belongs (Huang et al. 2018, "skewing").
        x = F.pad(x.expand(*x.shape[:-2], Tq, T), (0, 1)).flatten(-2)
        return x[..., Tq - 1 : Tq - 1 + Tq * T].unflatten(-1, (Tq, T))

    def attend(self, core: Callable, q, k, v, **kwargs) -> torch.Tensor:
        """y of a core with this bias and these values."""
        (Tq, T), Dv = (q.shape[-2], k.shape[-2]), v.shape[-1]
        bias = self.dense(Tq, T)
        if self.v is None:
            return core(q, k, v, bias=bias, **kwargs)
        # What a core that is linear in its values makes of one-hot values is its weights. Those of the keys
        # before the last `near` ones are at the largest distance for every query, so their sum is enough.
        n = min(len(self.v) - 1, T)
        near = Tq + n - 1
        columns = torch.eye(near, dtype=v.dtype, device=v.device)[-T:]
        columns = F.pad(F.pad(columns, (0, 0, T - len(columns), 0)), (0, 1), value=1.0)
        y = core(q, k, torch.cat((v, columns.expand(*v.shape[:-2], -1, -1)), -1), bias=bias, **kwargs)
        y, weights, total = y.split((Dv, near, 1), dim=-1)
        # the steps of `dense` back, to rows of distances n - 1 to 0
        weights = F.pad(weights.flatten(-2), (0, Tq)).unflatten(-1, (Tq, near + 1))[..., :n].flip(-1)
        far = total - weights.sum(-1, keepdim=True)
        return y + torch.cat((weights, far), dim=-1) @ self.v[: n + 1].to(v.dtype)


def bias_of(bias: torch.Tensor | ByDistance | None, start: int, end: int, T: int):
    """What is left of a bias for the queries from start to end, over the first T keys."""
    if isinstance(bias, ByDistance):
        return bias.per_query(lambda x: x[..., start:end, :])
    return bias if bias is None else bias[..., start:end, :T]


def check_finite(name: str, x: torch.Tensor) -> None:
    """Raises ValueError where x holds a NaN or an infinity. On a CPU only: elsewhere that would stall the device.

    Not among several processes either, where the others would wait for the one that raises.
    """
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    look = x.device.type == "cpu" and not torch.compiler.is_compiling() and alone
    if look and not math.isfinite(x.detach().sum().item()) and not x.isfinite().all():
        raise UserError(f"attention: {name} holds values that are not finite; has the model diverged?")


def checked(core: Callable) -> Callable:
    """A core that raises ValueError for what it cannot take; `core.unchecked` is without, for who has checked."""

    @functools.wraps(core)
    def attend(q, k, v, *, window=None, bias=None, **kwargs):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not q.dim() == k.dim() == v.dim() == 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
            raise UserError(f"q, k and v must be (B, H, T, D) with the same B and H; got {shapes}")
        if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or not 1 <= q.shape[-2] <= k.shape[-2]:
            raise UserError(f"q and k must have one D, k and v one T, and q from 1 to T queries; got {shapes}")
        if window is not None and window < 0:
            raise UserError(f"window={window} must be 0 (a token sees itself alone) or more")
        full = (*q.shape[:3], k.shape[2])
        if isinstance(bias, ByDistance):
            values, v_width = bias.values, v.shape[-1] if bias.v is None else bias.v.shape[-1]
            fits = values.dim() == 4 and all(n in (1, m) for n, m in zip(values.shape[:3], full[:3], strict=True))
            if not fits or v_width != v.shape[-1]:
                raise UserError(f"a bias by distance {tuple(values.shape)} does not fit the scores, {full}")
        elif bias is not None:
            if bias.dim() > 4 or any(n not in (1, m) for n, m in zip(bias.shape[::-1], full[::-1], strict=False)):
                raise UserError(f"bias {tuple(bias.shape)} does not broadcast to the scores, {full}")
            bias = bias.expand(torch.broadcast_shapes(bias.shape, full[2:]))
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_finite(name, x)
        return core(q, k, v, window=window, bias=bias, **kwargs)

    attend.unchecked = core
    return attend


CHUNK = 64  # tokens that are worked on together; shorter ones pay more for their number than they save


class Windows(torch.autograd.Function):
    """(N, T, D) -> (N, n, window + c, D): rows start + i c - window to start + (i + 1) c, for each i; a view.

    The backward pass is autograd's own of Tensor.unfold, in slices, which is many times as fast.
    """

    @staticmethod
    def forward(ctx, x, start, window, c):
        ctx.shape, ctx.at, ctx.c = x.shape, start - window, c
        return x[:, start - window :].unfold(1, window + c, c).mT

    @staticmethod
    def backward(ctx, dy):
        (N, T, D), c, n = ctx.shape, ctx.c, dy.shape[1]
        dx = dy.new_zeros(N, T + dy.shape[2], D)
        for i, part in enumerate(dy.split(c, dim=2)):
            at = ctx.at + i * c
            dx[:, at : at + n * c].unflatten(1, (n, c))[:, :, : part.shape[2]] += part
        return dx[:, :T], None, None, None


def banded(core: Callable) -> Callable:
    """Makes a core that takes any window cost O(T window), in time and in memory, forward and backward.

    The queries are cut into blocks of c tokens. A block sees its own keys and the window before them, and
    those are few: the core runs on every block at once, with its c queries as the last ones of c + window
    tokens. The first tokens, whose window would begin before position 0, are a call of their own.
    """

    @functools.wraps(core)
    def attend(q, k, v, *, window=None, scale=None, bias=None, **kwargs):
        (B, H, Tq, _), T = q.shape, k.shape[-2]
        if window is not None and window >= T - 1:
            window = None
        c = CHUNK * max(1, math.ceil((window or 0) / (2 * CHUNK)))
        first = c * math.ceil((window or 0) / c)
        if window is None or min(T, 2 * Tq) <= first + c:
            return core(q, k, v, window=window, scale=scale, bias=bias, **kwargs)
        if Tq < T:  # many new tokens after a cache
            q, before = F.pad(q, (0, 0, T - Tq, 0)), functools.partial(F.pad, pad=(0, 0, T - Tq, 0))
            bias = bias.per_query(before) if isinstance(bias, ByDistance) else bias if bias is None else before(bias)
            return attend(q, k, v, window=window, scale=scale, bias=bias, **kwargs)[..., -Tq:, :]
        y = []
        if first:
            near = (x[..., :first, :] for x in (q, k, v))
            y = [core(*near, window=window, scale=scale, bias=bias_of(bias, 0, first, first), **kwargs)]
        pad = -T % c  # rows that are cut off in the end
        q, k, v = (pad_rows(x, pad) for x in (q, k, v))
        q_blocks = q[..., first:, :].reshape(B * H, -1, c, q.shape[-1])
        k_blocks, v_blocks = (Windows.apply(x.flatten(0, 1), first, window, c) for x in (k, v))
        if isinstance(bias, ByDistance):
            bias = bias.per_query(lambda x: pad_rows(x, pad)[..., first:, :].unflatten(-2, (-1, c)))
            values = (
                bias.values if bias.values.dim() == 5 else bias.values[:, :, None]
            )  # (.., H, blocks or 1, c or 1, n)
            bias = ByDistance(values.expand(B, H, *values.shape[2:]).flatten(0, 1), bias.v)
        elif bias is not None:
            bias = F.pad(bias, (0, pad, 0, pad))[..., first:, first - window :].unfold(-2, c, c)
            bias = bias.unfold(-2, window + c, c).diagonal(0, -4, -3).movedim(-1, -3)  # (..., blocks, c, window + c)
            bias = bias.expand(B, H, -1, -1, -1).flatten(0, 1)
        blocks = core(q_blocks, k_blocks, v_blocks, window=window, scale=scale, bias=bias, **kwargs)
        return torch.cat((*y, blocks.reshape(B, H, -1, v.shape[-1])[..., : T - first, :]), dim=-2)

    return attend


ROWS = 2**23  # numbers of what a few queries need at once: 32 MiB in float32; off a CPU four times that


def in_rows(per_query: Callable) -> Callable:
    """Makes a core take a few queries at a time, so that what they need does not grow with T^2.

    per_query(q, k, v, bias): how many numbers one query of all heads needs. They are computed again in the
    backward pass. A bias by distance is spelled out here.
    """

    def decorate(core: Callable) -> Callable:
        @functools.wraps(core)
        def attend(q, k, v, *, window=None, scale=None, bias=None, **kwargs):
            def part(q, k, v, bias):
                if isinstance(bias, ByDistance):
                    return bias.attend(core, q, k, v, window=window, scale=scale, **kwargs)
                return core(q, k, v, window=window, scale=scale, bias=bias, **kwargs)

            Tq = q.shape[-2]
            rows = (ROWS if q.device.type == "cpu" else 4 * ROWS) // max(1, per_query(q, k, v, bias))
            if isinstance(bias, ByDistance) and bias.v is not None:
                rows = min(rows, max(CHUNK, len(bias.v)))  # one-hot values for few keys
            if rows >= Tq:
                return part(q, k, v, bias)
            if isinstance(bias, ByDistance):
                warnings.warn("a bias by distance has no fused kernel: a few queries at a time, slowly", stacklevel=4)
            return in_parts(part, max(1, rows), q, k, v, bias)

        @torch.compiler.disable  # which would unroll the loop
        def in_parts(part, rows, q, k, v, bias):
            y, Tq, past = [], q.shape[-2], k.shape[-2] - q.shape[-2]
            for i in range(0, Tq, rows):
                end = min(i + rows, Tq)
                few = q[..., i:end, :], k[..., : past + end, :], v[..., : past + end, :]
                y.append(checkpoint(part, *few, bias_of(bias, i, end, past + end), use_reentrant=False))
            return torch.cat(y, dim=-2)

        return attend

    return decorate


def dense_bias(q, k, v, bias) -> int:
    """in_rows' measure of a core that is fused, or whose weights are few, unless there is a bias by distance."""
    if not isinstance(bias, ByDistance):
        return 0
    B = len(q) if bias.values.requires_grad else len(bias.values)  # with a gradient PyTorch has no fused kernel
    return B * q.shape[1] * k.shape[-2] * (1 if bias.v is None else 3)


@checked
@banded
@in_rows(dense_bias)
def softmax_attention(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0):
    """y = softmax(s) v (Vaswani et al., equation 1), fused."""
    (Tq, D), (T, Dv) = q.shape[-2:], v.shape[-2:]
    if D != Dv and not (bias is not None and bias.requires_grad):  # one width for fused kernels, which have no dbias
        q, k, v = (F.pad(x, (0, max(D, Dv) - x.shape[-1])) for x in (q, k, v))
    mask = None
    if window is not None or bias is not None or 1 < Tq < T:
        mask = visible(Tq, T, window, q.device)
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, -math.inf)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None and Tq > 1, scale=D**-0.5 if scale is None else scale
    )
    return y[..., :Dv]


LASER_RANGE = 60.0  # exp(-60) = 9e-27, and its inverse, are far from float32's limits


@checked
def laser_attention(q, k, v, *, window=None, scale=None, bias=None):
    """y = log(softmax(s) exp(v)) (Duvvuri and Dhillon, equation 6), for any v.

    exp and log go around ordinary softmax attention, as in the paper, with v shifted by its largest value
    per channel. The paper's shift alone is not enough: a maximum taken over the whole sequence lets one
    large v at a future token underflow every earlier output to log(0). The weights of a row sum to 1, so
    its sum of exponentials is at least exp(min v - max v): where that is far from underflow (it is, in
    any healthy model), the shift is harmless; elsewhere the sum is taken in log space, slowly.

    All of it is in float32 or wider: rounding exp(v) to bfloat16 would be an error of 2^-9 in y however
    small y is, and would depend on the shift, that is on future tokens.
    Dropout on the weights is excluded: position 0 has a single one, and dropping it gives log(0).
    The test of the range makes a GPU wait, once per call, and interrupts torch.compile's graph.
    """
    q, k, values = (at_least_float32(t) for t in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        if _wider_than(values, LASER_RANGE):
            return _laser_in_log_space(q, k, values, window=window, scale=scale, bias=bias).to(v.dtype)
        shift = values.detach().amax(-2, keepdim=True)  # (B, H, 1, Dv)
        y = softmax_attention.unchecked(q, k, (values - shift).exp(), window=window, scale=scale, bias=bias)
        return (y.log() + shift).to(v.dtype)


@torch.compiler.disable
def _wider_than(v: torch.Tensor, limit: float) -> bool:
    """Whether some channel of v spans more than limit over time; warns once."""
    v = v.detach()
    wide = (v.amax(-2) - v.amin(-2)).max().item() > limit
    if wide:
        warnings.warn(f"LASER's values span more than {limit:.0f}: sums are taken in log space, slowly", stacklevel=3)
    return wide


@banded
@in_rows(lambda q, k, v, bias: v.numel())
def _laser_in_log_space(q, k, v, *, window, scale, bias):
    """y = logsumexp_j(log_softmax(s)_ij + v_j)."""
    unseen = ~visible(q.shape[-2], k.shape[-2], window, q.device)
    log_weights = scores(q, k, scale, bias).masked_fill(unseen, -math.inf).log_softmax(-1)
    return (log_weights[..., None] + v[..., None, :, :]).logsumexp(-2)


BETA_LINEAR_FROM = 256  # tokens; below, the quadratic form is as fast
BETA_ROWS = 8192  # queries of all heads that a CPU works on at once: their tensors stay in its cache


@checked
def beta_attention(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0):
    """y = beta(s) v with beta(s) = s / (1 + ||s||_2) per row, masked scores 0 (the beta post), in linear time.

    Neither half of beta needs the row s itself. With s_j = q . k_j, over the keys j that are seen:

        sum_j s_j v_j = q S,  S = sum_j k_j^T v_j        ||s||^2 = sum_j s_j^2 = q G q^T,  G = sum_j k_j^T k_j

    so the running sums S and G, which are D x Dv and D x D, hold all of the past, exactly. Weights that are
    dropped, a bias, or a window have no such sums; there, and for few tokens, it is the quadratic form.
    Rounding is relative to ||q|| ||k||: where keys are so alike, and a query so much at a right angle to them,
    that ||s|| is a hundred times smaller, float32 keeps four digits; the quadratic form would keep six.
    """
    if q.shape[-2] < max(k.shape[-2], BETA_LINEAR_FROM) or window is not None or bias is not None or dropout:
        return _beta_quadratic(q, k, v, window=window, scale=scale, bias=bias, dropout=dropout)
    return beta_linear(q, k, v, scale=scale)[0]


@banded
@in_rows(dense_bias)
def _beta_quadratic(q, k, v, *, window, scale, bias, dropout):
    """Row by row. d beta(s) h = h / (1+r) - <s, h> s / (r (1+r)^2), r = ||s||, where <s, h> s / r = 0 at r = 0."""
    s = scores(q, k, scale, bias).masked_fill(~visible(q.shape[-2], k.shape[-2], window, q.device), 0.0)
    weights = s / (1 + torch.linalg.vector_norm(s, dim=-1, keepdim=True))
    return F.dropout(weights, dropout, training=dropout > 0).to(v.dtype) @ v


def beta_linear(q, k, v, *, scale=None, state=None):
    """(y, state) of BetaLinear for unscaled queries, in float32 or wider also under autocast; y in v's precision."""
    with torch.autocast(q.device.type, enabled=False):
        y, state = BetaLinear.apply(scaled(q, scale), at_least_float32(k), at_least_float32(v), state)
    return y.to(v.dtype), state


class BetaLinear(torch.autograd.Function):
    """(q, k, v, state) -> (y, state): beta attention from running sums, in chunks.

    q, k (B, H, T, D), v (B, H, T, Dv); state (B, H, D, Dv + D): [S | G] of the tokens before, None for none;
    it has no gradient. With the values widened to w = [v | k]:

        forward    [N_i | q_i G_i] = sum_j<=i (q_i . k_j) w_j      r_i^2 = q_i G_i q_i^T      y_i = N_i / (1 + r_i)
        backward   a_i = [dy_i | -(dy_i . y_i) q_i / r_i] / (1 + r_i)
                   dq_i = sum_j<=i (a_i . w_j) k_j      dk_j = sum_i>=j (a_i . w_j) q_i
                   dv_j = sum_i>=j (q_i . k_j) a_i[:Dv]

    which are four linear attentions: within a chunk a masked product, between chunks a running sum. On a CPU
    a few thousand rows at a time, which stay in its cache.
    """

    @staticmethod
    def forward(ctx, q, k, v, state):
        B, H, T, _ = q.shape
        ctx.step = T
        if q.device.type == "cpu":
            ctx.step = max(1, BETA_ROWS // (B * H * CHUNK)) * CHUNK
        ys, saved = [], []
        for parts in zip(*(x.split(ctx.step, dim=2) for x in (q, k, v)), strict=True):
            y, state, needed = BetaLinear.forward_part(*parts, state)
            ys.append(y)
            saved += needed
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(state)
        return torch.cat(ys, dim=2), state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, _):
        saved, state, grads = ctx.saved_tensors, None, []
        parts = dy.split(ctx.step, dim=2)
        with torch.autocast(dy.device.type, enabled=False):
            for i in reversed(range(len(parts))):
                *part, state = BetaLinear.backward_part(parts[i], *saved[6 * i : 6 * i + 6], state)
                grads.append(part)
        return *(torch.cat(x[::-1], dim=2) for x in zip(*grads, strict=True)), None

    @staticmethod
    def forward_part(q, k, v, state):
        """(y, state, what their gradients need) of some tokens, after those of the state."""
        (B, H, T, D), Dv = q.shape, v.shape[-1]
        c = min(max(CHUNK, D), T)
        q, k, v = (pad_rows(x, -T % c).reshape(-1, c, x.shape[-1]) for x in (q, k, v))  # (B H chunks, c, D)
        w = torch.cat((v, k), dim=-1)
        before, state = _running_sums((k.mT @ w).view(B, H, -1, D, Dv + D), state)
        past, s = q @ before, (q @ k.mT).tril_()
        r = (q * past[..., Dv:]).sum(-1, keepdim=True).clamp_(min=0).sqrt_()
        r = torch.hypot(r, torch.linalg.vector_norm(s, dim=-1, keepdim=True))
        y = torch.baddbmm(past[..., :Dv], s, v).div_(1 + r)
        return y.view(B, H, -1, Dv)[:, :, :T], state, (q, w, before, s, r, y)

    @staticmethod
    def backward_part(dy, q, w, before, s, r, y, state):
        """(dq, dk, dv, state): the state holds sum q_i^T a_i of the tokens after these, and then of these too."""
        B, H, T, Dv = dy.shape
        k = w[..., Dv:]
        # Far below |q| sqrt(trace G), its largest possible value, r is the rounding of a difference; as a
        # divisor it must not blow that up. What it divides is as small as itself.
        trace = before[..., Dv:].diagonal(0, -2, -1).sum(-1)[:, None, None]
        eps = torch.finfo(r.dtype).eps
        least = (q.square().sum(-1, keepdim=True) * trace).mul_(eps).clamp_(min=eps**4).sqrt_()
        dv = pad_rows(dy, -T % y.shape[1]).reshape(y.shape) / (1 + r)
        a = torch.cat((dv, q * ((dv * y).sum(-1, keepdim=True) / -torch.maximum(r, least))), dim=-1)
        after, state = _running_sums((q.mT @ a).view(B, H, -1, *before.shape[1:]), state, reverse=True)
        aw = (a @ w.mT).tril_()
        dq = (a @ before.mT).baddbmm_(aw, k)
        dk = (w @ after.mT).baddbmm_(aw.mT, q)
        dv = (k @ after[..., :Dv]).baddbmm_(s.mT, dv)
        return *(x.view(B, H, -1, x.shape[-1])[:, :, :T] for x in (dq, dk, dv)), state


def _running_sums(x: torch.Tensor, state: torch.Tensor | None, reverse: bool = False) -> tuple:
    """(state + sum_m<n x_m for each n of dimension 2, state + the sum of all); m > n in reverse.

    x (B, H, chunks, D, E); state (B, H, D, E), None for 0; the first result is (B H chunks, D, E). x_n stays
    out of its own sum, so that its size cannot round what came before.
    """
    sums, last = torch.empty_like(x), 0 if reverse else x.shape[2] - 1
    sums[:, :, x.shape[2] - 1 - last] = 0 if state is None else state
    if x.device.type == "cpu":  # where cumsum over a middle dimension takes several times as long as this
        for i in range(x.shape[2] - 1):
            a, b = (-1 - i, -2 - i) if reverse else (i, i + 1)
            torch.add(sums[:, :, a], x[:, :, a], out=sums[:, :, b])
    elif reverse:
        sums[:, :, :-1] = sums[:, :, -1:] + x[:, :, 1:].flip(2).cumsum(2).flip(2)
    else:
        sums[:, :, 1:] = sums[:, :, :1] + x[:, :, :-1].cumsum(2)
    return sums.flatten(0, 2), sums[:, :, last] + x[:, :, last]


@banded
@in_rows(lambda q, k, v, bias: q.shape[0] * q.shape[1] * k.shape[-2])
def _largest_scores(q, k, v, *, window, scale, bias):
    unseen = ~visible(q.shape[-2], k.shape[-2], window, q.device)
    return scores(q, k, scale, bias).abs().masked_fill_(unseen, 0.0).amax(-1, keepdim=True)


def largest_scores(q, k, v, *, window=None, scale=None, bias=None):
    """max_j |s_ij| of each query, (B, H, Tq, 1), as if that were a core: short heads cost O(T window), and long ones
    make no (T, T) matrix. Of v it takes nothing."""
    bias = ByDistance(bias.values) if isinstance(bias, ByDistance) else bias  # without what it adds to values
    return _largest_scores(q, k, k[..., :1], window=window, scale=scale, bias=bias)


ATTENTION: dict[str, Callable] = {
    "softmax": softmax_attention,
    "laser": laser_attention,
    "beta": beta_attention,
}

# What each core means, one query at a time: its scores s (B, H, n) over the n keys that it sees and their
# values v (B, H, n, Dv) give y (B, H, Dv). No masks, no tricks: obviously right, and what the tests hold
# the cores against.
ONE_QUERY: dict[str, Callable] = {
    "softmax": lambda s, v: (s.softmax(-1)[..., None] * v).sum(-2),
    "laser": lambda s, v: (s.log_softmax(-1)[..., None] + v).logsumexp(-2),  # = log(softmax(s) exp(v))
    "beta": lambda s, v: (s[..., None] * v).sum(-2) / (1 + s.norm(dim=-1, keepdim=True)),
}


def naive_attention(core, q, k, v, *, window=None, scale=None, bias=None):
    """What ATTENTION[core] must equal, one query after the other. Slow; for tests.

    Raises ValueError for a core that has no line in ONE_QUERY.
    """
    if core not in ONE_QUERY:
        raise UserError(f"{core} has no line in ONE_QUERY, its definition for one query, to be held against")
    rows, Tq, T = [], q.shape[-2], k.shape[-2]
    far = None
    if isinstance(bias, ByDistance):
        bias, far = bias.dense(Tq, T), bias.v
    for row, i in enumerate(range(T - Tq, T)):
        seen = slice(0 if window is None else max(0, i - window), i + 1)
        s = (q[..., row, None, :] * k[..., seen, :]).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        s = s if bias is None else s + bias[..., row, seen]
        v_seen = v[..., seen, :]
        if far is not None:
            v_seen = v_seen + far[(i - torch.arange(T)[seen]).clamp(max=len(far) - 1)]
        rows.append(ONE_QUERY[core](s, v_seen))
    return torch.stack(rows, dim=-2)


# -----------------------------------------------------------------------------
# Documents that lie one after the other in a window: each is attended alone


@torch.compiler.disable  # the shapes are others in every batch
def documents_of(pos: torch.Tensor) -> dict[tuple[int, int], list[int]]:
    """(start, end) -> the rows of pos (B, T) that have a document there. One begins at 0 and where pos is 0."""
    found, starts = {}, [[0] for _ in pos]
    for row, start in (pos[:, 1:] == 0).nonzero().tolist():
        starts[row].append(start + 1)
    for row, at in enumerate(starts):
        for span in zip(at, [*at[1:], pos.shape[1]], strict=True):
            found.setdefault(span, []).append(row)
    return found


@torch.compiler.disable
def by_document(core: Callable, documents: dict, q, k, v, *, bias=None, **kwargs) -> torch.Tensor:
    """y of a core, each of whose calls sees one document (or those of several rows that lie at the same place).

    Nothing is masked, so that every core, window and position takes it, and n documents of T / n tokens cost a core
    that is quadratic an n-th.
    """
    y = [{} for _ in q]
    for (start, end), rows in documents.items():
        few = slice(None) if len(rows) == len(q) else rows
        part = None if bias is None else bias_of(bias, start, end, end)
        if part is not None and len(part.values) > 1:
            part = ByDistance(part.values[few], part.v)
        out = core(*(x[few, :, start:end] for x in (q, k, v)), bias=part, **kwargs)
        for row, part in zip(rows, out, strict=True):
            y[row][start] = part
    return torch.stack([torch.cat([parts[start] for start in sorted(parts)], dim=-2) for parts in y])


# -----------------------------------------------------------------------------
# What a group of heads keeps of the tokens that it has seen, to decode token by token


def per_head(x: torch.Tensor, of: list[int]) -> torch.Tensor:
    """x (B, G, T, D) for the query heads that share its heads: head of[h] for head h, (B, H, T, D)."""
    n = len(of) // x.shape[1]
    if of == [g for g in range(x.shape[1]) for _ in range(n)]:
        return x if n == 1 else x.repeat_interleave(n, dim=1)
    return x[:, of]


class KeyValueCache:
    """Keys and values: of every token or, where there is a window, of the last window + 1. For any core."""

    def __init__(self, window: int | None, capacity: int):
        self.window, self.capacity = window, capacity
        self.n, self.k, self.v = 0, None, None

    def attend(self, core, share, q, k, v, **kwargs):
        """y (B, H, T, Dv) of the next T tokens, whose keys and values are kept; share(k, v) are those of each head."""
        if self.window is None:
            if self.k is None:
                self.k, self.v = (x.new_empty(*x.shape[:2], self.capacity, x.shape[-1]) for x in (k, v))
            end = self.n + k.shape[-2]
            self.k[:, :, self.n : end], self.v[:, :, self.n : end] = k, v
            k, v = (x[:, :, :end].to(q.dtype) for x in (self.k, self.v))
            self.n = end
        else:
            new = k.shape[-2]
            if self.k is not None:
                at = max(0, self.k.shape[-2] - self.window)
                k, v = (torch.cat((x[:, :, at:], y), -2).to(q.dtype) for x, y in ((self.k, k), (self.v, v)))
            at = max(0, k.shape[-2] - self.window - 1)
            self.k, self.v = (k[:, :, at:], v[:, :, at:]) if new == 1 else (k[:, :, at:].clone(), v[:, :, at:].clone())
        y = core(q, *share(k, v), window=self.window, **kwargs)
        if y.shape[-2] != q.shape[-2]:
            raise UserError(f"this attention gives {y.shape[-2]} outputs for {q.shape[-2]} queries: use_cache=False")
        return y

    @property
    def nbytes(self) -> int:
        return 0 if self.k is None else self.k.nbytes + self.v.nbytes


class BetaCache:
    """[S | G], the running sums of beta_attention: all that its long heads need of the past, however long."""

    def __init__(self, window: None, capacity: int):
        self.state = None

    def attend(self, core, share, q, k, v, *, scale=None, bias=None, dropout=0.0):
        """y (B, H, T, Dv) of the next T tokens, which are added to the sums."""
        if dropout:
            raise UserError("beta's running sums cannot drop attention weights: call eval() before decoding")
        if bias is not None:
            raise UserError("beta's running sums hold no bias: a Scheme that gives one has scores = True")
        k, v = share(k, v)
        if self.state is None or q.shape[-2] > 1:
            y, self.state = beta_linear(q, k, v, scale=scale, state=self.state)
            return y
        with torch.autocast(q.device.type, enabled=False):  # one token: beta_attention's equation as it stands
            q, k = scaled(q, scale), at_least_float32(k)
            self.state = self.state + k.mT * torch.cat((v, k), dim=-1)
            y, qG = (q @ self.state).split((v.shape[-1], k.shape[-1]), dim=-1)
            return (y / (1 + (q * qG).sum(-1, keepdim=True).clamp(min=0).sqrt())).to(v.dtype)

    @property
    def nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes


# The cores whose long heads need less than all keys and values.
CACHE: dict[str, Callable] = {"beta": BetaCache}


class Cache:
    """What a model keeps of the `length` tokens that it has seen, for up to `capacity`: GPT.new_cache makes it."""

    def __init__(self, layers: list[list], capacity: int):
        self.layers, self.capacity, self.length, self.rows, self.broken = layers, capacity, 0, 0, False

    @contextlib.contextmanager
    def extended(self, B: int, T: int) -> Iterator[None]:
        """Within it T tokens are added to each of B rows. Raises ValueError where they do not fit."""
        if self.broken:
            raise UserError("the last forward pass with this cache did not finish: new_cache() makes another")
        if self.length + T > self.capacity:
            raise UserError(f"{self.length} + {T} tokens do not fit into a cache of {self.capacity}")
        if self.length and B != self.rows:
            raise UserError(f"the cache holds {self.rows} row(s), and cannot go on with {B}")
        self.broken = True
        yield
        self.broken, self.rows, self.length = False, B, self.length + T

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(group.nbytes for layer in self.layers for group in layer)


# -----------------------------------------------------------------------------
# Choices


class L2Norm(nn.Module):
    """x / ||x||_2, times a learned scale that starts at `scale`, if given."""

    def __init__(self, scale: float | None = None):
        super().__init__()
        self.scale = None if scale is None else nn.Parameter(torch.tensor([scale]))  # FSDP2 shares no scalars out

    def forward(self, x):
        x = F.normalize(at_least_float32(x), dim=-1)
        return x if self.scale is None else self.scale * x


class LayerNorm(nn.Module):
    """LayerNorm (Ba et al. 2016) with an optional bias."""

    def __init__(self, width: int, bias: bool, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019, equation 4) in float32 or wider, also under autocast; an optional bias."""

    def __init__(self, width: int, bias: bool, eps: float):
        super().__init__(width, eps=eps)
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        y = F.rms_norm(at_least_float32(x), self.normalized_shape, at_least_float32(self.weight), self.eps).to(x.dtype)
        return y if self.bias is None else y + self.bias


NORM: dict[str, Callable] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}

# Which norms a block has: (before a sublayer, after it, after its sum with the residual stream).
WHERE: dict[str, tuple[bool, bool, bool]] = {
    "pre": (True, False, False),  # x + f(norm(x)): GPT-2, Llama
    "post": (False, False, True),  # norm(x + f(x)): Vaswani et al. 2017, GPT-1
    "sandwich": (True, True, False),  # x + norm(f(norm(x))): Gemma 2
    "olmo2": (False, True, False),  # x + norm(f(x)): OLMo 2
}


def l2_scale(T: int) -> float:
    """g at the start of training, log2(T^2 - T) (Henry et al. 2020, section 3.1)."""
    return math.log2(max(T, 2) ** 2 - max(T, 2))


# f(config, D) -> what is done to the queries, and to the keys, of a layer
QK_NORM: dict[str, Callable] = {
    "none": lambda c, D: (nn.Identity(), nn.Identity()),
    "layernorm": lambda c, D: tuple(c.new_norm("layernorm", D) for _ in "qk"),  # as in LASER, section 4
    "rmsnorm": lambda c, D: tuple(c.new_norm("rmsnorm", D) for _ in "qk"),
    "l2": lambda c, D: (L2Norm(D**0.5 * l2_scale(c.block_size)), L2Norm()),  # D**0.5: s is g q k, unscaled
}


class Sinusoids(nn.Module):
    """p[2i] = sin(pos / 10000^(2i / C)), p[2i + 1] = cos of the same (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        rate = 10000.0 ** (-torch.arange(0, config.n_embd, 2, dtype=torch.float64) / config.n_embd)
        angle = torch.outer(torch.arange(config.block_size, dtype=torch.float64), rate)
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, pos):
        return self.table[pos]


class Scheme(nn.Module):
    """A position that acts inside attention: forward(q, k, heads, past) -> (q, k, bias).

    heads are the indices of q's, past the number of tokens before them.
    """

    scores = True  # whether it gives a bias: running sums cannot hold one, so beta keeps all keys for it
    shared = False  # whether all layers have the same one


class RoPE(Scheme):
    """Rotates q and k by their positions, so that q_i k_j depends on i - j (Su et al. 2021, section 3.4.2).

    Dimensions 2d and 2d + 1 turn together by pos / base^(2d / D), as in the paper. Llama in transformers pairs
    d and d + D/2: the same model, with the rows of the projections in another order.
    """

    scores, shared = False, True

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        D, base = config.head_size, config.base
        rate = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        angle = torch.outer(torch.arange(config.block_size, dtype=torch.float64), rate)
        turn = torch.stack((angle.cos(), angle.sin()), dim=-1).float()
        self.register_buffer("turn", turn, persistent=False)  # (block_size, D / 2, 2)

    def forward(self, q, k, heads, past):
        turn = at_least_float32(self.turn[past : past + q.shape[-2]])
        return rotate(q, turn), rotate(k, turn), None


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, D) with each pair of dimensions turned: times cos + i sin, as a complex number."""
    x = at_least_float32(x).unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():  # one pass; elsewhere compilers want real ones
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(turn)).flatten(-2)
    (a, b), (cos, sin) = x.unbind(-1), turn.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class ALiBi(Scheme):
    """A head's scores lose slope (i - j), in proportion to the distance (Press et al. 2021, section 3).

    With a = slope / scale that is (a, -a i) . (j, 1), so two more dimensions of q and k are enough, and every
    kernel takes them. A bfloat16 holds 8 bits of a number, so each is the sum of two, which makes six dimensions;
    and float16 nothing past 65504, so a i is a i / 256 times 256.
    """

    scores, shared = False, True

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        n_map, pos = 2 if config.differential else 1, torch.arange(config.block_size, dtype=torch.float)
        slopes = torch.tensor(alibi_slopes(config.n_head // n_map)).repeat_interleave(n_map)[:, None]
        a, j = (slopes / config.scale).expand(-1, len(pos)), pos - len(pos) // 2  # halves the largest number
        (a1, a2), (ai1, ai2), (j1, j2) = (in_two(x) for x in (a, -a * j / 256, j))
        to_q, to_k = (a1, a1, a2, a2, ai1, ai2), (j1, j2, j1, j2, *2 * [torch.full_like(j, 256.0)])
        self.register_buffer("q", torch.stack(to_q, dim=-1), persistent=False)  # (H, block_size, 6)
        self.register_buffer("k", torch.stack(to_k, dim=-1), persistent=False)  # (block_size, 6)

    def forward(self, q, k, heads, past):
        at = slice(past, past + q.shape[-2])
        return beside(self.q[heads, at], q), beside(self.k[at], k), None


def beside(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """table (H or none, T, E) before the dimensions of x (B, H, T, D)."""
    return torch.cat((table.to(x.dtype).expand(*x.shape[:-1], -1), x), dim=-1)


def in_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as a sum of two numbers: its first 8 bits, which bfloat16 holds, and the rest, whose first 8 it holds too."""
    high = x.bfloat16().to(x.dtype)
    return high, x - high


def alibi_slopes(n: int) -> list[float]:
    """2^(-8h / n) for h = 1 to n; where n is no power of two, those of the last one below it, and then every
    second one of the next (the code of the ALiBi paper)."""
    m = 2 ** int(math.log2(n))
    return [2 ** (-8 * h / m) for h in range(1, m + 1)] + [2 ** (-4 * h / m) for h in range(1, 2 * (n - m), 2)]


class Relative(Scheme):
    """A vector per distance, up to max_distance, is added to the keys and one to the values (Shaw et al. 2018,
    equations 3 to 5): s_ij = q_i (k_j + a_k[i - j]), of which q_i a_k is a product of its own, and
    y_i = sum_j w_ij (v_j + a_v[i - j]). Shared by the heads of a layer. Memory grows with T max_distance."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        n, D, self.scale = config.reach + 1, config.head_size, config.scale
        self.k = nn.Parameter(0.02 * torch.randn(n, D))
        self.v = nn.Parameter(0.02 * torch.randn(n, 2 * D if config.differential else D))

    def forward(self, q, k, heads, past):
        n = past + q.shape[-2]  # distances past it there are none
        return q, k, ByDistance(self.scale * (q @ self.k[:n].to(q.dtype).mT), self.v[:n])


class T5(Scheme):
    """A learned number per head and bucket of distances is added to the scores; all layers share the table
    (Raffel et al. 2019, section 2.1)."""

    shared, buckets = True, 32

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        self.table = nn.Embedding(self.buckets, config.n_head)
        self.register_buffer("bucket", t5_bucket(torch.arange(config.block_size), config.reach), persistent=False)

    def forward(self, q, k, heads, past):
        return q, k, ByDistance(self.table(self.bucket).T[heads][None, :, None])


def t5_bucket(distance: torch.Tensor, max_distance: int) -> torch.Tensor:
    """A bucket for each distance below 16, then 16 that widen by a constant factor up to max_distance."""
    exact = T5.buckets // 2
    far = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact) * (T5.buckets - exact)
    return torch.where(distance < exact, distance, (exact + far.long()).clamp(max=T5.buckets - 1))


# f(config) -> what is added to the token embedding, as f(positions); and a Scheme, which acts in a layer's attention.
# What a core cannot take, as low scores under beta, is refused in GPTConfig._check_position.
POSITION: dict[str, tuple[Callable | None, Callable | None]] = {
    "learned": (lambda c: nn.Embedding(c.block_size, c.n_embd), None),
    "sinusoidal": (Sinusoids, None),
    "rope": (None, RoPE),
    "alibi": (None, ALiBi),
    "relative": (None, Relative),
    "t5": (None, T5),
    "none": (None, None),
}


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


# (f, gated): the MLP is W2 f(W1 x) or, gated, W2 (f(W1 x) * (W3 x)) (Shazeer 2020)
ACTIVATION: dict[str, tuple[Callable, bool]] = {
    "gelu": (gelu_tanh, False),  # GPT-2's own
    "gelu_exact": (F.gelu, False),  # nanoGPT's
    "relu": (F.relu, False),  # Vaswani et al. 2017
    "relu2": (lambda x: F.relu(x).square(), False),  # Primer (So et al. 2021)
    "swish": (F.silu, False),  # SiLU
    "elu": (F.elu, False),
    "selu": (F.selu, False),
    "sigmoid": (F.sigmoid, False),
    "softplus": (F.softplus, False),
    "glu": (F.sigmoid, True),
    "reglu": (F.relu, True),
    "geglu": (gelu_tanh, True),  # T5 1.1, Gemma
    "swiglu": (F.silu, True),  # PaLM, Llama
    "liglu": (lambda x: x, True),  # called bilinear by Shazeer
}


@dataclass
class GPTConfig:
    """Every choice of the model. Raises ValueError, naming what is legal, where choices do not fit."""

    block_size: int = 1024  # tokens that the model sees at once
    vocab_size: int = 50304  # 50257 of GPT-2, padded to a multiple of 64
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads per layer
    n_embd: int = 768  # width of the residual stream
    n_kv_head: int | None = None  # heads of keys and values, which groups of query heads share; None: n_head; 1: MQA
    head_dim: int | None = None  # width of a head; None: n_embd / n_head
    dropout: float = 0.0  # on embeddings and on what attention and MLP add to the residual stream
    attn_dropout: float | None = None  # on attention weights; None: as dropout, where the core allows it
    bias: bool = True  # in Linears and LayerNorms, as GPT-2
    attention: str = "softmax"  # the core: a name in ATTENTION
    heads: str = "L"  # L long, S short; tiled over heads, / between layers, tiled over layers: SSSSSL, S/S/L
    window: int | None = None  # span of short heads: i sees j where 0 <= i - j <= window; None: 50, 100 past 2048
    differential: bool = False  # every two heads are one: the first's map minus lambda times the second's
    qk_norm: str = "none"  # of queries and keys, before their product: a name in QK_NORM
    temperature: float = 1.0  # divides the scores
    per_dim_temperature: bool = False  # each dimension of the queries is scaled by a learned softplus(p)
    position: str = "learned"  # how the model knows of order: a name in POSITION
    rope_base: float | None = None  # of RoPE's wavelengths; None: 10000
    max_distance: int | None = None  # past it distances are one to position=relative (None: 16) and t5 (None: 128)
    nope_long: bool = False  # long heads have no position; short ones have (Command A: --heads=S/S/S/L)
    norm: str = "layernorm"  # a name in NORM
    norm_bias: bool | None = None  # in the norms; None: as bias in a LayerNorm, none in an RMSNorm
    norm_eps: float = 1e-5  # added to a norm's variance
    where: str = "pre"  # where a block's norms are: a name in WHERE
    block: str = "serial"  # serial: the MLP sees what attention has added; parallel: both see x (PaLM)
    mlp: str = "gelu"  # the MLP's activation, gated or not: a name in ACTIVATION
    n_hidden: int | None = None  # width of the MLP; None: 4 n_embd, and gated 8/3 n_embd, which is as many weights
    tied: bool = True  # the output head is the token embedding
    zero_init: bool = False  # what adds to the residual stream starts at zero
    logit_softcap: float | None = None  # c: logits are c tanh(logits / c), Gemma 2; None: not
    z_loss: float = 0.0  # times the mean squared log Z, added to the training loss (PaLM: 1e-4)
    activation_checkpointing: bool = False  # blocks are computed again in the backward pass: slower, far less memory

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_kv_head", "head_dim", "n_hidden"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.head_dim is None and self.n_embd % self.n_head:
            near = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            near = sorted(sorted(near, key=lambda h: abs(h - self.n_head))[:3])
            raise UserError(
                f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}, but of {near} it is; or set head_dim"
            )
        tables = {"attention": ATTENTION, "qk_norm": QK_NORM, "position": POSITION, "norm": NORM, "where": WHERE}
        for name, table in (tables | {"block": ("serial", "parallel"), "mlp": ACTIVATION}).items():
            if getattr(self, name) not in table:
                raise UserError(f"{name}={getattr(self, name)!r} is none of {', '.join(table)}")
        for name in ("dropout", "attn_dropout"):
            if not 0 <= (getattr(self, name) or 0.0) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.attn_dropout and not self._drops_weights():
            raise UserError(
                f"attention={self.attention!r} allows no dropout on attention weights (its function takes no "
                f"`dropout`; in LASER a dropped weight can be log(0)): leave attn_dropout out, or set it to 0"
            )
        if not 0 < self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature} must be a positive number; 1.0 leaves the scores alone")
        if self.block == "parallel" and self.where == "post":
            raise UserError("where='post' normalises after each sum, but a parallel block has one sum: where='pre'")
        if not 0 < self.norm_eps < 1:
            raise UserError(f"norm_eps={self.norm_eps} must be between 0 and 1")
        if not 0 <= self.z_loss < math.inf:
            raise UserError(f"z_loss={self.z_loss} must not be negative; PaLM's is 1e-4")
        if self.logit_softcap is not None and not 0 < self.logit_softcap < math.inf:
            raise UserError(f"logit_softcap={self.logit_softcap} must be a positive number; Gemma 2's is 30")
        self._check_heads()
        self._check_position()

    def _check_position(self):
        if self.position == "rope" and self.head_size % 2:
            raise UserError(
                f"position='rope' turns dimensions in pairs, but a head has {self.head_size}: head_dim must be even"
            )
        if self.position == "sinusoidal" and self.n_embd % 2:
            raise UserError(f"position='sinusoidal' is made of sines and cosines in pairs, but n_embd={self.n_embd}")
        if self.position in ("alibi", "t5") and self.attention == "beta":
            raise UserError(
                f"position={self.position!r} lowers the scores of far keys, but a score of beta is a weight, and a "
                f"low one a large negative weight: rope, relative, learned, sinusoidal or none go with beta"
            )
        if self.position == "relative" and self.attention == "laser":
            raise UserError(
                "position='relative' gives each pair of tokens a value of its own, but LASER takes exp of one value "
                "per token: rope, alibi, t5, learned, sinusoidal or none go with laser"
            )
        for name, value, used in (
            ("rope_base", self.rope_base, ("rope",)),
            ("max_distance", self.max_distance, ("relative", "t5")),
        ):
            if value is not None and self.position not in used:
                raise UserError(
                    f"{name}={value} is of position={' or '.join(used)}, not of {self.position!r}: leave it None"
                )
        if self.rope_base is not None and not 0 < self.rope_base < math.inf:
            raise UserError(f"rope_base={self.rope_base} must be a positive number")
        least = T5.buckets // 2 + 1 if self.position == "t5" else 1
        if self.max_distance is not None and self.max_distance < least:
            raise UserError(f"max_distance={self.max_distance} must be at least {least} for {self.position!r}")
        if self.nope_long and POSITION[self.position][1] is None:
            inside = ", ".join(name for name, (_, scheme) in POSITION.items() if scheme)
            raise UserError(f"nope_long leaves out a position inside attention, {inside}; not {self.position!r}")
        if self.nope_long and not {"S", "L"} <= set(self.heads):
            raise UserError(
                f"nope_long tells long heads from short ones, but heads={self.heads!r} has one kind: --heads=S/S/S/L, "
                f"or --position=none"
            )

    def _check_heads(self):
        if self.n_head % self.kv_heads:
            legal = [g for g in range(1, self.n_head + 1) if self.n_head % g == 0]
            raise UserError(f"n_head={self.n_head} is not a multiple of n_kv_head={self.kv_heads}; one of {legal} fits")
        layers = self.heads.split("/")
        if not all(layers) or set(self.heads) - set("SL/"):
            raise UserError(
                f"heads={self.heads!r} must be made of S (short) and L (long) with / between layers: L, SSSL, S/S/L"
            )
        if len(layers) > self.n_layer or any(len(layer) > self.n_head for layer in layers):
            raise UserError(
                f"heads={self.heads!r} has {len(layers)} layer(s) of up to {max(map(len, layers))} head(s), more than "
                f"n_layer={self.n_layer} and n_head={self.n_head} hold: the end of the pattern would be lost"
            )
        if "S" not in self.heads and self.window is not None:
            raise UserError(f"window={self.window} needs a short head, but heads={self.heads!r} has no S: --heads=SSSL")
        if self.window is not None and self.window < 0:
            raise UserError(f"window={self.window} must be 0 (a token sees itself alone) or more")
        if self.differential and self.n_head % 2:
            raise UserError(f"differential attention pairs the heads, but n_head={self.n_head} is odd")
        if self.differential and self.kv_heads % 2:
            raise UserError(f"differential attention pairs the heads, but n_kv_head={self.kv_heads} is odd")
        for letters in (self.layer_heads(layer) for layer in range(self.n_layer)):
            if self.differential and letters[::2] != letters[1::2]:
                raise UserError(
                    f"heads={self.heads!r} with differential: heads 2i and 2i + 1 are one differential head and need "
                    f"one span, but the letters of a layer are {letters}; write each letter twice: SSLL"
                )

    @property
    def head_size(self) -> int:
        """D, the width of a head's queries and keys."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """G, the heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def scale(self) -> float:
        """Of the scores: 1 / sqrt(D), divided by the temperature."""
        return self.head_size**-0.5 / self.temperature

    @property
    def hidden(self) -> int:
        """The width of the MLP; 8/3 n_embd is rounded to a multiple of 8."""
        return self.n_hidden or (8 * max(1, round(self.n_embd / 3)) if ACTIVATION[self.mlp][1] else 4 * self.n_embd)

    @property
    def reach(self) -> int:
        """max_distance, or its papers' default."""
        return self.max_distance or (16 if self.position == "relative" else 128)

    @property
    def base(self) -> float:
        """rope_base, or its paper's default."""
        return self.rope_base or 10000.0

    @property
    def long_bias(self) -> bool:
        """Whether the position gives the scores of long heads a bias."""
        scheme = POSITION[self.position][1]
        return scheme is not None and scheme.scores and not self.nope_long

    @property
    def sums(self) -> bool:
        """Whether running sums can hold what long heads need of the past: a core in CACHE whose scores get no bias."""
        return self.attention in CACHE and not self.long_bias

    @property
    def linear(self) -> bool:
        """Whether training takes time linear in the tokens in long heads: beta, unless something needs its weights."""
        return self.sums and self.block_size >= BETA_LINEAR_FROM and not self.weight_dropout

    def new_norm(self, norm: str, width: int) -> nn.Module:
        return NORM[norm](width, self.has_norm_bias(norm), self.norm_eps)

    def has_norm_bias(self, norm: str) -> bool:
        """norm_bias, or what None stands for."""
        return (self.bias and norm == "layernorm") if self.norm_bias is None else self.norm_bias

    def _drops_weights(self) -> bool:
        return "dropout" in inspect.signature(ATTENTION[self.attention]).parameters

    @property
    def weight_dropout(self) -> float:
        """The dropout on attention weights: attn_dropout, else dropout where the core allows it."""
        if self.attn_dropout is not None:
            return self.attn_dropout
        return self.dropout if self._drops_weights() else 0.0

    @property
    def span(self) -> int | None:
        """The window of the short heads, if there are any: by default the LS paper's (section 5.1)."""
        if "S" not in self.heads:
            return None
        return self.window if self.window is not None else 50 if self.block_size <= 2048 else 100

    def layer_heads(self, layer: int) -> str:
        """The heads of one layer, a letter each: 'SSSL'."""
        layers = self.heads.split("/")
        pattern = layers[layer % len(layers)]
        return (pattern * self.n_head)[: self.n_head]


# -----------------------------------------------------------------------------
# The model


class CausalSelfAttention(nn.Module):
    """Projections and head grouping around a core: short heads and long heads are two calls of it.

    Differential attention (Ye et al. 2024): heads 2i and 2i + 1 share a value twice as wide, and
    y = norm(A_2i V - lambda A_2i+1 V) (1 - lambda_init), with one lambda per layer and an RMSNorm per pair,
    where A V is whatever the core makes of q, k and V: with LASER, each map has its own log.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        C, H, G, D = config.n_embd, config.n_head, config.kv_heads, config.head_size
        self.c_attn = nn.Linear(C, (H + 2 * G) * D, bias=config.bias)
        self.c_proj = nn.Linear(H * D, C, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.q_norm, self.k_norm = QK_NORM[config.qk_norm](config, D)
        # softplus(p) is 1 at the start (LASER, section 4: softmax(Q diag(softplus(p)) K^T / sqrt(d)))
        p = torch.full((D,), math.log(math.e - 1)) if config.per_dim_temperature else None
        self.per_dim_temperature = None if p is None else nn.Parameter(p)
        scheme, letters = POSITION[config.position][1], config.layer_heads(layer)
        self.nope_long = config.nope_long
        self.position = None if scheme is None or (self.nope_long and "S" not in letters) else scheme(config)
        core = ATTENTION[config.attention]  # what is not `checked` knows a bias as a tensor alone
        self.core = core.unchecked if hasattr(core, "unchecked") else in_rows(dense_bias)(core)
        self.scale, self.weight_dropout, self.sizes = config.scale, config.weight_dropout, (H, G, D)
        self.n_map = 2 if config.differential else 1  # heads that share a value
        self.largest = None  # a list: of each call's groups of heads the largest score is added
        if config.differential:
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
            self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
                nn.Parameter(0.1 * torch.randn(D)) for _ in range(4)
            )
            self.ln_head = RMSNorm(2 * D, False, 1e-5)
        # Two calls of the core, the short heads first, as the LS paper numbers them. Where `heads` mixes them
        # in another order, they are picked out before and put back after.
        by_span = [[h for h in range(H) if letters[h] == letter] for letter in "SL"]
        windows = (config.span, None)
        self.groups = [HeadGroup(hs, H // G, self.n_map, w) for hs, w in zip(by_span, windows, strict=True) if hs]
        order = sum(by_span, [])
        self.inverse = None if order == sorted(order) else [order.index(h) for h in range(H)]
        self.calls = self.groups  # of the core, for all tokens at once

    def in_one_call(self) -> None:
        """From here on the core is called once, with n_short, where the first heads are the short ones."""
        (H, G, _), short = self.sizes, self.groups[0]
        if len(self.groups) == 2 and self.inverse is None and not self.nope_long:
            self.calls = [HeadGroup([*range(H)], H // G, self.n_map, short.window, n_short=len(short.k_of))]

    def forward(self, x, cache=None, past=0, documents=None):
        (B, T, _), (H, G, D) = x.shape, self.sizes
        qkv = self.c_attn(x)
        if cache is None:  # while decoding, it is the logits that are looked at
            check_finite("what q, k and v are made of", qkv)
        q, k, v = qkv.split((H * D, G * D, G * D), dim=-1)
        q, k = (t.view(B, T, -1, D).transpose(1, 2) for t in (q, k))  # (B, H, T, D), (B, G, T, D)
        v = v.view(B, T, -1, self.n_map * D).transpose(1, 2)  # (B, G, T, D) or (B, G / 2, T, 2 D)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.per_dim_temperature is not None:
            q = q * F.softplus(self.per_dim_temperature)
        dropout = {"dropout": self.weight_dropout} if self.training and self.weight_dropout else {}
        y = []
        for i, group in enumerate(self.calls if cache is None and self.largest is None else self.groups):
            q_part, k_part, v_part, bias = *(take(*t) for t in ((q, group.q), (k, group.k), (v, group.v))), None
            if self.position is not None and not (self.nope_long and group.window is None):
                q_part, k_part, bias = self.position(q_part, k_part, group.q, past)
            part, kwargs = (q_part.to(v.dtype), k_part.to(v.dtype), v_part), {"scale": self.scale, "bias": bias}
            if cache is not None:
                y.append(cache[i].attend(self.core, group.share, *part, **kwargs, **dropout))
                continue
            part = part[0], *group.share(*part[1:])
            alone = (lambda f: f) if documents is None else (lambda f: functools.partial(by_document, f, documents))
            if self.largest is not None:
                self.largest.append(alone(largest_scores)(*part, window=group.window, **kwargs).max())
            y.append(alone(self.core)(*part, window=group.window, **group.mixed, **kwargs, **dropout))
        y = torch.cat(y, dim=1) if len(y) > 1 else y[0]
        if self.inverse is not None:
            y = y[:, self.inverse]
        if self.n_map == 2:
            first = (self.lambda_q1 * self.lambda_k1).sum().exp()  # no @, which autocast would round
            second = (self.lambda_q2 * self.lambda_k2).sum().exp()
            y = y[:, ::2] - (first - second + self.lambda_init) * y[:, 1::2]
            y = self.ln_head(y) * (1 - self.lambda_init)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, H * D))
        return self.resid_dropout(y) if self.training else y  # decoding a token feels every call


def take(x: torch.Tensor, heads: slice | list[int]) -> torch.Tensor:
    """These heads of x (B, H, T, D): x itself where they are all, since even a whole slice costs a backward pass."""
    return x if heads == slice(0, x.shape[1]) else x[:, heads]


class HeadGroup:
    """The query heads of a layer that share a window, and which heads of keys and values they need.

    n_query query heads in a row share a key head and a value; with two maps it is pairs of heads that do, and
    the maps of a pair have two key heads and one value. With n_short the window is that of the first n_short heads;
    the others see all.
    """

    def __init__(self, heads: list[int], n_query: int, n_map: int, window: int | None, n_short: int | None = None):
        k = [n_map * (h // n_map // n_query) + h % n_map for h in heads]
        v = [h // n_map // n_query for h in heads]
        self.window, self.q, self.k, self.v = window, *(self._index(sorted(set(x))) for x in (heads, k, v))
        self.k_of, self.v_of = ([sorted(set(x)).index(h) for h in x] for x in (k, v))
        self.mixed = {} if n_short is None else {"n_short": n_short}

    @staticmethod
    def _index(heads: list[int]) -> slice | list[int]:
        """A slice where it is enough: a view, not a copy."""
        together = heads == list(range(heads[0], heads[-1] + 1))
        return slice(heads[0], heads[-1] + 1) if together else heads

    def share(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of each query head."""
        return per_head(k, self.k_of), per_head(v, self.v_of)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.act, self.gated = ACTIVATION[config.mlp]
        self.c_fc = nn.Linear(config.n_embd, (1 + self.gated) * config.hidden, bias=config.bias)
        self.c_proj = nn.Linear(config.hidden, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            x = self.act(gate) * x
        else:
            x = self.act(x)
        x = self.c_proj(x)
        return self.dropout(x) if self.training else x


class Block(nn.Module):
    """Attention and an MLP, each with the norms of WHERE; in parallel both see the same x (PaLM, section 2)."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        before, after, added = WHERE[config.where]
        self.parallel = config.block == "parallel"

        def norm(wanted: bool) -> nn.Module:
            return config.new_norm(config.norm, config.n_embd) if wanted else nn.Identity()

        self.ln_1, self.ln_2 = norm(before or added), norm((before or added) and not self.parallel)
        self.ln_1_after, self.ln_2_after = norm(after), norm(after)
        self.added = added
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x, *seen):
        if self.added:
            x = self.ln_1(x + self.attn(x, *seen))
            return self.ln_2(x + self.mlp(x))
        h = self.ln_1(x)
        if self.parallel:
            return x + self.ln_1_after(self.attn(h, *seen)) + self.ln_2_after(self.mlp(h))
        x = x + self.ln_1_after(self.attn(h, *seen))
        return x + self.ln_2_after(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019), with the choices of GPTConfig."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        embedded = POSITION[config.position][0]
        modules = {
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": None if embedded is None else embedded(config),
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)]),
            "ln_f": nn.Identity() if config.where == "post" else config.new_norm(config.norm, config.n_embd),
        }
        self.transformer = nn.ModuleDict({name: module for name, module in modules.items() if module is not None})
        # Vaswani et al., section 3.4: beside sinusoids, which have size 1, an embedding of 0.02 would be lost
        self.embedding_scale = config.n_embd**0.5 if config.position == "sinusoidal" else 1.0
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.transformer.wte.weight = self.lm_head.weight
        positions = [block.attn.position for block in self.transformer.h]
        if any(position is not None and position.shared for position in positions):
            one = next(position for position in positions if position is not None)
            for block in self.transformer.h:
                block.attn.position = one if block.attn.position is not None else None
        self.apply(self._init_weights)
        # what adds to the residual stream: as GPT-2; or zero, by its last norm where there is one
        std = 0.02 / math.sqrt(2 * config.n_layer)
        by_norm = config.zero_init and WHERE[config.where][1]
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.0 if config.zero_init and not by_norm else std)
            elif name.endswith("_after.weight") and by_norm:
                nn.init.zeros_(p)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self,
        idx: torch.Tensor,
        targets: torch.Tensor | None = None,
        cache: Cache | None = None,
        pos: torch.Tensor | None = None,
    ) -> tuple:
        """(logits, loss) for token ids idx (B, T), T <= block_size.

        With targets (B, T), where -1 is ignored: logits (B, T, V) and the mean cross-entropy in nats, in
        training with z_loss mean(log^2 Z) added (PaLM, section 5), Z the sum of a token's exp(logits).
        Without: the logits of the last position (B, 1, V) and None.
        With a cache of new_cache's, idx are the next tokens after those that it holds, and are added to it.
        With pos (B, T), the positions of the tokens in their documents, no token sees another document's: one begins
        where pos is 0, as dataset.positions has it.
        Raises ValueError past block_size or past the cache's end, or for a cache with pos.
        """
        T, past = idx.shape[1], 0 if cache is None else cache.length
        if T < 1 or past + T > self.config.block_size:
            raise UserError(f"{past + T} tokens do not fit into block_size={self.config.block_size}, from 1 on")
        if cache is not None:
            if pos is not None:
                raise UserError("a cache holds one document: pos and cache do not go together")
            with torch.no_grad(), cache.extended(*idx.shape):
                return self._forward(idx, targets, cache, None)
        return self._forward(idx, targets, None, pos)

    def hidden(self, idx: torch.Tensor, cache: Cache | None = None, pos: torch.Tensor | None = None) -> torch.Tensor:
        """What the head gets, (B, T, C), of forward's idx, cache and pos, which it has checked."""
        T, past = idx.shape[1], 0 if cache is None else cache.length
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if "wpe" in self.transformer:
            x = x + self.transformer.wpe(torch.arange(past, past + T, device=idx.device) if pos is None else pos)
        x = self.transformer.drop(x)
        again = self.config.activation_checkpointing and self.training and cache is None
        documents = None if pos is None else documents_of(pos)
        for i, block in enumerate(self.transformer.h):
            seen = None if cache is None else cache.layers[i], past, documents
            x = checkpoint(block, x, *seen, use_reentrant=False) if again else block(x, *seen)
        return self.transformer.ln_f(x)

    def _forward(self, idx, targets, cache, pos):
        x = self.hidden(idx, cache, pos)
        if targets is None:
            return self._logits(x[:, [-1]]), None
        logits = self._logits(x)  # (B, T, V)
        flat, targets = logits.flatten(0, 1).float(), targets.flatten()
        loss = F.cross_entropy(flat, targets, ignore_index=-1)
        if self.training and self.config.z_loss:
            log_z, seen = flat.logsumexp(-1), targets != -1
            loss = loss + self.config.z_loss * (log_z.square() * seen).sum() / seen.sum()
        return logits, loss

    def _logits(self, x):
        logits, cap = self.lm_head(x), self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def new_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for up to `capacity` tokens, block_size by default. Raises ValueError past block_size."""
        capacity = self.config.block_size if capacity is None else capacity
        if not 1 <= capacity <= self.config.block_size:
            raise UserError(f"a cache of {capacity} tokens does not fit block_size={self.config.block_size}")

        def group(window: int | None) -> object:
            kind = CACHE[self.config.attention] if window is None and self.config.sums else KeyValueCache
            return kind(window, capacity)

        return Cache([[group(g.window) for g in b.attn.groups] for b in self.transformer.h], capacity)

    @torch.no_grad()
    def largest_logits(self, idx: torch.Tensor, pos: torch.Tensor | None = None) -> list[float]:
        """The largest absolute attention score of each layer on idx and pos (B, T), which are forward's.

        It explodes where training is unstable (LS paper, figure 1b). Costs a forward pass, and q k^T once more in
        float32, a few queries at a time.
        """
        layers = [block.attn for block in self.transformer.h]
        for layer in layers:
            layer.largest = []
        try:
            self(idx, pos=pos)
            return [torch.stack(layer.largest).max().item() for layer in layers]
        finally:
            for layer in layers:
                layer.largest = None

    def use_triton(self) -> None:
        """Attention by the kernels of kernels.py, which mean the same, wherever they take their inputs.

        Raises ImportError without Triton, ValueError for a model of which they would never take any.
        """
        try:
            from attention.kernels import KERNEL, never
        except ImportError:
            raise NotInstalled("Triton's kernels need Triton: pip install triton") from None
        if reason := never(self.config):
            raise UserError(f"Triton's kernels would not be used: {reason}")
        for block in self.transformer.h:
            block.attn.core = KERNEL[self.config.attention].unchecked
            block.attn.in_one_call()

    def num_params(self, non_embedding: bool = True) -> int:
        """Parameters; without the embeddings unless asked, except for a token embedding that is the head too."""
        n = sum(p.numel() for p in self.parameters())
        embeddings = () if self.config.tied else (self.transformer.wte,)
        embeddings += (self.transformer.wpe,) if "wpe" in self.transformer else ()
        return n - sum(p.numel() for e in embeddings for p in e.parameters()) if non_embedding else n

    def flops(self) -> int:
        """FLOPs per token, forward and backward: 6 N + 6 (D + Dv) sum over heads of keys (PaLM, appendix B).

        D, Dv: widths of a head's keys and values. keys: block_size for a long head, window + 1 for a short
        one, and what their chunks and sums amount to for those of a core in CACHE, whose time is linear.
        """
        c = self.config
        letters = "".join(c.layer_heads(layer) for layer in range(c.n_layer))
        D = c.head_size
        Dv = 2 * D if c.differential else D
        long = min(c.block_size, max(CHUNK, D) + 2 * D) if c.linear else c.block_size
        keys = letters.count("L") * long + letters.count("S") * min(c.block_size, (c.span or 0) + 1)
        return 6 * self.num_params() + 6 * (D + Dv) * keys

    def crop_block_size(self, block_size: int) -> None:
        """Shortens the context, for fine-tuning a model at a smaller one."""
        if not 1 <= block_size <= self.config.block_size:
            raise UserError(f"block_size={block_size} is below 1 or larger than the model's, {self.config.block_size}")
        self.config.window = self.config.span  # which the context may have chosen
        self.config.block_size = block_size
        if self.config.position == "learned":
            self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size])

    @classmethod
    def from_pretrained(cls, name: str, override_args: dict | None = None) -> "GPT":
        """The weights of a model of transformers' of a family in pretrained.FAMILIES: GPT-2, Llama, Mistral, Qwen 3.

        name: 'gpt2', 'gpt2-medium', ..., owner/model on the hub, or a local folder. override_args: the fields
        of GPTConfig in pretrained.FREE, which do not depend on weights (dropout, attention, block_size, ...).
        Raises ValueError for another model, ImportError without transformers, OSError without the weights.
        """
        from training.pretrained import load  # which imports this file

        return load(name, override_args)

    @classmethod
    def from_checkpoint(cls, checkpoint: dict, **overrides) -> "GPT":
        """The model of a checkpoint of train.py's, or of nanoGPT's, as checkpoint.load gives it."""
        known = {field.name for field in fields(GPTConfig)}
        if unknown := set(checkpoint["model_args"]) - known:
            raise UserError(f"the checkpoint's model has fields unknown here: {', '.join(sorted(unknown))}")
        model = cls(GPTConfig(**checkpoint["model_args"] | overrides))
        try:
            model.load_state_dict(checkpoint["model"])
        except RuntimeError as error:
            raise UserError(f"the checkpoint's weights do not fit its model: {str(error).splitlines()[-1]}") from None
        return model

    @torch.no_grad()
    def stream(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | None = None,
        vocab_size: int | None = None,
        seed: int | None = None,
        use_cache: bool = True,
    ) -> Iterator[torch.Tensor]:
        """Yields one new token per row, (B, 1), up to max_new_tokens times, after the prompts idx (B, T).

        temperature: 0 is greedy. top_k: sample from the k most likely. top_p: from the fewest that hold
        this probability. stop: a token that ends its row (repeated until every row has ended).
        vocab_size: the tokenizer's; ids past it (padding) are never sampled. seed: of a generator of its
        own; None draws from torch's. use_cache: keep keys, values and sums of the tokens seen; the text
        is the same without, slowly. The model sees the last block_size tokens: past them each costs a whole
        forward pass, cached or not, since every token of the window moves to another (learned) position, and
        what was computed of it has seen tokens that are no longer there.
        Raises ValueError for an empty prompt, an impossible argument, or logits that are not finite.
        """
        if idx.shape[1] == 0:
            raise UserError("the prompt is empty: at least one token is needed")
        if not temperature >= 0 or not (top_k is None or top_k >= 1) or not (top_p is None or 0 < top_p <= 1):
            raise UserError(
                f"sampling needs temperature >= 0, top_k >= 1 and 0 < top_p <= 1; got {temperature}, {top_k}, {top_p}"
            )
        generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        ended = torch.zeros(len(idx), 1, dtype=torch.bool, device=idx.device)
        block_size = self.config.block_size
        cache = self.new_cache(min(block_size, idx.shape[1] + max_new_tokens)) if use_cache else None
        for _ in range(max_new_tokens):
            if idx.shape[1] > block_size:
                cache, idx = None, idx[:, -block_size:]
            with torch.inference_mode():
                logits = self(idx if cache is None else idx[:, cache.length :], cache=cache)[0]
            logits = logits[:, -1].float()[:, :vocab_size]  # (B, V)
            if not logits.isfinite().all():
                raise UserError("the model's logits are not finite; has its training diverged?")
            token = _sample(logits, temperature, top_k, top_p, generator)
            if stop is not None:
                token = torch.where(ended, stop, token)
                ended = ended | (token == stop)
            idx = torch.cat((idx, token), dim=1)
            yield token
            if stop is not None and ended.all():
                return

    def generate(self, idx: torch.Tensor, max_new_tokens: int, *args, **kwargs) -> torch.Tensor:
        """The prompts idx (B, T) and what `stream`, which takes the same arguments, adds to them."""
        return torch.cat((idx, *self.stream(idx, max_new_tokens, *args, **kwargs)), dim=1)


def _sample(logits, temperature, top_k, top_p, generator):
    """One token per row, (B, 1), from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    temperature = max(temperature, torch.finfo(logits.dtype).tiny)  # less is 0 where denormal numbers are flushed
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0, whatever the temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, [-1]]
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        ranked, order = probs.sort(descending=True)
        beyond = ranked.cumsum(-1) - ranked >= top_p  # what came before already holds top_p
        probs = probs.scatter(-1, order, ranked.masked_fill(beyond, 0.0))
    return torch.multinomial(probs, 1, generator=generator)
