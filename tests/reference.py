"""Attention one query at a time, without masks and tricks: what every form is compared with."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from attention.forms import Heads
from attention.scores import asked_by, caller, learned, of_token, plain_form
from model import ATTENTION, GPT, GPTConfig

FUNCTIONS = [name for name, f in ATTENTION.items() if not isinstance(f, type)]
# those without trained numbers: what a layer computes depends on q, k and v alone
OF_QKV = [name for name in FUNCTIONS if not asked_by(ATTENTION[name], (learned, of_token))]

# What each attention means, once more: a function of (s, v, f) that returns y (B, H, Dv) of one
# query. s (B, H, n): its scores over the n keys that it sees. v (B, H, n, Dv): their values. A
# weight is multiplied by f (H, n) before the weights are divided by their sum or norm. An attention
# that is not here is compared with its own definition for one query.


def softmax(s, v, f):
    weights = (s + f.log()).softmax(-1)  # = f exp(s) / sum(f exp(s))
    return mean(weights, v)


def softcap(s, v, f):
    return softmax(50 * torch.tanh((s + f.log()) / 50), v, torch.ones_like(f))


def laser(s, v, f):
    log_weights = (s + f.log()).log_softmax(-1)
    return (log_weights[..., None] + v).logsumexp(-2)  # = log(softmax(s) exp(v))


def beta(s, v, f):
    s = s * f
    return mean(s, v) / (1 + s.norm(dim=-1, keepdim=True))


def beta_squared(s, v, f):
    s2 = s.square() * f
    return mean(s2, v) / (1 + s2.sum(-1, keepdim=True))


def mean(weights: Tensor, v: Tensor) -> Tensor:
    return (weights[..., None] * v).sum(-2)


ONE_QUERY: dict[str, Callable] = {
    "softmax": softmax,
    "softcap": softcap,
    "laser": laser,
    "beta": beta,
    "beta_squared": beta_squared,
}


def fast(core: str) -> Callable:
    """The code of an attention that a model runs, chosen for the arguments of each call."""

    def attend(q, k, v, *, window=None, **settings):
        n = q.shape[1]
        c = SimpleNamespace(n_head=n, n_kv_head=n)
        heads = Heads(c, core, ATTENTION[core], window, range(n))
        if window is not None:
            settings["window"] = window
        return heads.run(q, k, v, **settings)

    return attend


def plain(core: str) -> Callable:
    """The definition of an attention, as a function of q, k and v."""
    return plain_form(ATTENTION[core])


def naive_attention(
    core: str, q, k, v, *, window=None, scale=None, bias=None, decay=None
) -> Tensor:
    """What fast(core) and plain(core) must equal. Each query's keys are cut out.

    decay (H, 1, 1): a key's weight is multiplied by exp(-decay distance), in softmax and LASER too.
    """
    Tq = q.shape[-2]
    T = k.shape[-2]
    if bias is not None:
        bias = bias.expand(*q.shape[:2], Tq, T)
    y = []
    for row, i in enumerate(range(T - Tq, T)):
        first = 0 if window is None else max(0, i - window)
        keys = slice(first, i + 1)
        distance = torch.arange(i - first, -1, -1)
        values = v[..., keys, :]
        of_row = None if bias is None else bias[..., row, keys]
        q_row = q[..., row, :]
        k_row = k[..., keys, :]
        y.append(one_query(core, q_row, k_row, values, scale, of_row, decay, distance.to(k)))
    return torch.stack(y, dim=-2)


def one_query(core: str, q, k, v, scale, bias, decay, distance) -> Tensor:
    """y (B, H, Dv) of q (B, H, D) over all of the keys k (B, H, n, D), `distance` (n) away."""
    s = (q[..., None, :] * k).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias
    if core not in ONE_QUERY:  # the query is the last of the keys
        q, s = q[..., None, :], s[..., None, :]
        seen = torch.ones_like(s, dtype=torch.bool)
        return caller(ATTENTION[core])(s, seen, q, k, v, decay=decay)[..., 0, :]
    f = torch.ones_like(distance) if decay is None else (-decay[:, 0] * distance).exp()
    return ONE_QUERY[core](s, v, f)


# -----------------------------------------------------------------------------
# comparing


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether a is b up to a share of b's largest entry or, if b is smaller, of 1."""
    a = a.double()
    b = b.double()
    return (a - b).abs().max().item() <= tolerance * max(1.0, b.abs().max().item())


