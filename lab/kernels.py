"""Triton kernels of attention, for CUDA GPUs: softmax_triton, laser_triton and beta_triton.

    python train.py config/train_shakespeare_char.py --import=lab.kernels --attention=softmax_triton
    python bench.py --import=lab.kernels --what=attention --only=sdpa,softmax,softmax_triton

Importing this file adds the three to model.ATTENTION. Each is the attention without _triton,
computed by other code. Inputs that a kernel cannot take go to the core's form, and a line says why.
Nobody has timed the kernels yet. With TRITON_INTERPRET=1 they run on a CPU, slowly, for their
tests.

softmax and LASER (class Flash) are FlashAttention-2 (Dao 2023): scores are never written to memory.
The backward pass computes them again, from the logarithm of each row's sum. Blocks of keys that a
short head does not see are skipped.

LASER is y = log(softmax(s) exp(v)) (Duvvuri and Dhillon, equation 6), so it takes exp(v - max v) in
the place of v. This is kept as the sum of two numbers of v's precision: a single bfloat16 would be
an error of 2^-9 in y, however small y is. For the same reason the weights of a row are rounded
first, and then divided by the sum of the rounded weights. Where a channel's values span more than
LASER_RANGE, exp(v - max v) is not enough (see fast.laser_by_exp), and two more kernels take the
sums in log space. They read the range on the GPU, so the host need not wait for it, and they end at
once for heads that do not need them.

beta (class Beta) takes linear time, with the running sums of sums.Beta.

Read the parts that all kernels share first, then forward_kernel, then the rest in any order.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from attention.fast import LASER_RANGE
from attention.forms import FORM, note_once
from attention.sums import LINEAR_FROM
from model import ATTENTION

INTERPRETED = constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2_E = constexpr(math.log2(math.e))
INFINITY = constexpr(math.inf)
EXACT = constexpr(16)  # tokens, and channels, of a block in log space
ROWS = 64  # tokens of a block, in kernels that take each token by itself
STEP = 256  # numbers that a program of before_kernel sums up over time
WIDTHS = (16, 32, 64, 128)  # head widths that the kernels take
VARYING = ("T", "n", "span")  # a kernel is not compiled again when these change

# -----------------------------------------------------------------------------
# What the kernels share. A program works on one head of one sequence, bh = b H + h. A head of a
# tensor x is (T, width): x_b, x_h and x_t are the strides of sequences, heads and tokens, and the
# numbers of a token lie side by side. Tensors that the kernels make are (B, T, H, width) in memory.
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
def head(x, bh, H, x_b, x_h):
    """A pointer to the first number of a head of x."""
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    return x + b * x_b + h * x_h


@triton.jit
def new_head(x, bh, H, T, WIDTH: constexpr):
    """The same for x (B, T, H, WIDTH) in memory; the step from token to token is H WIDTH."""
    return head(x, bh, H, T * H * WIDTH, WIDTH)


@triton.jit
def load(x, step, rows, T, WIDTH: constexpr):
    """(rows, WIDTH) of the head that x points to; zeros past T."""
    channels = tl.arange(0, WIDTH)
    numbers = x + rows[:, None] * step + channels[None, :]
    return tl.load(numbers, mask=rows[:, None] < T, other=0.0)


@triton.jit
def load_new(x, bh, H, rows, T, WIDTH: constexpr):
    """(rows, WIDTH) of a head of x (B, T, H, WIDTH); zeros past T."""
    x = new_head(x, bh, H, T, WIDTH)
    return load(x, H * WIDTH, rows, T, WIDTH)


@triton.jit
def store(x, step, rows, T, value):
    """Write value (rows, channels) into the head that x points to, and nothing past T."""
    channels = tl.arange(0, value.shape[1])
    numbers = x + rows[:, None] * step + channels[None, :]
    value = rounded(value, x.dtype.element_ty)
    tl.store(numbers, value, mask=rows[:, None] < T)


@triton.jit
def store_new(x, bh, H, rows, T, value, WIDTH: constexpr):
    """The same into a head of x (B, T, H, WIDTH)."""
    x = new_head(x, bh, H, T, WIDTH)
    store(x, H * WIDTH, rows, T, value)


@triton.jit
def load_rows(x, bh, rows, T):
    """One number for each of these rows of a head, from x (B H, T); zeros past T."""
    x += bh.to(tl.int64) * T
    return tl.load(x + rows, mask=rows < T, other=0.0)


@triton.jit
def store_rows(x, bh, rows, T, value):
    """Write one number for each of these rows of a head into x (B H, T)."""
    x += bh.to(tl.int64) * T
    tl.store(x + rows, value, mask=rows < T)


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
def base_of(top):
    """The number to subtract from scores up to top: top itself, but 0 where no key was seen."""
    return tl.where(top == -INFINITY, 0.0, top)


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
    q, k, v, low, shift, y, x, lse,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    span, c, H, T,
    D: constexpr, E: constexpr,
    M: constexpr, N: constexpr,
    SHORT: constexpr, LASER: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Write y and lse of M queries of a head, by online softmax; for LASER also x = exp(y - shift).

    Of LASER, v is exp(v - shift), and with SPLIT v + low is. total (M) and acc (M, E) are the sums
    of weights, and of weighted values, over the keys so far, relative to the largest score, top.
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest rows first
    bh = tl.program_id(1)
    q = head(q, bh, H, q_b, q_h)
    k = head(k, bh, H, k_b, k_h)
    v = head(v, bh, H, v_b, v_h)
    low = head(low, bh, H, v_b, v_h)
    rows = start + tl.arange(0, M)
    Q = load(q, q_t, rows, T, D)

    acc = tl.zeros((M, E), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), -INFINITY, tl.float32)
    edges = key_blocks(start, span, T, M, N, SHORT)
    for part in tl.static_range(0 if SHORT else 1, 3):
        for j in range(edges[part], edges[part + 1], N):
            cols = j + tl.arange(0, N)
            K = load(k, k_t, cols, T, D)
            CUT = part != 1
            s = scores(Q, K, rows[:, None], cols[None, :], span, c, T, CUT)
            new = tl.maximum(top, tl.max(s, 1))
            base = base_of(new) if CUT else new
            shrink = tl.exp2(top - base)
            V = load(v, v_t, cols, T, E)
            p = tl.exp2(s - base[:, None])
            P = rounded(p, V.dtype)
            total = total * shrink + tl.sum(P.to(tl.float32) if LASER else p, 1)
            acc = acc * shrink[:, None] + dot(P, V)
            if SPLIT:
                acc += dot(P, load(low, v_t, cols, T, E))
            top = new

    acc = acc / total[:, None]
    if LASER:
        store_new(x, bh, H, rows, T, acc, E)
        SHIFT = tl.load(shift + bh * E + tl.arange(0, E))
        acc = tl.log(acc) + SHIFT[None, :]
    store_new(y, bh, H, rows, T, acc, E)
    store_rows(lse, bh, rows, T, top + tl.log2(total))


@triton.jit(do_not_specialize=VARYING)
def exp_kernel(
    v, shift, high, low,
    v_b, v_h, v_t,
    H, T,
    E: constexpr, N: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Write exp(v - shift) of N tokens of a head into high or, with SPLIT, into high + low."""
    rows = tl.program_id(0) * N + tl.arange(0, N)
    bh = tl.program_id(1)
    v = head(v, bh, H, v_b, v_h)
    V = load(v, v_t, rows, T, E).to(tl.float32)
    SHIFT = tl.load(shift + bh * E + tl.arange(0, E))

    X = tl.exp2((V - SHIFT[None, :]) * LOG2_E)
    store_new(high, bh, H, rows, T, X, E)
    if SPLIT:
        rest = X - rounded(X, high.dtype.element_ty).to(tl.float32)
        store_new(low, bh, H, rows, T, rest, E)


