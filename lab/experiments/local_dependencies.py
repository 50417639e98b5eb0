"""The long-short paper's figure 2: can attention learn dense local dependencies, if queries and keys are free?

    python -m lab.experiments.local_dependencies --steps=10000    # 25 minutes on one CPU core
    python -m lab.experiments.local_dependencies --device=cuda    # the paper's 100,000 steps

The target P (n, n) gives each token equal weights on about half of the `band` tokens before it (section 3.1). Adam
changes q and k (n, d) until P' = softmax(q k^T) is close to P. Long attention sees all earlier tokens, and short
attention the last `span` tokens. The script prints, and writes to --out, the share of the target that is missed,
||P - P'||^2 / ||P||^2, and the largest |q k^T|.

The paper does not name its loss, its learning rate or the first q and k. Here the loss is the share that is missed, and
q and k begin with random normal numbers (--init). Row 0 is left out, because it has nothing before it. In the paper's
section 3 a token sees itself, and in its task it does not. Here both attentions can see the token itself, and have to
learn not to.
"""

import itertools
import time

import torch
from torch.nn import functional as F

from attention.scores import visible
from configurator import pick_device
from errors import UserError
from lab.experiments.results import check_writable, save, show_table, start

# What is the task?
n = 2500  # number of tokens
d = 25  # dimensions of q and k
band = 50  # tokens that the target looks back
span = 50  # tokens that short attention looks back
seed = 1337  # decides the random numbers: the target, q and k
# How is it learned?
steps = 100000  # steps of Adam
learning_rates = "1e-2,1e-3"  # learning rates to try, separated by commas; the best one counts for each attention
init = 0.1  # standard deviation of the first q and k
# Where do the results go, and on what does it run?
rows = 20  # number of lines that are printed per fit
out = "local_dependencies.json"  # the file of results
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps


def target(n: int, band: int) -> torch.Tensor:
    """(n, n): p_ij is 1 with probability 1/2 where 0 < i - j <= band, else 0; rows that have any sum to 1."""
    p = torch.rand(n, n) < 0.5
    p = p & visible(p, p, band) & ~torch.eye(n, dtype=torch.bool)
    return p / p.sum(-1, keepdim=True).clamp(min=1)


def short_scores(q: torch.Tensor, k: torch.Tensor, size: int) -> torch.Tensor:
    """q k^T of each row with its own block of `size` and the one before: (n / size, size, 2 size); unseen ones -inf."""
    q, k = q.unflatten(0, (-1, size)), k.unflatten(0, (-1, size))
    k = torch.cat((F.pad(k[:-1], (0, 0, 0, 0, 1, 0)), k), dim=1)
    s = (q @ k.mT).masked_fill(~visible(q, k, size), -torch.inf)
    s[0, :, :size] = -torch.inf  # there is nothing before the first block
    return s


def long_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q k^T (n, n) of each row with all rows up to it; unseen ones -inf."""
    return (q @ k.T).masked_fill(~visible(q, k, None), -torch.inf)


def fit(name: str, p: torch.Tensor, rate: float, dev: str) -> list[dict]:
    """Fits q and k; a row of results now and then."""
    torch.manual_seed(seed)
    q = (init * torch.randn(n, d)).to(dev).requires_grad_()
    k = (init * torch.randn(n, d)).to(dev).requires_grad_()
    short = name == "short"
    if short:  # of p what short attention can see
        p = torch.stack([F.pad(p, (span, 0))[i : i + span, i : i + 2 * span] for i in range(0, n, span)])
    p = p.to(dev)
    some = p.sum(-1, keepdim=True) > 0
    size = p.square().sum()
    found = []
    began = time.perf_counter()
    adam = torch.optim.Adam((q, k), lr=rate, fused=dev != "mps")
    for step in range(steps + 1):
        s = short_scores(q, k, span) if short else long_scores(q, k)
        missed = ((s.softmax(-1) - p) * some).square().sum() / size
        if step % max(1, steps // rows) == 0 or step == steps:
            largest = s.detach().masked_fill(s == -torch.inf, 0).abs().max().item()
            seconds = time.perf_counter() - began
            found.append({"step": step, "missed": missed.item(), "largest": largest, "seconds": seconds})
            print(f"{name:6}{rate:8g}{step:9,}{missed.item():12.4f}{largest:12.1f}{seconds:10.0f} s", flush=True)
        missed.backward()
        adam.step()
        adam.zero_grad()
    return found


def main() -> None:
    if min(n, d, band, span, steps, rows) < 1 or init <= 0:
        raise UserError("n, d, band, span, steps, rows and init must be positive")
    if n % span or band > span:
        raise UserError(f"n={n} must be a multiple of span={span}, which must be at least band={band}")
    try:
        rates = [float(rate) for rate in learning_rates.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        raise UserError(f"--learning_rates={learning_rates} must be positive numbers, separated by commas")
    check_writable(out)
    dev, _, _ = pick_device(device, "float32")
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
    p, fits = target(n, band), {}
    print(f"{'':6}{'rate':>8}{'step':>9}{'missed':>12}{'largest':>12}")
    for rate, name in itertools.product(rates, ("short", "long")):
        fits[name, rate] = fit(name, p, rate, dev)
        save(out, {f"{name} {rate:g}": rows for (name, rate), rows in fits.items()})
    cells = []
    for name in ("long", "short"):
        rate = min(rates, key=lambda rate, name=name: fits[name, rate][-1]["missed"])
        end = fits[name, rate][-1]
        cells.append([name, f"{rate:g}", f"{end['missed']:.4f}", f"{end['largest']:.1f}"])
    show_table(["attention", "learning rate", "share missed", "largest score"], cells)


if __name__ == "__main__":
    start(globals())
