"""The LASER paper's figure 1: how small are a trained model's attention probabilities, and attention's gradients?

    python experiments/attention_probabilities.py --out_dir=out-shakespeare-char-cpu

Of each layer, over the validation split: the share of the probabilities p = softmax(s) that are below 1e-3 and 1e-7,
beside the share if all scores were equal, which says what the length alone does. And what the paper concludes from
them (section 3.2): the norm of the Jacobian dy / ds of a query's output with respect to its scores, for softmax,
p_j (v_j - y), and for LASER, p_j (exp(v_j - y) - 1), on the same q, k and v. A mean over queries and heads.
"""

import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import UserError, configure, pick_device, user_errors
from experiments.runs import watched
from model import ByDistance, in_rows, scores, visible
from text.dataset import Tokens, folder_of
from training.opening import open_model

out_dir = "out"  # the folder that train.py wrote
batches = 10  # of validation windows
batch_size = 1  # windows per batch
device = "auto"  # auto (cuda, mps or cpu, the first there is), cpu, cuda, cuda:0, mps


@in_rows(lambda q, k, v, bias: 10 * q.shape[0] * q.shape[1] * k.shape[-2])  # 64 bits each
def measures(q, k, v, *, window=None, scale=None, bias=None):
    """Of each query how many keys it sees, how many of them below 1e-3 and below 1e-7, |dy/ds| of softmax and of LASER,
    and a 1 to count it: (B, H, Tq, 6), as if that were a core."""
    seen = visible(q.shape[-2], k.shape[-2], window, q.device)
    p, v = scores(q, k, scale, bias).masked_fill(~seen, -torch.inf).softmax(-1).double(), v.double()
    small = ((p.masked_fill(~seen, 1.0) < t).sum(-1) for t in (1e-3, 1e-7))
    y, shift = p @ v, v.amax(-2, keepdim=True)
    e = (v - shift).exp()
    r = 1 / (p @ e)  # exp(v_j - y) = e_j r, with y LASER's output
    # sum over channels of (v_j - y)^2 and of (e_j r - 1)^2, as products of matrices
    softmax = v.square().sum(-1)[..., None, :] - 2 * y @ v.mT + y.square().sum(-1, keepdim=True)
    laser = r.square() @ e.square().mT - 2 * r @ e.mT + v.shape[-1]
    norms = ((p.square() * x.clamp(min=0)).sum(-1).sqrt() for x in (softmax, laser))
    n = seen.sum(-1).expand(p.shape[:-1])
    return torch.stack([n, *small, *norms, torch.ones_like(y[..., 0])], dim=-1)


@torch.no_grad()
def main() -> None:
    if min(batches, batch_size) < 1:
        raise UserError(f"batches={batches} and batch_size={batch_size} must be at least 1")
    where, _, _ = pick_device(device, "float32")
    model, _, run, about = open_model("resume", out_dir, "best")
    if model.config.attention == "beta":
        raise UserError("beta's weights are no probabilities: a model of softmax or LASER goes here")
    model.eval().to(where)
    tokens = Tokens(folder_of(run["dataset"]), "val", model.config.block_size)
    layers = [[torch.zeros(6, dtype=torch.float64) for _ in range(2)] for _ in model.transformer.h]

    def see(layer: int, q, k, v, *, window=None, scale=None, bias=None, **_) -> None:
        bias = ByDistance(bias.values) if isinstance(bias, ByDistance) else bias
        for total, inputs in zip(layers[layer], ((q, bias), (0 * q, None)), strict=True):
            found = measures(inputs[0], k, v, window=window, scale=scale, bias=inputs[1])
            total += found.sum((0, 1, 2)).cpu()

    for x, _ in tokens.eval_batches(batches, batch_size):
        watched(model, x.to(where), see)
    print(f"{about}; {model.config.attention}, {batches * batch_size} windows of {model.config.block_size} tokens\n")
    columns = "layer", "below 1e-3", "if scores were equal", "below 1e-7", "Jacobian, softmax", "LASER"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, (found, equal) in [*enumerate(layers), ("all", [sum(x) for x in zip(*layers, strict=True)])]:
        shares = (x / n for x, n in ((found[1], found[0]), (equal[1], equal[0]), (found[2], found[0])))
        norms = (f"{x / found[5]:.4f}" for x in found[3:5])
        print(f"| {name} | {' | '.join(f'{x:.1%}' for x in shares)} | {' | '.join(norms)} |")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
