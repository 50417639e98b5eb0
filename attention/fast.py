"""Softmax and LASER by PyTorch's fused attention, and two ways to make any attention cheaper.

by_rows: a definition runs for a few queries at a time. in_blocks: short heads cost O(T window).
sums.py has beta and beta_squared; forms.py says which code runs.

All are functions attend(q, k, v, window, scale, dropout, ...) -> y, as scores.plain_form describes
them, or make such functions. Each has only the arguments that it can take.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention.scores import at_least_float32, plain_form, uncompiled, unrolls, visible

CHUNK = 64  # tokens that are computed together; many smaller chunks would cost more than they save
ROWS_FROM = 256  # keys from which a CPU computes a definition for a few queries at a time
IN_CACHE = 2**21  # scores that a CPU computes at a time: they stay in its cache
KEPT = 2**28  # numbers kept for the backward pass: 1 GiB in float32; on a GPU 8 times as many
AT_ONCE = 2**23  # numbers held at once where they are computed again: 32 MiB; on a GPU 8 times
BFLOAT16_FROM = 512  # tokens; for fewer, a CPU's fused attention is slower in bfloat16
LASER_RANGE = 80.0  # largest range of a channel: float32 and bfloat16 end at exp(88)
HAS_FLASH = torch.backends.cuda.is_flash_attention_available()  # whether PyTorch was built with it

# recompute(f, x, ...): f(x, ...), of which nothing is kept: the backward pass computes it again
recompute = partial(checkpoint, use_reentrant=False)

# -----------------------------------------------------------------------------
# any attention, a few queries at a time


def by_rows(definition: Callable) -> Callable:
    """The code of a definition: it runs for a few queries at a time, with the keys up to the last.

    So later keys cost nothing, and the numbers of a few queries stay in a CPU's cache. They are
    kept for the backward pass, or computed again where all of them would be too many. On a GPU or
    under torch.compile, all queries run at once while there is room.
    """
    attend = plain_form(definition)
    per_score, per_channel = numbers_held(definition)

    def attend_by_rows(q, k, v, **settings):
        Tq = q.shape[-2]
        n_scores = k[..., 0].numel()  # of one query, of all heads
        held = n_scores * (per_score + per_channel * v.shape[-1])
        room = 1 if q.device.type == "cpu" else 8
        run = partial(attend, **settings)

        if held * Tq > KEPT * room:
            run = partial(recompute, run)
            return in_rows(run, q, k, v, 1 + int(AT_ONCE * room / held))
        if unrolls(q) or k.shape[-2] < ROWS_FROM:
            return run(q, k, v)
        return in_rows(run, q, k, v, 2 * CHUNK if n_scores * 2 * CHUNK <= IN_CACHE else CHUNK)

    return attend_by_rows


@uncompiled  # torch.compile would unroll the loop
def in_rows(run: Callable, q, k, v, n: int) -> Tensor:
    """run(q, k, v), for n queries at a time."""
    end = k.shape[-2] - q.shape[-2]
    outputs = []
    for part in q.split(n, dim=-2):
        end += part.shape[-2]
        outputs.append(run(part, k[..., :end, :], v[..., :end, :]))
    return torch.cat(outputs, dim=-2)


@cache
def numbers_held(definition: Callable) -> tuple[float, float]:
    """(a, b): the definition keeps a + b Dv numbers for each score, for its backward pass.

    Counted on a small input. LASER's sum in log space keeps a number for each channel of v.
    """
    T = 48
    Dv = 32
    kept = {}

    def note(x):
        kept[x.data_ptr()] = x.numel() / T**2
        return x

    with torch.device("cpu"), torch.inference_mode(False):
        x = torch.ones(1, 1, T, Dv, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            # the output is held, so that its graph frees nothing, and no address comes twice
            _ = plain_form(definition)(x, x, x)
            counts = kept.values()  # those of each score, and of each channel as well
            return sum(n for n in counts if 1 <= n < Dv), sum(n >= Dv for n in counts)


# -----------------------------------------------------------------------------
# any attention, short heads in blocks


def in_blocks(attend: Callable) -> Callable:
    """The same attention with short heads that cost O(T window) time and memory.

    The queries are cut into blocks of c tokens. A block sees its own keys and the window before it.
    attend runs once for all blocks: the c queries of a block are the last of its c + window tokens,
    and dimension 1 counts blocks. The first tokens, which have less than a window before them or
    are no whole block, are a call of their own. Few tokens are not cut, and neither are queries
    after the keys of a cache. On a GPU the blocks are not compiled: docs/benchmarks.md, "How fast
    is it on a GPU?", says why.
    """

    def blocks(q, k, v, *, window=None, **settings):
        T = k.shape[-2]
        if window is None or window >= T - 1:  # the window hides nothing
            return attend(q, k, v, **settings)

        # whole chunks, at least half as many queries as the window
        c = CHUNK * max(1, math.ceil(window / (2 * CHUNK)))
        first = c * max(1, math.ceil(window / c)) + T % c
        if q.shape[-2] < T or T <= first + c:  # blocks would not save more than they cost
            return attend(q, k, v, window=window, **settings)
        run = eager_cut if q.is_cuda else cut
        return run(q, k, v, c, first, window, settings)

    def cut(q, k, v, c, first, window, settings):
        B, H, T, D = q.shape
        y_first = attend(*(x[..., :first, :] for x in (q, k, v)), window=window, **settings)

        # a decay, a learned scalar: one for each head
        for name, x in settings.items():
            if isinstance(x, Tensor):
                settings[name] = x.expand(B, H, 1, 1).reshape(B * H, 1, 1, 1)
        q = q[..., first:, :].reshape(B * H, -1, c, D)  # (B H, blocks, c, D)
        k, v = (Windows.apply(x.flatten(0, 1), first, window, c) for x in (k, v))
        rest = attend(q, k, v, window=window, **settings)  # (B H, blocks, c, Dv)
        return torch.cat((y_first, rest.reshape(B, H, T - first, -1)), dim=-2)

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


def general_form(definition: Callable) -> Callable:
    """The code of an attention for which nobody has written a faster one."""
    return in_blocks(by_rows(definition))


# -----------------------------------------------------------------------------
# softmax


def sdpa(q, k, v, window=None, scale=None, dropout=0.0):
    """y = softmax(s) v by PyTorch's fused attention, with a mask only where it needs one.

    On a CPU, short texts in bfloat16 are computed in float32, which is faster.
    """
    if q.device.type == "cpu" and v.dtype == torch.bfloat16 and k.shape[-2] < BFLOAT16_FROM:
        with torch.autocast("cpu", enabled=False):
            return sdpa(q.float(), k.float(), v.float(), window, scale, dropout).bfloat16()

    # fused kernels take one width of q, k and v
    Tq, D = q.shape[-2:]
    T, Dv = v.shape[-2:]
    scale = scale or D**-0.5
    if D != Dv:
        width = max(D, Dv)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))

    # a single query sees all keys of a cache
    mask = None
    if window is not None or 1 < Tq < T:
        mask = visible(q, k, window)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None and Tq > 1, scale=scale
    )
    return y[..., :Dv]


sdpa_in_blocks = in_blocks(sdpa)


def windowed(q, k, v, *, window, scale=None, dropout=0.0):
    """y = softmax(s) v of short heads: FlashAttention's window on a GPU, and elsewhere blocks.

    FlashAttention takes no dropout here, no fewer queries than keys, and none of ALiBi's wider q.
    """
    B, H, T, D = q.shape
    if dropout or not q.shape == k.shape == v.shape or not _has_window(v):
        return sdpa_in_blocks(q, k, v, window=window, scale=scale, dropout=dropout)
    from torch.nn.attention.varlen import varlen_attn  # it imports torch.compile

    q, k, v = (x.to(v.dtype).transpose(1, 2).reshape(B * T, H, D) for x in (q, k, v))
    starts = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q.device)
    y = varlen_attn(q, k, v, starts, starts, T, T, scale=scale, window_size=(window, 0))
    return y.view(B, T, H, D).transpose(1, 2)


def _has_window(x):
    """Whether FlashAttention takes heads such as x (..., D): in 16 bits, on GPUs since 2020."""
    if not (HAS_FLASH and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)):
        return False
    width = x.shape[-1]
    recent = torch.cuda.get_device_properties(x.device).major >= 8
    return recent and width % 8 == 0 and width <= 192


# -----------------------------------------------------------------------------
# LASER


def laser_by_exp(mean: Callable, definition: Callable) -> Callable:
    """y = log(softmax(s) exp(v)), around a `mean` whose weights a_j sum to 1, such as softmax's.

    For any number c of a channel (Duvvuri and Dhillon, equation 6, have c = max v, and exp)

        y = c + log(sum_j a_j exp(v_j - c)) = c + log1p(sum_j a_j expm1(v_j - c))

    expm1 keeps the digits of small values, so bfloat16 is nearly as exact as for softmax. c depends
    on later tokens (see `center`), but changes no more than the rounding of y.

    Where the range of a channel, max v - c, is above LASER_RANGE, expm1 may overflow, so the
    definition runs: it takes its sums in log space, slowly. To look at the range makes a GPU wait,
    and breaks torch.compile's graph. So under torch.compile, and on a GPU in training, y is NaN
    there: the run ends, with a sentence. float16 ends at exp(11): products run in float32.
    """
    in_log_space = general_form(definition)

    def laser(q, k, v, **settings):
        values = at_least_float32(v)
        widens = q.device.type == "cpu" and k.shape[-2] < BFLOAT16_FROM  # as in sdpa
        dtype = values.dtype if widens or v.dtype == torch.float16 else v.dtype
        with torch.autocast(q.device.type, enabled=False):
            c = center(values.detach())
            too_wide = values.detach().amax(-2, keepdim=True) - c > LASER_RANGE  # (B, H, 1, Dv)

            may_wait = not torch.compiler.is_compiling() and (
                q.device.type == "cpu" or not torch.is_grad_enabled()
            )
            if may_wait and too_wide.any():
                warnings.warn(
                    f"a channel of the values has a range above {LASER_RANGE:.0f}: LASER computes "
                    "its sums in log space, slowly",
                    stacklevel=3,
                )
                return in_log_space(q, k, values, **settings).to(v.dtype)

            changes = torch.expm1(values - c).to(dtype)
            y = mean(q.to(dtype), k.to(dtype), changes, **settings)
            y = c + torch.log1p(at_least_float32(y))
            if not may_wait:
                y = y.masked_fill(too_wide, math.nan)
        return y.to(v.dtype)

    return laser


def center(v: Tensor) -> Tensor:
    """The number c of each channel of v (B, H, T, Dv) from which LASER counts: (B, H, 1, Dv).

    The mean of the first values, near which changes are small and keep their digits. Values far
    from it count as three times the mean distance, so that one of them does not move c. But at most
    min v + 3: then LASER's sum is at least -0.95, and nothing underflows.
    """
    first = v[..., :CHUNK, :]
    mean = first.mean(-2, keepdim=True)
    far = 3 * (first - mean).abs().mean(-2, keepdim=True)
    mean = first.clamp(mean - far, mean + far).mean(-2, keepdim=True)
    return torch.minimum(mean, v.amin(-2, keepdim=True) + 3)
