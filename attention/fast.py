"""Fast forms of the attentions of model.py: the same functions in less time and memory.

windowed(definition) makes short heads of any attention cost O(T window). fused_softmax and laser_by_exp make softmax
and LASER faster still; attention/sums.py does it for beta and beta2, and attention/forms.py says which form runs.

Shapes are those of scores.py. Every form has the arguments and the result of a definition (model.py, ATTENTION). A
"core" is an attention function that other code calls: a definition or a form.
"""

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention.scores import ByDistance, at_least_float32, part_of, spelled_out, uncompiled, visible

CHUNK = 64  # tokens that are computed together; smaller chunks are so many that they cost more than they save
ROWS = 2**23  # numbers that a few queries may need at once: 32 MiB in float32; on a GPU four times as many
LASER_RANGE = 60.0  # largest range of a channel: exp(-60) = 9e-27, and its inverse, are far from float32's limits

# -----------------------------------------------------------------------------
# Any attention: short heads in blocks, long heads a few queries at a time


def windowed(core: Callable, numbers: Callable | None = None) -> Callable:
    """The same attention with short heads that cost O(T window), in time and in memory, forward and backward.

    numbers(q, k, v, bias): how many numbers one query needs at once, over all heads. If all queries together need too
    many, a few queries at a time are computed, and computed again in the backward pass.
    """
    return in_blocks(in_rows(core, numbers or for_scores))


def in_blocks(core: Callable) -> Callable:
    """Cuts the queries into blocks of c tokens. A block sees its own keys and the window before them.

    The core runs on all blocks at once, with the c queries of each as the last ones of c + window tokens. The first
    tokens, whose window would begin before position 0, are a call of their own.
    """

    def attend(q, k, v, *, window=None, scale=None, bias=None, **more):
        (B, H, Tq, D), T = q.shape, k.shape[-2]
        if isinstance(bias, torch.Tensor):
            bias = bias.expand(torch.broadcast_shapes(bias.shape, (Tq, T)))
        if window is not None and window >= T - 1:
            window = None
        if window is not None and (not more.get("causal", True) or more.get("seen") is not None):
            if Tq < T or bias is not None or T <= 2 * CHUNK:
                return core(q, k, v, window=window, scale=scale, bias=bias, **more)
            return in_padded_blocks(core, q, k, v, window=window, scale=scale, **more)
        c = CHUNK * max(1, math.ceil((window or 0) / (2 * CHUNK)))
        first = c * math.ceil((window or 0) / c)
        if window is None or min(T, 2 * Tq) <= first + c:
            return core(q, k, v, window=window, scale=scale, bias=bias, **more)
        if Tq < T:  # many new tokens after a cache
            pad = functools.partial(F.pad, pad=(0, 0, T - Tq, 0))
            if bias is not None:
                bias = bias.per_query(pad) if isinstance(bias, ByDistance) else pad(bias)
            return attend(pad(q), k, v, window=window, scale=scale, bias=bias, **more)[..., -Tq:, :]
        settings = {"window": window, "scale": scale, **more}
        y = []
        if first:
            few = part_of(bias, slice(first), slice(first))
            y.append(core(q[..., :first, :], k[..., :first, :], v[..., :first, :], bias=few, **settings))
        pad = -T % c  # rows after the last token; they are cut off in the end
        q_blocks = pad_rows(q, pad)[..., first:, :].reshape(B * H, -1, c, D)
        k_blocks = Windows.apply(pad_rows(k, pad).flatten(0, 1), first, window, c)
        v_blocks = Windows.apply(pad_rows(v, pad).flatten(0, 1), first, window, c)
        bias = bias_blocks(bias, (B, H), pad, first, window, c)
        if "decay" in more:
            settings["decay"] = more["decay"].expand(B, H, 1, 1).reshape(B * H, 1, 1, 1)
        blocks = core(q_blocks, k_blocks, v_blocks, bias=bias, **settings)
        y.append(blocks.reshape(B, H, -1, v.shape[-1])[..., : T - first, :])
        return torch.cat(y, dim=-2)

    return attend


