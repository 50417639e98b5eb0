"""beta and beta_squared in linear time: what they need of the past is a few running sums, so nothing is approximated.

Shapes are those of scores.py: q, k (B, H, T, D), v (B, H, T, Dv). The tokens are computed in chunks of c. Within a
chunk the scores are computed as in the definition; all earlier chunks enter through their sums. With a decay, the
scores of beta and the squared scores of beta_squared are multiplied by gamma^(i - j), gamma = exp(-decay). A chunk
needs three powers of gamma, and none is above 1, so nothing overflows: from the last token of the chunk before to
query i, from key j to the chunk's last token, and over the whole chunk.
"""

import itertools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from attention.fast import CHUNK, in_blocks
from attention.scores import at_least_float32, plain_form

LINEAR_FROM = 256  # tokens; for fewer, the quadratic form is as fast
ROWS_AT_ONCE = 8192  # queries of all heads that a CPU computes at once, so that their tensors stay in its cache
NUMBERS_AT_ONCE = 2**27  # features of all queries that a GPU holds at once: 512 MiB in float32


def by_sums(kind: type, definition: Callable) -> Callable:
    """The fast form of an attention whose `kind` (Beta, BetaSquared) has its equations; short heads run the definition.

    With dropped weights, a bias or a window there are no such sums; then, and for few tokens, the definition runs.
    """
    quadratic = in_blocks(plain_form(definition))  # holds all scores of long heads

    def sums(q, k, v, *, window=None, scale=None, bias=None, decay=None, dropout=0.0, **far):
        alone = window is None and bias is None and not dropout
        if alone and k.shape[-2] == q.shape[-2] >= kind.linear_from(q.shape[-1]):
            return linear_attention(kind, q, k, v, scale=scale, decay=decay)[0]
        return quadratic(q, k, v, window=window, scale=scale, bias=bias, decay=decay, dropout=dropout, **far)

    return sums


