"""LASER paper, appendix A.5: LASER's error in bfloat16, with and without a shift of the values.

    python -m lab.experiments.laser_precision

It trains a LASER model with the CPU config, unless it has done so before. It takes the queries,
keys and values of the model's layers on the validation text, rounded to bfloat16. Each way to
compute attention from them in bfloat16 is compared with the definition in float64. The script
prints the mean and the standard deviation, over layers and batches, of ||y - y_exact|| /
||y_exact||, also with values that are multiplied by a factor, because those of a larger model may
be larger. Numbers that are in --out are not measured again.
"""

import math
import statistics

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.fast import general_form
from attention.forms import form_of
from attention.probe import probing
from configurator import at_least_one, pick_device, run_script
from lab.experiments.results import measured, show_table
from lab.experiments.runs import finished, identity
from model import ATTENTION, GPT
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model

# Which model?
config_file = "config/train_shakespeare_char_cpu.py"  # the config file of the run
out_dir = "out-laser-precision"  # the folder of the run
out = "lab/experiments/laser_precision.json"  # the results
extra = ""  # more flags of train.py, separated by spaces
# On how much text, and on what does it run?
batches = 50  # number of batches of the validation text
batch_size = 12  # windows per batch
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps


def vanilla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """log(softmax(s) exp(v)), as it stands (equation 6)."""
    return F.scaled_dot_product_attention(q, k, v.exp(), is_causal=True).log()


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The log-weighted-sum-exp trick, with the largest value of each channel (algorithm 1)."""
    m = v.amax(-2, keepdim=True)
    return F.scaled_dot_product_attention(q, k, (v - m).exp(), is_causal=True).log() + m


WAYS = {
    "LASER, vanilla": (vanilla, "laser"),
    "LASER, the paper's shift": (shifted, "laser"),
    "LASER, ours": (form_of("laser", ATTENTION["laser"])[0], "laser"),
    "softmax": (form_of("softmax", ATTENTION["softmax"])[0], "softmax"),
}
FACTORS = (3.0, 10.0, 100.0)  # of the values


def layers_of(gpt: GPT, idx: Tensor) -> list[tuple]:
    """q, k and v of each layer, (1, H, T, D)."""
    layers = []

    def see(layer, group, q, k, v, **_) -> None:
        layers.append((q, k, v))

    with torch.no_grad(), probing(gpt.eval(), see):
        gpt(idx)
    return layers


def errors(name: str, inputs: list[tuple], factor: float) -> list[float]:
    """A way's relative error on each of the inputs, whose values are multiplied by factor.

    NaN counts as infinity.
    """
    way, core = WAYS[name]
    # a few queries at a time: LASER's definition holds T x T x D numbers
    definition = general_form(ATTENTION[core], holds_values=True)
    relative = []
    for q, k, v in inputs:
        v = v * factor
        exact = definition(q.double(), k.double(), v.double())
        error = ((way(q, k, v).double() - exact).norm() / exact.norm()).item()
        relative.append(math.inf if math.isnan(error) else error)
    return relative


@torch.no_grad()
def measure(command: list[str], where: str) -> dict:
    """{way: [the standard deviation of its errors, their mean, and at each factor]} of a run."""
    finished("LASER", command, out_dir)
    model, _, settings, _ = open_model("resume", out_dir, "latest")
    model.to(where)
    tokens = Tokens(folder_of(settings["dataset"]), "val", model.config.block_size)
    inputs = []
    for x, _ in tokens.eval_batches(batches, batch_size):
        for layer in layers_of(model, x.to(where)):
            inputs.append([part.bfloat16() for part in layer])
    some = inputs[:: max(1, len(inputs) // 12)]
    found = {}
    for name in WAYS:
        e = errors(name, inputs, 1.0)
        means = [statistics.mean(errors(name, some, factor)) for factor in FACTORS]
        found[name] = [statistics.pstdev(e), statistics.mean(e), *means]
    return found


def main() -> None:
    at_least_one(batches=batches, batch_size=batch_size)
    command = [config_file, "--attention=laser", *extra.split()]
    where, _, _ = pick_device(device, "float32")
    size = f"{batches} x {batch_size}"
    of = identity(command)
    found = measured(out, "errors", where, size, measure, command, where, of=of)
    rows = []
    for name in WAYS:
        deviation, mean, *large = found[name]
        rows.append([name, f"{mean:.4f} ({deviation:.4f})", *(f"{e:.4f}" for e in large)])
    factors = " | ".join(f"{factor:g}" for factor in FACTORS)
    show_table(f"in bfloat16 | error, mean (standard deviation) | values times {factors}", rows)


if __name__ == "__main__":
    run_script(globals())
