"""What the exercises must do: for each a list of checks, which get its module.

A check raises AssertionError with a sentence about what is wrong. All numbers are float64; rows and
tokens are counted from 0.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention.scores import plain_form, visible
from model import beta_attention, laser_attention, softmax_attention
from parts import rotate, turns


def inputs(T: int = 8, D: int = 4) -> list[Tensor]:
    """q, k and v: random, the same for each check."""
    return list(torch.randn(3, T, D, generator=torch.manual_seed(1), dtype=torch.float64))


def core(definition: Callable, *x: Tensor, **settings: object) -> Tensor:
    """y of a definition of model.py for q, k and v, of one head of one sequence."""
    return plain_form(definition)(*(t[None, None] for t in x), **settings)[0, 0]


softmax_of_core = partial(core, softmax_attention)


def equal(y: Tensor, exact: Tensor, what: str, mistakes: dict[str, Tensor] | None = None) -> None:
    """Each row of y must be that of exact. mistakes: {what is wrong: the y that comes of it}."""
    assert y.shape == exact.shape, (
        f"{what} has the shape {tuple(y.shape)}, and should have {tuple(exact.shape)}"
    )
    for mistake, wrong in (mistakes or {}).items():
        assert not torch.allclose(y, wrong.to(y), atol=1e-6), f"{what}: {mistake}"
    for i, (row, right) in enumerate(zip(y.double(), exact.double(), strict=True)):
        found = row.round(decimals=4).tolist()
        wanted = right.round(decimals=4).tolist()
        is_right = torch.allclose(row, right, atol=1e-6)
        assert is_right, f"{what}: row {i} is {found}, and should be {wanted}"


def equal_masks(mask: Tensor, right: Tensor) -> None:
    """Both are (T, T), True where row i sees token j."""
    assert mask.shape == right.shape, f"it has the shape {tuple(mask.shape)}"
    for i, j in (mask != right).nonzero().tolist():
        raise AssertionError(f"row {i} {'sees' if mask[i, j] else 'does not see'} token {j}")


def sees(attend: Callable, window: int | None = None) -> None:
    """Row i of attend(q, k, v) must depend on the tokens that query i sees, and on no others."""
    x = [t.requires_grad_() for t in inputs()]
    rows = []
    for i, y in enumerate(attend(*x)):
        grads = torch.stack(torch.autograd.grad(y.sum(), x, retain_graph=True))
        assert grads.isfinite().all(), f"a gradient of row {i} is not finite"
        rows.append(grads.abs().sum((0, 2)) > 0)
    equal_masks(torch.stack(rows), visible(*x[:2], window))


class Largest(TorchDispatchMode):
    """Remembers the most numbers that a tensor had that was made within it."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def is_linear(attend: Callable) -> None:
    """attend(q, k, v) must not make T x T numbers."""
    T = 256
    with Largest() as largest:
        attend(*inputs(T))
    assert largest.numbers < T * T, f"{T} tokens make a tensor of {T} x {T} numbers"


# -----------------------------------------------------------------------------
# 1


def mean(m):
    equal(m.mean(inputs()[2])[None], inputs()[2].mean(0)[None], "mean")


def scores(m):
    q, k, _ = inputs()
    mistakes = {"the scores are not divided by sqrt(D)": q @ k.T}
    equal(m.scores(q, k), q @ k.T / 2, "scores", mistakes)


def softmax(m):
    s = inputs(5, 7)[0]
    a = m.softmax(s)
    column = a.sum(0)
    assert not torch.allclose(column, torch.ones_like(column)), "the columns sum to 1, not the rows"
    equal(a, s.softmax(-1), "softmax")

    assert m.softmax(1000 * s).isfinite().all(), "scores of 1000: a weight is not finite"
    s[0] -= 2000
    far = m.softmax(s)
    assert far.isfinite().all(), "a row whose scores are far below another row's is not finite"


def lookup(m):
    q, k, v = inputs()
    equal(m.lookup(q[:3], k, v), (q[:3] @ k.T / 2).softmax(-1) @ v, "lookup")


# -----------------------------------------------------------------------------
# 2