def linear_attention(kind: type, q, k, v, *, scale=None, decay=None, state=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, state) of `Linear` for unscaled queries, in float32 or wider also under autocast; y in v's precision.

    decay: as a definition takes it, one number for each head, (H, 1, 1); None: no decay.
    """
    with torch.autocast(q.device.type, enabled=False):
        q = scaled(q, scale)
        if decay is not None:
            decay = decay.to(q.dtype).expand(q.shape[1], 1, 1).flatten()
        y, state = Linear.apply(kind, q, at_least_float32(k), at_least_float32(v), decay, state)
    return y.to(v.dtype), state


def scaled(q: torch.Tensor, scale: float | None) -> torch.Tensor:
    """scale q, in float32 or wider: its products with the keys are the scores."""
    return at_least_float32(q) * (q.shape[-1] ** -0.5 if scale is None else scale)


class Linear(torch.autograd.Function):
    """(kind, q, k, v, decay, state) -> (y, state), for q, k (B, H, T, D), v (B, H, T, Dv) and decay (H) or None.

    state (B, H, features, columns): the sums over the tokens before, None for none; it has no gradient.
    """

    @staticmethod
    def forward(ctx, kind, q, k, v, decay, state):
        B, H, T, D = q.shape
        ctx.kind, ctx.sizes = kind, part_sizes(kind, T, D, B * H, q.device.type == "cpu")
        outputs, saved = [], []
        for parts in zip(*(x.split(ctx.sizes, dim=2) for x in (q, k, v)), strict=True):
            fade = Fade(decay, min(kind.chunk(D), parts[0].shape[2]), q)
            y, state, needed = kind.forward(*map(fade.chunks, parts), fade, state)
            outputs.append(y.view(B, H, -1, v.shape[-1]))
            saved += needed
        ctx.save_for_backward(decay, *saved)
        ctx.mark_non_differentiable(state)
        return torch.cat(outputs, dim=2), state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, _):
        decay, *saved = ctx.saved_tensors
        n, state, grads = len(saved) // len(ctx.sizes), None, []
        d_decay = None if decay is None else torch.zeros_like(decay)
        with torch.autocast(dy.device.type, enabled=False):
            for i, part in reversed([*enumerate(dy.split(ctx.sizes, dim=2))]):
                needed = saved[n * i : n * (i + 1)]
                fade = Fade(decay, needed[0].shape[1], part)
                *d, state = ctx.kind.backward(fade.chunks(part), *needed, fade, state)
                grads.append([x.view(*dy.shape[:2], -1, x.shape[-1]) for x in d])
                if decay is not None:
                    d_decay += fade.gradient
        return None, *(torch.cat(x[::-1], dim=2) for x in zip(*grads, strict=True)), d_decay, None


def part_sizes(kind: type, T: int, D: int, heads: int, on_cpu: bool) -> list[int]:
    """How many of T tokens are computed at once: whole chunks; what is left at the end is a part of its own.

    A CPU computes a few thousand rows at a time, so that they stay in its cache; a GPU so many that they fit.
    """
    c = kind.chunk(D)
    rows = ROWS_AT_ONCE if on_cpu else NUMBERS_AT_ONCE // kind.features(D)
    step = max(1, rows // max(1, heads * c)) * c
    whole = T // c * c
    sizes = [min(step, whole - start) for start in range(0, whole, step)]
    return sizes + ([T - whole] if T > whole else [])


class Fade:
    """What a decay does to the weights of one part of the tokens, cut into chunks of c. decay (H); None: no decay.

    Chunks of a tensor are (B H n, c, E). If m whole chunks lie between key j and query i, their distance is
    i - j = (i' + 1) + m c + (c - 1 - j'), where i' and j' are their places in their chunks. A power p is a number, or
    one for each of the E columns: they are decayed by gamma^(p distance).
    """

    def __init__(self, decay: torch.Tensor | None, c: int, like: torch.Tensor):
        (self.B, self.H), self.c, self.decay = like.shape[:2], c, decay
        if decay is not None:
            self.gradient = torch.zeros_like(decay)
            self.place = torch.arange(c, dtype=decay.dtype, device=decay.device)[:, None]
            self.distance = (self.place - self.place.T).clamp(min=0)

    def chunks(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, H, T, E), cut into chunks."""
        return x.reshape(-1, self.c, x.shape[-1])

    def per_head(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers of chunks, (B H n, ., .), as (B, H, n, ., .)."""
        return x.view(self.B, self.H, -1, *x.shape[1:])

    def columns(self, *widths: int) -> torch.Tensor | None:
        """A power for each column: 1 for the first widths[0] columns, 2 for the next widths[1]."""
        if self.decay is None:
            return None
        return torch.cat([self.decay.new_full((width,), power) for power, width in enumerate(widths, start=1)])

    def over(self, distance, x: torch.Tensor, power=1) -> torch.Tensor:
        """x (., c, E), decayed over a distance: (c, 1), or (c, c) where E = c. There must be a decay."""
        factor = (-self.decay[:, None, None] * (power * distance)).exp()  # (H, c, E)
        return (self.per_head(x) * factor[:, None]).flatten(0, 2)

    def within(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers of the pairs of queries and keys of one chunk, (., c, c), decayed over their distances."""
        return x if self.decay is None else self.over(self.distance, x)

    def since(self, x: torch.Tensor, power=1) -> torch.Tensor:
        """Numbers of queries, decayed since the end of the chunk before."""
        return x if self.decay is None else self.over(self.place + 1, x, power)

    def until(self, x: torch.Tensor, power=1) -> torch.Tensor:
        """Numbers of keys, decayed until the end of their own chunk."""
        return x if self.decay is None else self.over(self.c - 1 - self.place, x, power)

    def whole(self, power=1) -> torch.Tensor | None:
        """The decay of a sum over a whole chunk, (H, 1, its columns or 1)."""
        if self.decay is None:
            return None
        return (-self.c * self.decay[:, None, None] * power).exp()

    def derive(self, within, of_queries, of_keys, before, after, power=1) -> None:
        """Adds the gradient of the decay: -sum (i - j) w_ij dw_ij over all pairs, w_ij being a decayed weight.

        The three terms of a distance are counted apart. within (., c, c): w dw of the pairs of one chunk. of_queries
        (., c, E): their sum over E is that of w dw over a query's keys in earlier chunks; of_keys: over a key's queries
        in later chunks. before, after: the sums around a chunk, whose product has all pairs that lie around it.
        """
        for x, distance in ((within, self.distance), (of_queries, self.place + 1), (of_keys, self.c - 1 - self.place)):
            self.gradient -= (self.per_head(x).sum((0, 2)) * distance).sum((-2, -1))
        around = (self.per_head(before * after).sum((0, 2)) * self.whole(power)).sum((-2, -1))
        self.gradient -= self.c * around


def running_sums(x, state: torch.Tensor | None, fade: torch.Tensor | None, reverse: bool = False) -> tuple:
    """(the state at the beginning of each chunk, the state at the end); in reverse: at the end, at the beginning.

    The state is the sum of the chunks before: x (B, H, chunks, D, E), state (B, H, D, E), None for 0. With
    fade (H, 1, 1 or E) a chunk multiplies the state by it, and then adds its x. The first result is (B H chunks, D, E).
    A chunk's state leaves its own x out: the rounding of a large x would cost the earlier terms their precision.
    """
    order = range(x.shape[2])[:: -1 if reverse else 1]
    start = torch.zeros_like(x[:, :, 0]) if state is None else state
    if by_loops(x):  # cumsum over a middle dimension takes several times as long
        sums = torch.empty_like(x)
        sums[:, :, order[0]] = start
        for a, b in itertools.pairwise(order):
            if fade is None:
                torch.add(sums[:, :, a], x[:, :, a], out=sums[:, :, b])
            else:
                torch.addcmul(x[:, :, a], sums[:, :, a], fade, out=sums[:, :, b])
    else:
        sums = torch.cat((start[:, :, None], (x.flip(2) if reverse else x)[:, :, :-1]), dim=2)
        if fade is None:
            sums = sums.cumsum(2)
        for step in (2**m for m in range((len(order) - 1).bit_length()) if fade is not None):  # log2(n) launches
            far = sums[:, :, :-step] * fade[:, None] ** step
            sums = torch.cat((sums[:, :, :step], sums[:, :, step:] + far), dim=2)
        sums = sums.flip(2) if reverse else sums
    last = sums[:, :, order[-1]]
    return sums.flatten(0, 2), (last if fade is None else last * fade) + x[:, :, order[-1]]


def by_loops(x: torch.Tensor) -> bool:
    """Whether many small steps are best: on a CPU, without torch.compile. A GPU takes as long to start one as to do it.

    torch.compile would unroll the steps, and take minutes.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


# -----------------------------------------------------------------------------
# beta


class Beta:
    """y = s / (1 + ||s||) v (the beta post). With s_j = q . k_j, over the keys j that are seen:

        sum_j s_j v_j = q S,  S = sum_j k_j^T v_j        ||s||^2 = sum_j s_j^2 = q G q^T,  G = sum_j k_j^T k_j

    so the state [S | G], D x (Dv + D), holds all of the past. A decay multiplies the scores by gamma^(i - j), and so S
    by gamma and G by gamma^2 for each token. With the values widened to w = [v | k], and without a decay:

        forward    [N_i | q_i G_i] = sum_j<=i (q_i . k_j) w_j      r_i^2 = q_i G_i q_i^T      y_i = N_i / (1 + r_i)
        backward   a_i = [dy_i | -(dy_i . y_i) q_i / r_i] / (1 + r_i)
                   dq_i = sum_j<=i (a_i . w_j) k_j      dk_j = sum_i>=j (a_i . w_j) q_i
                   dv_j = sum_i>=j (q_i . k_j) a_i[:Dv]

    Rounding errors are relative to ||q|| ||k||. Where ||s|| is a hundred times smaller (similar keys, and a query
    almost orthogonal to them), four digits of a float32 are right; with the definition, six are.
    """

    @staticmethod
    def features(D: int) -> int:
        """The numbers of a key that the sums are made of."""
        return D

    @staticmethod
    def chunk(D: int) -> int:
        return max(CHUNK, D)

    @staticmethod
    def linear_from(D: int) -> int:
        """The number of tokens from which the sums are faster than the definition."""
        return LINEAR_FROM

    @staticmethod
    def state_size(D: int, Dv: int) -> int:
        return D * (Dv + D)

    @staticmethod
    def one_token(q, k, v, decay, state) -> tuple:
        """(y, state) of one more token, as decoding needs it. state: the sums of the tokens before; they are decayed by
        the distance of one token first. decay (H, 1, 1) or None."""
        Dv, D = v.shape[-1], k.shape[-1]
        if decay is not None:
            gamma = (-decay).exp()
            state = state * torch.cat((gamma.expand(-1, 1, Dv), gamma.square().expand(-1, 1, D)), dim=-1)
        state = state + k.mT * torch.cat((v, k), dim=-1)  # for one key `*` takes half the time of `@`
        y, qG = (q @ state).split((Dv, D), dim=-1)
        square = (q * qG).sum(-1, keepdim=True)
        return y / (1 + square.clamp(min=0).sqrt()), state

    @staticmethod
    def forward(q, k, v, fade: Fade, state) -> tuple:
        """(y, state, tensors for the backward pass) of the tokens that follow those of the state, in chunks."""
        Dv, D = v.shape[-1], k.shape[-1]
        w = torch.cat((v, k), dim=-1)
        power = fade.columns(Dv, D)
        before, state = running_sums(fade.per_head(k.mT @ fade.until(w, power)), state, fade.whole(power))
        past, s = fade.since(q @ before, power), fade.within((q @ k.mT).tril_())
        r = (q * past[..., Dv:]).sum(-1, keepdim=True).clamp_(min=0).sqrt_()
        r = torch.hypot(r, torch.linalg.vector_norm(s, dim=-1, keepdim=True))
        y = torch.baddbmm(past[..., :Dv], s, v).div_(1 + r)
        return y, state, (q, w, before, s, r, y)

    @staticmethod
    def backward(dy, q, w, before, s, r, y, fade: Fade, state) -> tuple:
        """(dq, dk, dv, state). state: the sum of q_i^T a_i of later tokens; the returned one includes these tokens."""
        Dv, D = y.shape[-1], q.shape[-1]
        v, k = w.split((Dv, D), dim=-1)
        power = fade.columns(Dv, D)
        least = fade.since(rounding(q, before[..., Dv:])).clamp_(min=torch.finfo(r.dtype).eps ** 2)
        p = dy / (1 + r)
        z = (p * y).sum(-1, keepdim=True) / -torch.maximum(r, least)
        a = fade.since(torch.cat((p, z * q), dim=-1), power)
        after, state = running_sums(fade.per_head(q.mT @ a), state, fade.whole(power), reverse=True)
        ds = (p @ v.mT).tril_().addcmul_(z, s)  # of the decayed scores
        dq, dk = a @ before.mT, fade.until(w, power) @ after.mT
        if fade.decay is not None:
            fade.derive(ds * s, q * dq, k * dk, before, after, power)
        ds = fade.within(ds)
        dq, dk = dq.baddbmm_(ds, k), dk.baddbmm_(ds.mT, q)
        dv = fade.until(k @ after[..., :Dv]).baddbmm_(s.mT, p)
        return dq, dk, dv, state


def rounding(q: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """The rounding error of r = sqrt(q G q^T), (..., T, 1): a gradient divides by r or, if r is smaller, by this.

    r is at most |q| sqrt(trace G). Far below that it is only rounding error, and dividing by it would blow it up.
    """
    trace = G.diagonal(0, -2, -1).sum(-1)[..., None, None]
    return (q.square().sum(-1, keepdim=True) * trace).mul(torch.finfo(q.dtype).eps).sqrt()


# -----------------------------------------------------------------------------
# beta_squared


class BetaSquared:
    """y = sum_j s_j^2 v_j / (1 + sum_j s_j^2): linear attention over products of two features.

        s_j^2 = (q . k_j)^2 = sum_a<=b m_ab q_a q_b k_ja k_jb,   m = 1 if a = b, else 2

    so with f(k) the D (D + 1) / 2 products of a key, and w_j = [v_j | 1], the state is the sum of f(k_j)^T w_j. It has
    D (D + 1) / 2 x (Dv + 1) numbers, as many as the keys and values of about (D + 1)^2 / 4 tokens. Within a chunk s^2
    is computed from the scores, so that longer chunks than beta's are best.
    """

    @staticmethod
    def features(D: int) -> int:
        return D * (D + 1) // 2

    @staticmethod
    def chunk(D: int) -> int:
        return max(CHUNK, 8 * D)

    @staticmethod
    def linear_from(D: int) -> int:
        """The number of tokens from which the sums are faster: on a CPU 200 for D = 16, 700 for 32, 1500 for 64."""
        return LINEAR_FROM if D <= 16 else 24 * D

    @staticmethod
    def state_size(D: int, Dv: int) -> int:
        return BetaSquared.features(D) * (Dv + 1)

    @staticmethod
    def one_token(q, k, v, decay, state) -> tuple:
        """As Beta.one_token."""
        state = (state if decay is None else state * (-decay).exp()) + products(k).mT * with_ones(v)
        y = (products(q) * how_often(q.shape[-1], q).T) @ state
        return y[..., :-1] / (1 + y[..., -1:]), state

    @staticmethod
    def forward(q, k, v, fade: Fade, state) -> tuple:
        """(y, state, tensors for the backward pass) of the tokens that follow those of the state, in chunks."""
        Dv, w = v.shape[-1], with_ones(v)
        before, state = running_sums(fade.per_head(products(k).mT @ fade.until(w)), state, fade.whole())
        before.mul_(how_often(q.shape[-1], q))
        weights = fade.within((q @ k.mT).tril_().square_())
        y, total = fade.since(products(q) @ before).baddbmm_(weights, w).split((Dv, 1), dim=-1)
        total = 1 + total
        y = y / total
        return y, state, (q, k, v, before, total, y)

    @staticmethod
    def backward(dy, q, k, v, before, total, y, fade: Fade, state) -> tuple:
        """(dq, dk, dv, state). state: the sum of f(q_i)^T a_i of later tokens; the returned one includes these."""
        Dv, w = v.shape[-1], with_ones(v)
        p = dy / total
        a = torch.cat((p, -(p * y).sum(-1, keepdim=True)), dim=-1)
        a_since = fade.since(a)
        after, state = running_sums(fade.per_head(products(q).mT @ a_since), state, fade.whole(), reverse=True)
        from_after = after * how_often(q.shape[-1], q)
        s = (q @ k.mT).tril_()
        weights, d_weights = fade.within(s.square()), (a @ w.mT).tril_()
        dq, dk = d_products(q, a_since @ before.mT), d_products(k, fade.until(w) @ from_after.mT)
        if fade.decay is not None:  # of degree 2: f(q) . df(q) = q . dq / 2
            fade.derive(d_weights * weights, q * dq / 2, k * dk / 2, before, after)
        ds = fade.within(d_weights).mul_(s).mul_(2)
        dq, dk = dq.baddbmm_(ds, k), dk.baddbmm_(ds.mT, q)
        dv = fade.until(products(k) @ from_after[..., :Dv]).baddbmm_(weights.mT, p)
        return dq, dk, dv, state


def with_ones(v: torch.Tensor) -> torch.Tensor:
    """v (..., Dv) and a column of ones."""
    return F.pad(v, (0, 1), value=1.0)


def products(x: torch.Tensor) -> torch.Tensor:
    """x_a x_b for all a <= b: (..., D (D + 1) / 2)."""
    if by_loops(x):
        return torch.cat([x[..., a : a + 1] * x[..., a:] for a in range(x.shape[-1])], dim=-1)
    a, b = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return x[..., a] * x[..., b]


def d_products(x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """The gradient of x, d (..., D (D + 1) / 2) being that of products(x)."""
    D = x.shape[-1]
    if by_loops(x):
        dx = torch.zeros_like(x)
        for a, part in enumerate(d.split([D - a for a in range(D)], dim=-1)):
            dx[..., a:].addcmul_(x[..., a : a + 1], part)
            dx[..., a] += (part * x[..., a:]).sum(-1)
        return dx
    i = torch.arange(D, device=x.device)
    a, b = torch.minimum(i[:, None], i), torch.maximum(i[:, None], i)
    place = a * D - a * (a - 1) // 2 + b - a  # of x_a x_b among the products
    return (d[..., place] * (1 + (a == b)) * x[..., None, :]).sum(-1)


def how_often(D: int, like: torch.Tensor) -> torch.Tensor:
    """How often each of the products is in (q . k)^2, (D (D + 1) / 2, 1): once if a = b, else twice."""
    a, b = torch.triu_indices(D, D, device=like.device)
    return (1 + (a < b)).to(like.dtype)[:, None]


SUMS: dict[str, type] = {"beta": Beta, "beta_squared": BetaSquared}  # attentions whose past is a few running sums
