"""Attention one query at a time: no masks, no windows, no tricks. Every form of an attention is compared with it."""

from collections.abc import Callable

import torch

from attention.forms import fast_form, takes
from attention.scores import ByDistance
from model import ATTENTION

# What each means, once more: the scores s (B, H, n) of a query over the n keys that it sees, and their values
# v (B, H, n, Dv), give y (B, H, Dv). A weight is multiplied by f (H, n) before the weights are divided by their sum or
# norm. An attention that is not here is held against its own definition for one query.
ONE_QUERY: dict[str, Callable] = {
    "softmax": lambda s, v, f: ((s + f.log()).softmax(-1)[..., None] * v).sum(-2),  # = f exp(s) v / sum(f exp(s))
    "softcap": lambda s, v, f: ((50 * (s + f.log()).div(50).tanh()).softmax(-1)[..., None] * v).sum(-2),
    "laser": lambda s, v, f: ((s + f.log()).log_softmax(-1)[..., None] + v).logsumexp(-2),  # = log(softmax(s) exp(v))
    "beta": lambda s, v, f: ((s * f)[..., None] * v).sum(-2) / (1 + (s * f).norm(dim=-1, keepdim=True)),
    "beta2": lambda s, v, f: ((s.square() * f)[..., None] * v).sum(-2) / (1 + (s.square() * f).sum(-1, keepdim=True)),
}


def fast(core: str) -> Callable:
    """The form of an attention that a model runs."""
    return fast_form(core, ATTENTION[core])


def naive_attention(
    core: str, q, k, v, *, window=None, scale=None, bias=None, decay=None, causal=True, seen=None
) -> torch.Tensor:
    """What fast(core) and ATTENTION[core] must equal. For each query it cuts out the keys that the query sees.

    decay (H, 1, 1): the weight of a key is multiplied by exp(-decay distance), in softmax and LASER too.
    """
    if seen is not None:  # each row of the batch has its own padding
        settings = {"window": window, "scale": scale, "decay": decay, "causal": causal}
        rows = [
            naive_row(core, *(x[[b]] for x in (q, k, v)), seen[b].flatten().tolist(), settings) for b in range(len(q))
        ]
        return torch.cat(rows)
    Tq, T = q.shape[-2], k.shape[-2]
    if not causal:
        return naive_row(core, q, k, v, [True] * T, {"window": window, "scale": scale, "decay": decay, "causal": False})
    far = None
    if isinstance(bias, ByDistance):
        bias, far = bias.dense(Tq, T), bias.v
    y = []
    for row, i in enumerate(range(T - Tq, T)):
        seen = slice(0 if window is None else max(0, i - window), i + 1)
        b = None if bias is None else bias[..., row, seen]
        v_seen = v[..., seen, :]
        if far is not None:
            v_seen = v_seen + far[(i - torch.arange(T)[seen]).clamp(max=len(far) - 1)]
        y.append(one_query(core, q[..., row, :], k[..., seen, :], v_seen, scale, b, decay))
    return torch.stack(y, dim=-2)


def naive_row(core: str, q, k, v, real: list[bool], settings: dict) -> torch.Tensor:
    """naive_attention of one text, whose key j is padding if real[j] is False."""
    Tq, T = q.shape[-2], k.shape[-2]
    y = []
    for row, i in enumerate(range(T - Tq, T)):
        near = T + Tq if settings["window"] is None else settings["window"]
        keys = [j for j in range(T) if (j <= i or not settings["causal"]) and abs(i - j) <= near]
        keys = [j for j in keys if real[j]] or keys
        distance = torch.tensor([abs(i - j) for j in keys], dtype=k.dtype)
        parts = q[..., row, :], k[..., keys, :], v[..., keys, :]
        y.append(one_query(core, *parts, settings["scale"], None, settings["decay"], distance))
    return torch.stack(y, dim=-2)


def one_query(core: str, q, k, v, scale, bias, decay=None, distance=None) -> torch.Tensor:
    """y (B, H, Dv) of q (B, H, D) over all of the keys k (B, H, n, D), n - 1 to 0 or `distance` (n) tokens away."""
    distance, more = torch.arange(k.shape[-2] - 1, -1, -1, dtype=k.dtype) if distance is None else distance, {}
    if core not in ONE_QUERY:
        if decay is not None and takes(ATTENTION[core], "decay"):
            more = {"decay": decay}
        elif decay is not None:
            bias = (0.0 if bias is None else bias) - decay[:, 0] * distance
        bias = None if bias is None else bias[..., None, :]
        return ATTENTION[core](q[..., None, :], k, v, scale=scale, bias=bias, **more)[..., 0, :]
    s = (q[..., None, :] * k).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    factor = torch.ones_like(distance) if decay is None else (-decay[:, 0] * distance).exp()
    return ONE_QUERY[core](s if bias is None else s + bias, v, factor)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """The module with random numbers in all parameters, biases and norms too."""
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module.eval()
