"""Triton kernels of attention, for CUDA GPUs. Nothing else imports Triton.

KERNEL[name](fast) has the signature of fast, the fast form of ATTENTION[name], and computes the same. Inputs that a
kernel cannot take (a bias, dropped weights, fewer queries than keys, other widths, precisions or devices) go to fast.
With TRITON_INTERPRET=1 the kernels run on a CPU, slowly, for their tests.

Flash, for softmax and LASER, is FlashAttention-2 (Dao 2023): scores are never written, but computed again in the
backward pass from the logarithm of a row's sum. Blocks of keys that a short head does not see are skipped.

LASER, y = log(softmax(s) exp(v)) (Duvvuri and Dhillon, equation 6), is the same with exp(v - max v) in the place of v,
as the sum of two numbers of v's precision: one bfloat16 would cause an error of 2^-9 in y, however small y is. For the
same reason a row's weights are rounded first, and then divided by the sum of the rounded weights. Where a channel's
values span more than LASER_RANGE, exp(v - max v) is not enough (see fast.laser_by_exp), and two more kernels take the
sums in log space. They read the range on the device, so the host need not wait, and end at once if not needed.
"""

import math
import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from attention.fast import LASER_RANGE
from attention.forms import unchanged
from attention.sums import LINEAR_FROM
from errors import refuse

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2_E = tl.constexpr(math.log2(math.e))
EXACT = tl.constexpr(16)  # tokens, and channels, of a block in log space
WIDTHS = (16, 32, 64, 128)  # head widths that the kernels take
VARYING = ("T", "n", "span")  # a kernel is not compiled again when these change

# -----------------------------------------------------------------------------
# What the kernels are made of. A head of a tensor is (T, width): `x` points to its first number, `step` is the distance
# to the next token, and the numbers of a token lie side by side.


@triton.jit
def dot(a, b):
    """a b, summed in float32; of float32 numbers as three products in TF32, whose error is about float32's.

    (The interpreter would multiply the bits of a bfloat16 as if they were an integer.)
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x in dtype, to the nearest. (The interpreter would cut the bits off.)"""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def tile(x, step, rows, T, WIDTH: tl.constexpr):
    """(rows, WIDTH) of a head; zeros past T."""
    return tl.load(x + rows[:, None] * step + tl.arange(0, WIDTH)[None, :], mask=rows[:, None] < T, other=0.0)


@triton.jit
def put(x, step, rows, T, value, WIDTH: tl.constexpr):
    """value (rows, WIDTH) into a head, nothing past T."""
    where = x + rows[:, None] * step + tl.arange(0, WIDTH)[None, :]
    tl.store(where, rounded(value, x.dtype.element_ty), mask=rows[:, None] < T)


@triton.jit
def of_rows(x, bh, rows, T):
    """One number for each of these rows of a head, from x (B H, T)."""
    return tl.load(x + bh.to(tl.int64) * T + rows, mask=rows < T, other=0.0)


@triton.jit
def seen(queries, keys, span, T):
    """Whether query i, before T, sees key j: 0 <= i - j <= span. Of the shape that the two broadcast to."""
    return (queries >= keys) & (queries - keys <= span) & (queries < T)


