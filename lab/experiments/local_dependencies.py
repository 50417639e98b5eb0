"""The long-short paper's figure 2 and section 3: can attention learn dense local dependencies, if q and k are free?

    OMP_NUM_THREADS=1 python -m lab.experiments.local_dependencies --what=sweep,show   # a quarter of an hour
    OMP_NUM_THREADS=1 python -m lab.experiments.local_dependencies --what=full,show    # 100,000 steps: hours on a CPU

The target P (n, n) gives each token equal weights on about half of the `band` tokens before it (section 3.1). Adam
changes q and k (n, d) until P' = softmax(q k^T) is close to P. Long attention sees all earlier tokens, and short
attention the last `span` tokens. The results are the share of the target that is missed, ||P - P'||^2 / ||P||^2, the
largest |q k^T|, and the rank of P': its singular values above 1% of the largest one.

`full` is the paper's task, n = 2500 and d = 25. `sweep` changes n, d and the first q and k, one at a time: section 3
says that n d numbers cannot describe n^2 weights where n is much larger than d. Each row takes the learning rate that
misses least after a tenth of the steps, with seed 101. Fits in --out are not repeated.

The paper does not name its loss, its learning rate or the first q and k. Here the loss is the share that is missed, the
rate falls to 0 along a cosine (with a constant rate Adam's loss rises again and again, once its gradients are small),
and q and k begin with random normal numbers. Row 0 is left out, because it has nothing before it. In the paper's
section 3 a token sees itself, and in its task it does not. Here both attentions can see the token itself, and have to
learn not to.
"""

import math
import statistics

import torch

from attention.scores import visible
from configurator import at_least_one, names
from errors import refuse
from lab.experiments.results import check_writable, difference, drawing, measured, show_table, start

# What is measured?
what = "sweep,full,show"  # the parts to run, separated by commas; show: the tables and the picture
seeds = "1,2,3"  # each decides the random numbers of a fit: the target, q and k
n = 2500  # tokens of the part full
steps = 100000  # steps of Adam of the part full
sweep_steps = 10000  # steps of Adam of the part sweep
device = "cpu"  # cpu, cuda or mps
out = "lab/experiments/local_dependencies.json"  # the results
picture = "lab/pictures/local_dependencies.png"  # the picture

BAND = SPAN = 50  # tokens that the target, and short attention, look back
RATES = (3e-3, 1e-2, 3e-2)  # learning rates to try
KINDS = {"long": None, "short": SPAN}  # {name: the window}
# (n, d, standard deviation of the first q and k) of the fits of the part sweep
SWEEP = [(500, d, 0.1) for d in (5, 10, 25, 50)] + [(250, 25, 0.1), (1000, 25, 0.1), (500, 25, 1.0)]


def target(n: int) -> torch.Tensor:
    """(n, n): p_ij is 1 with probability 1/2 where 0 < i - j <= BAND, else 0; rows that have any sum to 1."""
    p = torch.rand(n, n) < 0.5
    p = p & visible(p, p, BAND) & ~torch.eye(n, dtype=torch.bool)
    return p / p.sum(-1, keepdim=True).clamp(min=1)


def pieces(p: torch.Tensor, window: int | None, rows: int = 125) -> list[tuple]:
    """Some rows of the target at a time, with the keys that they can see: [(rows, keys, mask, target)].

    The mask is -inf where a row does not see a key. A row whose target is all zero is left out of the loss: its target
    is NaN.
    """
    n, found = len(p), []
    for i in range(0, n, rows):
        at = slice(i, min(n, i + rows))
        keys = slice(0 if window is None else max(0, i - window), at.stop)
        mask = torch.zeros_like(p[at, keys]).masked_fill(~visible(p[at], p[keys], window), -torch.inf)
        found.append((at, keys, mask, p[at, keys].where(p[at].any(-1, keepdim=True), torch.nan)))
    return found


@torch.no_grad()
def gradients(q: torch.Tensor, k: torch.Tensor, task: list[tuple]) -> tuple[torch.Tensor, ...]:
    """(||P' - P||^2, its gradients with respect to q and k) for P' = softmax(q k^T), with the pieces of a target.

    With D = P' - P the gradient with respect to the scores is 2 P' (D - the sum of D P' over the row). Ten times as
    fast as autograd on whole matrices.
    """
    missed, dq, dk = torch.zeros((), device=q.device), torch.zeros_like(q), torch.zeros_like(k)
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


