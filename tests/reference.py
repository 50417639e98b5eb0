"""Attention one query at a time: no masks, no windows, no tricks. Every form of an attention is compared with it."""

from collections.abc import Callable

import torch

from attention.forms import fast_form
from attention.scores import plain_form, takes
from model import ATTENTION, GPT, GPTConfig

# What each means, once more: the scores s (B, H, n) of a query over the n keys that it sees, and their values
# v (B, H, n, Dv), give y (B, H, Dv). A weight is multiplied by f (H, n) before the weights are divided by their sum or
# norm. An attention that is not here is held against its own definition for one query.
ONE_QUERY: dict[str, Callable] = {
    "softmax": lambda s, v, f: ((s + f.log()).softmax(-1)[..., None] * v).sum(-2),  # = f exp(s) v / sum(f exp(s))
    "softcap": lambda s, v, f: ((50 * (s + f.log()).div(50).tanh()).softmax(-1)[..., None] * v).sum(-2),
    "laser": lambda s, v, f: ((s + f.log()).log_softmax(-1)[..., None] + v).logsumexp(-2),  # = log(softmax(s) exp(v))
    "beta": lambda s, v, f: ((s * f)[..., None] * v).sum(-2) / (1 + (s * f).norm(dim=-1, keepdim=True)),
    "beta_squared": lambda s, v, f: (
        ((s.square() * f)[..., None] * v).sum(-2) / (1 + (s.square() * f).sum(-1, keepdim=True))
    ),
}


def fast(core: str) -> Callable:
    """The form of an attention that a model runs."""
    return fast_form(core, ATTENTION[core])


def plain(core: str) -> Callable:
    """The definition of an attention, as a function of q, k and v."""
    return plain_form(ATTENTION[core])


def naive_attention(
    core: str, q, k, v, *, window=None, scale=None, bias=None, decay=None, far=None, seen=None
) -> torch.Tensor:
    """What fast(core) and plain(core) must equal. For each query it cuts out the keys that the query sees.

    decay (H, 1, 1): the weight of a key is multiplied by exp(-decay distance), in softmax and LASER too. seen (Tq, T),
    or (B, Tq, T): a mask of one's own.
    """
    if seen is not None and seen.dim() == 3:
        more = {"scale": scale, "bias": bias, "decay": decay, "far": far}
        rows = (naive_attention(core, *(x[[b]] for x in (q, k, v)), seen=seen[b], **more) for b in range(len(q)))
        return torch.cat([*rows])
    Tq, T = q.shape[-2], k.shape[-2]
    y = []
    for row, i in enumerate(range(T - Tq, T)):
        keys = torch.arange(0 if window is None else max(0, i - window), i + 1) if seen is None else seen[row].nonzero()
        keys, distance = keys.flatten(), (i - keys.flatten()).abs()
        b = None if bias is None else bias[..., row, keys]
        values = v[..., keys, :] if far is None else v[..., keys, :] + far[distance.clamp(max=len(far) - 1)]
        y.append(one_query(core, q[..., row, :], k[..., keys, :], values, scale, b, decay, distance.to(k.dtype)))
    return torch.stack(y, dim=-2)


def one_query(core: str, q, k, v, scale, bias, decay=None, distance=None) -> torch.Tensor:
    """y (B, H, Dv) of q (B, H, D) over all of the keys k (B, H, n, D), n - 1 to 0 or `distance` (n) tokens away."""
    distance, more = torch.arange(k.shape[-2] - 1, -1, -1, dtype=k.dtype) if distance is None else distance, {}
    if core not in ONE_QUERY:
        if decay is not None and takes(ATTENTION[core], "fade"):
            more = {"decay": decay}
        elif decay is not None:
            bias = (0.0 if bias is None else bias) - decay[:, 0] * distance
        bias = None if bias is None else bias[..., None, :]
        return plain(core)(q[..., None, :], k, v, scale=scale, bias=bias, **more)[..., 0, :]
    s = (q[..., None, :] * k).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    factor = torch.ones_like(distance) if decay is None else (-decay[:, 0] * distance).exp()
    return ONE_QUERY[core](s if bias is None else s + bias, v, factor)


def shaken(c: GPTConfig, by: float = 0.2, dtype: torch.dtype = torch.float32) -> GPT:
    """A model far from initialisation, so that every parameter matters."""
    gpt = GPT(c).to(dtype).eval()
    for p in gpt.parameters():
        p.data += by * torch.randn_like(p)
    return gpt


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """The module with random numbers in all parameters, biases and norms too."""
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module.eval()
