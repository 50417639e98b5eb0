"""beta and beta_squared in linear time: exactly, since all they need of the past is a few sums.

Shapes are those of scores.py: q, k (B, H, T, D), v (B, H, T, Dv). The tokens are computed in chunks
of c. Within a chunk the scores are computed as in the definition; all earlier chunks enter through
their sums. With a decay, the scores of beta and the squared scores of beta_squared are multiplied
by gamma^(i - j), gamma = exp(-decay). This power is a product of three, over these distances:

    from key j to the last token of its chunk
    over the whole chunks in between
    from the last token before its own chunk to query i

No factor is above 1, so nothing overflows.

Read by_sums and Linear first, then Beta; BetaSquared is Beta over products of two features.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.fast import CHUNK, general_form
from attention.scores import at_least_float32

LINEAR_FROM = 256  # tokens; for fewer, the quadratic form is as fast
ROWS_AT_ONCE = 8192  # queries of all heads that a CPU computes at once: they stay in its cache
FEATURES_AT_ONCE = 2**27  # of all queries that a GPU computes at once: 512 MiB in float32


def by_sums(sums: type, definition: Callable) -> Callable:
    """The form of an attention's long heads by its running sums (Beta or BetaSquared).

    For few tokens, for fewer queries than keys (a cache of keys and values), and while weights are
    dropped, the definition runs. A cache of running sums does not come here.
    """
    general = general_form(definition)

    def attend(q, k, v, *, dropout=0.0, **settings):  # scale, decay
        Tq, D = q.shape[-2:]
        if k.shape[-2] == Tq >= sums.linear_from(D) and not dropout:
            return linear_attention(sums, q, k, v, **settings)[0]
        return general(q, k, v, dropout=dropout, **settings)

    return attend


def linear_attention(
    sums: type, q, k, v, *, scale=None, decay=None, state=None
) -> tuple[Tensor, Tensor]:
    """(y, state) of `Linear` for unscaled queries, in float32 or wider also under autocast.

    decay: one number per head, (H, 1, 1), or None. y is in v's precision. A single token after
    others (in decoding) needs no chunks.
    """
    with torch.autocast(q.device.type, enabled=False):
        q = scaled(q, scale)
        k = at_least_float32(k)
        values = at_least_float32(v)
        if state is not None and q.shape[-2] == 1:
            y, state = sums.one_token(q, k, values, decay, state)
        else:
            if decay is not None:
                decay = decay.to(q.dtype).expand(q.shape[1], 1, 1)
            y, state = Linear.apply(sums, q, k, values, decay, state)
    return y.to(v.dtype), state


def scaled(q: Tensor, scale: float | None) -> Tensor:
    """scale q, in float32 or wider: its products with the keys are the scores."""
    return at_least_float32(q) * (q.shape[-1] ** -0.5 if scale is None else scale)


class Linear(torch.autograd.Function):
    """(sums, q, k, v, decay, state) -> (y, state), for q, k (B, H, T, D) and v (B, H, T, Dv).

    decay (H, 1, 1) or None. state (B, H, features, columns): the sums over the tokens before, or
    None; it has no gradient.
    """

    @staticmethod
    def forward(ctx, sums, q, k, v, decay, state):
        ctx.sums = sums
        ctx.sizes = part_sizes(sums, q)
        c = sums.chunk(q.shape[-1])
        outputs = []
        saved = []
        for part in zip(*(x.split(ctx.sizes, dim=2) for x in (q, k, v)), strict=True):
            fade = Fade(decay, min(c, part[0].shape[2]), q)
            y, state, needed = sums.forward(*map(fade.chunks, part), fade, state)
            outputs.append(fade.tokens(y))
            saved += needed
        ctx.save_for_backward(decay, *saved)
        ctx.mark_non_differentiable(state)
        return torch.cat(outputs, dim=2), state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, _):
        decay, *saved = ctx.saved_tensors
        n = len(saved) // len(ctx.sizes)  # tensors of each part
        state = None
        d_decay = 0.0
        gradients = []  # (dq, dk, dv) of each part, the last one first
        with torch.autocast(dy.device.type, enabled=False):
            for dy_part in reversed(dy.split(ctx.sizes, dim=2)):
                needed = saved[-n:]
                saved = saved[:-n]
                fade = Fade(decay, needed[0].shape[1], dy)
                fade.learned = ctx.needs_input_grad[4]
                *of_part, state = ctx.sums.backward(fade.chunks(dy_part), *needed, fade, state)
                gradients.append(map(fade.tokens, of_part))
                d_decay += fade.gradient
        dq, dk, dv = (torch.cat(x[::-1], dim=2) for x in zip(*gradients, strict=True))
        return None, dq, dk, dv, d_decay if fade.learned else None, None


def part_sizes(sums: type, q: Tensor) -> list[int]:
    """How many of q's T tokens are computed at once: whole chunks; the rest is a part of its own.

    A CPU computes a few thousand rows at a time, which stay in its cache; a GPU all that fit.
    """
    B, H, T, D = q.shape
    c = sums.chunk(D)
    rows = ROWS_AT_ONCE if q.device.type == "cpu" else FEATURES_AT_ONCE // sums.features(D)
    step = max(1, rows // max(1, B * H * c)) * c
    whole = T // c * c
    sizes = [min(step, whole - start) for start in range(0, whole, step)]
    if T > whole:
        sizes.append(T - whole)
    return sizes


class Fade:
    """What a decay does to the weights of one part of the tokens, cut into chunks of c.

    decay (H, 1, 1), or None for no decay. Chunks of a tensor are (B H n, c, E). If m whole chunks
    lie between key j and query i, their distance is i - j = (i' + 1) + m c + (c - 1 - j'), where i'
    and j' are their places in their chunks. A power p is a number, or one for each of the E
    columns: these are decayed by gamma^(p distance).
    """

    learned = False  # whether `derive` is to set the gradient of the decay
    gradient = 0.0
    from_before = to_end = distance = None

    def __init__(self, decay: Tensor | None, c: int, like: Tensor):
        self.B, self.H = like.shape[:2]
        self.c = c
        self.decay = decay
        if decay is not None:
            place = torch.arange(c, dtype=decay.dtype, device=decay.device)[:, None]
            self.from_before = place + 1  # (c, 1): from the end of the chunk before to a query
            self.to_end = c - 1 - place  # (c, 1): from a key to the end of its chunk
            self.distance = (place - place.T).clamp(min=0)  # (c, c)

    def chunks(self, x: Tensor) -> Tensor:
        """x (B, H, T, E), cut into chunks: (B H n, c, E)."""
        return x.reshape(-1, self.c, x.shape[-1])

    def per_head(self, x: Tensor) -> Tensor:
        """x (B H n, ., .) of all chunks as (B, H, n, ., .)."""
        return x.view(self.B, self.H, -1, *x.shape[1:])

    def tokens(self, x: Tensor) -> Tensor:
        """x (B H n, c, E) of all chunks as (B, H, T, E)."""
        return self.per_head(x).flatten(2, 3)

    def over(self, distance: Tensor | None, x: Tensor, power=1) -> Tensor:
        """x (., c, E), decayed over a distance: (c, 1), or (c, c) where E = c."""
        if self.decay is None:
            return x
        factor = (-self.decay * (power * distance)).exp()  # (H, c, E)
        return (self.per_head(x) * factor[:, None]).flatten(0, 2)

    def within(self, x: Tensor) -> Tensor:
        """x (., c, c) of the queries and keys of one chunk, decayed over their distances."""
        return self.over(self.distance, x)

    def since(self, x: Tensor, power=1) -> Tensor:
        """x (., c, E) of queries, decayed since the end of the chunk before."""
        return self.over(self.from_before, x, power)

    def until(self, x: Tensor, power=1) -> Tensor:
        """x (., c, E) of keys, decayed until the end of their own chunk."""
        return self.over(self.to_end, x, power)

    def whole(self, power=1) -> Tensor:
        """What a whole chunk of decay leaves of a sum, (H, 1, its columns or 1)."""
        return (-self.c * self.decay * power).exp()

    def sums(
        self, x: Tensor, w: Tensor, state: Tensor | None, power=1, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(the state before each chunk, (B H n, D, E); the state after all of them).

        The state (B, H, D, E), or None for 0, is the sum of x^T w over the chunks before, x (., c,
        D) and w (., c, E). A chunk decays the state, and then adds its own sum. reverse: from the
        last chunk to the first. A chunk's state leaves its own sum out: the rounding of a large sum
        would cost the earlier terms their precision.
        """
        own = self.per_head(x.mT @ w)  # (B, H, n, D, E)
        order = range(own.shape[2])[:: -1 if reverse else 1]
        start = torch.zeros_like(own[:, :, 0]) if state is None else state
        gamma = own.new_ones(1) if self.decay is None else self.whole(power)
        if by_loops(own):  # cumsum over a middle dimension takes several times as long
            before = torch.empty_like(own)
            before[:, :, order[0]] = start
            for a, b in itertools.pairwise(order):
                torch.addcmul(own[:, :, a], before[:, :, a], gamma, out=before[:, :, b])
        else:
            in_order = own.flip(2) if reverse else own
            before = torch.cat((start[:, :, None], in_order[:, :, :-1]), dim=2)
            before = before.cumsum(2) if self.decay is None else decayed_cumsum(before, gamma)
            before = before.flip(2) if reverse else before
        state = before[:, :, order[-1]]
        if self.decay is not None:
            state = state * gamma
        return before.flatten(0, 2), state + own[:, :, order[-1]]

    def derive(self, within, of_queries, of_keys, around, power=1) -> None:
        """Sets the gradient of the decay: -sum (i - j) w_ij dw_ij over all pairs, w_ij decayed.

        The three terms of a distance are counted apart. within (., c, c): w dw of the pairs of one
        chunk. of_queries (., c, E): their sum over E is that of w dw over a query's keys in earlier
        chunks; of_keys: over a key's queries in later chunks. around: the product of the sums
        before a chunk and after it, which has all pairs around it, but for the chunk's decay.
        """
        terms = (
            (within, self.distance),
            (of_queries, self.from_before),
            (of_keys, self.to_end),
            (around, self.c * self.whole(power)),
        )
        of_terms = [(self.per_head(x).sum((0, 2)) * factor).sum((-2, -1)) for x, factor in terms]
        self.gradient = -sum(of_terms)[:, None, None]


