"""Fast forms of softmax and LASER, and two ways to make any attention cheaper.

in_blocks(attend): short heads cost O(T window). few_rows_at_a_time(attend): long heads hold no T x
T scores. sums.py has the fast forms of beta and beta_squared; forms.py says which form runs.

All forms are functions attend(q, k, v, *, window, scale, bias, ...) -> y, as scores.plain_form
describes them. Each has only the arguments that it can take.
"""

import functools
import math
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention.scores import at_least_float32, plain_form, uncompiled, visible

CHUNK = 64  # tokens that are computed together; many smaller chunks would cost more than they save
BFLOAT16_FROM = (
    512  # with fewer tokens a CPU's fused attention is slower in bfloat16 than in float32
)
AT_ONCE = 2**23  # numbers held at once: 32 MiB in float32; a GPU holds four times as many
HALF = (torch.bfloat16, torch.float16)
LASER_RANGE = 60.0  # largest range of a channel: exp(-60) is far above float32's smallest number
HALF_RANGE = 10.0  # the same for float16, whose smallest weight, 6e-8, times exp(10) is small
LOG_2 = math.log(2)
HAS_FLASH = torch.backends.cuda.is_flash_attention_available()  # whether PyTorch was built with it

# -----------------------------------------------------------------------------
# any attention: short heads in blocks, long heads a few queries at a time


def block_length(window: int) -> int:
    """The queries in a block of a short head: whole chunks, at least half as many as the window."""
    return CHUNK * max(1, math.ceil(window / (2 * CHUNK)))


def in_blocks(attend: Callable) -> Callable:
    """The same attention with short heads that cost O(T window) time and memory.

    The queries are cut into blocks of c tokens. A block sees its own keys and the window before it.
    attend runs once for all blocks: the c queries of a block are the last of its c + window tokens,
    and dimension 1 counts blocks. The first tokens, whose window begins before position 0, are a
    call of their own. Few tokens are not cut, and neither are queries after the keys of a cache.
    On a GPU the blocks are not compiled: docs/benchmarks.md, "How fast is it on a GPU?", says why.
    """

    def blocks(q, k, v, *, window=None, **settings):
        T = k.shape[-2]
        if window is None or window >= T - 1:  # the window hides nothing
            return attend(q, k, v, **settings)
        settings["window"] = window
        c = block_length(window)
        first = c * max(1, math.ceil(window / c))
        if q.shape[-2] < T or T <= first + c:  # blocks would not save more than they cost
            return attend(q, k, v, **settings)
        run = eager_cut if q.is_cuda else cut
        return run(q, k, v, c, first, **settings)

    def cut(q, k, v, c, first, *, window, bias=None, **settings):
        B, H, T, D = q.shape
        settings["window"] = window
        if bias is not None:
            bias = bias.expand(torch.broadcast_shapes(bias.shape, (T, T)))
            settings["bias"] = bias[..., :first, :first]
        y_first = attend(*(x[..., :first, :] for x in (q, k, v)), **settings)

        pad = -T % c  # rows after the last token, which are cut off at the end
        q_blocks = pad_rows(q, pad)[..., first:, :].reshape(B * H, -1, c, D)  # (BH, blocks, c, D)
        k_blocks, v_blocks = (
            Windows.apply(pad_rows(x, pad).flatten(0, 1), first, window, c) for x in (k, v)
        )
        if bias is not None:
            bias = F.pad(bias, (0, pad, 0, pad))[..., first:, first - window :]
            rows = bias.unfold(-2, c, c)  # (..., blocks, keys, c)
            pairs = rows.unfold(-2, window + c, c)  # (..., blocks, blocks, c, window + c)
            bias = pairs.diagonal(0, -4, -3).movedim(-1, -3)  # each block's queries with its keys
            settings["bias"] = bias.expand(B, H, -1, -1, -1).flatten(0, 1)
        for name, x in settings.items():
            if isinstance(x, Tensor) and name != "bias":  # a decay, a learned scalar
                settings[name] = x.expand(B, H, 1, 1).reshape(B * H, 1, 1, 1)
        rest = attend(q_blocks, k_blocks, v_blocks, **settings)  # (B H, blocks, c, Dv)
        rest = rest.reshape(B, H, -1, v.shape[-1])  # (B, H, T - first + pad, Dv)
        return torch.cat((y_first, rest[..., : T - first, :]), dim=-2)

    eager_cut = uncompiled(cut)
    return blocks