def fit(n: int, d: int, init: float, kind: str, rate: float, seed: int, steps: int) -> dict:
    """Fits q and k. The numbers of 20 steps and of the last one, and the rank at the end."""
    torch.manual_seed(seed)
    p = target(n).to(device)
    q, k = (torch.nn.Parameter((init * torch.randn(n, d)).to(device)) for _ in range(2))
    task, size, hidden = pieces(p, KINDS[kind]), p.square().sum().item(), ~visible(p, p, KINDS[kind])
    adam, found = torch.optim.Adam((q, k), lr=rate, fused=device != "mps"), {"step": [], "missed": [], "largest": []}
    for step in range(steps + 1):
        missed, q.grad, k.grad = gradients(q, k, task)
        if step % max(1, steps // 20) == 0:
            s = (q @ k.T).detach()
            largest = s.masked_fill(hidden, 0).abs().max().item()
            for key, x in (("step", step), ("missed", missed.item() / size), ("largest", largest)):
                found[key].append(x)
        adam.param_groups[0]["lr"] = rate * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        adam.step()
    values = torch.linalg.svdvals((q @ k.T).detach().masked_fill(hidden, -torch.inf).softmax(-1))
    return found | {"rank": int((values > 0.01 * values[0]).sum())}


def recorded(row: tuple, kind: str, rate: float, seed: int, steps: int) -> dict:
    """The numbers of a fit in --out. Makes it if it is missing."""
    n, d, init = row
    name = f"n {n}, d {d}, first {init:g}, {kind}, rate {rate:g}, {steps} steps"
    return measured(out, "fits", name, seed, lambda: fit(n, d, init, kind, rate, seed, steps))


def fits(rows: list[tuple], steps: int) -> dict[tuple, tuple[float, list[dict]]]:
    """{(row, kind): (its best learning rate, its fits with the seeds)}."""
    found = {}
    for row in rows:
        for kind in KINDS:
            tried = {rate: recorded(row, kind, rate, 101, steps // 10) for rate in RATES}
            best = min(RATES, key=lambda rate, tried=tried: tried[rate]["missed"][-1])
            found[row, kind] = best, [recorded(row, kind, best, int(seed), steps) for seed in seeds.split(",")]
    return found


def show(found: dict) -> None:
    """Prints the table of fits: means over the seeds, and what long attention misses beyond short attention."""
    lines = []
    for (row, kind), (rate, made) in found.items():
        last = {key: [r[key][-1] for r in made] for key in ("missed", "largest")}
        cells = [*row, kind, f"{rate:g}", f"{made[0]['step'][-1]:,}", f"{statistics.mean(last['missed']):.4f}"]
        short = [r["missed"][-1] for r in found[row, "short"][1]]
        cells += [difference(last["missed"], short, 4) if kind == "long" else ""]
        lines.append([*cells, f"{statistics.mean(last['largest']):.1f}", *{min(r["rank"] for r in made)}])
    columns = "n, d, first q and k, attention, learning rate, steps, missed, long - short, largest score, rank"
    show_table(columns.split(", "), lines)


def draw(found: dict) -> None:
    """What is missed and the largest score over the steps (figures 2c, 2d), and what is missed against d and n."""
    full = (n, 25, 0.1) if ((n, 25, 0.1), "long") in found else (1000, 25, 0.1)
    with drawing(picture, 1, 4, 18, 4) as (missed, largest, of_d, of_n):
        for kind, color in zip(KINDS, ("black", "C0"), strict=True):
            for ax, key in ((missed, "missed"), (largest, "largest")):
                for i, r in enumerate(found[full, kind][1]):
                    ax.plot([x / 1000 for x in r["step"][1:]], r[key][1:], color=color, label=None if i else kind)
            for ax, at, rows in ((of_d, 1, SWEEP[:4]), (of_n, 0, (SWEEP[4], SWEEP[2], SWEEP[5]))):
                if all((row, kind) in found for row in rows):
                    x = [statistics.mean(r["missed"][-1] for r in found[row, kind][1]) for row in rows]
                    ax.plot([row[at] for row in rows], x, "o-", color=color, label=kind)
        missed.set(
            title=f"share missed, n = {full[0]}, d = {full[1]} (figure 2c)", xlabel="thousand steps", yscale="log"
        )
        largest.set(title="largest score (figure 2d)", xlabel="thousand steps")
        of_d.set(title=f"share missed, n = 500, {sweep_steps:,} steps", xlabel="d", yscale="log")
        of_n.set(title=f"share missed, d = 25, {sweep_steps:,} steps", xlabel="n")


def main() -> None:
    at_least_one(n=n, steps=steps, sweep_steps=sweep_steps)
    check_writable(out, picture)
    torch.set_flush_denormal(True)
    parts, found = names(what, ["sweep", "full", "show"]), {}
    if "sweep" in parts:
        found |= fits(SWEEP, sweep_steps)
    if "full" in parts:
        found |= fits([(n, 25, 0.1)], steps)
    if "show" in parts:
        refuse([(not found, "--what=show needs the part that it shows beside it: sweep,show or full,show")])
        show(found)
        draw(found)


if __name__ == "__main__":
    start(globals())