def decayed_cumsum(x: Tensor, gamma: Tensor) -> Tensor:
    """The sums over chunks a <= b of gamma^(b - a) x_a, by log2(n) steps for n chunks."""
    step = 1
    while step < x.shape[2]:
        earlier = x[:, :, :-step] * gamma[:, None] ** step
        x = torch.cat((x[:, :, :step], x[:, :, step:] + earlier), dim=2)
        step *= 2
    return x


def by_loops(x: Tensor) -> bool:
    """Whether many small steps are best: on a CPU, without torch.compile.

    A GPU takes as long to start a step as to do it; torch.compile would unroll the steps.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


# -----------------------------------------------------------------------------
# beta


class Beta:
    """y = s / (1 + ||s||) v (the beta post). With s_j = q . k_j, over the keys j that are seen:

        sum_j s_j v_j = q S,          S = sum_j k_j^T v_j
        ||s||^2 = sum_j s_j^2 = q G q^T,  G = sum_j k_j^T k_j

    so the state [S | G], D x (Dv + D), holds all of the past. A decay multiplies the scores by
    gamma^(i - j), and so S by gamma and G by gamma^2 for each token. With the values widened to
    w = [v | k], and without a decay:

        forward    [N_i | q_i G_i] = sum_j<=i (q_i . k_j) w_j
                   r_i^2 = q_i G_i q_i^T      y_i = N_i / (1 + r_i)
        backward   a_i = [dy_i | -(dy_i . y_i) q_i / r_i] / (1 + r_i)
                   dq_i = sum_j<=i (a_i . w_j) k_j      dk_j = sum_i>=j (a_i . w_j) q_i
                   dv_j = sum_i>=j (q_i . k_j) a_i[:Dv]

    Rounding errors are relative to ||q|| ||k||. Where ||s|| is a hundred times smaller (similar
    keys, and a query almost orthogonal to them), four digits of a float32 are right; with the
    definition, six are.
    """

    @staticmethod
    def features(D: int) -> int:
        """The numbers of a key that the sums are made of."""
        return D

    @staticmethod
    def chunk(D: int) -> int:
        """The tokens of a chunk."""
        return max(CHUNK, D)

    @staticmethod
    def linear_from(D: int) -> int:
        """The number of tokens from which the sums are faster than the definition."""
        return LINEAR_FROM

    @staticmethod
    def state_size(D: int, Dv: int) -> int:
        """The numbers of a head's sums."""
        return D * (Dv + D)

    @staticmethod
    def one_token(q, k, v, decay, state):
        """(y, state) of one more token, for decoding.

        state: the sums of the tokens before, which are decayed by one token first. decay (H, 1, 1)
        or None.
        """
        Dv = v.shape[-1]
        if decay is not None:
            state = state * (-decay * powers(q, Dv)).exp()
        w = torch.cat((v, k), dim=-1)
        state = state + k.mT * w  # for one key `*` takes half the time of `@`
        y, qG = (q @ state).tensor_split([Dv], dim=-1)
        square = (q * qG).sum(-1, keepdim=True)
        return y / (1 + square.clamp(min=0).sqrt()), state

    @staticmethod
    def forward(q, k, v, fade: Fade, state):
        """(y, state, tensors for the backward pass) of the tokens after the state's, in chunks."""
        Dv = v.shape[-1]
        w = torch.cat((v, k), dim=-1)  # (., c, Dv + D)
        power = powers(q, Dv)
        before, state = fade.sums(k, fade.until(w, power), state, power)  # (., D, Dv + D)
        past = fade.since(q @ before, power)  # (., c, Dv + D)
        s = fade.within((q @ k.mT).tril_())  # (., c, c)
        r = (q * past[..., Dv:]).sum(-1, keepdim=True).clamp_(min=0).sqrt_()
        r = torch.hypot(r, torch.linalg.vector_norm(s, dim=-1, keepdim=True))
        y = torch.baddbmm(past[..., :Dv], s, v).div_(1 + r)
        return y, state, (q, w, before, s, r, y)

    @staticmethod
    def backward(dy, q, w, before, s, r, y, fade: Fade, state):
        """(dq, dk, dv, state), all in chunks: dq (., c, D).

        state: the sum of q_i^T a_i of later tokens; the returned one includes these tokens.
        """
        Dv = y.shape[-1]
        v, k = w.tensor_split([Dv], dim=-1)
        power = powers(q, Dv)
        # r is at most |q| sqrt(trace G). Far below that it is only rounding error, and dividing by
        # it would blow it up.
        eps = torch.finfo(q.dtype).eps
        trace = before[..., Dv:].diagonal(0, -2, -1).sum(-1)[..., None, None]
        least = (q.square().sum(-1, keepdim=True) * trace).mul_(eps).sqrt_()
        least = fade.since(least).clamp_(min=eps**2)
        p = dy / (1 + r)
        z = (p * y).sum(-1, keepdim=True) / -torch.maximum(r, least)
        a = fade.since(torch.cat((p, z * q), dim=-1), power)  # (., c, Dv + D)
        later, state = fade.sums(q, a, state, power, reverse=True)
        ds = (p @ v.mT).tril_().addcmul_(z, s)  # of the decayed scores, (., c, c)
        dq = a @ before.mT
        dk = fade.until(w, power) @ later.mT
        if fade.learned:
            fade.derive(ds * s, q * dq, k * dk, before * later, power)
        ds = fade.within(ds)
        dv = fade.until(k @ later[..., :Dv]).baddbmm_(s.mT, p)
        return dq.baddbmm_(ds, k), dk.baddbmm_(ds.mT, q), dv, state


