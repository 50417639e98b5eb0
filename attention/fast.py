"""Fast forms of the attentions of model.py: the same functions in less time and memory.

windowed(definition) makes short heads of any attention cost O(T window). FAST has a function for each attention that
can be made faster still: it takes the definition and returns a fast form. fast_form(name, definition) compares the fast
form with the definition, and returns it. If they differ, the definition runs: your edit is never ignored.

Shapes are those of scores.py. Every form has the arguments and the result of a definition (model.py, ATTENTION). A
"core" is an attention function that other code calls: a definition or a form.
"""

import ast
import functools
import hashlib
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention.scores import ByDistance, at_least_float32, part_of, scores, spelled_out, visible
from configurator import note

CHUNK = 64  # tokens that are computed together; smaller chunks are so many that they cost more than they save
ROWS = 2**23  # numbers that a few queries may need at once: 32 MiB in float32; on a GPU four times as many
LASER_RANGE = 60.0  # largest range of a channel: exp(-60) = 9e-27, and its inverse, are far from float32's limits
BETA_LINEAR_FROM = 256  # tokens; for fewer, the quadratic form of beta is as fast
BETA_ROWS = 8192  # queries of all heads that a CPU computes at once, so that their tensors stay in its cache

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

    def attend(q, k, v, *, window=None, scale=None, bias=None, **dropout):
        (B, H, Tq, D), T = q.shape, k.shape[-2]
        if isinstance(bias, torch.Tensor):
            bias = bias.expand(torch.broadcast_shapes(bias.shape, (Tq, T)))
        if window is not None and window >= T - 1:
            window = None
        c = CHUNK * max(1, math.ceil((window or 0) / (2 * CHUNK)))
        first = c * math.ceil((window or 0) / c)
        if window is None or min(T, 2 * Tq) <= first + c:
            return core(q, k, v, window=window, scale=scale, bias=bias, **dropout)
        if Tq < T:  # many new tokens after a cache
            pad = functools.partial(F.pad, pad=(0, 0, T - Tq, 0))
            if bias is not None:
                bias = bias.per_query(pad) if isinstance(bias, ByDistance) else pad(bias)
            return attend(pad(q), k, v, window=window, scale=scale, bias=bias, **dropout)[..., -Tq:, :]
        settings = {"window": window, "scale": scale, **dropout}
        y = []
        if first:
            few = part_of(bias, slice(first), slice(first))
            y.append(core(q[..., :first, :], k[..., :first, :], v[..., :first, :], bias=few, **settings))
        pad = -T % c  # rows after the last token; they are cut off in the end
        q_blocks = pad_rows(q, pad)[..., first:, :].reshape(B * H, -1, c, D)
        k_blocks = Windows.apply(pad_rows(k, pad).flatten(0, 1), first, window, c)
        v_blocks = Windows.apply(pad_rows(v, pad).flatten(0, 1), first, window, c)
        bias = bias_blocks(bias, (B, H), pad, first, window, c)
        blocks = core(q_blocks, k_blocks, v_blocks, bias=bias, **settings)
        y.append(blocks.reshape(B, H, -1, v.shape[-1])[..., : T - first, :])
        return torch.cat(y, dim=-2)

    return attend


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
        Tq = q.shape[-2]
        rows = (ROWS if q.device.type == "cpu" else 4 * ROWS) // max(1, numbers(q, k, v, bias))
        if isinstance(bias, ByDistance) and bias.v is not None:
            rows = min(rows, max(CHUNK, len(bias.v)))  # so ByDistance.attend needs one-hot values for few keys
        if rows >= Tq:
            return core(q, k, v, bias=bias, **settings)
        if isinstance(bias, ByDistance):
            warnings.warn("t5 and relative have no fused kernel: a few queries run at a time, slowly", stacklevel=4)
        return in_parts(max(1, rows), q, k, v, bias, settings)

    @torch.compiler.disable  # torch.compile would unroll the loop
    def in_parts(rows, q, k, v, bias, settings):
        Tq, past = q.shape[-2], k.shape[-2] - q.shape[-2]
        y = []
        for start in range(0, Tq, rows):
            end = min(start + rows, Tq)
            few = q[..., start:end, :], k[..., : past + end, :], v[..., : past + end, :]
            part = functools.partial(core, bias=part_of(bias, slice(start, end), slice(past + end)), **settings)
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

    def attend(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0):
        if window is None and bias is None:
            return sdpa(q, k, v, scale=scale, dropout=dropout)
        return in_windows(q, k, v, window=window, scale=scale, bias=bias, dropout=dropout)

    return attend


