"""Scores, masks and biases: all that a definition of attention in model.py needs.

Shapes: B batch, H heads, D width of queries and keys, Dv width of values, T keys, Tq queries: those of the last Tq of
the T tokens. In training Tq = T.
"""

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from errors import NotFinite

# A decorator: torch.compile leaves the function as it is. torch.compiler.disable does the same, but it imports all of
# torch.compile at once, which takes longer than everything else that this project imports; PyTorch itself uses this.
uncompiled: Callable = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or x itself in float64: the precision in which scores and sums are computed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def visible(q, k, window: int | None, causal: bool = True, seen: torch.Tensor | None = None) -> torch.Tensor:
    """True where query i sees key j: (Tq, T) or, with `seen`, (B, 1, Tq, T).

    These are the keys with 0 <= i - j <= window, or j <= i without a window. If the attention is not causal: the keys
    with |i - j| <= window, or all. seen (B, 1, 1, T): False where a key is padding, which no query sees. Only a query
    that would see nothing but padding does see it: its output means nothing, but it is finite.
    """
    Tq, T = q.shape[-2], k.shape[-2]
    distance = torch.arange(T - Tq, T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        mask = mask & (distance.abs() <= window)
    if seen is None:
        return mask
    return torch.where((mask & seen).any(-1, keepdim=True), mask & seen, mask)


def scores(q: torch.Tensor, k: torch.Tensor, scale: float | None, bias: "torch.Tensor | ByDistance | None"):
    """s = scale q k^T + bias, not masked yet, in float32 or wider (also under autocast): (B, H, Tq, T).

    scale: 1 / sqrt(D) if None. bias: a tensor that broadcasts to the scores, or a ByDistance.
    """
    with torch.autocast(q.device.type, enabled=False):
        s = at_least_float32(q) @ at_least_float32(k).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if isinstance(bias, ByDistance):
        bias = bias.dense(q.shape[-2], k.shape[-2])
    return s if bias is None else s + bias


def decayed(x: torch.Tensor, decay: torch.Tensor | None) -> torch.Tensor:
    """x gamma^|i - j| for query i and key j, gamma = exp(-decay): (B, H, Tq, T).

    decay >= 0: a number for each head, (H, 1, 1) or what broadcasts to (B, H, 1, 1); None: x itself.
    """
    if decay is None:
        return x
    Tq, T = x.shape[-2:]
    distance = torch.arange(T - Tq, T, device=x.device)[:, None] - torch.arange(T, device=x.device)
    return x * (-decay * distance.abs()).exp()


class ByDistance:
    """A bias that depends on how far key j lies behind query i: values[..., min(i - j, n - 1)].

    values (B or 1, H, Tq or 1, n): one number for each distance (and, where there are Tq rows, for each query), but
    not for each pair of tokens. v (n, Dv), if given, is added to the values of the keys in the same way:
    y_i = sum_j w_ij (v_j + v[min(i - j, n - 1)]), for a core that is linear in its values.
    """

    def __init__(self, values: torch.Tensor, v: torch.Tensor | None = None):
        self.values = values
        self.v = v

    def per_query(self, change: Callable) -> "ByDistance":
        """The same bias with change(values), if values has a row for each query; else the bias itself."""
        return self if self.values.shape[-2] == 1 else ByDistance(change(self.values), self.v)

    def dense(self, Tq: int, T: int) -> torch.Tensor:
        """The bias as a tensor, (B or 1, H, Tq, T). Its numbers for keys after the query mean nothing."""
        x = self.values[..., :T]
        x = torch.cat((x[..., -1:].expand(*x.shape[:-1], T - x.shape[-1]), x.flip(-1)), dim=-1)
        # Each row now ends with distance 0, the distance of row i from key i. Writing rows of T + 1 numbers and
        # reading them T at a time moves each row one step to the right, to its place (Huang et al. 2018, "skewing").
        x = F.pad(x.expand(*x.shape[:-2], Tq, T), (0, 1)).flatten(-2)
        return x[..., Tq - 1 : Tq - 1 + Tq * T].unflatten(-1, (Tq, T))

    def attend(self, core: Callable, q, k, v, **settings) -> torch.Tensor:
        """y of a core with this bias and with the values by distance."""
        Tq, T, Dv = q.shape[-2], k.shape[-2], v.shape[-1]
        bias = self.dense(Tq, T)
        if self.v is None:
            return core(q, k, v, bias=bias, **settings)
        # For one-hot values the output of a core that is linear in its values is its weights. From the keys before the
        # last `near` ones every query has the largest distance, so the sum of their weights is enough.
        n = min(len(self.v) - 1, T)
        near = Tq + n - 1
        columns = torch.eye(near, dtype=v.dtype, device=v.device)[-T:]
        columns = F.pad(F.pad(columns, (0, 0, T - len(columns), 0)), (0, 1), value=1.0)
        y = core(q, k, torch.cat((v, columns.expand(*v.shape[:-2], -1, -1)), -1), bias=bias, **settings)
        y, weights, total = y.split((Dv, near, 1), dim=-1)
        # The steps of `dense`, backwards: each row now has the weights of the distances n - 1 to 0.
        weights = F.pad(weights.flatten(-2), (0, Tq)).unflatten(-1, (Tq, near + 1))[..., :n].flip(-1)
        far = total - weights.sum(-1, keepdim=True)
        return y + torch.cat((weights, far), dim=-1) @ self.v[: n + 1].to(v.dtype)


def part_of(bias: torch.Tensor | ByDistance | None, queries: slice, keys: slice, rows: slice | list = slice(None)):
    """The part of a bias for these queries and keys and these rows of the batch. Tensors hold all queries and keys."""
    if bias is None:
        return None
    if isinstance(bias, ByDistance):
        values = bias.values if len(bias.values) == 1 else bias.values[rows]
        return ByDistance(values, bias.v).per_query(lambda x: x[..., queries, :])
    bias = bias if len(bias) == 1 else bias[rows]
    return bias[..., queries, keys]


def spelled_out(definition: Callable) -> Callable:
    """The definition, extended to take a ByDistance as its bias, also one with v."""

    def attend(q, k, v, *, bias=None, **settings):
        if isinstance(bias, ByDistance):
            return bias.attend(definition, q, k, v, **settings)
        return definition(q, k, v, bias=bias, **settings)

    return attend


def check_finite(x: torch.Tensor) -> None:
    """Raises NotFinite if x, which q, k and v are taken from, holds a NaN or an infinity.

    It checks only on a CPU, because a GPU would have to wait, and only in a single process: if one of several raised,
    the others would wait for ever.
    """
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not alone:
        return
    if not math.isfinite(x.detach().sum().item()) and not x.isfinite().all():
        raise NotFinite("attention: q, k or v holds values that are not finite; has the model diverged?")


def check_shapes(q: torch.Tensor, v: torch.Tensor, y: torch.Tensor) -> None:
    """Raises ValueError if a core's output y for these queries and values does not have the shape (B, H, Tq, Dv)."""
    owed = (*q.shape[:-1], v.shape[-1])
    if y.shape != owed:
        gave = f"this attention gave {tuple(y.shape)} for q {tuple(q.shape)} and v {tuple(v.shape)}, not {owed}"
        whole = "an attention that needs all queries at once cannot decode with a cache: use_cache=False"
        raise ValueError(f"{gave}, an output for each query ({whole})")