def powers(q: Tensor, Dv: int) -> Tensor:
    """The power of gamma for each column of the sums: 1 for the first Dv, 2 for the others."""
    return F.pad(q.new_ones(Dv), (0, q.shape[-1]), value=2.0)


# -----------------------------------------------------------------------------
# beta_squared


class BetaSquared:
    """y = sum_j s_j^2 v_j / (1 + sum_j s_j^2): linear attention over products of two features.

        s_j^2 = (q . k_j)^2 = sum_a<=b m_ab q_a q_b k_ja k_jb,   m = 1 if a = b, else 2

    so with f(k) the D (D + 1) / 2 products of a key, and w_j = [v_j | 1], the state is the sum of
    f(k_j)^T w_j. It has D (D + 1) / 2 x (Dv + 1) numbers, as many as the keys and values of about
    (D + 1)^2 / 4 tokens. Within a chunk s^2 is computed from the scores, so longer chunks than
    beta's are best. The functions are those of Beta.
    """

    @staticmethod
    def features(D: int) -> int:
        return D * (D + 1) // 2

    @staticmethod
    def chunk(D: int) -> int:
        return max(CHUNK, 8 * D)

    @staticmethod
    def linear_from(D: int) -> int:
        """As Beta's; measured on a CPU: 200 tokens for D = 16, 700 for 32, 1500 for 64."""
        return LINEAR_FROM if D <= 16 else 24 * D

    @staticmethod
    def state_size(D: int, Dv: int) -> int:
        return BetaSquared.features(D) * (Dv + 1)

    @staticmethod
    def one_token(q, k, v, decay, state):
        if decay is not None:
            state = state * (-decay).exp()
        state = state + products(k).mT * with_ones(v)
        y = (products(q) * how_often(q).T) @ state
        return y[..., :-1] / (1 + y[..., -1:]), state

    @staticmethod
    def forward(q, k, v, fade: Fade, state):
        w = with_ones(v)
        before, state = fade.sums(products(k), fade.until(w), state)
        weighted = before.mul_(how_often(q))
        weights = fade.within((q @ k.mT).tril_().square_())  # (., c, c)
        y = fade.since(products(q) @ weighted).baddbmm_(weights, w)  # (., c, Dv + 1)
        total = 1 + y[..., -1:]
        y = y[..., :-1] / total
        return y, state, (q, k, v, weighted, total, y)

    @staticmethod
    def backward(dy, q, k, v, weighted, total, y, fade: Fade, state):
        """(dq, dk, dv, state). state: sum of f(q_i)^T a_i of later tokens, then of these too."""
        w = with_ones(v)
        p = dy / total
        a = torch.cat((p, -(p * y).sum(-1, keepdim=True)), dim=-1)
        a_since = fade.since(a)
        later, state = fade.sums(products(q), a_since, state, reverse=True)
        from_later = later * how_often(q)
        s = (q @ k.mT).tril_()
        weights = fade.within(s.square())  # (., c, c)
        d_weights = (a @ w.mT).tril_()
        dq = d_products(q, a_since @ weighted.mT)
        dk = d_products(k, fade.until(w) @ from_later.mT)
        if fade.learned:  # of degree 2: f(q) . df(q) = q . dq / 2
            fade.derive(d_weights * weights, q * dq / 2, k * dk / 2, weighted * later)
        ds = fade.within(d_weights).mul_(s).mul_(2)
        dv = fade.until(products(k) @ from_later[..., :-1]).baddbmm_(weights.mT, p)
        return dq.baddbmm_(ds, k), dk.baddbmm_(ds.mT, q), dv, state


