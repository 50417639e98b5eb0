"""How large are the gradients of softmax, LASER and beta at each weight? (LASER, section 3.2)

    python -m lab.experiments.jacobians

A query with the scores s_j sees the values v_j; a = softmax(s), and r = ||s||. The derivatives of
its output y are

    softmax   dy/ds_j = a_j (v_j - y)                   (lemma 3.1)
    LASER     dy/ds_j = a_j (exp(v_j - y) - 1)          (lemma 3.1, through exp and log)
    beta      dy/ds_j = (v_j - (s_j / r) y) / (1 + r)

The script compares them with autograd through the definitions in model.py, for many keys. Then it
draws them for two keys, whose values are APART and 0, over all weights of the first key: softmax's
a (1 - a) APART, and LASER's. Beta's weight is s / (1 + r); its second score is 1. Last it checks
what lemma 3.2 says about LASER: its output is a log-sum-exp of v_j + log a_j, so it lies between
their maximum and log n above it.
"""

import math

from configurator import run_script

import torch
from torch import Tensor

from attention.scores import plain_form
from lab.experiments.results import drawing, show_table
from model import beta_attention, laser_attention, softmax_attention

picture = "lab/experiments/pictures/jacobians.png"  # the picture

APART = 5.0  # the value of the first key; that of the second is 0

ATTENTION = {
    "softmax": plain_form(softmax_attention),
    "LASER": plain_form(laser_attention),
    "beta": plain_form(beta_attention),
}
# of the first key: softmax's weights go from 1e-6 to 1 - 1e-6
SCORES = torch.linspace(-13.8, 13.8, 10001, dtype=torch.float64)


def outputs(name: str, s: Tensor, v: Tensor) -> Tensor:
    """y (B, 1) of B queries, with the scores s (B, n) of their n keys and the values v (B, n)."""
    q = torch.ones(len(s), 1, 1, 1, dtype=s.dtype)
    return ATTENTION[name](q, s[:, None, :, None], v[:, None, :, None], scale=1.0)[:, 0, 0]


def closed_form(name: str, s: Tensor, v: Tensor) -> Tensor:
    """dy/ds (B, n), as at the top of this file."""
    y = outputs(name, s, v)
    if name == "beta":
        r = s.norm(dim=1, keepdim=True)
        return (v - s / r * y) / (1 + r)
    return s.softmax(1) * (v - y if name == "softmax" else (v - y).expm1())


def two_values(name: str, s: Tensor = SCORES) -> tuple[Tensor, Tensor]:
    """(weights of the first of two keys, dy/ds of its score s)."""
    if name == "beta":
        s = torch.stack((s.div(2).sinh(), torch.ones_like(s)), 1)
        weight = s[:, 0] / (1 + s.norm(dim=1))
    else:
        s = torch.stack((s, torch.zeros_like(s)), 1)
        weight = s.softmax(1)[:, 0]
    v = torch.tensor((APART, 0.0), dtype=torch.float64).expand(len(s), 2)
    return weight, closed_form(name, s, v)[:, 0]


def draw() -> None:
    """The gradients of the three attentions, and the ratio of LASER's to softmax's."""
    (a, softmax), (_, laser) = two_values("softmax"), two_values("LASER")
    with drawing(picture, 1, 2, 12, 4.5) as (plain, ratio):
        for name, color in (("softmax", "black"), ("LASER", "C1"), ("beta", "C0")):
            plain.plot(*two_values(name), color=color, label=name)
        plain.plot(a, 1 - a, ":", color="C1", label="1 - a: LASER's limit, values far apart")
        plain.set(ylabel="dy / ds", title=f"two values, {APART:g} apart")
        plain.set_ylim(top=3.1)
        plain.legend(fontsize=8, loc="upper left", ncols=2)
        ratio.plot(a.logit(), laser / softmax, color="C1")
        ratio.axhline(1, color="0.6", linewidth=1)
        ticks = torch.tensor([1e-5, 1e-3, 0.1, 0.5, 0.9, 0.999, 1 - 1e-5], dtype=torch.float64)
        ratio.set_xticks(ticks.logit(), [f"{x:g}" for x in ticks.tolist()])
        ratio.set(yscale="log", title="LASER's gradient / softmax's")
        for ax in (plain, ratio):
            ax.set_xlabel("weight of the larger value")


def show_errors(s: Tensor, v: Tensor) -> None:
    """Print how exact the closed forms are, and where two values have the largest gradient."""
    rows = []
    for name in ATTENTION:
        y = outputs(name, s.requires_grad_(), v)
        want = torch.autograd.grad(y.sum(), s)[0]
        s = s.detach()
        error = (closed_form(name, s, v) - want).abs().max() / want.abs().max()
        weight, slope = two_values(name)
        position = abs(weight[slope.argmax()])
        rows.append([name, f"{error:.0e}", f"{slope.max():.3f}", f"{position:.3f}"])
    columns = " | closed form against autograd: largest error | two values: largest gradient"
    show_table(f"{columns} | at the weight", rows)


def show_limits() -> None:
    """Print where LASER's gradient is larger than softmax's, and its largest and smallest ratio."""
    limit = 1 / APART - 1 / math.expm1(APART)
    print(f"\nLASER's gradient is larger than softmax's below a weight of {limit:.3f}", end="")
    softmax, laser = (two_values(name)[1] for name in ("softmax", "LASER"))
    ratio = laser / softmax
    print(f", and smaller above it: {ratio.max():.1f} to {ratio.min():.2f} times as large")


def main() -> None:
    g = torch.Generator().manual_seed(0)
    s, v = 5 * torch.randn(2, 1000, 50, dtype=torch.float64, generator=g)
    show_errors(s, v)
    show_limits()
    above = outputs("LASER", s, v)[:, 0] - (v + s.log_softmax(1)).amax(1)
    bounds = f"between {above.min():.3f} and {above.max():.3f}"
    print(f"\nlemma 3.2, 50 keys: y - max(v + log a) is {bounds};", end=" ")
    print(f"it must be between 0 and log 50 = {math.log(50):.3f}\n")
    draw()


if __name__ == "__main__":
    run_script(globals())