def in_padded_blocks(core: Callable, q, k, v, *, window: int, causal=True, seen=None, decay=None, **settings):
    """y of short heads that see tokens on both sides, or that do not see padding, in blocks of c queries.

    The text gets padding on both sides. A block has the c + 2 window keys that its queries see (c + window if causal).
    Queries are the last ones of their keys; so a block has `window` more queries, whose outputs are thrown away.
    """
    B, H, T, _ = q.shape
    c = CHUNK * max(1, math.ceil(window / (2 * CHUNK)))
    after = 0 if causal else window
    sides = (window, -T % c + after)
    seen = q.new_ones(1, 1, 1, T, dtype=torch.bool) if seen is None else seen
    seen = F.pad(seen, sides).expand(B, H, 1, -1).flatten(0, 2).unfold(-1, window + c + after, c)
    k, v = (F.pad(x, (0, 0, *sides)).flatten(0, 1) for x in (k, v))
    q_blocks = Windows.apply(pad_rows(q, sides[1]).flatten(0, 1), after, after, c)
    k_blocks = Windows.apply(k, window + after, window + after, c)
    v_blocks = Windows.apply(v, window + after, window + after, c)
    if decay is not None:
        settings["decay"] = decay.expand(B, H, 1, 1).reshape(B * H, 1, 1, 1)
    y = core(q_blocks, k_blocks, v_blocks, window=window, causal=causal, seen=seen[:, :, None], **settings)
    return y[..., :c, :].reshape(B, H, -1, v.shape[-1])[..., :T, :]


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


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x (..., T, D) with rows of zeros after its last one. With rows = 0 this is x itself; F.pad would copy it."""
    return F.pad(x, (0, 0, 0, rows)) if rows else x


def bias_blocks(bias, batch_and_heads: tuple[int, int], pad: int, first: int, window: int, c: int):
    """The bias of each block of `in_blocks`: a tensor (B H or 1, blocks, c, window + c), or by distance."""
    if bias is None:
        return None
    if isinstance(bias, ByDistance):
        bias = bias.per_query(lambda x: pad_rows(x, pad)[..., first:, :].unflatten(-2, (-1, c)))
        values = bias.values if bias.values.dim() == 5 else bias.values[:, :, None]  # (.., H, blocks or 1, c or 1, n)
        return ByDistance(values.expand(*batch_and_heads, *values.shape[2:]).flatten(0, 1), bias.v)
    bias = F.pad(bias, (0, pad, 0, pad))[..., first:, first - window :].unfold(-2, c, c)
    bias = bias.unfold(-2, window + c, c).diagonal(0, -4, -3).movedim(-1, -3)  # (..., blocks, c, window + c)
    return bias.expand(*batch_and_heads, -1, -1, -1).flatten(0, 1)


def in_rows(core: Callable, numbers: Callable) -> Callable:
    """Takes a few queries at a time, so that memory does not grow with T^2. numbers: see `windowed`."""
    core = spelled_out(core)

    def attend(q, k, v, *, bias=None, **settings):
        Tq, causal = q.shape[-2], settings.get("causal", True)
        rows = (ROWS if q.device.type == "cpu" else 4 * ROWS) // max(1, numbers(q, k, v, bias))
        if isinstance(bias, ByDistance) and bias.v is not None:
            rows = min(rows, max(CHUNK, len(bias.v)))  # so ByDistance.attend needs one-hot values for few keys
        far = settings.get("window") is not None or settings.get("decay") is not None
        if rows >= Tq or (far and not causal):  # distances are counted from the last key
            return core(q, k, v, bias=bias, **settings)
        if isinstance(bias, ByDistance):
            warnings.warn("t5 and relative have no fused kernel: a few queries run at a time, slowly", stacklevel=4)
        return in_parts(max(1, rows), q, k, v, bias, settings)

    @uncompiled  # torch.compile would unroll the loop
    def in_parts(rows, q, k, v, bias, settings):
        Tq, past = q.shape[-2], k.shape[-2] - q.shape[-2]
        causal, seen = settings.get("causal", True), settings.get("seen")
        y = []
        for start in range(0, Tq, rows):
            end = min(start + rows, Tq)
            keys = slice(past + end if causal else None)
            few = q[..., start:end, :], k[..., keys, :], v[..., keys, :]
            more = settings if seen is None else settings | {"seen": seen[..., keys]}
            part = functools.partial(core, bias=part_of(bias, slice(start, end), keys), **more)
            y.append(checkpoint(part, *few, use_reentrant=False))
        return torch.cat(y, dim=-2)

    return attend


def for_scores(q, k, v, bias) -> int:
    """The `numbers` of `windowed` for an attention that holds its scores: a score for each head and key.

    16 scores count as one number, because holding all scores costs less time than computing them again.
    """
    return max(q.numel() // (q.shape[-1] * q.shape[-2]) * k.shape[-2] // 16, for_bias(q, k, v, bias))


def for_bias(q, k, v, bias) -> int:
    """The same for an attention that holds no scores: only the dense numbers of a bias by distance, if any."""
    if not isinstance(bias, ByDistance):
        return 0
    B = len(q) if bias.values.requires_grad else len(bias.values)  # with a gradient PyTorch has no fused kernel
    return B * q.shape[1] * k.shape[-2] * (1 if bias.v is None else 3)


def for_values(q, k, v, bias) -> int:
    """The same for LASER in log space: a number for each value."""
    return v.numel()


# -----------------------------------------------------------------------------
# softmax


def fused_softmax(definition: Callable) -> Callable:
    """y = softmax(s) v by PyTorch's fused kernels."""
    in_windows = windowed(sdpa, for_bias)

    def attend(q, k, v, *, window=None, bias=None, **settings):
        if window is None and bias is None:
            return sdpa(q, k, v, **settings)
        return in_windows(q, k, v, window=window, bias=bias, **settings)

    return attend


