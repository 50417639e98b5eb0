"""Shaw's and T5's positions, by distances between tokens; ALiBi's slopes, learned; sinusoids.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.positions --position=t5

and --position=relative, --position=sinusoidal, --decay=learned.

Shaw's and T5's are for short texts: they change each score, so time and memory grow with T^2, in
short heads and in beta too. Importing this file adds them to parts.POSITION and parts.DECAY.
Shapes: B batch, H heads, T time, Tq queries, D head width.
"""

import functools
import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attention.scores import distances, has_argument, plain_form
from errors import UserError
from parts import DECAY, POSITION, ALiBi, Scheme, turns

# -----------------------------------------------------------------------------
# Shaw


class Relative(Scheme):
    """Adds a learned vector for each distance to the keys, and another one to the values.

    s_ij = q_i (k_j + a_k[i - j]) and y_i = sum_j w_ij (v_j + a_v[i - j]) (Shaw et al. 2018,
    equations 3 to 5). Distances above max_distance share a vector. Long heads' time grows with T^3.
    """

    max_distance = 16  # the paper's

    def __init__(self, c):
        super().__init__()
        n = self.max_distance + 1
        self.scale = c.scale
        self.k = nn.Parameter(0.02 * torch.randn(n, c.head_dim))
        self.v = nn.Parameter(0.02 * torch.randn(n, c.head_dim))

    def forward(self, q, k, heads, past):
        return q, k, {"vectors": (self.k, self.v)}

    def place(self, distance: Tensor) -> Tensor:
        """Which of the n vectors belongs to a distance i - j."""
        return distance.clamp(0, self.max_distance)

    def wrap(self, definition):
        if not linear_in_values(definition):
            raise UserError(
                "position='relative' adds a vector to the values for each distance: the attention "
                f"must be linear in its values, and {definition.__name__} is not. Use rope, alibi, "
                "t5, learned, sinusoidal or none"
            )

        @functools.wraps(definition)
        def with_vectors(s, seen, v, *, q, vectors=None, **arguments):
            if has_argument(definition, "q"):
                arguments["q"] = q
            if vectors is None:
                return definition(s, seen, v, **arguments)
            of_keys, of_values = vectors
            Tq, T = s.shape[-2:]

            # scores
            place = self.place(distances(Tq, T, s.device)).expand_as(s)
            q = q[..., -of_keys.shape[-1] :]  # without the dimensions that a decay puts before it
            by_place = self.scale * q @ of_keys.to(q.dtype).mT  # (B, H, Tq, n)
            s = s + by_place.gather(-1, place)

            # values: an attention turns the identity into its weights
            identity = torch.eye(T, device=v.device, dtype=v.dtype).expand(*v.shape[:-1], -1)
            y = definition(s, seen, torch.cat((v, identity), dim=-1), **arguments)
            y, weights = y.split((v.shape[-1], T), dim=-1)
            of_place = torch.zeros_like(by_place, dtype=y.dtype).scatter_add(-1, place, weights)
            repeats = v.shape[-1] // of_values.shape[-1]  # 2 where a pair of heads shares a value
            return y + of_place @ of_values.to(y.dtype).repeat(1, repeats)

        # it is called with q too
        parameters = {**inspect.signature(definition).parameters}
        parameters.setdefault("q", inspect.Parameter("q", inspect.Parameter.KEYWORD_ONLY))
        with_vectors.__signature__ = inspect.Signature([*parameters.values()])
        return with_vectors


@functools.cache
def linear_in_values(definition: Callable) -> bool:
    """Whether y of 2 v is 2 y, on a few numbers."""
    attend = plain_form(definition)
    q, k, v = torch.arange(60.0, device="cpu").sin().view(3, 1, 1, 5, 4)
    return torch.allclose(attend(q, k, 2 * v), 2 * attend(q, k, v))


# -----------------------------------------------------------------------------
# T5


class T5(Scheme):
    """Adds a learned number per head and bucket of distances to the scores (Raffel et al. 2019).

    Section 2.1. Layers share the numbers, which FSDP cannot: several processes need --parallel=ddp.
    """

    max_distance = 128  # the paper's
    buckets = 32

    def __init__(self, c):
        super().__init__()
        # c is one object for all layers of a model
        self.table = vars(c).setdefault("t5_table", nn.Embedding(self.buckets, c.n_head))

    def forward(self, q, k, heads, past):
        return q, k, {"by_bucket": self.table.weight.T[heads.indices]}  # (H, buckets)

    def place(self, distance: Tensor) -> Tensor:
        """The bucket of a distance i - j."""
        return t5_bucket(distance.clamp(min=0), self.max_distance)

    def wrap(self, definition):
        if has_argument(definition, "fade"):
            raise UserError(
                "position='t5' adds a number to scores, so that far keys can weigh less. In "
                f"{definition.__name__} a low score is no small weight, but a negative or a large "
                "one: use alibi or rope"
            )

        @functools.wraps(definition)
        def with_buckets(s, seen, v, *, by_bucket=None, **arguments):
            if by_bucket is not None:
                s = s + by_bucket[:, self.place(distances(*s.shape[-2:], s.device))]
            return definition(s, seen, v, **arguments)

        return with_buckets


def t5_bucket(distance: Tensor, max_distance: int) -> Tensor:
    """The bucket of each distance: one for each below 16, then 16 more, wider by a factor each."""
    exact = T5.buckets // 2
    ratio = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact)
    wide = exact + (ratio * (T5.buckets - exact)).long()
    return torch.where(distance < exact, distance, wide.clamp(max=T5.buckets - 1))


# -----------------------------------------------------------------------------
# ALiBi


class LearnedALiBi(ALiBi):
    """ALiBi with slopes that begin at ALiBi's and are trained, for each head and layer."""

    def __init__(self, c):
        super().__init__(c)
        self.log_slopes = nn.Parameter(self.slopes.log())

    def slopes_of(self, heads):
        return self.log_slopes[heads.indices].exp()


# -----------------------------------------------------------------------------
# sinusoids


class Sinusoids(nn.Module):
    """p[2i] = sin(pos / 10000^(2i / C)), p[2i + 1] = cos of it (Vaswani et al. 2017, section 3.5).

    Before these are added, the token embedding is multiplied by sqrt(C) (section 3.4).
    """

    def __init__(self, c):
        super().__init__()
        self.register_buffer("table", torch.empty(0, c.n_embd), persistent=False)
        self.resize(c.block_size)

    def forward(self, x, pos):
        return x * x.shape[-1] ** 0.5 + self.table[pos].to(x.dtype)

    def resize(self, block_size: int) -> None:
        turn = turns(0, block_size, self.table.shape[1], 10000.0, self.table.device)
        self.table = turn.flip(-1).flatten(1).to(self.table)  # (n, C / 2, 2) -> (n, C)


POSITION |= {
    "sinusoidal": (Sinusoids, None),
    "relative": (None, Relative),
    "t5": (None, T5),
}
DECAY["learned"] = LearnedALiBi