def with_ones(v: Tensor) -> Tensor:
    """v (..., Dv) and a column of ones."""
    return F.pad(v, (0, 1), value=1.0)


def products(x: Tensor) -> Tensor:
    """x_a x_b for all a <= b: (..., D (D + 1) / 2)."""
    D = x.shape[-1]
    if by_loops(x):
        return torch.cat([x[..., a : a + 1] * x[..., a:] for a in range(D)], dim=-1)
    a, b = torch.triu_indices(D, D, device=x.device)
    return x[..., a] * x[..., b]


def d_products(x: Tensor, d: Tensor) -> Tensor:
    """The gradient of x, d (..., D (D + 1) / 2) being that of products(x)."""
    D = x.shape[-1]
    dx = torch.zeros_like(x)
    if by_loops(x):
        for a, part in enumerate(d.split([D - a for a in range(D)], dim=-1)):
            dx[..., a:].addcmul_(x[..., a : a + 1], part)
            dx[..., a] += (part * x[..., a:]).sum(-1)
        return dx
    a, b = torch.triu_indices(D, D, device=x.device)
    return dx.index_add(-1, a, d * x[..., b]).index_add(-1, b, d * x[..., a])


def how_often(q: Tensor) -> Tensor:
    """How often each product is in (q . k)^2, (D (D + 1) / 2, 1): once if a = b, else twice."""
    D = q.shape[-1]
    a, b = torch.triu_indices(D, D, device=q.device)
    return (1 + (a < b))[:, None]
