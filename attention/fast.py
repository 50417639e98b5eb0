"""Fast forms of softmax and LASER, and what makes short heads of any attention cheap.

in_blocks(attend) makes short heads cost O(T window); few_rows_at_a_time(attend) limits the memory of long ones.
attention/sums.py has the fast forms of beta and beta_squared, and attention/forms.py says which form runs. All forms
are functions attend(q, k, v, *, window, scale, bias, decay, dropout, far) -> y, as scores.plain_form describes them.
"""

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention.scores import at_least_float32, plain_form, uncompiled, visible

CHUNK = 64  # tokens that are computed together; smaller chunks are so many that they cost more than they save
NUMBERS = 2**23  # that a few queries may need at once: 32 MiB in float32; on a GPU four times as many
LASER_RANGE = 60.0  # largest range of a channel: exp(-60) = 9e-27, and its inverse, are far from float32's limits

# -----------------------------------------------------------------------------
# Any attention: short heads in blocks, long heads a few queries at a time


def in_blocks(attend: Callable) -> Callable:
    """The same attention with short heads that cost O(T window), in time and in memory, forward and backward.

    The queries are cut into blocks of c tokens. A block sees its own keys and the window before them. attend runs on
    all blocks at once, with the c queries of each as the last ones of c + window tokens; dimension 1 counts the blocks.
    The first tokens, whose window would begin before position 0, are a call of their own. Few tokens are not cut, nor
    few queries after many keys (a cache).
    """

    def blocks(q, k, v, *, window=None, bias=None, **settings):
        (B, H, Tq, D), T = q.shape, k.shape[-2]
        if window is not None and window >= T - 1:
            window = None
        c = CHUNK * max(1, math.ceil((window or 0) / (2 * CHUNK)))
        first = c * math.ceil((window or 0) / c)
        if window is None or min(T, 2 * Tq) <= first + c:
            return attend(q, k, v, window=window, bias=bias, **settings)
        settings["window"] = window
        bias = None if bias is None else bias.expand(torch.broadcast_shapes(bias.shape, (Tq, T)))
        if Tq < T:  # many new tokens after a cache
            q, bias = (None if x is None else F.pad(x, (0, 0, T - Tq, 0)) for x in (q, bias))
            return blocks(q, k, v, bias=bias, **settings)[..., -Tq:, :]
        y = []
        if first:
            few = None if bias is None else bias[..., :first, :first]
            y.append(attend(*(x[..., :first, :] for x in (q, k, v)), bias=few, **settings))
        pad = -T % c  # rows after the last token; they are cut off in the end
        q_blocks = pad_rows(q, pad)[..., first:, :].reshape(B * H, -1, c, D)
        k_blocks = Windows.apply(pad_rows(k, pad).flatten(0, 1), first, window, c)
        v_blocks = Windows.apply(pad_rows(v, pad).flatten(0, 1), first, window, c)
        if bias is not None:
            bias = F.pad(bias, (0, pad, 0, pad))[..., first:, first - window :].unfold(-2, c, c)
            bias = bias.unfold(-2, window + c, c).diagonal(0, -4, -3).movedim(-1, -3)  # (..., blocks, c, window + c)
            bias = bias.expand(B, H, -1, -1, -1).flatten(0, 1)
        for name, x in settings.items():
            if isinstance(x, Tensor) and name != "far":  # a decay or a learned number: one of each head
                settings[name] = x.expand(B, H, 1, 1).reshape(B * H, 1, 1, 1)
        rest = attend(q_blocks, k_blocks, v_blocks, bias=bias, **settings)
        y.append(rest.reshape(B, H, -1, v.shape[-1])[..., : T - first, :])
        return torch.cat(y, dim=-2)

    return blocks


class Windows(torch.autograd.Function):
    """(N, T, D) -> (N, n, window + c, D), a view: for each i the rows start + i c - window to start + (i + 1) c.

    The backward pass is Tensor.unfold's, but in slices: many times as fast as autograd's own.
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


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x (..., T, D) and `rows` copies of its last row: not zeros, since a definition may divide by a key's length."""
    return torch.cat((x, x[..., -1:, :].expand(*x.shape[:-2], rows, -1)), dim=-2) if rows else x


