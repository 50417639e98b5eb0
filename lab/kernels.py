"""Triton kernels of attention, for CUDA GPUs: softmax_triton and laser_triton.

    python train.py config/train_shakespeare_char.py --import=lab.kernels --attention=softmax_triton
    python bench.py --import=lab.kernels --what=attention --only=sdpa,softmax,softmax_triton

Importing this file adds the two to model.ATTENTION. Each is the attention without _triton, computed
by other code. Inputs that the kernels cannot take go to the core's form, and a line says why.
Nobody has timed the kernels yet. With TRITON_INTERPRET=1 they run on a CPU, slowly, for their
tests.

The kernels are FlashAttention-2 (Dao 2023): scores are never written to memory. The backward pass
computes them again, from the logarithm of each row's sum. Blocks of keys that a short head does not
see are skipped.

LASER is fast.laser_by_exp around these kernels. It takes a mean of exp(v - max v), in float32. The
kernels multiply this as the sum of two numbers of q's precision: a single bfloat16 would be an
error of 2^-9 in y, however small y is. For the same reason the weights of a row are rounded first,
and then divided by the sum of the rounded weights. laser_by_exp also tests the values' range: the
host waits for this test once per call, it interrupts the graph of torch.compile, and where a range
is too large for exp the definition runs in the place of the kernels.

Read the parts that all kernels share first, then forward_kernel, then the rest in any order.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from attention.fast import laser_by_exp
from attention.forms import FORM, note_once
from model import ATTENTION

INTERPRETED = constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2_E = constexpr(math.log2(math.e))
INFINITY = constexpr(math.inf)
DTYPES = (torch.bfloat16, torch.float32)  # that the kernels take; float16 would overflow
WIDTHS = (16, 32, 64, 128)  # head widths that the kernels take
VARYING = ("T", "span")  # a kernel is not compiled again when these change

# -----------------------------------------------------------------------------
# What the kernels share. A program works on one head of one sequence. A head of a tensor x is
# (T, width): x_b, x_h and x_t are the strides of sequences, heads and tokens, and the numbers of a
# token lie side by side. Tensors that the kernels make are (B, T, H, width) in memory.
#
# Pointers to results come from new_head, and from nothing that also gets q, k or v: torch.compile
# would take a result for a part of them, and copy q, k and v before each call.


@triton.jit
def dot(a, b):
    """a b, summed in float32.

    The product of float32 numbers is three products in TF32, whose error is about float32's. The
    interpreter would multiply the bits of a bfloat16 as if they were an integer.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def rounded(x, dtype: constexpr):
    """float32 x in dtype, to the nearest. (The interpreter would cut the bits off.)"""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        last = (bits >> 16) & 1
        x = ((bits + 0x7FFF + last) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def this_head():
    """The number of this program's head among all heads, b H + h."""
    return tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def head(x, x_b, x_h):
    """A pointer to the first number of this program's head of x."""
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    return x + b * x_b + h * x_h


@triton.jit
def new_head(x, T, WIDTH: constexpr):
    """The same for x (B, T, H, WIDTH) in memory; the step from token to token is H WIDTH."""
    return head(x, T * tl.num_programs(1) * WIDTH, WIDTH)


@triton.jit
def load(x, step, rows, T, WIDTH: constexpr):
    """(rows, WIDTH) of the head that x points to; zeros past T."""
    channels = tl.arange(0, WIDTH)
    numbers = x + rows[:, None] * step + channels[None, :]
    return tl.load(numbers, mask=rows[:, None] < T, other=0.0)


@triton.jit
def load_head(x, x_b, x_h, x_t, rows, T, WIDTH: constexpr):
    """(rows, WIDTH) of this program's head of x; zeros past T."""
    return load(head(x, x_b, x_h), x_t, rows, T, WIDTH)


@triton.jit
def load_new(x, rows, T, WIDTH: constexpr):
    """The same of x (B, T, H, WIDTH) in memory."""
    return load(new_head(x, T, WIDTH), tl.num_programs(1) * WIDTH, rows, T, WIDTH)


@triton.jit
def store_new(x, rows, T, value, WIDTH: constexpr):
    """Write value (rows, WIDTH) into this program's head of x (B, T, H, WIDTH), and nothing past T.

    It is rounded to x's precision.
    """
    channels = tl.arange(0, WIDTH)
    step = tl.num_programs(1) * WIDTH
    numbers = new_head(x, T, WIDTH) + rows[:, None] * step + channels[None, :]
    tl.store(numbers, rounded(value, x.dtype.element_ty), mask=rows[:, None] < T)


@triton.jit
def load_rows(x, rows, T):
    """One number for each of these rows of this program's head, from x (B, H, T); zeros past T."""
    return tl.load(x + this_head() * T + rows, mask=rows < T, other=0.0)


@triton.jit
def store_rows(x, rows, T, value):
    """Write one number for each of these rows of this program's head into x (B, H, T)."""
    tl.store(x + this_head() * T + rows, value, mask=rows < T)


@triton.jit
def scores(A, B, queries, keys, span, c, T, CUT: constexpr):
    """c A B^T, where A and B are queries and keys, or keys and queries.

    With CUT, -inf where a query past T, or one that does not see the key: 0 <= i - j <= span.
    queries and keys are their positions, of two shapes that broadcast to the result's.
    """
    s = dot(A, tl.trans(B)) * c
    if CUT:
        seen = (queries >= keys) & (queries - keys <= span) & (queries < T)
        s = tl.where(seen, s, -INFINITY)
    return s


@triton.jit
def key_blocks(start, span, T, M: constexpr, N: constexpr, SHORT: constexpr):
    """The edges (a, b, c, d) of three ranges of keys, in blocks of N, for the M queries from start.

    From b to c every query sees every key. From a to b and from c to d some queries see some keys.
    a, b and c are multiples of N, or equal d.
    """
    d = tl.minimum(start + M, T)
    a = 0
    b = 0
    if SHORT:
        a = tl.maximum(start - span, 0) // N * N
        seen_by_all = tl.maximum(start + M - 1 - span, 0)  # the first such key
        b = tl.maximum(a, tl.cdiv(seen_by_all, N) * N)
        b = tl.minimum(b, d)
    c = tl.maximum(b, (start + 1) // N * N)
    return a, b, c, d


@triton.jit
def query_blocks(start, span, T, M: constexpr, N: constexpr):
    """The edges (a, b, c, d) of three ranges of queries, in blocks of M, for the N keys from start.

    As in key_blocks, every query from b to c sees every key.
    """
    d = tl.minimum(start + N + span, T)
    a = start // M * M
    b = tl.minimum(tl.cdiv(start + N - 1, M) * M, d)
    c = tl.maximum(b, tl.minimum(start + span + 1, T) // M * M)
    return a, b, c, d


# -----------------------------------------------------------------------------
# Flash. c is scale log2(e), so that exp2 is enough. lse is log2 of a row's sum of exp2(c q k).


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, low, y, lse,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    span, c, T,
    D: constexpr, E: constexpr,
    M: constexpr, N: constexpr,
    SHORT: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Write y and lse of M queries of a head, by online softmax. With SPLIT the values are v + low.

    total (M) and acc (M, E) are the sums of weights, and of weighted values, over the keys so far,
    relative to the largest score, top.
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest rows first
    rows = start + tl.arange(0, M)
    Q = load_head(q, q_b, q_h, q_t, rows, T, D)

    acc = tl.zeros((M, E), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), -INFINITY, tl.float32)
    edges = key_blocks(start, span, T, M, N, SHORT)
    for part in tl.static_range(0 if SHORT else 1, 3):
        for j in range(edges[part], edges[part + 1], N):
            cols = j + tl.arange(0, N)
            K = load_head(k, k_b, k_h, k_t, cols, T, D)
            CUT = part != 1
            s = scores(Q, K, rows[:, None], cols[None, :], span, c, T, CUT)
            new = tl.maximum(top, tl.max(s, 1))
            base = tl.where(new == -INFINITY, 0.0, new) if CUT else new  # no key was seen yet
            shrink = tl.exp2(top - base)
            V = load_head(v, v_b, v_h, v_t, cols, T, E)
            P = rounded(tl.exp2(s - base[:, None]), V.dtype)
            total = total * shrink + tl.sum(P.to(tl.float32), 1)
            acc = acc * shrink[:, None] + dot(P, V)
            if SPLIT:
                acc += dot(P, load_new(low, cols, T, E))
            top = new

    store_new(y, rows, T, acc / total[:, None], E)
    store_rows(lse, rows, T, top + tl.log2(total))


@triton.jit(do_not_specialize=VARYING)
def dk_dv_kernel(
    q, k, v, low, g, lse, delta, dk, dv,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    span, c, scale, T,
    D: constexpr, E: constexpr,
    M: constexpr, N: constexpr,
    SHORT: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Write the gradients of N keys and values of a head. delta is the sum of g y over channels."""
    start = tl.program_id(0) * N
    cols = start + tl.arange(0, N)
    K = load_head(k, k_b, k_h, k_t, cols, T, D)
    V = load_head(v, v_b, v_h, v_t, cols, T, E)
    LOW = V
    if SPLIT:
        LOW = load_new(low, cols, T, E)

    dK = tl.zeros((N, D), tl.float32)
    dV = tl.zeros((N, E), tl.float32)
    edges = query_blocks(start, span, T, M, N)
    for part in tl.static_range(3):
        for i in range(edges[part], edges[part + 1], M):
            rows = i + tl.arange(0, M)
            Q = load_head(q, q_b, q_h, q_t, rows, T, D)
            G = load_new(g, rows, T, E)
            CUT = part != 1
            s = scores(K, Q, rows[None, :], cols[:, None], span, c, T, CUT)  # (N, M)
            p = tl.exp2(s - load_rows(lse, rows, T)[None, :])
            dV += dot(rounded(p, G.dtype), G)
            dp = dot(V, tl.trans(G))
            if SPLIT:
                dp += dot(LOW, tl.trans(G))
            ds = p * (dp - load_rows(delta, rows, T)[None, :])
            dK += dot(rounded(ds, Q.dtype), Q)

    store_new(dk, cols, T, dK * scale, D)
    store_new(dv, cols, T, dV, E)


@triton.jit(do_not_specialize=VARYING)
def dq_kernel(
    q, k, v, low, g, lse, delta, dq,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    span, c, scale, T,
    D: constexpr, E: constexpr,
    M: constexpr, N: constexpr,
    SHORT: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Write the gradients of M queries of a head."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    rows = start + tl.arange(0, M)
    Q = load_head(q, q_b, q_h, q_t, rows, T, D)
    G = load_new(g, rows, T, E)
    LSE = load_rows(lse, rows, T)
    DELTA = load_rows(delta, rows, T)

    dQ = tl.zeros((M, D), tl.float32)
    edges = key_blocks(start, span, T, M, N, SHORT)
    for part in tl.static_range(0 if SHORT else 1, 3):
        for j in range(edges[part], edges[part + 1], N):
            cols = j + tl.arange(0, N)
            K = load_head(k, k_b, k_h, k_t, cols, T, D)
            CUT = part != 1
            s = scores(Q, K, rows[:, None], cols[None, :], span, c, T, CUT)
            p = tl.exp2(s - LSE[:, None])
            dp = dot(G, tl.trans(load_head(v, v_b, v_h, v_t, cols, T, E)))
            if SPLIT:
                dp += dot(G, tl.trans(load_new(low, cols, T, E)))
            ds = p * (dp - DELTA[:, None])
            dQ += dot(rounded(ds, K.dtype), K)
    store_new(dq, rows, T, dQ * scale, D)


# -----------------------------------------------------------------------------
# Flash, from PyTorch

SMALL = False  # whether a block has 99 KiB of shared memory, as on GeForce; A100: 163, H100: 227
if torch.cuda.is_available():
    SMALL = torch.cuda.get_device_properties().shared_memory_per_block_optin < 2**17


def blocks(D: int, E: int, split: bool, dtype: torch.dtype) -> tuple[dict, dict]:
    """The sizes of blocks, warps and stages of the forward and of the backward kernels.

    D, E: the widths of keys and values. dtype: of q and k. split: the values are two tensors.
    """
    if INTERPRETED.value:  # small blocks, so that there are several
        return {"M": 64, "N": 32}, {"M": 32, "N": 64}
    wide = max(D, E) > 64
    tight = wide and SMALL
    warps = 8 if wide else 4
    if dtype == torch.float32:  # chosen for its digits, not for speed
        forward = {"M": 64, "N": 32, "num_stages": 1 if tight else 2}
        backward = {"M": 32, "N": 32, "num_stages": 1}
    else:
        forward = {"M": 128, "N": 64, "num_stages": 2 if split and wide else 3}
        backward = {"M": 64, "N": 64, "num_stages": 2}
        if tight:
            forward["num_stages"] = 1
            backward["num_stages"] = 1
    return forward | {"num_warps": warps}, backward | {"num_warps": warps}


def empty_heads(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor of like's shape (B, H, T, width), in the memory layout (B, T, H, width).

    A layer's projections need this layout.
    """
    B, H, T, width = like.shape
    return like.new_empty(B, T, H, width).transpose(1, 2)


def new_heads(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x (B, H, T, width) in dtype and in the memory layout of empty_heads."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def in_two(v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) in dtype, whose sum is v. If v is in dtype, it is high, and low is not read."""
    if v.dtype == dtype:
        return v, v
    high = new_heads(v, dtype)
    return high, new_heads(v - high, dtype)


def strides(*tensors: torch.Tensor) -> list[int]:
    """The strides of sequences, heads and tokens of each tensor (B, H, T, width)."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def grid(x: torch.Tensor, block: int) -> tuple[int, int, int]:
    """A kernel's programs: one for each block of tokens, and head, of x (B, H, T, width)."""
    B, H, T, _ = x.shape
    return triton.cdiv(T, block), H, B


class Flash(torch.autograd.Function):
    """y = softmax(scale q k) v: y = Flash.apply(q, k, v, span, scale).

    q, k (B, H, T, D) and v (B, H, T, E) give y (B, H, T, E), in the precision of v, which may be in
    float32 where q and k are in bfloat16. Each query sees its own key and `span` keys before it.
    """

    @staticmethod
    def forward(ctx, q, k, v, span, scale):
        T, D = q.shape[2:]
        E = v.shape[-1]
        split = v.dtype != q.dtype
        y = empty_heads(v)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        high, low = in_two(v, q.dtype)
        sizes, _ = blocks(D, E, split, q.dtype)
        forward_kernel[grid(q, sizes["M"])](
            q, k, high, low, y, lse,
            *strides(q, k, high),
            span, scale * LOG2_E.value, T,
            D, E, **sizes,
            SHORT=span < T, SPLIT=split,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.choices = (span, scale)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        span, scale = ctx.choices
        T, D = q.shape[2:]
        E = v.shape[-1]
        split = v.dtype != q.dtype
        g = new_heads(dy, q.dtype)
        delta = (g.float() * y.float()).sum(-1).contiguous()
        high, low = in_two(v, q.dtype)
        dq, dk, dv = map(empty_heads, (q, k, v))

        _, sizes = blocks(D, E, split, q.dtype)
        inputs = (q, k, high, low, g, lse, delta)
        numbers = (*strides(q, k, high), span, scale * LOG2_E.value, scale, T, D, E)
        options = sizes | {"SHORT": span < T, "SPLIT": split}
        dk_dv_kernel[grid(q, sizes["N"])](*inputs, dk, dv, *numbers, **options)
        dq_kernel[grid(q, sizes["M"])](*inputs, dq, *numbers, **options)
        return dq, dk, dv, None, None


# -----------------------------------------------------------------------------
# Into the tables


def flash(q, k, v, *, dtype, window=None, scale=None):
    """y = softmax(s) v by the kernels, with q, k and the weights in dtype."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q.to(dtype), k.to(dtype), v))
    T, D = q.shape[2:]
    span = T if window is None else min(window, T)
    scale = D**-0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        return Flash.apply(q, k, v, span, scale)


# make(mean, definition) -> attend, where mean is a form of softmax
AROUND: dict[str, Callable] = {
    "softmax": lambda mean, definition: mean,
    "laser": laser_by_exp,
}


def numbers_of_a_sequence(x: torch.Tensor) -> int:
    """How far the numbers of a sequence reach, in x (B, H, T, width) or in empty_heads(x)."""
    _, H, T, width = x.shape
    return T * max(x.stride(2), H * width)


def why_not(q, k, v) -> str | None:
    """Why the kernels cannot take these inputs; None if they can."""
    widths = q.shape[-1], v.shape[-1]
    if not (q.is_cuda or INTERPRETED.value):
        return f"they are for CUDA, not for {q.device.type}"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        return f"they take bfloat16 and float32, not {q.dtype}"
    if q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        return "there are fewer queries than keys"
    if not set(widths) <= set(WIDTHS):
        return f"queries and values are {widths} wide; they take the widths {WIDTHS}"
    heads = q.shape[0] * q.shape[1]
    if heads >= 2**16 or max(map(numbers_of_a_sequence, (q, k, v))) >= 2**31:
        return "there are too many heads or tokens for a GPU's indices"
    return None


@torch.compiler.assume_constant_result
def say_once(line: str) -> None:
    """Print a line on stderr, once. With torch.compile: while it traces, so the graph stays one."""
    note_once(line)


def by_kernel(name: str, make: Callable, definition: Callable) -> Callable:
    """A form of an attention: its kernels or, where they cannot take the inputs, the core's form.

    make(definition): the core's form.
    """
    core_form = make(definition)
    by_dtype = {dtype: AROUND[name](partial(flash, dtype=dtype), definition) for dtype in DTYPES}

    def attend(q, k, v, **settings):
        reason = why_not(q, k, v)
        others = sorted(set(settings) - {"window", "scale"})
        if others:
            reason = f"they do not take {', '.join(others)}"
        if reason is None:
            return by_dtype[q.dtype](q, k, v, **settings)
        if q.shape[-2] == k.shape[-2]:  # not in decoding, which is always the core's
            say_once(f"{name}_triton: the kernels are not used: {reason}")
        return core_form(q, k, v, **settings)

    return attend


for name in AROUND:
    form = FORM[name]
    ATTENTION[f"{name}_triton"] = ATTENTION[name]
    FORM[f"{name}_triton"] = replace(
        form,
        name=f"Triton kernels, or {form.name}",
        long=partial(by_kernel, name, form.long),
        short=partial(by_kernel, name, form.short),
    )