def sees_the_next(q, k, v):
    mask = visible(q, k, None)
    mask[6, 7] = True
    return (q @ k.T).where(mask, -math.inf).softmax(-1) @ v


def sums_over_all(q, k, v):
    return (q @ k.T).softmax(-1).tril() @ v


def subtracts_a_mean(q, k, v):
    return softmax_of_core(q - 1e-6 * q.mean(0), k, v)


SUSPECTS = {
    "query 6 sees token 7": sees_the_next,
    "later keys count in the sum of the weights": sums_over_all,
    "a millionth of the mean of all queries is subtracted from each": subtracts_a_mean,
}


def seen(m):
    mask = m.seen(5)
    assert mask.dtype == torch.bool, f"seen: it has numbers of {mask.dtype}, not torch.bool"
    equal_masks(mask, torch.ones(5, 5).tril() > 0)


def causal_attention(m):
    sees(m.causal_attention)
    equal(m.causal_attention(*inputs()), softmax_of_core(*inputs()), "causal_attention")


def sees_later(m):
    assert not m.sees_later(softmax_of_core), "sees_later is True for an attention that is causal"
    for mistake, attend in SUSPECTS.items():
        assert m.sees_later(attend), f"sees_later does not find that {mistake}"


# -----------------------------------------------------------------------------
# 3


def window_attention(m):
    sees(lambda *x: m.window_attention(*x, 2), window=2)


def window_has_no_padding(m):
    q, k, v = inputs()
    sums = m.window_attention(0 * q, k, torch.ones_like(v), 2)[:, 0]
    for i, x in enumerate(sums.tolist()):
        assert abs(x - 1) < 1e-9, (
            f"the weights of row {i}'s tokens sum to {x:.3f}: is the rest on the padding?"
        )


def window_is_exact(m):
    for w in (0, 3, 20):
        exact = softmax_of_core(*inputs(), window=w)
        equal(m.window_attention(*inputs(), w), exact, f"a window of {w}")


def window_is_linear(m):
    is_linear(lambda *x: m.window_attention(*x, 2))


# -----------------------------------------------------------------------------
# 4


def laser_as_written(m):
    exact = core(laser_attention, *inputs())
    equal(m.laser_as_written(*inputs()), exact, "laser_as_written")


def laser(m):
    q, k, v = inputs()
    equal(m.laser(q, k, v), core(laser_attention, q, k, v), "laser")
    v[5] = 1000.0
    exact = core(laser_attention, q, k, v)
    equal(m.laser(q, k, v), exact, "laser, after token 5 got a value of 1000")
    sees(m.laser)


def gradients(m):
    for a in (0.1, 0.5):
        softmax = 5 * a * (1 - a)
        laser = a * (1 - a) * (math.exp(5) - 1) / (a * math.exp(5) + 1 - a)
        found = zip(("softmax", "LASER"), m.gradients(a), (softmax, laser), strict=True)
        for name, x, right in found:
            equal(torch.tensor([x]), torch.tensor([right]), f"{name}'s gradient at a weight of {a}")


def equal_at(m):
    a = m.equal_at()
    softmax, laser = m.gradients(a)
    assert abs(a - 0.193) < 0.001, (
        f"at a weight of {a:.3f} softmax's gradient is {softmax:.3f}, LASER's {laser:.3f}"
    )


# -----------------------------------------------------------------------------
# 5


def beta(m):
    q, k, v = inputs()
    s = (q @ k.T / 2).tril()
    mistakes = {
        "the norm has no square root": s @ v / (1 + s.square().sum(-1, keepdim=True)),
        "q is not divided by sqrt(D)": core(beta_attention, q, k, v, scale=1.0),
    }
    equal(m.beta(q, k, v), core(beta_attention, q, k, v), "beta", mistakes)
    sees(m.beta)
    is_linear(m.beta)


def sum_backward(m):
    x = [t.requires_grad_() for t in inputs()]
    q, k, v = x
    dz = inputs(16)[0][8:]
    exact = torch.autograd.grad((q @ k.T).tril() @ v, x, dz)
    dq, dk, dv = m.sum_backward(*(t.detach() for t in x), dz)

    mistake = "it is a sum over the queries i <= j, not over i >= j"
    equal(dq, exact[0], "dq")
    equal(dk, exact[1], "dk", {mistake: (dz @ v.T).triu().T @ q})
    equal(dv, exact[2], "dv", {mistake: (q @ k.T).triu().T @ dz})
    is_linear(lambda *x: m.sum_backward(*x, x[2])[0])