@triton.jit
def head_of(bh, H):
    """(sequence, head) of a program, wide enough to be multiplied by strides."""
    return (bh // H).to(tl.int64), (bh % H).to(tl.int64)


@triton.jit
def begin(bh, H, q, k, v, q_b, q_h, k_b, k_h, v_b, v_h):
    """Where the queries, keys and values of a program's head begin. (Where a result is stored must not come from here:
    torch.compile would take it for a part of q, k or v, which it then copies before each call.)"""
    b, h = head_of(bh, H)
    return q + b * q_b + h * q_h, k + b * k_b + h * k_h, v + b * v_b + h * v_h


@triton.jit
def keys_of(start, span, T, M: tl.constexpr, N: tl.constexpr, SHORT: tl.constexpr):
    """Edges (a, b, c, d) of blocks of N keys for the M queries from start. Every query sees every key from b to c; from
    a to b and from c to d only some queries see some keys. a, b and c are multiples of N, or equal d."""
    d = tl.minimum(start + M, T)
    if SHORT:
        a = tl.maximum(start - span, 0) // N * N
        b = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(start + M - 1 - span, 0), N) * N, a), d)
    else:
        a, b = 0, 0
    return a, b, tl.maximum(b, (start + 1) // N * N), d


@triton.jit
def queries_of(start, span, T, M: tl.constexpr, N: tl.constexpr):
    """The same for the N keys from start: queries in blocks of M."""
    d = tl.minimum(start + N + span, T)
    b = tl.minimum(tl.cdiv(start + N - 1, M) * M, d)
    return start // M * M, b, tl.maximum(b, tl.minimum(start + span + 1, T) // M * M), d


# -----------------------------------------------------------------------------
# flash: c is scale log2(e), so that exp2 is enough; lse the base-2 logarithm of a row's sum of exp2(c s)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, lo, shift, y, x, lse, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, span, c, H, T,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SHORT: tl.constexpr, LASER: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """M queries of a head by online softmax: y, lse and, of LASER, x, the sum of weighted exponentials.

    acc (M, E) and total (M) are sums over the keys so far, relative to top (M), their largest score.
    """
    start, bh = (tl.num_programs(0) - 1 - tl.program_id(0)) * M, tl.program_id(1)  # the longest rows first
    b, h = head_of(bh, H)
    q, k, v = begin(bh, H, q, k, v, q_b, q_h, k_b, k_h, v_b, v_h)
    lo += b * v_b + h * v_h
    mine = (b * T * H + h) * E
    rows = start + tl.arange(0, M)
    Q = tile(q, q_t, rows, T, D)
    acc, total = tl.zeros((M, E), tl.float32), tl.zeros((M,), tl.float32)
    top = tl.full((M,), -float("inf"), tl.float32)
    edges = keys_of(start, span, T, M, N, SHORT)
    for part in tl.static_range(0 if SHORT else 1, 3):
        for j in range(edges[part], edges[part + 1], N):
            cols = j + tl.arange(0, N)
            s = dot(Q, tl.trans(tile(k, k_t, cols, T, D))) * c
            if part != 1:
                s = tl.where(seen(rows[:, None], cols[None, :], span, T), s, -float("inf"))
            new = tl.maximum(top, tl.max(s, 1))
            base = tl.where(new == -float("inf"), 0.0, new) if part != 1 else new  # a row may not have seen a key yet
            shrink = tl.exp2(top - base)
            V = tile(v, v_t, cols, T, E)
            p = tl.exp2(s - base[:, None])
            P = rounded(p, V.dtype)
            total = total * shrink + tl.sum(P.to(tl.float32) if LASER else p, 1)
            acc = acc * shrink[:, None] + dot(P, V)
            if SPLIT:
                acc += dot(P, tile(lo, v_t, cols, T, E))
            top = new
    acc = acc / total[:, None]
    if LASER:
        put(x + mine, H * E, rows, T, acc, E)
        acc = tl.log(acc) + tl.load(shift + bh * E + tl.arange(0, E))[None, :]
    put(y + mine, H * E, rows, T, acc, E)
    tl.store(lse + bh.to(tl.int64) * T + rows, top + tl.log2(total), mask=rows < T)


@triton.jit(do_not_specialize=VARYING)
def exp_kernel(
    v, shift, hi, lo, v_b, v_h, v_t, H, T, E: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """exp(v - shift) of N tokens of a head, as the sum of hi and lo."""
    rows, bh = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1)
    b, h = head_of(bh, H)
    V = tile(v + b * v_b + h * v_h, v_t, rows, T, E).to(tl.float32)
    V = tl.exp2((V - tl.load(shift + bh * E + tl.arange(0, E))[None, :]) * LOG2_E)
    mine = (b * T * H + h) * E
    put(hi + mine, H * E, rows, T, V, E)
    if SPLIT:
        put(lo + mine, H * E, rows, T, V - rounded(V, hi.dtype.element_ty).to(tl.float32), E)


@triton.jit(do_not_specialize=VARYING)
def delta_kernel(
    dy, x, g, delta, dy_b, dy_h, dy_t, H, T, E: tl.constexpr, M: tl.constexpr, LASER: tl.constexpr
):  # fmt: skip
    """delta = sum(g x) of M rows of a head, where g = dy and x = y; for LASER g = dy / x, which is stored."""
    rows, bh = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1)
    b, h = head_of(bh, H)
    mine = (b * T * H + h) * E
    G = tile(dy + b * dy_b + h * dy_h, dy_t, rows, T, E).to(tl.float32)
    X = tile(x + mine, H * E, rows, T, E).to(tl.float32)
    if LASER:
        G = tl.where(rows[:, None] < T, G / X, 0.0)
        put(g + mine, H * E, rows, T, G, E)
        G = rounded(G, g.dtype.element_ty).to(tl.float32)
    tl.store(delta + bh.to(tl.int64) * T + rows, tl.sum(G * X, 1), mask=rows < T)


@triton.jit(do_not_specialize=VARYING)
def dk_dv_kernel(
    q, k, v, lo, g, lse, delta, dk, dv, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    span, c, scale, H, T, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SHORT: tl.constexpr, LASER: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The gradients of N keys and values of a head."""
    start, bh = tl.program_id(0) * N, tl.program_id(1)
    b, h = head_of(bh, H)
    q, k, v = begin(bh, H, q, k, v, q_b, q_h, k_b, k_h, v_b, v_h)
    lo, g = lo + b * v_b + h * v_h, g + b * g_b + h * g_h
    cols = start + tl.arange(0, N)
    K, V = tile(k, k_t, cols, T, D), tile(v, v_t, cols, T, E)
    LO = tile(lo, v_t, cols, T, E) if SPLIT else V
    dK, dV = tl.zeros((N, D), tl.float32), tl.zeros((N, E), tl.float32)
    edges = queries_of(start, span, T, M, N)
    for part in tl.static_range(3):
        for i in range(edges[part], edges[part + 1], M):
            rows = i + tl.arange(0, M)
            Q, G = tile(q, q_t, rows, T, D), tile(g, g_t, rows, T, E)
            p = dot(K, tl.trans(Q)) * c - of_rows(lse, bh, rows, T)[None, :]  # (N, M)
            if part != 1:
                p = tl.where(seen(rows[None, :], cols[:, None], span, T), p, -float("inf"))
            p = tl.exp2(p)
            dV += dot(rounded(p, G.dtype), G)
            dp = dot(V, tl.trans(G))
            if SPLIT:
                dp += dot(LO, tl.trans(G))
            dK += dot(rounded(p * (dp - of_rows(delta, bh, rows, T)[None, :]), Q.dtype), Q)
    if LASER:
        dV *= V.to(tl.float32) + (LO.to(tl.float32) if SPLIT else 0.0)
    put(dk + (b * T * H + h) * D, H * D, cols, T, dK * scale, D)
    put(dv + (b * T * H + h) * E, H * E, cols, T, dV, E)


@triton.jit(do_not_specialize=VARYING)
def dq_kernel(
    q, k, v, lo, g, lse, delta, dq, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    span, c, scale, H, T, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SHORT: tl.constexpr, LASER: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The gradient of M queries of a head."""
    start, bh = (tl.num_programs(0) - 1 - tl.program_id(0)) * M, tl.program_id(1)
    b, h = head_of(bh, H)
    q, k, v = begin(bh, H, q, k, v, q_b, q_h, k_b, k_h, v_b, v_h)
    lo, g = lo + b * v_b + h * v_h, g + b * g_b + h * g_h
    rows = start + tl.arange(0, M)
    Q, G = tile(q, q_t, rows, T, D), tile(g, g_t, rows, T, E)
    LSE = of_rows(lse, bh, rows, T)
    DELTA = of_rows(delta, bh, rows, T)
    dQ = tl.zeros((M, D), tl.float32)
    edges = keys_of(start, span, T, M, N, SHORT)
    for part in tl.static_range(0 if SHORT else 1, 3):
        for j in range(edges[part], edges[part + 1], N):
            cols = j + tl.arange(0, N)
            K = tile(k, k_t, cols, T, D)
            p = dot(Q, tl.trans(K)) * c - LSE[:, None]
            if part != 1:
                p = tl.where(seen(rows[:, None], cols[None, :], span, T), p, -float("inf"))
            dp = dot(G, tl.trans(tile(v, v_t, cols, T, E)))
            if SPLIT:
                dp += dot(G, tl.trans(tile(lo, v_t, cols, T, E)))
            dQ += dot(rounded(tl.exp2(p) * (dp - DELTA[:, None]), K.dtype), K)
    put(dq + (b * T * H + h) * D, H * D, rows, T, dQ * scale, D)


# -----------------------------------------------------------------------------
# LASER in log space: blocks of EXACT queries, keys and channels at once; for heads where wide is not 0


@triton.jit
def log_weights(Q, k, k_t, LSE, EXTRA, rows, cols, span, c, T, D: tl.constexpr):
    """log2 of the weights (queries, keys), -inf unseen. LSE has rounding errors, of the scores and of weights that were
    rounded before they were summed; EXTRA corrects them."""
    s = dot(Q, tl.trans(tile(k, k_t, cols, T, D))) * c - LSE[:, None] - EXTRA[:, None]
    return tl.where(seen(rows[:, None], cols[None, :], span, T), s, -float("inf"))


@triton.jit
def exponents(Q, k, k_t, v, v_t, LSE, EXTRA, rows, cols, span, c, T, D: tl.constexpr):
    """(t, s): s = log2 of the weights (queries, keys), t = s + v log2(e) (queries, keys, EXACT channels)."""
    s = log_weights(Q, k, k_t, LSE, EXTRA, rows, cols, span, c, T, D)
    V = tile(v, v_t, cols, T, EXACT).to(tl.float32)
    return s[:, :, None] + V[None, :, :] * LOG2_E, s


@triton.jit(do_not_specialize=VARYING)
def exact_forward_kernel(
    q, k, v, lse, extra, y, wide, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, span, c, H, T,
    D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """y = log sum_j exp(log w_ij + v_j), for EXACT queries of a head, EXACT channels at a time; and extra."""
    start, bh = tl.program_id(0) * EXACT, tl.program_id(1)
    if tl.load(wide + bh) == 0:
        return
    b, h = head_of(bh, H)
    q, k, v = begin(bh, H, q, k, v, q_b, q_h, k_b, k_h, v_b, v_h)
    rows = start + tl.arange(0, EXACT)
    Q = tile(q, q_t, rows, T, D)
    LSE, all_weights = of_rows(lse, bh, rows, T), tl.zeros((EXACT,), tl.float32)
    first, end = tl.maximum(start - span, 0) // EXACT * EXACT, tl.minimum(start + EXACT, T)
    for j in range(first, end, EXACT):
        s = log_weights(Q, k, k_t, LSE, tl.zeros_like(LSE), rows, j + tl.arange(0, EXACT), span, c, T, D)
        all_weights += tl.sum(tl.exp2(s), 1)
    EXTRA = tl.where(rows < T, tl.log2(all_weights), 0.0)
    tl.store(extra + bh.to(tl.int64) * T + rows, EXTRA, mask=rows < T)
    for e in range(0, E, EXACT):
        top, total = tl.full((EXACT, EXACT), -float("inf"), tl.float32), tl.zeros((EXACT, EXACT), tl.float32)
        for j in range(first, end, EXACT):
            t, _ = exponents(Q, k, k_t, v + e, v_t, LSE, EXTRA, rows, j + tl.arange(0, EXACT), span, c, T, D)
            new = tl.maximum(top, tl.max(t, 1))
            base = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp2(top - base) + tl.sum(tl.exp2(t - base[:, None, :]), 1)
            top = new
        put(y + (b * T * H + h) * E + e, H * E, rows, T, (top + tl.log2(total)) / LOG2_E, EXACT)


@triton.jit
def shares(t, y, dy, dy_t, rows, T, step):
    """g = exp(log w + v - y), the share of each key in each sum, and dy (queries, 1, EXACT channels)."""
    Y, G = tile(y, step, rows, T, EXACT), tile(dy, dy_t, rows, T, EXACT).to(tl.float32)
    return tl.exp2(t - Y[:, None, :] * LOG2_E), G[:, None, :]


@triton.jit
def dscores(
    Q, k, v, LSE, EXTRA, y, dy, rows, cols, span, c, T, k_t, v_t, dy_t, step, D: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """(queries, keys): ds_ij = sum_d dy_id (g_ijd - w_ij)."""
    ds = tl.zeros((EXACT, EXACT), tl.float32)
    for e in range(0, E, EXACT):
        t, s = exponents(Q, k, k_t, v + e, v_t, LSE, EXTRA, rows, cols, span, c, T, D)
        g, G = shares(t, y + e, dy + e, dy_t, rows, T, step)
        ds += tl.sum(G * (g - tl.exp2(s)[:, :, None]), 2)
    return ds


@triton.jit(do_not_specialize=VARYING)
def exact_backward_kernel(
    q, k, v, lse, extra, y, dy, dq, dk, dv, wide, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dy_b, dy_h, dy_t,
    span, c, scale, H, T, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The gradients of EXACT queries of a head, of the keys there and of their values."""
    start, bh = tl.program_id(0) * EXACT, tl.program_id(1)
    if tl.load(wide + bh) == 0:
        return
    b, h = head_of(bh, H)
    q, k, v = begin(bh, H, q, k, v, q_b, q_h, k_b, k_h, v_b, v_h)
    y, dy = y + (b * T * H + h) * E, dy + b * dy_b + h * dy_h
    mine = start + tl.arange(0, EXACT)
    Q = tile(q, q_t, mine, T, D)
    LSE, EXTRA = of_rows(lse, bh, mine, T), of_rows(extra, bh, mine, T)
    dQ, dK = tl.zeros((EXACT, D), tl.float32), tl.zeros((EXACT, D), tl.float32)
    for j in range(tl.maximum(start - span, 0) // EXACT * EXACT, tl.minimum(start + EXACT, T), EXACT):
        cols = j + tl.arange(0, EXACT)
        ds = dscores(Q, k, v, LSE, EXTRA, y, dy, mine, cols, span, c, T, k_t, v_t, dy_t, H * E, D, E)
        dQ += dot(ds, tile(k, k_t, cols, T, D).to(tl.float32))
    put(dq + (b * T * H + h) * D, H * D, mine, T, dQ * scale, D)
    end = tl.minimum(start + EXACT + span, T)
    for i in range(start, end, EXACT):
        rows = i + tl.arange(0, EXACT)
        Q = tile(q, q_t, rows, T, D)
        LSE, EXTRA = of_rows(lse, bh, rows, T), of_rows(extra, bh, rows, T)
        ds = dscores(Q, k, v, LSE, EXTRA, y, dy, rows, mine, span, c, T, k_t, v_t, dy_t, H * E, D, E)
        dK += dot(tl.trans(ds), Q.to(tl.float32))
    put(dk + (b * T * H + h) * D, H * D, mine, T, dK * scale, D)
    for e in range(0, E, EXACT):
        dV = tl.zeros((EXACT, EXACT), tl.float32)
        for i in range(start, end, EXACT):
            rows = i + tl.arange(0, EXACT)
            Q = tile(q, q_t, rows, T, D)
            LSE, EXTRA = of_rows(lse, bh, rows, T), of_rows(extra, bh, rows, T)
            t, _ = exponents(Q, k, k_t, v + e, v_t, LSE, EXTRA, rows, mine, span, c, T, D)
            g, G = shares(t, y + e, dy + e, dy_t, rows, T, H * E)
            dV += tl.sum(G * g, 0)
        put(dv + (b * T * H + h) * E + e, H * E, mine, T, dV, EXACT)


# -----------------------------------------------------------------------------
# from PyTorch

SMALL = BEFORE_HOPPER = False
if torch.cuda.is_available():  # shared memory of a block: 99 KiB on GeForce, 163 on A100, 227 on H100
    SMALL = torch.cuda.get_device_properties().shared_memory_per_block_optin < 2**17
    BEFORE_HOPPER = torch.cuda.get_device_capability() < (9, 0)


def blocks(D: int, E: int, laser: bool, dtype: torch.dtype) -> tuple[dict, dict]:
    """The sizes of blocks, and the warps, of forward and backward kernels for heads of this width."""
    if INTERPRETED.value:  # small ones, so that there are several
        return {"M": 64, "N": 32}, {"M": 32, "N": 64}
    wide = max(D, E) > 64
    warps, tight = {"num_warps": 8 if wide else 4}, wide and SMALL
    if dtype == torch.float32:  # chosen for its digits, not for speed
        stages = 1 if tight else 2
        return {"M": 64, "N": 32, "num_stages": stages} | warps, {"M": 32, "N": 32, "num_stages": 1} | warps
    stages, back = (1, 1) if tight else (2 if laser and wide else 3, 2)
    return {"M": 128, "N": 64, "num_stages": stages} | warps, {"M": 64, "N": 64, "num_stages": back} | warps


def chunk(D: int, E: int, dtype: torch.dtype) -> tuple[int, dict]:
    """The tokens of a chunk of beta's sums, and the warps."""
    if INTERPRETED.value:
        return 16, {}
    if dtype == torch.float32:
        return 32, {"num_warps": 8, "num_stages": 1}
    return (128, {"num_warps": 8}) if max(D, E) > 32 else (64, {"num_warps": 4})


def by_time(like: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty (B, H, T, width) whose memory is (B, T, H, width), as a layer's projections need it."""
    B, H, T, _ = like.shape
    return like.new_empty(B, T, H, width, dtype=dtype).transpose(1, 2)


def in_time(x: torch.Tensor) -> torch.Tensor:
    """x in by_time's memory layout; a tensor saved for the backward pass may come back in another one."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def as_planned(dy: torch.Tensor) -> torch.Tensor:
    """dy with strides to rely on: torch.compile plans with those of y, but dy may come with others."""
    usable = dy.stride(-1) == 1 and dy.shape[2] * dy.stride(2) < 2**31
    return dy if usable and not torch.compiler.is_compiling() else in_time(dy)


class Flash(torch.autograd.Function):
    """(q, k, v, span, scale, laser) -> y: each query sees its own key and `span` keys before it."""

    @staticmethod
    def forward(ctx, q, k, v, span, scale, laser):
        (B, H, T, D), E = q.shape, v.shape[-1]
        split = laser and v.dtype == torch.bfloat16
        y, lse = by_time(q, E, v.dtype), q.new_empty(B * H, T, dtype=torch.float32)
        values = lo = v
        shift = wide = lse
        x = y
        if laser:
            least, most = (t.float() for t in v.aminmax(dim=-2))
            shift, wide = most.contiguous(), ((most - least).amax(-1) > LASER_RANGE).int().flatten()
            x, values = by_time(q, E, torch.float32), by_time(q, E, v.dtype)
            lo = by_time(q, E, v.dtype) if split else values
            exp_kernel[triton.cdiv(T, 64), B * H](v, shift, values, lo, *v.stride()[:3], H, T, E, 64, split)
        strides = (*q.stride()[:3], *k.stride()[:3])
        heads = span, scale * math.log2(math.e), H, T, D, E
        sizes, _ = blocks(D, E, laser, v.dtype)
        forward_kernel[triton.cdiv(T, sizes["M"]), B * H](
            q, k, values, lo, shift, y, x, lse, *strides, *values.stride()[:3], *heads,
            **sizes, SHORT=span < T, LASER=laser, SPLIT=split,
        )  # fmt: skip
        if laser:
            exact_forward_kernel[triton.cdiv(T, EXACT.value), B * H](
                q, k, v, lse, torch.empty_like(lse), y, wide, *strides, *v.stride()[:3], *heads
            )
        ctx.save_for_backward(q, k, v, x, lse, shift, wide)
        ctx.choices = span, scale, laser, split
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v, x, lse, shift, wide = ctx.saved_tensors
        span, scale, laser, split = ctx.choices
        (B, H, T, D), E = q.shape, v.shape[-1]
        dy, x = as_planned(dy), in_time(x)
        dq, dk, dv = (by_time(q, t.shape[-1], t.dtype) for t in (q, k, v))
        delta, g, values, lo = torch.empty_like(lse), dy, v, v
        _, sizes = blocks(D, E, laser, v.dtype)
        rows = triton.cdiv(T, 64), B * H
        if laser:
            g, values = by_time(q, E, v.dtype), by_time(q, E, v.dtype)
            lo = by_time(q, E, v.dtype) if split else values
            exp_kernel[rows](v, shift, values, lo, *v.stride()[:3], H, T, E, 64, split)
        delta_kernel[rows](dy, x, g, delta, *dy.stride()[:3], H, T, E, 64, laser)
        strides = (*q.stride()[:3], *k.stride()[:3])
        heads = span, scale * math.log2(math.e), scale, H, T, D, E
        main = (*strides, *values.stride()[:3], *g.stride()[:3], *heads)
        kind = sizes | {"SHORT": span < T, "LASER": laser, "SPLIT": split}
        dk_dv_kernel[triton.cdiv(T, sizes["N"]), B * H](q, k, values, lo, g, lse, delta, dk, dv, *main, **kind)
        dq_kernel[triton.cdiv(T, sizes["M"]), B * H](q, k, values, lo, g, lse, delta, dq, *main, **kind)
        if laser:
            grid = triton.cdiv(T, EXACT.value), B * H
            exact, logs = by_time(q, E, torch.float32), (lse, torch.empty_like(lse))
            mine = (*strides, *v.stride()[:3])
            exact_forward_kernel[grid](q, k, v, *logs, exact, wide, *mine, *heads[:2], *heads[3:])
            mine = (*mine, *dy.stride()[:3], *heads)
            exact_backward_kernel[grid](q, k, v, *logs, exact, dy, dq, dk, dv, wide, *mine)
        return dq, dk, dv, None, None, None


# -----------------------------------------------------------------------------
# beta in linear time: sums.Beta's sums in chunks of N tokens. The scale is applied to products, not to queries


@triton.jit
def dot_wide(a, b, SPLIT: tl.constexpr):
    """a b for b in float32 and a in its own precision, as if both were in float32: SPLIT makes b a sum of two."""
    if SPLIT:
        high = rounded(b, a.dtype)
        y = dot(a, high) + dot(a, rounded(b - high.to(tl.float32), a.dtype))
    else:
        y = dot(a, b)
    return y


@triton.jit(do_not_specialize=VARYING)
def sums_kernel(
    x, y, z, out, x_b, x_h, x_t, y_b, y_h, y_t, H, T, D: tl.constexpr, E: tl.constexpr, N: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Of N tokens of a head [x^T y | x^T x] or, with weights z of the tokens, [x^T y | x^T z x]: (D, E + D)."""
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = head_of(bh, H)
    rows = part * N + tl.arange(0, N)
    X, Y = tile(x + b * x_b + h * x_h, x_t, rows, T, D), tile(y + b * y_b + h * y_h, y_t, rows, T, E)
    Z = X
    if WEIGHTED:
        weights = of_rows(z, bh, rows, T)
        Z = rounded(X.to(tl.float32) * weights[:, None], X.dtype)
    out += (bh.to(tl.int64) * tl.num_programs(0) + part) * D * (E + D)
    put(out, E + D, tl.arange(0, D), D, dot(tl.trans(X), Y), E)
    put(out + E, E + D, tl.arange(0, D), D, dot(tl.trans(X), Z), D)


@triton.jit(do_not_specialize=VARYING)
def before_kernel(x, n, SIZE: tl.constexpr, STEP: tl.constexpr, REVERSE: tl.constexpr):
    """Each of the n parts of x (heads, n, SIZE) becomes the sum of those before it, or (REVERSE) after it."""
    x += tl.program_id(1).to(tl.int64) * n * SIZE + tl.program_id(0) * STEP + tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.float32)
    for i in range(n):
        where = x + (n - 1 - i if REVERSE else i) * SIZE
        here = tl.load(where)
        tl.store(where, total)
        total += here


@triton.jit(do_not_specialize=VARYING)
def beta_forward_kernel(
    q, k, v, before, y, norm, divisor, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, scale, eps, H, T,
    D: tl.constexpr, E: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """y of N tokens of a head, ||s||, and ||s|| as a divisor: not below its rounding error, as in sums.Beta."""
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = head_of(bh, H)
    rows, wide = part * N + tl.arange(0, N), tl.arange(0, D)
    before += (bh.to(tl.int64) * tl.num_programs(0) + part) * D * (E + D)
    Q, K = tile(q + b * q_b + h * q_h, q_t, rows, T, D), tile(k + b * k_b + h * k_h, k_t, rows, T, D)
    G = tile(before + E, E + D, wide, D, D)
    x = Q.to(tl.float32)
    past = tl.maximum(tl.sum(dot_wide(Q, G, SPLIT) * x, 1), 0.0)
    trace = tl.sum(tl.load(before + E + wide * (E + D) + wide), 0)
    s = tl.where(rows[:, None] >= rows[None, :], dot(Q, tl.trans(K)) * scale, 0.0)
    r = tl.sqrt(past * scale * scale + tl.sum(s * s, 1))
    V = tile(v + b * v_b + h * v_h, v_t, rows, T, E)
    Y = dot_wide(Q, tile(before, E + D, wide, D, E), SPLIT) * scale + dot(rounded(s, V.dtype), V)
    put(y + (b * T * H + h) * E, H * E, rows, T, Y / (1 + r)[:, None], E)
    least = tl.sqrt(tl.maximum(eps * scale * scale * trace * tl.sum(x * x, 1), 1e-30))
    mine = bh.to(tl.int64) * T + rows
    tl.store(norm + mine, r, mask=rows < T)
    tl.store(divisor + mine, tl.maximum(r, least), mask=rows < T)


@triton.jit(do_not_specialize=VARYING)
def beta_rows_kernel(
    dy, y, norm, divisor, p, z, dy_b, dy_h, dy_t, H, T, E: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """p = dy / (1 + ||s||) and z = -(p y) / ||s|| of N tokens of a head: a = [p | z q]."""
    rows, bh = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1)
    b, h = head_of(bh, H)
    here, mine = bh.to(tl.int64) * T + rows, (b * T * H + h) * E
    r = tl.load(norm + here, mask=rows < T, other=0.0)
    P = tile(dy + b * dy_b + h * dy_h, dy_t, rows, T, E).to(tl.float32) / (1 + r)[:, None]
    py = tl.sum(P * tile(y + mine, H * E, rows, T, E).to(tl.float32), 1)
    put(p + mine, H * E, rows, T, P, E)
    tl.store(z + here, -py / tl.load(divisor + here, mask=rows < T, other=1.0), mask=rows < T)


@triton.jit(do_not_specialize=VARYING)
def beta_backward_kernel(
    q, k, v, before, after, p, z, dq, dk, dv, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, scale, H, T,
    D: tl.constexpr, E: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The gradients of N tokens of a head; before is [S | G], after sum q^T [p | z q] of the tokens after these."""
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = head_of(bh, H)
    rows, wide = part * N + tl.arange(0, N), tl.arange(0, D)
    here = (bh.to(tl.int64) * tl.num_programs(0) + part) * D * (E + D)
    before, after = before + here, after + here
    Q, K = tile(q + b * q_b + h * q_h, q_t, rows, T, D), tile(k + b * k_b + h * k_h, k_t, rows, T, D)
    V = tile(v + b * v_b + h * v_h, v_t, rows, T, E)
    P = tile(p + (b * T * H + h) * E, H * E, rows, T, E)
    Z = of_rows(z, bh, rows, T)
    s = tl.where(rows[:, None] >= rows[None, :], dot(Q, tl.trans(K)) * scale, 0.0)
    R = tile(after, E + D, wide, D, E)
    dV = dot_wide(K, R, SPLIT) * scale + dot(tl.trans(rounded(s, P.dtype)), P)
    put(dv + (b * T * H + h) * E, H * E, rows, T, dV, E)
    aw = tl.where(rows[:, None] >= rows[None, :], dot(P, tl.trans(V)) + Z[:, None] * s, 0.0)
    aw = rounded(aw, K.dtype)
    dQ = dot_wide(P, tl.trans(tile(before, E + D, wide, D, E)), SPLIT) + dot(aw, K)
    dQ += dot_wide(Q, tile(before + E, E + D, wide, D, D), SPLIT) * (Z * scale)[:, None]
    put(dq + (b * T * H + h) * D, H * D, rows, T, dQ * scale, D)
    dK = dot_wide(V, tl.trans(R), SPLIT) + dot(tl.trans(aw), Q)
    dK += dot_wide(K, tile(after + E, E + D, wide, D, D), SPLIT) * scale  # the sum is symmetric
    put(dk + (b * T * H + h) * D, H * D, rows, T, dK * scale, D)


class Beta(torch.autograd.Function):
    """(q, k, v, scale) -> y = beta(s) v of q, k (B, H, T, D), v (B, H, T, E), with the equations of sums.Beta."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        (B, H, T, D), E = q.shape, v.shape[-1]
        N, options = chunk(D, E, v.dtype)
        grid, split = (triton.cdiv(T, N), B * H), v.dtype != torch.float32
        y, before = by_time(q, E, v.dtype), Beta.sums(k, v, None, N, reverse=False)
        norm, divisor = (q.new_empty(B * H, T, dtype=torch.float32) for _ in range(2))
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        eps = 2.0**-16 if split else torch.finfo(torch.float32).eps
        beta_forward_kernel[grid](
            q, k, v, before, y, norm, divisor, *strides, scale, eps, H, T, D, E, N, split, **options
        )
        ctx.save_for_backward(q, k, v, before, y, norm, divisor)
        ctx.choices = scale, N, split
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v, before, y, norm, divisor = ctx.saved_tensors
        scale, N, split = ctx.choices
        (B, H, T, D), E = q.shape, v.shape[-1]
        dy, y = as_planned(dy), in_time(y)
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        p, z = by_time(q, E, v.dtype), torch.empty_like(norm)
        dq, dk, dv = (by_time(q, t.shape[-1], t.dtype) for t in (q, k, v))
        beta_rows_kernel[triton.cdiv(T, 64), B * H](dy, y, norm, divisor, p, z, *dy.stride()[:3], H, T, E, 64)
        after = Beta.sums(q, p, z, N, reverse=True)
        beta_backward_kernel[triton.cdiv(T, N), B * H](
            q, k, v, before, after, p, z, dq, dk, dv, *strides, scale, H, T, D, E, N, split, **chunk(D, E, v.dtype)[1]
        )
        return dq, dk, dv, None

    @staticmethod
    def sums(x, y, z, N: int, reverse: bool) -> torch.Tensor:
        """[x^T y | x^T z x] of all tokens before each chunk of N, or after it: (B H, chunks, D, E + D), float32."""
        (B, H, T, D), E = x.shape, y.shape[-1]
        n, size = triton.cdiv(T, N), D * (E + D)
        out = x.new_empty(B * H, n, D, E + D, dtype=torch.float32)
        strides = (*x.stride()[:3], *y.stride()[:3])
        sums_kernel[n, B * H](
            x, y, out if z is None else z, out, *strides, H, T, D, E, N, z is not None, **chunk(D, E, x.dtype)[1]
        )
        before_kernel[size // 256, B * H](out, n, size, 256, reverse)
        return out


def fits(core: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> bool:
    """Whether the kernels of a core take these inputs."""
    here = q.is_cuda or INTERPRETED.value
    alike = q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float32)  # float16 would overflow
    same = q.shape == k.shape and q.shape[:3] == v.shape[:3] and q.device == k.device == v.device
    far = (x.shape[2] * max(x.stride(2), x.shape[1] * x.shape[3]) for x in (q, k, v))  # sizes of inputs, outputs
    few = q.shape[0] * q.shape[1] < 2**16 and max(far) < 2**31  # a GPU's limits
    if core == "beta":  # no window, not too few tokens, no heads too wide for a GPU's registers or memory
        most = 32 if v.dtype == torch.float32 else 64 if SMALL or BEFORE_HOPPER else 128
        few = few and window is None and q.shape[-2] >= LINEAR_FROM and max(q.shape[-1], v.shape[-1]) <= most
    return here and alike and same and few and q.shape[-1] in WIDTHS and v.shape[-1] in WIDTHS


def use(model: torch.nn.Module, definition: Callable) -> None:
    """Makes a GPT's attention use these kernels for all inputs that they take. definition: its ATTENTION[name].

    Raises UserError if they would take none of the model's inputs, or if the definition was edited.
    """
    c, layers = model.config.resolved(), [block.attn for block in model.transformer.h]
    name, D, E = c.attention, c.head_dim, (1 + c.differential) * c.head_dim
    groups = [group for layer in layers for group in layer.groups]
    extra = [sum(scheme.extra for scheme in group.schemes) for group in groups]
    wide = D + min(extra)
    whose = f" ({min(extra)} of these for {c.position if c.decay == 'none' else 'the decay'})" if min(extra) else ""
    refuse((wrong, f"Triton's kernels would not be used: {why}") for wrong, why in (
        (not torch.cuda.is_available() and not INTERPRETED.value, "they are for CUDA"),
        (name not in KERNEL, f"attention={name!r} has no Triton kernel, but {', '.join(KERNEL)} have"),
        (c.short_attention not in (None, name),
         f"they take one attention, but short heads have {c.short_attention!r} and long ones {name!r}"),
        (bool(c.attn_dropout),
         f"they cannot drop attention weights, and attn_dropout is {c.attn_dropout}: set --attn_dropout=0"),
        (all(any(scheme.biased for scheme in group.schemes) for group in groups),
         f"they take no bias by distance, and position={c.position!r} has one"),
        (name == "beta" and any(extra), "beta's kernel knows no decay"),
        (not {wide, E} <= {*WIDTHS},
         f"queries are {wide} wide{whose} and values {E}; the kernels take the widths {WIDTHS}"),
        (name == "beta" and ("L" not in c.heads or c.block_size < LINEAR_FROM),
         f"beta's kernel is for long heads and a block_size of {LINEAR_FROM} or more"),
        (not unchanged(name, definition),
         f"they compute the original attention={name!r}, but its definition in model.py was edited"),
    ))  # fmt: skip
    for group in groups:
        group.core = KERNEL[name](group.core)


def by_kernel(core: str, run: Callable) -> Callable:
    """KERNEL[core]: fast -> the same attention, by run(q, k, v, span, scale) where `fits` says so, else by fast."""

    def kernel(fast: Callable) -> Callable:
        def kernels(q, k, v, *, window=None, scale=None, bias=None, decay=None, dropout=0.0, **far):
            if bias is None and decay is None and not dropout and fits(core, q, k, v, window):
                q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
                scale, T = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[-2]
                with torch.autocast(q.device.type, enabled=False):
                    return run(q, k, v, T if window is None else min(window, T), scale)
            return fast(q, k, v, window=window, scale=scale, bias=bias, decay=decay, dropout=dropout, **far)

        return kernels

    return kernel


KERNEL: dict[str, Callable] = {
    "softmax": by_kernel("softmax", lambda *x: Flash.apply(*x, False)),
    "laser": by_kernel("laser", lambda *x: Flash.apply(*x, True)),
    "beta": by_kernel("beta", lambda q, k, v, span, scale: Beta.apply(q, k, v, scale)),
}