class Windows(torch.autograd.Function):
    """(N, T, D) -> (N, n, window + c, D), a view: each block's keys and the window before them.

    Block i has the rows start + i c - window to start + (i + 1) c.
    The backward pass is Tensor.unfold's, in slices: many times as fast as autograd's own.
    """

    @staticmethod
    def forward(ctx, x, start, window, c):
        ctx.shape = x.shape
        ctx.start = start - window
        ctx.c = c
        return x[:, ctx.start :].unfold(1, window + c, c).mT

    @staticmethod
    def backward(ctx, dy):
        N, T, D = ctx.shape
        c = ctx.c
        n = dy.shape[1]
        dx = dy.new_zeros(N, T + dy.shape[2], D)
        for i, rows in enumerate(dy.split(c, dim=2)):  # rows i c to (i + 1) c of all windows
            start = ctx.start + i * c
            target = dx[:, start : start + n * c].unflatten(1, (n, c))  # (N, n, c, D)
            target[:, :, : rows.shape[2]] += rows
        return dx[:, :T], None, None, None


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x (..., T, D) and then copies of its last row.

    Not zeros, since a definition may divide by a key's length.
    """
    if rows == 0:
        return x  # F.pad and torch.cat would copy it
    last = x[..., -1:, :].expand(*x.shape[:-2], rows, -1)
    return torch.cat((x, last), dim=-2)


def few_rows_at_a_time(attend: Callable, holds_values: bool) -> Callable:
    """The same attention, a few queries at a time where all of them would need too much memory.

    holds_values: whether attend holds all values for each query, as LASER does in log space, or
    scores alone. The backward pass computes them again. Since that costs time, scores may take 16
    times as much memory.
    """

    def attend_in_parts(q, k, v, **settings):
        budget = AT_ONCE if q.device.type == "cpu" else 4 * AT_ONCE
        per_query = v.numel() if holds_values else k[..., 0].numel() // 16
        n = max(1, budget // max(1, per_query))
        if n >= q.shape[-2]:
            return attend(q, k, v, **settings)
        return parts(n, q, k, v, **settings)

    @uncompiled  # torch.compile would unroll the loop
    def parts(n, q, k, v, *, bias=None, **settings):
        Tq = q.shape[-2]
        past = k.shape[-2] - Tq
        if bias is not None:
            bias = bias.expand(torch.broadcast_shapes(bias.shape, (Tq, past + Tq)))
        outputs = []
        for start in range(0, Tq, n):
            rows = slice(start, start + n)
            keys = slice(past + rows.stop)
            if bias is not None:
                settings["bias"] = bias[..., rows, keys]
            run = functools.partial(attend, **settings)
            inputs = q[..., rows, :], k[..., keys, :], v[..., keys, :]
            outputs.append(checkpoint(run, *inputs, use_reentrant=False))
        return torch.cat(outputs, dim=-2)

    return attend_in_parts


def general_form(definition: Callable, holds_values: bool = False) -> Callable:
    """The form of an attention for which nobody has written a faster one."""
    return in_blocks(few_rows_at_a_time(plain_form(definition), holds_values))


# -----------------------------------------------------------------------------
# softmax


def sdpa(q, k, v, window=None, scale=None, bias=None, dropout=0.0):
    """y = softmax(s) v by PyTorch's fused attention, with a mask only where it needs one.

    On a CPU, short texts in bfloat16 are computed in float32, which is faster.
    """
    if q.device.type == "cpu" and v.dtype == torch.bfloat16 and k.shape[-2] < BFLOAT16_FROM:
        with torch.autocast("cpu", enabled=False):
            y = sdpa(q.float(), k.float(), v.float(), window, scale, bias, dropout)
        return y.bfloat16()
    Tq, D = q.shape[-2:]
    T, Dv = v.shape[-2:]
    if D != Dv and not (bias is not None and bias.requires_grad):
        width = max(D, Dv)  # fused kernels take one width; they give no gradient of a bias
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    mask = None
    if window is not None or bias is not None or 1 < Tq < T:  # a single query sees all keys
        mask = visible(q, k, window)
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, -math.inf)
    scale = D**-0.5 if scale is None else scale
    causal = mask is None and Tq > 1
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, scale=scale)
    return y[..., :Dv]


sdpa_in_blocks = in_blocks(sdpa)


def windowed(q, k, v, *, window, scale=None, **settings):
    """y = softmax(s) v of short heads: FlashAttention's window on a GPU, and elsewhere blocks.

    settings: a bias or dropout, for which there are blocks only. Neither does FlashAttention take
    fewer queries than keys, ALiBi's wider q and k, or the wider v of a pair of heads.
    """
    B, H, T, D = q.shape
    if settings or not q.shape == k.shape == v.shape or not has_window(v):
        return sdpa_in_blocks(q, k, v, window=window, scale=scale, **settings)
    from torch.nn.attention.varlen import varlen_attn  # it imports torch.compile

    q, k, v = (x.to(v.dtype).transpose(1, 2).reshape(B * T, H, D) for x in (q, k, v))
    starts = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q.device)
    y = varlen_attn(q, k, v, starts, starts, T, T, scale=scale, window_size=(window, 0))
    return y.view(B, T, H, D).transpose(1, 2)


def fast_in_16_bits(x: Tensor) -> bool:
    """Whether x has 16 bits and is on a GPU with fused kernels for them: on NVIDIA's since 2020."""
    return x.is_cuda and x.dtype in HALF and torch.cuda.get_device_properties(x.device).major >= 8