def few_rows_at_a_time(attend: Callable, numbers: Callable) -> Callable:
    """The same attention, a few queries at a time where all together would need too much memory.

    numbers(q, k, v): how many numbers one query needs, over all heads. The backward pass computes them again.
    """

    def rows(q, k, v, **settings):
        n = (NUMBERS if q.device.type == "cpu" else 4 * NUMBERS) // max(1, numbers(q, k, v))
        return attend(q, k, v, **settings) if n >= q.shape[-2] else parts(max(1, n), q, k, v, **settings)

    @uncompiled  # torch.compile would unroll the loop
    def parts(n, q, k, v, *, bias=None, **settings):
        Tq, past = q.shape[-2], k.shape[-2] - q.shape[-2]
        bias = None if bias is None else bias.expand(torch.broadcast_shapes(bias.shape, (Tq, past + Tq)))
        y = []
        for start in range(0, Tq, n):
            end = min(start + n, Tq)
            few = None if bias is None else bias[..., start:end, : past + end]
            part = q[..., start:end, :], k[..., : past + end, :], v[..., : past + end, :]
            y.append(checkpoint(functools.partial(attend, bias=few, **settings), *part, use_reentrant=False))
        return torch.cat(y, dim=-2)

    return rows


def for_scores(q, k, v) -> int:
    """The numbers that a query needs in an attention that holds its scores: a score for each head and key.

    16 scores count as one, since memory is cheaper than time here: the backward pass would compute them again.
    """
    return q.numel() // (q.shape[-1] * q.shape[-2]) * k.shape[-2] // 16


def for_values(q, k, v) -> int:
    """The numbers that a query needs in LASER's log space: one for each value."""
    return v.numel()


def general_form(definition: Callable, numbers: Callable = for_scores) -> Callable:
    """The form of an attention that nobody has written a faster one for."""
    return in_blocks(few_rows_at_a_time(plain_form(definition), numbers))


# -----------------------------------------------------------------------------
# softmax


def fused_softmax(definition: Callable) -> Callable:
    """y = softmax(s) v by PyTorch's fused kernels, which know neither a decay nor values by distance."""
    fused, general = in_blocks(sdpa), general_form(definition)

    def softmax(q, k, v, *, decay=None, far=None, **settings):
        if decay is None and far is None:
            return fused(q, k, v, **settings)
        return general(q, k, v, decay=decay, far=far, **settings)

    return softmax


def sdpa(q, k, v, *, window=None, scale=None, bias=None, decay=None, dropout=0.0):
    """F.scaled_dot_product_attention, with a mask only where is_causal is not enough. decay is None."""
    Tq, T, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if D != Dv and not (bias is not None and bias.requires_grad):  # fused kernels take one width, give no dbias
        q, k, v = (F.pad(x, (0, max(D, Dv) - x.shape[-1])) for x in (q, k, v))
    mask = visible(q, k, window) if window is not None or bias is not None or 1 < Tq < T else None
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, -math.inf)
    scale = D**-0.5 if scale is None else scale
    causal = mask is None and Tq > 1
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, scale=scale)
    return y[..., :Dv]


# -----------------------------------------------------------------------------
# LASER


def laser_by_exp(definition: Callable, mean: Callable | None = None) -> Callable:
    """y = log(softmax(s) exp(v)) with exp and log around fused softmax (Duvvuri and Dhillon, equation 6), for any v.

    mean: the form of an attention in the place of softmax. Its weights must sum to 1, as softmax's do.

    As in the paper, each channel of v is shifted by its largest value. That shift alone is not enough: it is taken
    over the whole sequence, so one large v at a later token lets every earlier output underflow to log(0). But the
    weights of a row sum to 1, so its sum of exponentials is at least exp(min v - max v). Where this is far from
    underflow, the shift is harmless. Otherwise the definition runs: it takes its sums in log space, slowly.

    All of it is in float32 or wider: rounding exp(v) to bfloat16 would be an error of 2^-9 in y however small y is,
    and would depend on the shift, and so on later tokens. The test of the range makes a GPU wait, once per call, and
    interrupts torch.compile's graph.
    """
    mean, in_log_space = mean or in_blocks(sdpa), general_form(definition, for_values)

    def laser(q, k, v, *, decay=None, **settings):
        q, k, values = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        with torch.autocast(q.device.type, enabled=False):
            if decay is not None or wider_than(values, LASER_RANGE):
                return in_log_space(q, k, values, decay=decay, **settings).to(v.dtype)
            shift = values.detach().amax(-2, keepdim=True)  # (B, H, 1, Dv)
            y = mean(q, k, (values - shift).exp(), **settings)
            return (y.log() + shift).to(v.dtype)

    return laser


@uncompiled
def wider_than(v: Tensor, limit: float) -> bool:
    """Whether a channel of v (B, H, T, Dv) has a range (max - min over time) above limit. If so, it warns, once."""
    v = v.detach()
    wide = (v.amax(-2) - v.amin(-2)).max().item() > limit
    if wide:
        sums = "LASER computes its sums in log space, slowly"
        warnings.warn(f"a channel of the values has a range above {limit:.0f}: {sums}", stacklevel=3)
    return wide
