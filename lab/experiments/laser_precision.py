"""LASER paper, appendix A.5: how exact is LASER in bfloat16, and what is its shift for?

    python -m lab.experiments.laser_precision

Several ways to compute attention run as a fused kernel does: queries, keys, values, weights and
outputs are rounded to bfloat16, sums are in float32. Each is compared with the definition in
float64. Inputs are normal random numbers; the values have the standard deviation sigma, 0.02 in a
new model. The script prints ||x - x_exact|| / ||x_exact|| of the output and of gradients, and of
the output before one large value. Numbers that are in --out are not measured again.
"""

import functools
import math

from configurator import run_script

import torch
from torch import Tensor

from attention.fast import general_form, laser_by_exp
from attention.scores import scores, visible
from lab.experiments.results import measured, show_table
from lab.experiments.runs import of_rows
from model import ATTENTION

out = "lab/experiments/laser_precision.json"  # the results

SIGMAS = (0.02, 0.1, 0.3, 1.0, 3.0, 30.0)
LAST = (-2.0, 5.0, -5.0)  # all channels of the last token's value, beside sigma = 0.02
SIZES = 1, 4, 512, 32  # B, H, T, D


class Kernel(torch.autograd.Function):
    """y = softmax(s) v of bfloat16 q, k, v (B, H, T, D), as FlashAttention rounds it."""

    @staticmethod
    def forward(ctx, q, k, v):
        s = scores(q, k).where(visible(q, k, None), -math.inf)
        weights = s.softmax(-1)
        y = (weights.bfloat16().float() @ v.float()).bfloat16()
        ctx.save_for_backward(q, k, v, weights, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, weights, y = (x.float() for x in ctx.saved_tensors)
        dy = dy.float()
        ds = weights * (dy @ v.mT - (dy * y).sum(-1, keepdim=True))
        ds = ds.bfloat16().float() * q.shape[-1] ** -0.5
        gradients = ds @ k, ds.mT @ q, weights.bfloat16().float().mT @ dy
        return tuple(x.bfloat16() for x in gradients)


def kernel(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """softmax(s) v, as the mean that laser_by_exp takes."""
    return Kernel.apply(q, k, v)


def by_exp(q: Tensor, k: Tensor, v: Tensor, shifted: bool) -> Tensor:
    """log(softmax(s) exp(v)); shifted: with the largest value of each channel (algorithm 1)."""
    v = v.float()
    c = v.detach().amax(-2, keepdim=True) if shifted else 0.0
    y = kernel(q, k, (v - c).exp().bfloat16())
    return (c + y.float().log()).bfloat16()


# {name: (attend(q, k, v), the attention that it computes)}
WAYS = {
    "softmax": (kernel, "softmax"),
    "LASER, exp": (functools.partial(by_exp, shifted=False), "laser"),
    "LASER, exp and max (the paper)": (functools.partial(by_exp, shifted=True), "laser"),
    "LASER, expm1 and c": (laser_by_exp(kernel, ATTENTION["laser"]), "laser"),
}


def outputs(attend, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """y in the rows of dy, the gradients of q and k beside each other, and that of v."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = attend(*inputs)[..., : dy.shape[-2], :]
    dq, dk, dv = torch.autograd.grad(y, inputs, dy)
    return [y.double(), torch.cat((dq, dk)).double(), dv.double()]


def errors(name: str, sigma: float, last: float | None) -> list[float]:
    """A way's relative errors of y, of the gradients of q and k, and of that of v.

    last: the last token's value in the place of a random one; then y is that of the others. NaN
    counts as infinity.
    """
    attend, attention = WAYS[name]
    torch.manual_seed(0)
    q, k, v, dy = torch.randn(4, *SIZES).bfloat16()
    inputs = [q, k, v * sigma]
    if last is not None:
        inputs[2][:, :, -1] = last
        dy = dy[:, :, :-1]
    found = outputs(attend, inputs, dy)
    exact = general_form(ATTENTION[attention])
    wanted = outputs(exact, [x.double() for x in inputs], dy.double())
    relative = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
    return [math.inf if math.isnan(x) else x for x in relative]


def measure(sigma: float, last: float | None = None) -> dict:
    """{way: its errors}."""
    return {name: errors(name, sigma, last) for name in WAYS}


def show(title: str, found: dict, i: int) -> None:
    """Prints error i of each way."""
    rows = [[key, *(f"{x[name][i]:.1e}" for name in WAYS)] for key, x in found.items()]
    show_table(f"{title} | {' | '.join(WAYS)}", rows)


def main() -> None:
    of = of_rows(__file__)
    found = {x: measured(out, "errors", "sigma", x, measure, x, of=of) for x in SIGMAS}
    for i, part in enumerate(("output", "gradients of q and k", "gradient of v")):
        show(f"{part}: sigma", found, i)
    found = {x: measured(out, "before", "last", x, measure, 0.02, x, of=of) for x in LAST}
    show("output before a last value of", found, 0)


if __name__ == "__main__":
    run_script(globals())
