"""The LASER paper's figure 1: how small are a trained model's attention probabilities, and attention's gradients?

    python -m lab.experiments.attention_probabilities --out_dir=out-shakespeare-char-cpu

For each layer, over the validation split, it prints the share of the probabilities p = softmax(s) that are below 1e-3
and 1e-7. Beside the share below 1e-3 stands the share that equal scores would give, which is due to the length alone.
Then it prints what the paper concludes from small probabilities (section 3.2): the norm of the Jacobian dy / ds of a
query's output with respect to its scores. The Jacobian is p_j (v_j - y) for softmax and p_j (exp(v_j - y) - 1) for
LASER, on the same q, k and v; the norms are means over queries and heads. The last table has all models in --out.
lab/experiments/jacobians.py has these Jacobians for all weights.
"""

import statistics

import torch

from attention.fast import few_rows_at_a_time
from attention.heads import HeadGroup
from attention.probe import probing
from attention.scores import scores, visible
from configurator import at_least_one, pick_device
from errors import UserError
from lab.experiments.results import measured, saved, show_table, spread, start
from rules import attentions
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model

# What is measured?
out_dir = "out"  # the folder that train.py wrote
batches = 10  # windows of the validation split
out: str | None = None  # a file of results, to which these are added; None: they are only printed
# What does it run on?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps


def measures_at_once(q, k, v, *, window=None, scale=None, bias=None):
    """Six numbers of each query, (B, H, Tq, 6): how many keys it sees; how many of their probabilities are below 1e-3,
    and below 1e-7; |dy/ds| of softmax and of LASER; and a 1, so that sums also count the queries."""
    seen = visible(q, k, window)
    p = scores(q, k, scale, bias).masked_fill(~seen, -torch.inf).softmax(-1).double()
    v = v.double()
    n = seen.sum(-1).expand(p.shape[:-1])
    of_seen = p.masked_fill(~seen, 1.0)
    below = [(of_seen < limit).sum(-1) for limit in (1e-3, 1e-7)]
    y = p @ v
    e = (v - v.amax(-2, keepdim=True)).exp()
    r = 1 / (p @ e)  # exp(v_j - y) = e_j r, where y is LASER's output
    # the sums over channels of (v_j - y)^2 and of (e_j r - 1)^2, as products of matrices
    softmax = v.square().sum(-1)[..., None, :] - 2 * y @ v.mT + y.square().sum(-1, keepdim=True)
    laser = r.square() @ e.square().mT - 2 * r @ e.mT + v.shape[-1]
    norms = [(p.square() * square.clamp(min=0)).sum(-1).sqrt() for square in (softmax, laser)]
    return torch.stack([n, *below, *norms, torch.ones_like(n)], dim=-1)


measures = few_rows_at_a_time(measures_at_once, lambda q, k, v: 10 * q.shape[0] * q.shape[1] * k.shape[-2])


@torch.no_grad()
def main() -> None:
    at_least_one(batches=batches)
    where, _, _ = pick_device(device, "float32")
    model, _, run, about = open_model("resume", out_dir, "best")
    if other := [name for name in attentions(model.config) if name not in ("softmax", "laser")]:
        raise UserError(f"{other[0]}'s weights are no probabilities: a model of softmax or LASER goes here")
    model.eval().to(where)
    tokens = Tokens(folder_of(run["dataset"]), "val", model.config.block_size)
    layers = {block.attn: torch.zeros(2, 6, dtype=torch.float64) for block in model.transformer.h}

    def see(layer: torch.nn.Module, group: HeadGroup, q, k, v, *, window=None, scale=None, bias=None, **_) -> None:
        found = measures(q, k, v, window=window, scale=scale, bias=bias)
        equal = measures(0 * q, k, v, window=window, scale=scale)
        layers[layer] += torch.stack([x.sum((0, 1, 2)).cpu() for x in (found, equal)])

    with probing(model, see):
        for x, _ in tokens.eval_batches(batches, 1):
            model(x.to(where))
    print(f"{about}; {model.config.attention}, {batches} windows of {model.config.block_size} tokens")
    rows, totals = [], dict(enumerate(layers.values())) | {"all": sum(layers.values())}
    for name, (found, equal) in totals.items():
        shares = [found[1] / found[0], equal[1] / equal[0], found[2] / found[0]]
        norms = found[3:5] / found[5]
        rows.append([name, *(f"{x:.1%}" for x in shares), *(f"{x:.4f}" for x in norms)])
    columns = "layer", "below 1e-3", "if scores were equal", "below 1e-7", "Jacobian, softmax", "LASER"
    show_table(columns, rows)
    if out:
        share = [found[1] / found[0] for found, _ in layers.values()]
        found, equal = totals["all"]
        numbers = {"below": found[1] / found[0], "low": min(share), "high": max(share), "equal": equal[1] / equal[0]}
        numbers |= {"tiny": found[2] / found[0], "softmax": found[3] / found[5], "LASER": found[4] / found[5]}
        name = f"{model.config.attention}, {model.config.block_size} tokens"
        measured(out, "models", name, run["seed"], lambda: {key: float(x) for key, x in numbers.items()})
        show(saved(out, {})["models"])


def show(models: dict[str, dict]) -> None:
    """Prints the table of all models in --out, means over their seeds."""
    rows = []
    for name, by_seed in models.items():
        mean = {key: statistics.mean(r[key] for r in by_seed.values()) for key in next(iter(by_seed.values()))}
        shares = [f"{mean[key]:.1%}" for key in ("below", "low", "high", "equal", "tiny")]
        ratio = [r["LASER"] / r["softmax"] for r in by_seed.values()]
        rows.append([name, len(by_seed), *shares, *(f"{mean[key]:.3f}" for key in ("softmax", "LASER")), spread(ratio)])
    columns = "model, seeds, below 1e-3, lowest layer, highest layer, if scores were equal, below 1e-7"
    show_table([*columns.split(", "), "Jacobian, softmax", "LASER", "ratio"], rows)


if __name__ == "__main__":
    start(globals())