def in_double(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().double().requires_grad_() for name, t in x.items()}


def assert_exact(
    attend: Callable, core: str, x: dict[str, Tensor], tolerance: float, **settings
) -> None:
    """Compares the output, and the gradients of x, with those of naive_attention in float64.

    x: q, k, v, and what else has a gradient, such as bias. A decay's gradients are compared head by
    head, since they may lie thirty orders of magnitude apart.
    """
    exact = in_double(x)
    y = attend(**x, **settings)
    y_exact = naive_attention(core, **exact, **settings)
    assert y.dtype == x["v"].dtype and close(y, y_exact, tolerance)
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, [*x.values()], dy)
    theirs = torch.autograd.grad(y_exact, [*exact.values()], dy.double())
    for name, a, b in zip(x, ours, theirs, strict=True):
        heads = zip(a, b, strict=True) if name == "decay" else [(a, b)]
        assert all(close(*head, tolerance) for head in heads), name


# -----------------------------------------------------------------------------
# models

SIZES = {"block_size": 24, "vocab_size": 65, "n_layer": 2, "n_head": 4, "n_embd": 32}


def shaken(c: GPTConfig, by: float = 0.2, dtype: torch.dtype = torch.float32) -> GPT:
    """A model far from initialisation, so that every parameter matters."""
    gpt = GPT(c).to(dtype).eval()
    for p in gpt.parameters():
        p.data += by * torch.randn_like(p)
    return gpt


def cached(gpt: GPT, x: Tensor, pieces: list[int]) -> Tensor:
    """The logits of x (B, T), of which a cache gets pieces of these lengths."""
    cache = gpt.new_cache()
    logits = []
    for part in x.split(pieces, dim=1):
        y, _ = gpt(part, part, cache=cache)
        logits.append(y)
    return torch.cat(logits, dim=1)


def assert_one_model(gpt: GPT, x: Tensor, pieces: list[int], n: int) -> tuple:
    """(logits, gradients) of a GPT in float64, the same in every way to compute them.

    With a cache that gets pieces of x (B, T); of the first n tokens, whatever follows; and if
    activations are computed again, after two forward passes.
    """
    logits, loss = gpt(x, x)
    assert close(cached(gpt, x, pieces), logits, 1e-9)
    other = torch.cat((x[:, :n], (x[:, n:] + 1) % gpt.config.vocab_size), dim=1)
    logits_of_other, loss_of_other = gpt(other, x)
    assert close(logits_of_other[:, :n], logits[:, :n], 1e-9)

    gradients = torch.autograd.grad(loss, gpt.parameters())
    assert all(g.isfinite().all() and g.any() for g in gradients)
    of_other = torch.autograd.grad(loss_of_other, gpt.parameters())
    gpt.config.activation_checkpointing = True
    gpt.train()
    again = torch.autograd.grad(gpt(x, x)[1] + gpt(other, x)[1], gpt.parameters())
    for g, a, b in zip(again, gradients, of_other, strict=True):
        assert close(g, a + b, 1e-9)
    return logits, gradients


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """The module with random numbers in all parameters, biases and norms too."""
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module.eval()


def assert_bfloat16_is_near(gpt: GPT, x: Tensor, end: str = "", most: int = 4) -> None:
    """Under autocast the gradients of the parameters whose names end so are nearly float32's.

    most: units of 2^-8, a bfloat16's digit.
    """
    params = [p for name, p in gpt.named_parameters() if name.endswith(end)]
    results = []
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = gpt(x, x)[1]
        results.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)]))
    exact, ours = results
    assert 0 < (ours - exact).norm() < most * 2**-8 * exact.norm(), end