@triton.jit(do_not_specialize=VARYING)
def delta_kernel(
    dy, x, g, delta,
    dy_b, dy_h, dy_t,
    H, T,
    E: constexpr, M: constexpr, LASER: constexpr,
):  # fmt: skip
    """Write delta = sum(g x) of M rows of a head, g = dy; for LASER also write g = dy / x.

    x is y, or what forward_kernel wrote into x for LASER.
    """
    rows = tl.program_id(0) * M + tl.arange(0, M)
    bh = tl.program_id(1)
    dy = head(dy, bh, H, dy_b, dy_h)
    G = load(dy, dy_t, rows, T, E).to(tl.float32)
    X = load_new(x, bh, H, rows, T, E).to(tl.float32)

    if LASER:
        G = tl.where(rows[:, None] < T, G / X, 0.0)
        store_new(g, bh, H, rows, T, G, E)
        G = rounded(G, g.dtype.element_ty).to(tl.float32)
    store_rows(delta, bh, rows, T, tl.sum(G * X, 1))


@triton.jit(do_not_specialize=VARYING)
def dk_dv_kernel(
    q, k, v, low, g, lse, delta, dk, dv,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    g_b, g_h, g_t,
    span, c, scale, H, T,
    D: constexpr, E: constexpr,
    M: constexpr, N: constexpr,
    SHORT: constexpr, LASER: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Write the gradients of N keys and values of a head."""
    start = tl.program_id(0) * N
    bh = tl.program_id(1)
    q = head(q, bh, H, q_b, q_h)
    g = head(g, bh, H, g_b, g_h)
    cols = start + tl.arange(0, N)
    K = load(head(k, bh, H, k_b, k_h), k_t, cols, T, D)
    V = load(head(v, bh, H, v_b, v_h), v_t, cols, T, E)
    LOW = V
    if SPLIT:
        LOW = load(head(low, bh, H, v_b, v_h), v_t, cols, T, E)

    dK = tl.zeros((N, D), tl.float32)
    dV = tl.zeros((N, E), tl.float32)
    edges = query_blocks(start, span, T, M, N)
    for part in tl.static_range(3):
        for i in range(edges[part], edges[part + 1], M):
            rows = i + tl.arange(0, M)
            Q = load(q, q_t, rows, T, D)
            G = load(g, g_t, rows, T, E)
            CUT = part != 1
            s = scores(K, Q, rows[None, :], cols[:, None], span, c, T, CUT)  # (N, M)
            p = tl.exp2(s - load_rows(lse, bh, rows, T)[None, :])
            dV += dot(rounded(p, G.dtype), G)
            dp = dot(V, tl.trans(G))
            if SPLIT:
                dp += dot(LOW, tl.trans(G))
            ds = p * (dp - load_rows(delta, bh, rows, T)[None, :])
            dK += dot(rounded(ds, Q.dtype), Q)

    if SPLIT:
        dV *= V.to(tl.float32) + LOW.to(tl.float32)
    elif LASER:
        dV *= V.to(tl.float32)
    store_new(dk, bh, H, cols, T, dK * scale, D)
    store_new(dv, bh, H, cols, T, dV, E)


@triton.jit(do_not_specialize=VARYING)
def dq_kernel(
    q, k, v, low, g, lse, delta, dq,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    g_b, g_h, g_t,
    span, c, scale, H, T,
    D: constexpr, E: constexpr,
    M: constexpr, N: constexpr,
    SHORT: constexpr, LASER: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Write the gradients of M queries of a head."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    bh = tl.program_id(1)
    k = head(k, bh, H, k_b, k_h)
    v = head(v, bh, H, v_b, v_h)
    low = head(low, bh, H, v_b, v_h)
    rows = start + tl.arange(0, M)
    Q = load(head(q, bh, H, q_b, q_h), q_t, rows, T, D)
    G = load(head(g, bh, H, g_b, g_h), g_t, rows, T, E)
    LSE = load_rows(lse, bh, rows, T)
    DELTA = load_rows(delta, bh, rows, T)

    dQ = tl.zeros((M, D), tl.float32)
    edges = key_blocks(start, span, T, M, N, SHORT)
    for part in tl.static_range(0 if SHORT else 1, 3):
        for j in range(edges[part], edges[part + 1], N):
            cols = j + tl.arange(0, N)
            K = load(k, k_t, cols, T, D)
            CUT = part != 1
            s = scores(Q, K, rows[:, None], cols[None, :], span, c, T, CUT)
            p = tl.exp2(s - LSE[:, None])
            dp = dot(G, tl.trans(load(v, v_t, cols, T, E)))
            if SPLIT:
                dp += dot(G, tl.trans(load(low, v_t, cols, T, E)))
            ds = p * (dp - DELTA[:, None])
            dQ += dot(rounded(ds, K.dtype), K)
    store_new(dq, bh, H, rows, T, dQ * scale, D)


# -----------------------------------------------------------------------------
# LASER in log space: blocks of EXACT queries, keys and channels, for heads where wide is not 0.


@triton.jit
def log_weights(Q, K, LSE, EXTRA, rows, cols, span, c, T):
    """log2 of the weights (queries, keys), -inf where unseen.

    LSE has rounding errors, of the scores and of weights that were rounded before they were summed;
    EXTRA corrects them.
    """
    s = scores(Q, K, rows[:, None], cols[None, :], span, c, T, True)
    return s - LSE[:, None] - EXTRA[:, None]


@triton.jit
def with_values(s, v, v_t, cols, T):
    """s + v log2(e) (queries, keys, EXACT channels): log2 of the weighted exponentials."""
    V = load(v, v_t, cols, T, EXACT).to(tl.float32)
    return s[:, :, None] + V[None, :, :] * LOG2_E


@triton.jit(do_not_specialize=VARYING)
def exact_forward_kernel(
    q, k, v, lse, extra, y, wide,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    span, c, H, T,
    D: constexpr, E: constexpr,
):  # fmt: skip
    """Write y = log sum_j exp(log w_ij + v_j) of EXACT queries of a head, and extra."""
    bh = tl.program_id(1)
    if tl.load(wide + bh) == 0:
        return
    q = head(q, bh, H, q_b, q_h)
    k = head(k, bh, H, k_b, k_h)
    v = head(v, bh, H, v_b, v_h)
    start = tl.program_id(0) * EXACT
    rows = start + tl.arange(0, EXACT)
    Q = load(q, q_t, rows, T, D)
    LSE = load_rows(lse, bh, rows, T)

    none = tl.zeros_like(LSE)
    all_weights = tl.zeros((EXACT,), tl.float32)
    first = tl.maximum(start - span, 0) // EXACT * EXACT
    end = tl.minimum(start + EXACT, T)
    for j in range(first, end, EXACT):
        cols = j + tl.arange(0, EXACT)
        K = load(k, k_t, cols, T, D)
        s = log_weights(Q, K, LSE, none, rows, cols, span, c, T)
        all_weights += tl.sum(tl.exp2(s), 1)
    EXTRA = tl.where(rows < T, tl.log2(all_weights), 0.0)
    store_rows(extra, bh, rows, T, EXTRA)

    for e in range(0, E, EXACT):
        top = tl.full((EXACT, EXACT), -INFINITY, tl.float32)  # (queries, channels)
        total = tl.zeros((EXACT, EXACT), tl.float32)
        for j in range(first, end, EXACT):
            cols = j + tl.arange(0, EXACT)
            K = load(k, k_t, cols, T, D)
            s = log_weights(Q, K, LSE, EXTRA, rows, cols, span, c, T)
            t = with_values(s, v + e, v_t, cols, T)
            new = tl.maximum(top, tl.max(t, 1))
            base = base_of(new)
            added = tl.sum(tl.exp2(t - base[:, None, :]), 1)
            total = total * tl.exp2(top - base) + added
            top = new
        log_sum = (top + tl.log2(total)) / LOG2_E
        store_new(y + e, bh, H, rows, T, log_sum, E)


@triton.jit
def shares(s, v, y, dy, v_t, y_t, dy_t, rows, cols, T):
    """(g, dy) of EXACT channels: g (queries, keys, channels) and dy (queries, 1, channels).

    g = exp(log w + v - y), from s = log2 w, is each key's share of the sum.
    """
    Y = load(y, y_t, rows, T, EXACT)
    G = load(dy, dy_t, rows, T, EXACT).to(tl.float32)
    t = with_values(s, v, v_t, cols, T)
    g = tl.exp2(t - Y[:, None, :] * LOG2_E)
    return g, G[:, None, :]


@triton.jit
def dscores(s, v, y, dy, v_t, y_t, dy_t, rows, cols, T, E: constexpr):
    """ds_ij = sum_d dy_id (g_ijd - w_ij) (queries, keys), from s = log2 w."""
    weights = tl.exp2(s)[:, :, None]
    ds = tl.zeros((EXACT, EXACT), tl.float32)
    for e in range(0, E, EXACT):
        g, G = shares(s, v + e, y + e, dy + e, v_t, y_t, dy_t, rows, cols, T)
        ds += tl.sum(G * (g - weights), 2)
    return ds


@triton.jit(do_not_specialize=VARYING)
def exact_backward_kernel(
    q, k, v, lse, extra, y, dy, dq, dk, dv, wide,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    dy_b, dy_h, dy_t,
    span, c, scale, H, T,
    D: constexpr, E: constexpr,
):  # fmt: skip
    """Write the gradients of the queries, keys and values of EXACT tokens of a head."""
    bh = tl.program_id(1)
    if tl.load(wide + bh) == 0:
        return
    q = head(q, bh, H, q_b, q_h)
    k = head(k, bh, H, k_b, k_h)
    v = head(v, bh, H, v_b, v_h)
    y = new_head(y, bh, H, T, E)
    y_t = H * E
    dy = head(dy, bh, H, dy_b, dy_h)
    start = tl.program_id(0) * EXACT
    tokens = start + tl.arange(0, EXACT)

    # dq: these tokens are the queries, of all keys that they see
    Q = load(q, q_t, tokens, T, D)
    LSE = load_rows(lse, bh, tokens, T)
    EXTRA = load_rows(extra, bh, tokens, T)
    dQ = tl.zeros((EXACT, D), tl.float32)
    first = tl.maximum(start - span, 0) // EXACT * EXACT
    for j in range(first, tl.minimum(start + EXACT, T), EXACT):
        cols = j + tl.arange(0, EXACT)
        K = load(k, k_t, cols, T, D)
        s = log_weights(Q, K, LSE, EXTRA, tokens, cols, span, c, T)
        ds = dscores(s, v, y, dy, v_t, y_t, dy_t, tokens, cols, T, E)
        dQ += dot(ds, K.to(tl.float32))
    store_new(dq, bh, H, tokens, T, dQ * scale, D)

    # dk: these tokens are the keys, of all queries that see them
    K = load(k, k_t, tokens, T, D)
    dK = tl.zeros((EXACT, D), tl.float32)
    end = tl.minimum(start + EXACT + span, T)
    for i in range(start, end, EXACT):
        rows = i + tl.arange(0, EXACT)
        Q = load(q, q_t, rows, T, D)
        LSE = load_rows(lse, bh, rows, T)
        EXTRA = load_rows(extra, bh, rows, T)
        s = log_weights(Q, K, LSE, EXTRA, rows, tokens, span, c, T)
        ds = dscores(s, v, y, dy, v_t, y_t, dy_t, rows, tokens, T, E)
        dK += dot(tl.trans(ds), Q.to(tl.float32))
    store_new(dk, bh, H, tokens, T, dK * scale, D)

    # dv: the same, EXACT channels at a time
    for e in range(0, E, EXACT):
        dV = tl.zeros((EXACT, EXACT), tl.float32)
        for i in range(start, end, EXACT):
            rows = i + tl.arange(0, EXACT)
            Q = load(q, q_t, rows, T, D)
            LSE = load_rows(lse, bh, rows, T)
            EXTRA = load_rows(extra, bh, rows, T)
            s = log_weights(Q, K, LSE, EXTRA, rows, tokens, span, c, T)
            g, G = shares(s, v + e, y + e, dy + e, v_t, y_t, dy_t, rows, tokens, T)
            dV += tl.sum(G * g, 0)
        store_new(dv + e, bh, H, tokens, T, dV, E)


# -----------------------------------------------------------------------------
# Flash, from PyTorch

SMALL = False  # whether a block has 99 KiB of shared memory, as on GeForce; A100: 163, H100: 227
BEFORE_HOPPER = False
if torch.cuda.is_available():
    SMALL = torch.cuda.get_device_properties().shared_memory_per_block_optin < 2**17
    BEFORE_HOPPER = torch.cuda.get_device_capability() < (9, 0)


def blocks(D: int, E: int, laser: bool, dtype: torch.dtype) -> tuple[dict, dict]:
    """The sizes of blocks, warps and stages of the forward and of the backward kernels.

    D, E: the widths of keys and values.
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
        forward = {"M": 128, "N": 64, "num_stages": 2 if laser and wide else 3}
        backward = {"M": 64, "N": 64, "num_stages": 2}
        if tight:
            forward["num_stages"] = 1
            backward["num_stages"] = 1
    return forward | {"num_warps": warps}, backward | {"num_warps": warps}


def empty_heads(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor of like's shape (B, H, T, width), in the memory layout (B, T, H, width).

    A layer's projections need this layout. dtype: None for like's.
    """
    B, H, T, width = like.shape
    return like.new_empty(B, T, H, width, dtype=dtype).transpose(1, 2)


def as_new_heads(x: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, width) in the memory layout of empty_heads.

    A tensor that was saved for the backward pass may come back in another layout.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def usable(dy: torch.Tensor) -> torch.Tensor:
    """dy with strides that the kernels can take.

    torch.compile plans with the strides of y, but dy may come with others.
    """
    fits = dy.stride(-1) == 1 and dy.shape[2] * dy.stride(2) < 2**31
    return dy if fits and not torch.compiler.is_compiling() else as_new_heads(dy)


def strides(*tensors: torch.Tensor) -> list[int]:
    """The strides of sequences, heads and tokens of each tensor (B, H, T, width)."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def grid(x: torch.Tensor, block: int) -> tuple[int, int]:
    """A kernel's programs: one for each block of tokens, and head, of x (B, H, T, width)."""
    B, H, T, _ = x.shape
    return triton.cdiv(T, block), B * H


def exponentials(v: torch.Tensor, shift: torch.Tensor, split: bool) -> tuple:
    """(high, low), whose sum is exp(v - shift). Without split, high alone is, and low is high."""
    _, H, T, E = v.shape
    high = empty_heads(v)
    low = empty_heads(v) if split else high
    exp_kernel[grid(v, ROWS)](
        v, shift, high, low,
        *strides(v),
        H, T,
        E, ROWS, split,
    )  # fmt: skip
    return high, low


def exact_forward(q, k, v, lse, y, wide, span: int, c: float) -> torch.Tensor:
    """Write y of the heads in log space; return `extra` (B H, T), for the backward pass."""
    _, H, T, D = q.shape
    extra = torch.empty_like(lse)
    exact_forward_kernel[grid(q, EXACT.value)](
        q, k, v, lse, extra, y, wide,
        *strides(q, k, v),
        span, c, H, T,
        D, v.shape[-1],
    )  # fmt: skip
    return extra


class Flash(torch.autograd.Function):
    """softmax, and LASER: y = Flash.apply(q, k, v, span, scale, laser).

    q, k (B, H, T, D) and v (B, H, T, E) give y (B, H, T, E). Each query sees its own key and `span`
    keys before it.
    """

    @staticmethod
    def forward(ctx, q, k, v, span, scale, laser):
        B, H, T, D = q.shape
        E = v.shape[-1]
        split = laser and v.dtype == torch.bfloat16
        c = scale * LOG2_E.value
        y = empty_heads(v)
        lse = q.new_empty(B * H, T, dtype=torch.float32)

        # Softmax does not read the next five.
        x = y
        values = v
        low = v
        shift = lse
        wide = lse
        if laser:
            least, largest = v.aminmax(dim=-2)  # (B, H, E)
            shift = largest.float().contiguous()
            largest_range = (shift - least.float()).amax(-1)
            wide = (largest_range > LASER_RANGE).int().flatten()  # (B H)
            x = empty_heads(v, torch.float32)
            values, low = exponentials(v, shift, split)

        sizes, _ = blocks(D, E, laser, v.dtype)
        forward_kernel[grid(q, sizes["M"])](
            q, k, values, low, shift, y, x, lse,
            *strides(q, k, values),
            span, c, H, T,
            D, E, **sizes,
            SHORT=span < T, LASER=laser, SPLIT=split,
        )  # fmt: skip
        if laser:
            exact_forward(q, k, v, lse, y, wide, span, c)
        ctx.save_for_backward(q, k, v, x, lse, shift, wide)
        ctx.choices = (span, scale, laser, split)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v, x, lse, shift, wide = ctx.saved_tensors
        span, scale, laser, split = ctx.choices
        _, H, T, D = q.shape
        E = v.shape[-1]
        c = scale * LOG2_E.value
        dy = usable(dy)
        dq = empty_heads(q)
        dk = empty_heads(k)
        dv = empty_heads(v)

        delta = torch.empty_like(lse)
        g = dy
        values = v
        low = v
        if laser:
            g = empty_heads(v)
            values, low = exponentials(v, shift, split)
        delta_kernel[grid(q, ROWS)](
            dy, as_new_heads(x), g, delta,
            *strides(dy),
            H, T, E, ROWS, laser,
        )  # fmt: skip

        _, sizes = blocks(D, E, laser, v.dtype)
        inputs = (q, k, values, low, g, lse, delta)
        numbers = (*strides(q, k, values, g), span, c, scale, H, T, D, E)
        options = sizes | {"SHORT": span < T, "LASER": laser, "SPLIT": split}
        dk_dv_kernel[grid(q, sizes["N"])](*inputs, dk, dv, *numbers, **options)
        dq_kernel[grid(q, sizes["M"])](*inputs, dq, *numbers, **options)
        if laser:
            y = empty_heads(v, torch.float32)  # of the heads in log space, computed again
            extra = exact_forward(q, k, v, lse, y, wide, span, c)
            exact_backward_kernel[grid(q, EXACT.value)](
                q, k, v, lse, extra, y, dy, dq, dk, dv, wide,
                *strides(q, k, v, dy),
                span, c, scale, H, T,
                D, E,
            )  # fmt: skip
        return dq, dk, dv, None, None, None


# -----------------------------------------------------------------------------
# beta in linear time: sums.Beta in chunks of N tokens. Here products are scaled, not queries.


@triton.jit
def dot_wide(a, b, SPLIT: constexpr):
    """a b for b in float32 and a in its precision, as if both were in float32.

    SPLIT: b becomes the sum of two tensors of a's precision.
    """
    if SPLIT:
        high = rounded(b, a.dtype)
        low = rounded(b - high.to(tl.float32), a.dtype)
        y = dot(a, high) + dot(a, low)
    else:
        y = dot(a, b)
    return y


@triton.jit
def causal(s, rows):
    """s (rows, rows) with zeros where a query does not see a key of its chunk."""
    return tl.where(rows[:, None] >= rows[None, :], s, 0.0)


@triton.jit
def sums_of(x, bh, D: constexpr, E: constexpr):
    """A pointer to the sums (D, E + D) of this program's chunk, in x (B H, chunks, D, E + D)."""
    chunk = bh.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    return x + chunk * D * (E + D)


@triton.jit(do_not_specialize=VARYING)
def sums_kernel(
    x, y, z, sums,
    x_b, x_h, x_t,
    y_b, y_h, y_t,
    H, T,
    D: constexpr, E: constexpr,
    WEIGHTED: constexpr, N: constexpr,
):  # fmt: skip
    """Write [x^T y | x^T x] (D, E + D) of N tokens of a head; with weights z, [x^T y | x^T z x]."""
    bh = tl.program_id(1)
    rows = tl.program_id(0) * N + tl.arange(0, N)
    X = load(head(x, bh, H, x_b, x_h), x_t, rows, T, D)
    Y = load(head(y, bh, H, y_b, y_h), y_t, rows, T, E)
    Z = X
    if WEIGHTED:
        weights = load_rows(z, bh, rows, T)
        Z = rounded(X.to(tl.float32) * weights[:, None], X.dtype)

    sums = sums_of(sums, bh, D, E)
    channels = tl.arange(0, D)
    store(sums, E + D, channels, D, dot(tl.trans(X), Y))
    store(sums + E, E + D, channels, D, dot(tl.trans(X), Z))


@triton.jit(do_not_specialize=VARYING)
def before_kernel(x, n, SIZE: constexpr, STEP: constexpr, REVERSE: constexpr):
    """Replace each of the n parts of x (heads, n, SIZE) by the sum of the parts before it.

    REVERSE: of the parts after it.
    """
    x += tl.program_id(1).to(tl.int64) * n * SIZE
    numbers = x + tl.program_id(0) * STEP + tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.float32)
    for i in range(n):
        part = numbers + (n - 1 - i if REVERSE else i) * SIZE
        value = tl.load(part)
        tl.store(part, total)
        total += value


@triton.jit(do_not_specialize=VARYING)
def beta_forward_kernel(
    q, k, v, before, y, norm, divisor,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    scale, eps, H, T,
    D: constexpr, E: constexpr,
    SPLIT: constexpr, N: constexpr,
):  # fmt: skip
    """Write y of N tokens of a head, norm = ||s||, and ||s|| as a divisor.

    The divisor is not below the norm's rounding error, as in sums.Beta.
    """
    bh = tl.program_id(1)
    rows = tl.program_id(0) * N + tl.arange(0, N)
    channels = tl.arange(0, D)
    Q = load(head(q, bh, H, q_b, q_h), q_t, rows, T, D)
    K = load(head(k, bh, H, k_b, k_h), k_t, rows, T, D)

    before = sums_of(before, bh, D, E)
    G = load(before + E, E + D, channels, D, D)  # k^T k of all earlier chunks
    x = Q.to(tl.float32)
    past = tl.maximum(tl.sum(dot_wide(Q, G, SPLIT) * x, 1), 0.0)
    diagonal = before + E + channels * (E + D) + channels
    trace = tl.sum(tl.load(diagonal), 0)
    s = causal(dot(Q, tl.trans(K)) * scale, rows)
    r = tl.sqrt(past * scale * scale + tl.sum(s * s, 1))

    V = load(head(v, bh, H, v_b, v_h), v_t, rows, T, E)
    S = load(before, E + D, channels, D, E)  # k^T v of all earlier chunks
    sums = dot_wide(Q, S, SPLIT) * scale + dot(rounded(s, V.dtype), V)
    Y = sums / (1 + r)[:, None]
    store_new(y, bh, H, rows, T, Y, E)

    error = eps * scale * scale * trace * tl.sum(x * x, 1)
    error = tl.sqrt(tl.maximum(error, 1e-30))
    store_rows(norm, bh, rows, T, r)
    store_rows(divisor, bh, rows, T, tl.maximum(r, error))


@triton.jit(do_not_specialize=VARYING)
def beta_rows_kernel(
    dy, y, norm, divisor, p, z,
    dy_b, dy_h, dy_t,
    H, T,
    E: constexpr, N: constexpr,
):  # fmt: skip
    """Write p = dy / (1 + ||s||) and z = -(p y) / ||s|| of N tokens of a head."""
    rows = tl.program_id(0) * N + tl.arange(0, N)
    bh = tl.program_id(1)
    r = load_rows(norm, bh, rows, T)
    divisor = load_rows(divisor, bh, rows, T)
    dy = head(dy, bh, H, dy_b, dy_h)
    dY = load(dy, dy_t, rows, T, E).to(tl.float32)
    Y = load_new(y, bh, H, rows, T, E).to(tl.float32)

    P = dY / (1 + r)[:, None]
    store_new(p, bh, H, rows, T, P, E)
    Z = -tl.sum(P * Y, 1) / divisor
    store_rows(z, bh, rows, T, Z)


@triton.jit(do_not_specialize=VARYING)
def beta_backward_kernel(
    q, k, v, before, after, p, z, dq, dk, dv,
    q_b, q_h, q_t,
    k_b, k_h, k_t,
    v_b, v_h, v_t,
    scale, H, T,
    D: constexpr, E: constexpr,
    SPLIT: constexpr, N: constexpr,
):  # fmt: skip
    """Write the gradients of N tokens of a head.

    before: k^T [v | k] of all earlier chunks. after: q^T [p | z q] of all later ones.
    """
    bh = tl.program_id(1)
    rows = tl.program_id(0) * N + tl.arange(0, N)
    channels = tl.arange(0, D)
    Q = load(head(q, bh, H, q_b, q_h), q_t, rows, T, D)
    K = load(head(k, bh, H, k_b, k_h), k_t, rows, T, D)
    V = load(head(v, bh, H, v_b, v_h), v_t, rows, T, E)
    P = load_new(p, bh, H, rows, T, E)
    Z = load_rows(z, bh, rows, T)
    before = sums_of(before, bh, D, E)
    after = sums_of(after, bh, D, E)
    s = causal(dot(Q, tl.trans(K)) * scale, rows)

    R = load(after, E + D, channels, D, E)
    dV = dot_wide(K, R, SPLIT) * scale + dot(tl.trans(rounded(s, P.dtype)), P)
    store_new(dv, bh, H, rows, T, dV, E)

    ds = causal(dot(P, tl.trans(V)) + Z[:, None] * s, rows)
    ds = rounded(ds, K.dtype)
    S = load(before, E + D, channels, D, E)
    dQ = dot_wide(P, tl.trans(S), SPLIT) + dot(ds, K)
    G = load(before + E, E + D, channels, D, D)
    dQ += dot_wide(Q, G, SPLIT) * (Z * scale)[:, None]
    store_new(dq, bh, H, rows, T, dQ * scale, D)

    dK = dot_wide(V, tl.trans(R), SPLIT) + dot(tl.trans(ds), Q)
    F = load(after + E, E + D, channels, D, D)  # the sum of z q^T q, which is symmetric
    dK += dot_wide(K, F, SPLIT) * scale
    store_new(dk, bh, H, rows, T, dK * scale, D)


# -----------------------------------------------------------------------------
# beta, from PyTorch


def chunk(D: int, E: int, dtype: torch.dtype) -> dict[str, int]:
    """N, the tokens of a chunk of beta's sums, and the warps and stages of its kernels."""
    if INTERPRETED.value:
        return {"N": 16}
    if dtype == torch.float32:
        return {"N": 32, "num_warps": 8, "num_stages": 1}
    if max(D, E) > 32:
        return {"N": 128, "num_warps": 8}
    return {"N": 64, "num_warps": 4}


def sums_beside(x, y, z, sizes: dict[str, int], after: bool) -> torch.Tensor:
    """[x^T y | x^T z x] of all tokens before each chunk, or after it: (B H, chunks, D, E + D).

    z (B H, T), one number for each token, or None for ones. sizes: of chunk(). In float32.
    """
    _, H, T, D = x.shape
    E = y.shape[-1]
    chunks, heads = grid(x, sizes["N"])
    sums = x.new_empty(heads, chunks, D, E + D, dtype=torch.float32)
    weighted = z is not None
    weights = z if weighted else sums  # sums are not read
    sums_kernel[chunks, heads](
        x, y, weights, sums,
        *strides(x, y),
        H, T, D, E, weighted, **sizes,
    )  # fmt: skip
    size = D * (E + D)
    before_kernel[size // STEP, heads](sums, chunks, size, STEP, after)
    return sums


class Beta(torch.autograd.Function):
    """y = beta(scale q k) v, by the equations of sums.Beta: y = Beta.apply(q, k, v, scale).

    q, k (B, H, T, D) and v (B, H, T, E) give y (B, H, T, E).
    """

    @staticmethod
    def forward(ctx, q, k, v, scale):
        B, H, T, D = q.shape
        E = v.shape[-1]
        sizes = chunk(D, E, v.dtype)
        split = v.dtype != torch.float32
        eps = 2.0**-16 if split else torch.finfo(torch.float32).eps
        y = empty_heads(v)
        norm = q.new_empty(B * H, T, dtype=torch.float32)
        divisor = torch.empty_like(norm)
        before = sums_beside(k, v, None, sizes, after=False)
        beta_forward_kernel[grid(q, sizes["N"])](
            q, k, v, before, y, norm, divisor,
            *strides(q, k, v),
            scale, eps, H, T,
            D, E, split, **sizes,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, before, y, norm, divisor)
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v, before, y, norm, divisor = ctx.saved_tensors
        _, H, T, D = q.shape
        E = v.shape[-1]
        sizes = chunk(D, E, v.dtype)
        split = v.dtype != torch.float32
        dy = usable(dy)
        p = empty_heads(v)
        z = torch.empty_like(norm)
        beta_rows_kernel[grid(q, ROWS)](
            dy, as_new_heads(y), norm, divisor, p, z,
            *strides(dy),
            H, T, E, ROWS,
        )  # fmt: skip
        after = sums_beside(q, p, z, sizes, after=True)
        dq = empty_heads(q)
        dk = empty_heads(k)
        dv = empty_heads(v)
        beta_backward_kernel[grid(q, sizes["N"])](
            q, k, v, before, after, p, z, dq, dk, dv,
            *strides(q, k, v),
            ctx.scale, H, T,
            D, E, split, **sizes,
        )  # fmt: skip
        return dq, dk, dv, None


# -----------------------------------------------------------------------------
# Into the tables

# run(q, k, v, span, scale) -> y; a query sees its own key and span keys before it
KERNEL: dict[str, Callable] = {
    "softmax": lambda *inputs: Flash.apply(*inputs, False),
    "laser": lambda *inputs: Flash.apply(*inputs, True),
    "beta": lambda q, k, v, span, scale: Beta.apply(q, k, v, scale),
}


def numbers_of_a_sequence(x: torch.Tensor) -> int:
    """How far the numbers of a sequence reach, in x (B, H, T, width) or in empty_heads(x)."""
    _, H, T, width = x.shape
    return T * max(x.stride(2), H * width)


def why_not(name: str, q, k, v, window: int | None = None) -> str | None:
    """Why the kernels of an attention cannot take these inputs; None if they can."""
    widths = q.shape[-1], v.shape[-1]
    if not (q.is_cuda or INTERPRETED.value):
        return f"they are for CUDA, not for {q.device.type}"
    same_dtype = q.dtype == k.dtype == v.dtype
    if not same_dtype or q.dtype not in (torch.bfloat16, torch.float32):
        return f"they take bfloat16 and float32, not {q.dtype}"  # float16 would overflow
    if q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        return "there are fewer queries than keys"
    if not set(widths) <= set(WIDTHS):
        return f"queries and values are {widths} wide; they take the widths {WIDTHS}"
    heads = q.shape[0] * q.shape[1]
    if heads >= 2**16 or max(map(numbers_of_a_sequence, (q, k, v))) >= 2**31:
        return "there are too many heads or tokens for a GPU's indices"
    if name == "beta":
        return why_not_beta(max(widths), q, window)
    return None


def why_not_beta(width: int, q, window: int | None) -> str | None:
    """Why beta's kernels, which have limits of their own, cannot take heads of this width."""
    if window is not None or q.shape[-2] < LINEAR_FROM:
        return f"beta's kernel is for long heads and {LINEAR_FROM} tokens or more"
    most = 128
    if q.dtype == torch.float32:
        most = 32
    elif SMALL or BEFORE_HOPPER:
        most = 64
    if width > most:
        return f"beta's kernel takes {q.dtype} heads up to {most} wide on this GPU, not {width}"
    return None


@torch.compiler.assume_constant_result
def say_once(line: str) -> None:
    """Print a line on stderr, once. With torch.compile: while it traces, so the graph stays one."""
    note_once(line)


def by_kernel(name: str, make: Callable) -> Callable:
    """A Form's `long` or `short`: the kernels or, for inputs that they cannot take, make's form."""

    def with_kernels(definition: Callable) -> Callable:
        core_form = make(definition)

        def attend(q, k, v, *, scale=None, **settings):
            window = settings.get("window")
            reason = why_not(name, q, k, v, window)
            others = sorted(set(settings) - {"window"})
            if others:
                reason = f"they do not take {', '.join(others)}"
            if reason is None:
                return run(q, k, v, window, scale)
            if q.shape[-2] == k.shape[-2]:  # not in decoding, which is always the core's
                say_once(f"{name}_triton: the kernels are not used: {reason}")
            return core_form(q, k, v, scale=scale, **settings)

        return attend

    def run(q, k, v, window, scale):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        T = q.shape[-2]
        span = T if window is None else min(window, T)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        with torch.autocast(q.device.type, enabled=False):
            return KERNEL[name](q, k, v, span, scale)

    return with_kernels


for name in KERNEL:
    form = FORM[name]
    ATTENTION[f"{name}_triton"] = ATTENTION[name]
    FORM[f"{name}_triton"] = replace(
        form,
        name=f"Triton kernels, or {form.name}",
        long=by_kernel(name, form.long),
        short=None if form.short is None else by_kernel(name, form.short),
    )
