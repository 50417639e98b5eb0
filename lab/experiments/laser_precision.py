"""LASER paper, appendix A.5: the error of LASER attention in bfloat16, with and without a shift of the values.

    python -m lab.experiments.laser_precision

It trains a LASER model with the CPU config, unless it has done so before. It takes the queries, keys and values of the
model's layers on the validation text, rounded to bfloat16. Each way to compute attention from them in bfloat16 is
compared with the definition in float64. The script prints the mean and the standard deviation, over layers and batches,
of ||y - y_exact|| / ||y_exact||. In the second table the values are multiplied by a factor, because the values of a
larger model may be larger.
"""

import math
import statistics
from collections.abc import Callable

import torch
from torch.nn import functional as F

from attention.fast import for_values, general_form
from attention.forms import fast_form
from attention.probe import probing
from configurator import at_least_one, pick_device
from lab.experiments.results import show_table, start
from lab.experiments.runs import finished
from model import ATTENTION, GPT
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model

# Which model?
config_file = "config/train_shakespeare_char_cpu.py"  # the config file of the run
out_dir = "out-laser-precision"  # the folder of the run
extra = ""  # more flags of train.py, separated by spaces
# On how much text, and on what does it run?
batches = 50  # number of batches of the validation text
batch_size = 12  # windows per batch
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps


def vanilla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """log(softmax(s) exp(v)), as it stands (equation 6)."""
    return F.scaled_dot_product_attention(q, k, v.exp(), is_causal=True).log()


def shifted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The log-weighted-sum-exp trick, with the largest value of each channel (algorithm 1)."""
    m = v.amax(-2, keepdim=True)
    return F.scaled_dot_product_attention(q, k, (v - m).exp(), is_causal=True).log() + m


WAYS: dict[str, tuple[Callable, str]] = {
    "LASER, vanilla": (vanilla, "laser"),
    "LASER, the paper's shift": (shifted, "laser"),
    "LASER, ours": (fast_form("laser", ATTENTION["laser"]), "laser"),
    "softmax": (fast_form("softmax", ATTENTION["softmax"]), "softmax"),
}


def layers_of(gpt: GPT, idx: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """q, k and v of each layer, (1, H, T, D)."""
    found = []
    with torch.no_grad(), probing(gpt.eval(), lambda layer, group, q, k, v, **_: found.append((q, k, v))):
        gpt(idx)
    return found


def errors(way: Callable, core: str, inputs: list[tuple], factor: float) -> list[float]:
    """The relative error on each of the inputs, whose values are multiplied by factor; infinity for NaN."""
    definition = general_form(ATTENTION[core], for_values)  # a few queries at a time: LASER's holds T x T x D numbers
    found = []
    for q, k, v in inputs:
        v = v * factor
        exact = definition(q.double(), k.double(), v.double())
        error = ((way(q, k, v).double() - exact).norm() / exact.norm()).item()
        found.append(math.inf if math.isnan(error) else error)
    return found


@torch.no_grad()
def main() -> None:
    at_least_one(batches=batches, batch_size=batch_size)
    flags = [config_file, "--attention=laser", *extra.split()]
    finished("LASER", flags, out_dir)
    model, _, settings, _ = open_model("resume", out_dir, "latest")
    where, _, _ = pick_device(device, "float32")
    model.to(where)
    tokens = Tokens(folder_of(settings["dataset"]), "val", model.config.block_size)
    layers = (layer for x, _ in tokens.eval_batches(batches, batch_size) for layer in layers_of(model, x.to(where)))
    inputs = [tuple(x.bfloat16() for x in layer) for layer in layers]
    ranges = torch.stack([(v.amax(-2) - v.amin(-2)).amax().float() for _, _, v in inputs])
    shape = tuple(inputs[0][0].shape)
    print(f"{len(inputs)} q, k and v of shape {shape} on {where}; a channel's values span up to {ranges.max():.1f}")
    rows = []
    for name, (way, core) in WAYS.items():
        e = errors(way, core, inputs, 1.0)
        rows.append([name, f"{statistics.mean(e):.5f}", f"{statistics.pstdev(e):.5f}"])
    show_table(["in bfloat16", "relative error, mean", "standard deviation"], rows)
    factors, some = (3.0, 10.0, 100.0), inputs[:: max(1, len(inputs) // 12)]
    rows = [[name, *(f"{statistics.mean(errors(way, core, some, f)):.5f}" for f in factors)]
            for name, (way, core) in WAYS.items()]  # fmt: skip
    show_table(["values times", *(f"{f:g}" for f in factors)], rows)


if __name__ == "__main__":
    start(globals())