def sdpa(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0, causal=True, seen=None):
    """F.scaled_dot_product_attention, with a mask only where is_causal is not enough."""
    Tq, T, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if D != Dv and not (bias is not None and bias.requires_grad):  # fused kernels take one width, give no dbias
        q, k, v = (F.pad(x, (0, max(D, Dv) - x.shape[-1])) for x in (q, k, v))
    mask = None
    if window is not None or bias is not None or (causal and (seen is not None or 1 < Tq < T)):
        mask = visible(q, k, window, causal, seen)
    elif seen is not None:
        mask = seen | ~seen.any(-1, keepdim=True)  # the same, once for all queries
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, -math.inf)
    causal = causal and mask is None and Tq > 1
    scale = D**-0.5 if scale is None else scale
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, scale=scale)
    return y[..., :Dv]


# -----------------------------------------------------------------------------
# LASER


def laser_by_exp(definition: Callable) -> Callable:
    """y = log(softmax(s) exp(v)) with exp and log around fused softmax (Duvvuri and Dhillon, equation 6), for any v.

    As in the paper, each channel of v is shifted by its largest value. That shift alone is not enough: it is taken
    over the whole sequence, so one large v at a later token lets every earlier output underflow to log(0). But the
    weights of a row sum to 1, so its sum of exponentials is at least exp(min v - max v). Where this is far from
    underflow, the shift is harmless. Otherwise the definition runs: it takes its sums in log space, slowly.

    All of it is in float32 or wider: rounding exp(v) to bfloat16 would be an error of 2^-9 in y however small y is,
    and would depend on the shift, and so on later tokens. The test of the range makes a GPU wait, once per call, and
    interrupts torch.compile's graph.
    """
    softmax = fused_softmax(definition)
    in_log_space = windowed(definition, for_values)

    def attend(q, k, v, **settings):
        q, k, values = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        with torch.autocast(q.device.type, enabled=False):
            if wider_than(values, LASER_RANGE):
                return in_log_space(q, k, values, **settings).to(v.dtype)
            shift = values.detach().amax(-2, keepdim=True)  # (B, H, 1, Dv)
            y = softmax(q, k, (values - shift).exp(), **settings)
            return (y.log() + shift).to(v.dtype)

    return attend


@uncompiled
def wider_than(v: torch.Tensor, limit: float) -> bool:
    """Whether a channel of v (B, H, T, Dv) has a range (max - min over time) above limit. If so, it warns, once."""
    v = v.detach()
    wide = (v.amax(-2) - v.amin(-2)).max().item() > limit
    if wide:
        sums = "LASER computes its sums in log space, slowly"
        warnings.warn(f"a channel of the values has a range above {limit:.0f}: {sums}", stacklevel=3)
    return wide
