"""Can attention learn dense local dependencies, if q and k are free? (long-short, figure 2)

    OMP_NUM_THREADS=1 python -m lab.experiments.local_dependencies --what=sweep,show  # 15 minutes
    OMP_NUM_THREADS=1 python -m lab.experiments.local_dependencies --what=full,show   # hours

The target P (n, n) gives each token equal weights on about half of the `band` tokens before it
(section 3.1). Adam changes q and k (n, d) until P' = softmax(q k^T) is close to P. Long attention
sees all earlier tokens, and short attention the last `span` tokens. The results are the share of
the target that is missed, ||P - P'||^2 / ||P||^2, the largest |q k^T|, and the rank of P': its
singular values above 1% of the largest one.

`full` is the paper's task, n = 2500 and d = 25. `sweep` changes n, d and the first q and k, one at
a time: section 3 says that n d numbers cannot describe n^2 weights where n is much larger than d.
Each row takes the learning rate that misses least after a tenth of the steps, with seed 101. Fits
in --out are not repeated.

The paper does not name its loss, its learning rate or the first q and k. Here the loss is the share
that is missed, the rate falls to 0 along a cosine (with a constant rate Adam's loss rises again and
again, once its gradients are small), and q and k begin with random normal numbers. Row 0 is left
out, because it has nothing before it. In the paper's section 3 a token sees itself, and in its task
it does not. Here both attentions can see the token itself, and have to learn not to.
"""

import math
import statistics

from configurator import names, run_script

import torch
from torch import Tensor

from attention.scores import visible
from lab.experiments.results import difference, measured, show_table
from lab.experiments.runs import of_rows

# What is measured?
what = "sweep,full,show"  # the parts to run, separated by commas; show: the table of the others
seeds = "1,2,3"  # each decides the random numbers of a fit: the target, q and k
n = 2500  # tokens of the part full
steps = 100000  # steps of Adam of the part full
sweep_steps = 10000  # steps of Adam of the part sweep
device = "cpu"  # cpu, cuda or mps
out = "lab/experiments/local_dependencies.json"  # the results

BAND = 50  # tokens that the target looks back
SPAN = 50  # tokens that short attention looks back
RATES = (3e-3, 1e-2, 3e-2)  # learning rates to try
WINDOWS = {"long": None, "short": SPAN}  # of each attention
# fits: (n, d, standard deviation of the first q and k)
BY_D = [(500, d, 0.1) for d in (5, 10, 25, 50)]
SWEEP = [*BY_D, (250, 25, 0.1), (1000, 25, 0.1), (500, 25, 1.0)]


def target(n: int) -> Tensor:
    """(n, n): p_ij is 1 with probability 1/2 where 0 < i - j <= BAND, else 0.

    Rows that have any sum to 1.
    """
    p = torch.rand(n, n) < 0.5
    p = p & visible(p, p, BAND) & ~torch.eye(n, dtype=torch.bool)
    return p / p.sum(-1, keepdim=True).clamp(min=1)


def pieces(p: Tensor, window: int | None, rows: int = 125) -> list[tuple]:
    """A few rows of the target at a time, and the keys that they see: [(rows, keys, mask, target)].

    The mask is -inf where a row does not see a key. A row whose target is all zero is left out of
    the loss: its target is NaN.
    """
    n = len(p)
    parts = []
    for i in range(0, n, rows):
        part = slice(i, min(n, i + rows))
        keys = slice(0 if window is None else max(0, i - window), part.stop)
        wanted = p[part, keys]
        hidden = ~visible(p[part], p[keys], window)
        mask = torch.zeros_like(wanted).masked_fill(hidden, -torch.inf)
        parts.append((part, keys, mask, wanted.where(p[part].any(-1, keepdim=True), torch.nan)))
    return parts