def sdpa(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0):
    """F.scaled_dot_product_attention, with a mask only where is_causal is not enough."""
    Tq, T, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if D != Dv and not (bias is not None and bias.requires_grad):  # fused kernels take one width, give no dbias
        q, k, v = (F.pad(x, (0, max(D, Dv) - x.shape[-1])) for x in (q, k, v))
    mask = None
    if window is not None or bias is not None or 1 < Tq < T:
        mask = visible(q, k, window)
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, -math.inf)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None and Tq > 1, scale=D**-0.5 if scale is None else scale
    )
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

    def attend(q, k, v, *, window=None, scale=None, bias=None):
        q, k, values = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        settings = {"window": window, "scale": scale, "bias": bias}
        with torch.autocast(q.device.type, enabled=False):
            if wider_than(values, LASER_RANGE):
                return in_log_space(q, k, values, **settings).to(v.dtype)
            shift = values.detach().amax(-2, keepdim=True)  # (B, H, 1, Dv)
            y = softmax(q, k, (values - shift).exp(), **settings)
            return (y.log() + shift).to(v.dtype)

    return attend


@torch.compiler.disable
def wider_than(v: torch.Tensor, limit: float) -> bool:
    """Whether a channel of v (B, H, T, Dv) has a range (max - min over time) above limit. If so, it warns, once."""
    v = v.detach()
    wide = (v.amax(-2) - v.amin(-2)).max().item() > limit
    if wide:
        sums = "LASER computes its sums in log space, slowly"
        warnings.warn(f"a channel of the values has a range above {limit:.0f}: {sums}", stacklevel=3)
    return wide


# -----------------------------------------------------------------------------
# beta


def beta_by_sums(definition: Callable) -> Callable:
    """y = s / (1 + ||s||) v (the beta post) in linear time, exactly.

    Neither s v nor ||s|| needs the single scores. With s_j = q . k_j, over the keys j that are seen:

        sum_j s_j v_j = q S,  S = sum_j k_j^T v_j        ||s||^2 = sum_j s_j^2 = q G q^T,  G = sum_j k_j^T k_j

    so the running sums S and G, which are D x Dv and D x D, hold all of the past. With dropped weights, a bias or a
    window there are no such sums; then, and for few tokens, the definition runs. Rounding errors are relative to
    ||q|| ||k||. Where ||s|| is a hundred times smaller (similar keys, and a query almost orthogonal to them), four
    digits of a float32 are right; with the definition, six are.
    """
    quadratic = windowed(definition, for_bias)

    def attend(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0):
        few = q.shape[-2] < max(k.shape[-2], BETA_LINEAR_FROM)
        if few or window is not None or bias is not None or dropout:
            return quadratic(q, k, v, window=window, scale=scale, bias=bias, dropout=dropout)
        return beta_linear(q, k, v, scale=scale)[0]

    return attend


def beta_linear(q, k, v, *, scale=None, state=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, state) of BetaLinear for unscaled queries, in float32 or wider also under autocast; y in v's precision."""
    with torch.autocast(q.device.type, enabled=False):
        y, state = BetaLinear.apply(scaled(q, scale), at_least_float32(k), at_least_float32(v), state)
    return y.to(v.dtype), state


def scaled(q: torch.Tensor, scale: float | None) -> torch.Tensor:
    """scale q, in float32 or wider: its products with the keys are the scores."""
    return at_least_float32(q) * (q.shape[-1] ** -0.5 if scale is None else scale)