# -----------------------------------------------------------------------------
# 6


def written(step: Callable, n: int, *args: object) -> tuple[Tensor, int]:
    """(the outputs of n tokens, how many numbers the cache holds in memory after them)."""
    cache = None
    rows = []
    for x in zip(*inputs(n), strict=True):
        y, cache = step(*x, cache, *args)
        assert isinstance(cache, tuple), "the cache is no tuple of tensors, such as (S,)"
        rows.append(y)
    return torch.stack(rows), sum(t.untyped_storage().nbytes() // t.itemsize for t in cache)


def softmax_step(m):
    equal(written(m.softmax_step, 20)[0], softmax_of_core(*inputs(20)), "softmax_step")


def window_step(m):
    x = inputs(20)
    mistakes = {
        "it sees tokens before its window": softmax_of_core(*x),
        "its window is a token too short": softmax_of_core(*x, window=2),
    }
    exact = softmax_of_core(*x, window=3)
    equal(written(m.window_step, 20, 3)[0], exact, "window_step", mistakes)


def sum_step(m):
    q, k, v = inputs(20)
    mistakes = {"the new token does not see itself": (q @ k.T).tril(-1) @ v}
    equal(written(m.sum_step, 20)[0], (q @ k.T).tril() @ v, "sum_step", mistakes)


def cache_sizes(m):
    right = 160, 24, 16
    steps = (m.softmax_step, ()), (m.window_step, (3,)), (m.sum_step, ())
    for (step, args), most in zip(steps, right, strict=True):
        n = written(step, 20, *args)[1]
        assert n <= most, (
            f"after 20 tokens the cache of {step.__name__} holds {n} numbers in memory, not {most} "
            "(a slice keeps the whole tensor; .clone() copies it)"
        )
    found = m.cache_numbers(20, 4, 3)
    assert found == right, f"cache_numbers(20, 4, 3) is {found}, and should be {right}"


# -----------------------------------------------------------------------------
# 7


def sinusoids(m):
    turn = turns(0, 6, 8, 10000.0, torch.device("cpu"))  # cos and sin: (6, 4, 2)
    first = turn.flip(-1).flatten(1)
    mistakes = {
        "cosines stand before sines": turn.flatten(1),
        "sines and cosines stand in two halves": turn.flip(-1).mT.flatten(1),
    }
    equal(m.sinusoids(6, 8), first, "sinusoids", mistakes)


def rope(m):
    x = inputs()[0]
    turn = turns(0, 8, 4, 10000.0, torch.device("cpu"))
    mistakes = {"it turns clockwise": rotate(x, turn * torch.tensor([1, -1]))}
    equal(m.rope(x), rotate(x, turn), "rope", mistakes)


def scores_by_position(m):
    q, k, _ = inputs()
    s = m.scores_by_position(q[0], k[0], 6)
    equal(s[1:, 1:], s[:-1, :-1], "scores_by_position: one position later, at equal distances")
    equal(s[:, 0], m.rope(q[0].expand(6, -1)) @ k[0], "the scores of key 0")


def with_alibi(m):
    q, k, _ = inputs()
    far = 0.5 * (torch.arange(8)[:, None] - torch.arange(8))
    a, b = m.with_alibi(q, k, 0.5)
    mistakes = {"far keys get higher scores": q @ k.T + far}
    equal(a @ b.T, q @ k.T - far, "products of q' and k'", mistakes)


CHECKS = {
    "ex1_lookup": (mean, scores, softmax, lookup),
    "ex2_causal": (seen, causal_attention, sees_later),
    "ex3_window": (window_attention, window_has_no_padding, window_is_exact, window_is_linear),
    "ex4_laser": (laser_as_written, laser, gradients, equal_at),
    "ex5_beta": (beta, sum_backward),
    "ex6_cache": (softmax_step, window_step, sum_step, cache_sizes),
    "ex7_positions": (sinusoids, rope, scores_by_position, with_alibi),
}