@torch.no_grad()
def gradients(q: Tensor, k: Tensor, task: list[tuple]) -> tuple:
    """(||P' - P||^2, its gradients for q and k) of P' = softmax(q k^T), by the pieces of a target.

    With D = P' - P the gradient with respect to the scores is 2 P' (D - the sum of D P' over the
    row). Ten times as fast as autograd on whole matrices.
    """
    missed = torch.zeros((), device=q.device)
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    for rows, keys, mask, p in task:
        a = torch.addmm(mask, q[rows], k[keys].T).softmax(-1)
        d = a - p
        if rows.start == 0:  # the first row has no target
            d.nan_to_num_(0.0)
        missed += d.square().sum()
        ds = d.mul_(a).mul_(2)
        ds -= a * ds.sum(-1, keepdim=True)
        dq[rows] = ds @ k[keys]
        dk[keys] += ds.T @ q[rows]
    return missed, dq, dk


def fit(n: int, d: int, init: float, attention: str, rate: float, seed: int, steps: int) -> dict:
    """Fit q and k; return numbers of 20 steps and of the last one, and the rank at the end."""
    torch.manual_seed(seed)
    p = target(n).to(device)
    q, k = (torch.nn.Parameter((init * torch.randn(n, d)).to(device)) for _ in range(2))
    task = pieces(p, WINDOWS[attention])
    size = p.square().sum().item()
    hidden = ~visible(p, p, WINDOWS[attention])
    adam = torch.optim.Adam((q, k), lr=rate, fused=device != "mps")
    curves = {"step": [], "missed": [], "largest": []}
    for step in range(steps + 1):
        missed, q.grad, k.grad = gradients(q, k, task)
        if step % max(1, steps // 20) == 0:
            scores = (q @ k.T).detach()
            curves["step"].append(step)
            curves["missed"].append(missed.item() / size)
            curves["largest"].append(scores.masked_fill(hidden, 0).abs().max().item())
        adam.param_groups[0]["lr"] = rate * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        adam.step()
    weights = (q @ k.T).detach().masked_fill(hidden, -torch.inf).softmax(-1)
    return curves | {"rank": torch.linalg.matrix_rank(weights, rtol=0.01).item()}


def recorded(row: tuple, attention: str, rate: float, seed: int, steps: int) -> dict:
    """The numbers of a fit in --out. Make the fit if it is missing."""
    n, d, init = row
    name = f"n {n}, d {d}, first {init:g}, {attention}, rate {rate:g}, {steps} steps"
    args = fit, *row, attention, rate, seed, steps
    return measured(out, "fits", name, seed, *args, of=of_rows(__file__))


def fits(rows: list[tuple], steps: int) -> dict:
    """{(row, attention): (its best learning rate, its fits with the seeds)}."""
    fitted = {}
    for row in rows:
        for attention in WINDOWS:
            missed = {}
            for rate in RATES:
                missed[rate] = recorded(row, attention, rate, 101, steps // 10)["missed"][-1]
            best = min(missed, key=missed.get)
            chosen = [recorded(row, attention, best, int(seed), steps) for seed in seeds.split(",")]
            fitted[row, attention] = best, chosen
    return fitted


def last(fits: list[dict], key: str) -> list[float]:
    """The number at the end of each fit."""
    return [fit[key][-1] for fit in fits]


def show(fitted: dict) -> None:
    """Print the table of fits: means over the seeds, and long attention against short."""
    lines = []
    for row in dict.fromkeys(row for row, _ in fitted):
        both = [fitted[row, attention] for attention in WINDOWS]
        missed = [last(fits, "missed") for _, fits in both]
        cells = [
            *[f"{rate:g}" for rate, _ in both],
            *[f"{statistics.mean(x):.4f}" for x in missed],
            difference(*missed),
            *[f"{statistics.mean(last(fits, 'largest')):.1f}" for _, fits in both],
            *[min(fit["rank"] for fit in fits) for _, fits in both],
        ]
        lines.append([*row, *cells])
    columns = "n | d | first q and k | rate of long | of short | missed by long | by short"
    columns += " | long - short | largest score of long | of short | rank of long | of short"
    show_table(columns, lines)


def main() -> None:
    torch.set_flush_denormal(True)
    parts = names(what, ["sweep", "full", "show"])
    fitted = {}
    if "sweep" in parts:
        fitted |= fits(SWEEP, sweep_steps)
    if "full" in parts:
        fitted |= fits([(n, 25, 0.1)], steps)
    if "show" in parts:
        show(fitted)


if __name__ == "__main__":
    run_script(globals())