class BetaLinear(torch.autograd.Function):
    """(q, k, v, state) -> (y, state): beta attention from running sums, in chunks.

    q, k (B, H, T, D), v (B, H, T, Dv); state (B, H, D, Dv + D): [S | G] of the tokens before, None for none;
    it has no gradient. With the values widened to w = [v | k]:

        forward    [N_i | q_i G_i] = sum_j<=i (q_i . k_j) w_j      r_i^2 = q_i G_i q_i^T      y_i = N_i / (1 + r_i)
        backward   a_i = [dy_i | -(dy_i . y_i) q_i / r_i] / (1 + r_i)
                   dq_i = sum_j<=i (a_i . w_j) k_j      dk_j = sum_i>=j (a_i . w_j) q_i
                   dv_j = sum_i>=j (q_i . k_j) a_i[:Dv]

    These are four linear attentions: within a chunk a masked product, between chunks a running sum. A CPU computes a
    few thousand rows at a time, so that they stay in its cache.
    """

    @staticmethod
    def forward(ctx, q, k, v, state):
        B, H, T, _ = q.shape
        ctx.step = T
        if q.device.type == "cpu":
            ctx.step = max(1, BETA_ROWS // (B * H * CHUNK)) * CHUNK
        outputs, saved = [], []
        for parts in zip(*(x.split(ctx.step, dim=2) for x in (q, k, v)), strict=True):
            y, state, needed = BetaLinear.forward_part(*parts, state)
            outputs.append(y)
            saved += needed
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(state)
        return torch.cat(outputs, dim=2), state

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
        """(y, state, tensors for the backward pass) of the tokens that follow those of the state."""
        (B, H, T, D), Dv = q.shape, v.shape[-1]
        c = min(max(CHUNK, D), T)
        q, k, v = (pad_rows(x, -T % c).reshape(-1, c, x.shape[-1]) for x in (q, k, v))  # (B H chunks, c, D)
        w = torch.cat((v, k), dim=-1)
        before, state = running_sums((k.mT @ w).view(B, H, -1, D, Dv + D), state)
        past, s = q @ before, (q @ k.mT).tril_()
        r = (q * past[..., Dv:]).sum(-1, keepdim=True).clamp_(min=0).sqrt_()
        r = torch.hypot(r, torch.linalg.vector_norm(s, dim=-1, keepdim=True))
        y = torch.baddbmm(past[..., :Dv], s, v).div_(1 + r)
        return y.view(B, H, -1, Dv)[:, :, :T], state, (q, w, before, s, r, y)

    @staticmethod
    def backward_part(dy, q, w, before, s, r, y, state):
        """(dq, dk, dv, state). state: the sum of q_i^T a_i of later tokens; the returned one includes these tokens."""
        B, H, T, Dv = dy.shape
        k = w[..., Dv:]
        # r is at most |q| sqrt(trace G). Far below that it is only rounding error, and dividing by it would blow the
        # error up. So the divisor is at least `least`; the number that it divides is as small as r.
        trace = before[..., Dv:].diagonal(0, -2, -1).sum(-1)[:, None, None]
        eps = torch.finfo(r.dtype).eps
        least = (q.square().sum(-1, keepdim=True) * trace).mul_(eps).clamp_(min=eps**4).sqrt_()
        dv = pad_rows(dy, -T % y.shape[1]).reshape(y.shape) / (1 + r)
        a = torch.cat((dv, q * ((dv * y).sum(-1, keepdim=True) / -torch.maximum(r, least))), dim=-1)
        after, state = running_sums((q.mT @ a).view(B, H, -1, *before.shape[1:]), state, reverse=True)
        aw = (a @ w.mT).tril_()
        dq = (a @ before.mT).baddbmm_(aw, k)
        dk = (w @ after.mT).baddbmm_(aw.mT, q)
        dv = (k @ after[..., :Dv]).baddbmm_(s.mT, dv)
        return *(x.view(B, H, -1, x.shape[-1])[:, :, :T] for x in (dq, dk, dv)), state


def running_sums(x: torch.Tensor, state: torch.Tensor | None, reverse: bool = False) -> tuple:
    """(state + sum_m<n x_m for each n of dimension 2, state + the sum of all); m > n in reverse.

    x (B, H, chunks, D, E); state (B, H, D, E), None for 0; the first result is (B H chunks, D, E). Sum n leaves x_n
    out: the rounding of a large x_n would cost the earlier terms their precision.
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


# -----------------------------------------------------------------------------
# Which form runs

FAST: dict[str, Callable] = {
    "softmax": fused_softmax,
    "laser": laser_by_exp,
    "beta": beta_by_sums,
}
# The fingerprint of the definition that each fast form was written for. tests/test_forms.py says how to renew it.
WRITTEN_FOR = {"softmax": "15acaefcf836f259", "laser": "4a58817178a72575", "beta": "61cbe997ad752e79"}


@functools.cache
def fast_form(name: str, definition: Callable, whole: bool = False, short: bool = True) -> Callable:
    """The form of ATTENTION[name] that runs: FAST[name](definition) or, where there is none, windowed(definition).

    A form is used if it computes what the definition computes. Otherwise the definition runs, and a line says so.
    whole: the definition needs all queries and keys at once (model.WHOLE). short: whether there are short heads.
    """
    if name in FAST and unchanged(name, definition):
        return FAST[name](definition)
    if whole:
        return spelled_out(definition)
    general = windowed(definition)
    try:
        check_causal(name, definition)
    except Exception:  # a bug, or an attention for a fixed number of heads: the model's call will show the error
        return general
    return general if not short or alike_in_blocks(name, definition) else spelled_out(definition)


@functools.cache
def alike_in_blocks(name: str, definition: Callable) -> bool:
    """Whether `windowed` may cut this attention into blocks. If not, a line says so."""
    try:
        alike_there = same(windowed(definition), definition)
    except Exception:  # an error of the blocks: `check_causal` has called the definition as a whole, without one
        alike_there = False
    if not alike_there:
        note(f"attention={name!r}: outputs on blocks of a text differ from those on all of it: short heads cost T^2")
    return alike_there


@functools.cache
def unchanged(name: str, definition: Callable) -> bool:
    """Whether FAST[name] computes what the definition computes. If not, somebody has edited it, and a line says so.

    Comparing outputs cannot prove that two functions are equal. So the code of the definition, without comments and
    docstrings, must be the code that the fast form was written for, and the outputs must agree as well.
    """
    if fingerprint(definition) == WRITTEN_FOR[name] and same(FAST[name](definition), definition):
        return True
    note(f"attention={name!r}: its definition was edited, so the definition runs, not its fast form: more slowly")
    return False


def fingerprint(definition: Callable) -> str:
    """A checksum of the code of a definition and of the functions that it uses, without comments, docstrings, names.

    Empty if the code cannot be read, if another function wraps it, or if its file has other functions by these names.
    """
    codes, made_of = [], (scores, visible, at_least_float32)
    names = getattr(definition, "__globals__", {})
    if hasattr(definition, "__wrapped__") or any(names.get(f.__name__, f) is not f for f in made_of):
        return ""
    for function in (definition, *made_of):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):  # typed into an interpreter, or no function at all
            return ""
        if not isinstance(tree, ast.FunctionDef):  # a lambda
            return ""
        body = tree.body[1:] if ast.get_docstring(tree) else tree.body
        codes += [ast.unparse(part) for part in (*tree.decorator_list, tree.args, *body)]
    return hashlib.sha256("\n".join(codes).encode()).hexdigest()[:16]


@functools.cache
def check_causal(name: str, definition: Callable) -> None:
    """Prints a line, once, if a query's output changes when later tokens or earlier queries are left out."""
    T, n = 40, 25
    q, k, v, _ = (x.detach() for x in fixed_inputs(T))
    y = definition(q, k, v)
    first = definition(q[..., :n, :], k[..., :n, :], v[..., :n, :])
    last = definition(q[..., n:, :], k, v)
    if not alike(first, y[..., :n, :]) or not alike(last, y[..., n:, :]):
        note(
            f"attention={name!r}: a query's output changes with later tokens, or with their number. "
            "If it sees later tokens, its losses mean nothing"
        )


def same(fast: Callable, definition: Callable) -> bool:
    """Whether two attentions give the same outputs and gradients, in float64 on the CPU.

    The program's own random numbers stay as they are.
    """
    short, long = 2 * CHUNK + 2, BETA_LINEAR_FROM  # enough for blocks, and for beta's sums
    cases = [(long, {}), (short, {"window": 20, "scale": 0.3, "bias": True})]
    if takes_dropout(definition):
        cases.append((short, {"dropout": 0.3}))
    for T, settings in cases:
        found = []
        for attend in (fast, definition):
            with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                q, k, v, dy = fixed_inputs(T)
                more = {"bias": (q @ k.mT).detach()} if "bias" in settings else {}
                y = attend(q, k, v, **settings | more)
                found.append((y, *torch.autograd.grad(y, (q, k, v), dy, allow_unused=True, materialize_grads=True)))
        if not all(alike(a, b) for a, b in zip(*found, strict=True)):
            return False
    return True


def fixed_inputs(T: int) -> list[torch.Tensor]:
    """q, k (1, 2, T, 4), v and dy (1, 2, T, 3), which look random, to compare attentions with. Scores go up to 50."""
    x = torch.arange(1, 28 * T + 1, dtype=torch.float64, device="cpu").square().mul(0.37).sin()
    q, k, v, dy = (part.view(1, 2, T, -1) for part in x.split((8 * T, 8 * T, 6 * T, 6 * T)))
    return [part.detach().requires_grad_() for part in (10 * q, 3 * k, v, dy)]


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal but for the rounding of float64."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-9 * max(1.0, b.abs().max().item()))


@functools.cache
def linear_in_values(definition: Callable) -> bool:
    """Whether y is linear in v, as an attention must be for values by distance (ByDistance.v)."""
    q, k, v, other = (x.detach() for x in fixed_inputs(9))
    try:
        return alike(definition(q, k, v + other), definition(q, k, v) + definition(q, k, other))
    except Exception:  # a bug, or an attention for a fixed number of heads: the model's call will show the error
        return True


@functools.cache
def takes_dropout(definition: Callable) -> bool:
    """Whether an attention can drop weights: whether its function takes `dropout`."""
    return "dropout" in inspect.signature(definition).parameters


def linear(config: object) -> bool:
    """Whether training a GPTConfig takes linear time in long heads: beta, unless something needs its weights."""
    c = config.resolved()
    return c.attention == "beta" and not c.long_bias and c.block_size >= BETA_LINEAR_FROM and not c.attn_dropout
