"""The LASER paper's figure 1: how small are attention's probabilities and gradients in a model?

    python -m lab.experiments.attention_probabilities --out_dir=out-shakespeare-char-cpu

It prints the share of the probabilities p = softmax(s) that are below 1e-3 and 1e-7, over windows
of the validation split. Beside the share below 1e-3 stand that of the lowest layer, that of the
highest, and the one that equal scores would give, which is due to the length. Then it prints what
the paper concludes from small probabilities (section 3.2): the norm of the Jacobian dy / ds of a
query's output with respect to its scores. The Jacobian is p_j (v_j - y) for softmax and p_j
(exp(v_j - y) - 1) for LASER, on the same q, k and v; the norms are means over queries and heads.
The table has all models in --out.
lab/experiments/jacobians.py has these Jacobians for all weights.
"""

import statistics
from functools import partial

from configurator import pick_device, run_script

import torch
from torch import Tensor

from attention.fast import CHUNK, in_rows
from attention.scores import scores, visible
from errors import UserError
from lab.experiments.results import add, short, show_table, stored
from lab.look.probe import Probe
from model import GPT
from parts import attentions
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model

NORMS = ("softmax", "LASER")  # the attentions whose Jacobians are measured

# What is measured?
out_dir = "out"  # the folder that train.py wrote
batches = 10  # windows of the validation split
out = "probabilities.json"  # the file of results, to which these are added
# What does it run on?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps


def measures_at_once(q, k, v, *, window=None, scale=None):
    """Six numbers of each query, (B, H, Tq, 6), whose sums are the counts and means.

    How many keys it sees; how many of their probabilities are below 1e-3, and below 1e-7; |dy/ds|
    of softmax and of LASER; and a 1, which counts the queries.
    """
    seen = visible(q, k, window)
    p = scores(q, k, scale).masked_fill(~seen, -torch.inf).softmax(-1).double()
    v = v.double()
    n = seen.sum(-1).expand(p.shape[:-1])
    of_seen = p.masked_fill(~seen, 1.0)
    below = [(of_seen < limit).sum(-1) for limit in (1e-3, 1e-7)]
    y = p @ v
    e = (v - v.amax(-2, keepdim=True)).exp()
    r = 1 / (p @ e)  # exp(v_j - y) = e_j r, where y is LASER's output
    # the sums over channels of (v_j - y)^2 and of (e_j r - 1)^2, the latter as products of matrices
    softmax = torch.cdist(y, v).square()
    laser = r.square() @ e.square().mT - 2 * r @ e.mT + v.shape[-1]
    norms = [(p.square() * square.clamp(min=0)).sum(-1).sqrt() for square in (softmax, laser)]
    return torch.stack([n, *below, *norms, torch.ones_like(n)], dim=-1)


def measures(q, k, v, **settings):
    """The same, for a few queries at a time."""
    return in_rows(partial(measures_at_once, **settings), q, k, v, CHUNK)


@torch.no_grad()
def measured_layers(model: GPT, tokens: Tokens, where: str) -> list[Tensor]:
    """Each layer's sums of measures, (2, 6): with its own scores and with equal scores."""
    layers = torch.zeros(len(model.transformer.h), 2, 6, dtype=torch.float64)
    layer_of = {}
    for layer, block in enumerate(model.transformer.h):
        layer_of |= dict.fromkeys(block.attn.heads, layer)

    def see(heads, q, k, v, *, window=None, scale=None, **_) -> None:
        own = measures(q, k, v, window=window, scale=scale)
        equal = measures(0 * q, k, v, window=window, scale=scale)
        layers[layer_of[heads]] += torch.stack([x.sum((0, 1, 2)).cpu() for x in (own, equal)])

    for x, _ in tokens.eval_batches(batches, 1):
        model.hidden(x.to(where), Probe(see))
    return list(layers)


def summary(sums: Tensor) -> dict[str, float]:
    """Shares of probabilities and mean norms, from sums of measures (2, 6)."""
    own, equal = sums.tolist()
    return {
        "below": own[1] / own[0],
        "equal": equal[1] / equal[0],
        "tiny": own[2] / own[0],
        "softmax": own[3] / own[5],
        "LASER": own[4] / own[5],
    }


def main() -> None:
    where, _, _ = pick_device(device, "float32")
    model, _, run, about = open_model("resume", out_dir, "best")
    attention = model.config.attention
    for name in attentions(model.config):
        if name not in ("softmax", "laser"):
            raise UserError(
                f"{name}'s weights are no probabilities: a model of softmax or LASER goes here"
            )
    model.eval().to(where)
    T = model.config.block_size
    sums = measured_layers(model, Tokens(folder_of(run["dataset"]), "val", T), where)
    print(f"{about}; {attention}, {batches} windows of {T} tokens")
    below = [summary(x)["below"] for x in sums]
    total = summary(sum(sums)) | {"low": min(below), "high": max(below)}
    name = f"{attention}, {T} tokens"
    add(out, short(total), "models", name, str(run["seed"]))
    show(stored(out, "models"))


def show(models: dict[str, dict]) -> None:
    """Print the table of all models in --out, means over their seeds."""
    rows = []
    for name, by_seed in models.items():
        runs = list(by_seed.values())
        shares = ("below", "low", "high", "equal", "tiny")
        mean = {key: statistics.mean(run[key] for run in runs) for key in (*shares, *NORMS)}
        ratios = [run["LASER"] / run["softmax"] for run in runs]
        cells = [f"{mean[key]:.1%}" for key in shares] + [f"{mean[key]:.3f}" for key in NORMS]
        rows.append([name, len(runs), *cells, f"{min(ratios):.3f} to {max(ratios):.3f}"])
    columns = "model | seeds | below 1e-3 | lowest layer | highest layer | if scores were equal"
    show_table(f"{columns} | below 1e-7 | Jacobian, softmax | LASER | ratio", rows)


if __name__ == "__main__":
    run_script(globals())