def has_window(x: Tensor) -> bool:
    """Whether FlashAttention takes heads such as x (..., D)."""
    width = x.shape[-1]
    return HAS_FLASH and fast_in_16_bits(x) and width % 8 == 0 and width <= 192


# -----------------------------------------------------------------------------
# LASER


def laser_by_exp(mean: Callable, definition: Callable, fused: bool = False) -> Callable:
    """y = log(softmax(s) exp(v)) by exp and log around softmax (Duvvuri and Dhillon, equation 6).

    mean: a form of softmax, or of another attention whose weights sum to 1. fused: whether it is a
    kernel that is fast in 16 bits.

    As in the paper, each channel of v is shifted by its largest value. This shift alone is not
    enough: it is taken over the whole sequence, so one large v at a later token would let every
    earlier output underflow to log(0). But the weights of a row sum to 1, so its sum of
    exponentials is at least exp(min v - max v). Where this is far from underflow, the shift is
    harmless. Otherwise the definition runs: it takes its sums in log space, slowly. The test of the
    range makes a GPU wait, once per call; torch.compile leaves LASER out.

    All of it is in float32 or wider: rounding exp(v) to bfloat16 would be an error of 2^-9 in y
    however small y is. A GPU has no fast kernel for float32: there, a fused mean of values of 16
    bits runs in float16 (In16Bits), an error of 2^-12, and more where much of a row's sum comes
    from weights below 6e-8. The shift is then a multiple of log 2, which changes no digit. (Whether
    the range is below 10 depends on later tokens: that may change the last ones.)
    """
    in_log_space = general_form(definition, holds_values=True)

    @uncompiled
    def laser(q, k, v, **settings):
        q32, k32, values = map(at_least_float32, (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            shift = values.detach().amax(-2, keepdim=True)  # (B, H, 1, Dv)
            widest = largest(shift - values.detach().amin(-2, keepdim=True))
            if widest > LASER_RANGE:
                warnings.warn(
                    f"a channel of the values has a range above {LASER_RANGE:.0f}: LASER computes "
                    "its sums in log space, slowly",
                    stacklevel=3,
                )
                return in_log_space(q32, k32, values, **settings).to(v.dtype)
            in_half = fused and fast_in_16_bits(v) and widest < HALF_RANGE
            if in_half and settings.get("bias") is None:
                shift = (shift / LOG_2).ceil() * LOG_2 - HALF_RANGE / 2
                y = In16Bits.apply(q, k, (values - shift).exp(), mean, settings)
            else:
                y = mean(q32, k32, (values - shift).exp(), **settings)
            return (y.log() + shift).to(v.dtype)

    return laser


def largest(x: Tensor) -> float:
    """The largest number of x. A GPU's host waits for it."""
    return x.max().item()


class In16Bits(torch.autograd.Function):
    """A mean of values in float32 by a kernel for 16 bits: In16Bits.apply(q, k, v, mean, settings).

    Forward in float16, for its digits: v must be within its range, and above 0. Backward in
    bfloat16, since gradients have any size. There v is less its harmonic mean, which changes no
    gradient: small numbers keep the most digits, and dy is largest where y is small.
    """

    @staticmethod
    def forward(ctx, q, k, v, mean, settings):
        ctx.save_for_backward(q, k, v)
        ctx.mean = partial(mean, **settings)
        return ctx.mean(q.half(), k.half(), v.half()).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v = ctx.saved_tensors
        v = v - 1 / (1 / v).mean(-2, keepdim=True)
        with torch.enable_grad(), torch.autocast(dy.device.type, enabled=False):
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            y = ctx.mean(*(x.bfloat16() for x in inputs))
        return *torch.autograd.grad(y, inputs, dy.bfloat16()), None, None
