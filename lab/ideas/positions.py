"""Two positions for short texts, by distances between tokens: Shaw's vectors and T5's numbers.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.positions --position=t5

and --position=relative.

Both give the attention a bias, so memory grows with T^2. Shapes: B batch, H heads, T time, Tq
queries, D head width, Dv width of values.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attention.scores import at_least_float32, distances, plain_form
from attention.trial import alike, fixed_inputs
from positions import POSITION, Scheme

# -----------------------------------------------------------------------------
# Shaw


class Relative(Scheme):
    """Adds a learned vector for each distance to the keys, and another one to the values.

    s_ij = q_i (k_j + a_k[i - j]), where q_i a_k is computed apart, as a bias, and
    y_i = sum_j w_ij (v_j + a_v[i - j]) (Shaw et al. 2018, equations 3 to 5). Distances above
    max_distance share a vector. For short texts: memory grows with T^2, long heads' time with T^3.
    """

    biased = True
    defaults = {"max_distance": 16}  # the paper's

    def __init__(self, c):
        super().__init__()
        n = c.max_distance + 1
        D = c.head_dim
        self.scale = c.scale
        self.k = nn.Parameter(0.02 * torch.randn(n, D))
        self.v = nn.Parameter(0.02 * torch.randn(n, 2 * D if c.differential else D))

    @staticmethod
    def refuses(c, definitions):
        for name, definition in definitions.items():
            yield (
                not linear_in_values(definition),
                "position='relative' adds a vector to the values for each distance: the attention "
                f"must be linear in its values, and {name} is not. Use rope, alibi, t5, learned, "
                "sinusoidal or none",
            )

    def forward(self, q, k, group, past):
        T = q.shape[-2]
        by_distance = self.scale * (q @ self.k.to(q.dtype).mT)  # (B, H, T, n)
        index = self.place(T, past + T, q.device)
        bias = by_distance.gather(-1, index.expand(*q.shape[:2], -1, -1))  # (B, H, T, past + T)
        around = functools.partial(with_vectors, self.v, self.place)
        return q, k, {"bias": bias, "around": around}

    def place(self, Tq: int, T: int, device: torch.device) -> Tensor:
        """Which of the n vectors belongs to query i and key j, (Tq, T)."""
        return distances(Tq, T, device).clamp(0, len(self.k) - 1)


def with_vectors(vectors: Tensor, place: Callable, definition: Callable) -> Callable:
    """A definition that is linear in its values, with vectors (n, Dv) added to the values.

    place: Relative.place.
    """

    def run(s, seen, v, **arguments):
        y = definition(s, seen, with_one_hot(v), **arguments)
        y, weights = y.split((v.shape[-1], v.shape[-2]), dim=-1)
        index = place(*s.shape[-2:], s.device).expand_as(weights)  # (B, H, Tq, T)
        n = len(vectors)
        by_place = weights.new_zeros(*weights.shape[:-1], n).scatter_add(-1, index, weights)
        return y + by_place @ vectors.to(y.dtype)  # (B, H, Tq, n) @ (n, Dv)

    return run


def with_one_hot(v: Tensor) -> Tensor:
    """[v | I], (B, H, T, Dv + T), in float32 or wider: an attention turns I into its weights."""
    one_hot = torch.eye(v.shape[-2], device=v.device, dtype=v.dtype).expand(*v.shape[:-1], -1)
    return at_least_float32(torch.cat((v, one_hot), dim=-1))


@functools.cache
def linear_in_values(definition: Callable) -> bool:
    """Whether y is linear in v."""
    plain = plain_form(definition)
    q, k, v = fixed_inputs(1, definition)
    other = v.flip(-2)
    return alike(plain(q, k, v + other), plain(q, k, v) + plain(q, k, other))


# -----------------------------------------------------------------------------
# T5


class T5(Scheme):
    """Adds a learned number per head and bucket of distances to the scores (Raffel et al. 2019).

    Section 2.1. Memory grows with T^2.
    """

    biased = True
    shared = True
    defaults = {"max_distance": 128}  # the paper's
    buckets = 32

    def __init__(self, c):
        super().__init__()
        self.table = nn.Embedding(self.buckets, c.n_head)
        bucket = t5_bucket(torch.arange(c.max_distance + 1), c.max_distance)
        self.register_buffer("bucket", bucket, persistent=False)

    @classmethod
    def refuses(cls, c, definitions):
        least = cls.buckets // 2 + 1
        yield (
            c.max_distance is not None and c.max_distance < least,
            f"max_distance={c.max_distance} must be at least {least} for position='t5'",
        )
        yield from super().refuses(c, definitions)

    def forward(self, q, k, group, past):
        T = q.shape[-2]
        end = past + T
        distance = torch.arange(end, device=q.device).clamp(max=len(self.bucket) - 1)
        by_distance = self.table(self.bucket[distance]).T[group.q]  # (H, past + T)
        index = distances(T, end, q.device).clamp(min=0)  # (T, past + T)
        return q, k, {"bias": by_distance[None, :, index]}  # (1, H, T, past + T)


def t5_bucket(distance: Tensor, max_distance: int) -> Tensor:
    """The bucket of each distance: one for each below 16, then 16 more, wider by a factor each."""
    exact = T5.buckets // 2
    ratio = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact)
    wide = exact + (ratio * (T5.buckets - exact)).long()
    return torch.where(distance < exact, distance, wide.clamp(max=T5.buckets - 1))


POSITION["relative"] = (None, Relative)
POSITION["t5"] = (None, T5)
