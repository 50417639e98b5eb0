"""LASER against softmax over model sizes (LASER paper, figures 2, 3, 4, 6, table 11, LAMB).

    OMP_NUM_THREADS=1 python -m lab.experiments.laser --jobs=2   # on two cores
    python -m lab.experiments.laser --scale=paper                # the paper's sizes, large machine
    python -m lab.experiments.laser --what=show                  # picture and tables of --out

At each size each attention is trained with each learning rate of the scale and seed 1, and then at
its best rate with the seeds 2, 3 and so on, which are compared. Both attentions get the same rates.
Finished runs are skipped: you can stop and start again. (`compare --table=laser_settled` has eight
seeds at two sizes.)
"""

import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Literal

from configurator import names, run_script

import numpy as np
import torch

from lab.experiments.results import difference, drawing, mean, show_table
from lab.experiments.runs import by_seed, final, finals
from lab.experiments.tables import rows_of, steps_of
from lab.experiments.times import model_of
from training.estimate import num_params

# What is measured?
what = "train,show"  # the parts to run, separated by commas; show: the picture and the tables
scale: Literal["pocket", "paper"] = "pocket"  # pocket: for two CPU cores; paper: the paper's
seeds = 3  # runs of each attention and size at its best learning rate
jobs = 1  # runs at the same time; they share the cores of the CPU
out = "lab/experiments/laser.json"  # the results
picture = "lab/experiments/pictures/laser.png"  # the picture
out_dir = "out-laser"  # the folder for the runs, each in a folder of its own

CPU = "config/train_shakespeare_char_cpu.py"
# "size, recipe"; all sizes have the recipe adamw
POCKET = rows_of("""
2 x 64, adamw: --n_layer=2 --n_head=4 --n_embd=64
3 x 96, adamw: --n_layer=3 --n_head=6 --n_embd=96
4 x 128, adamw: --n_layer=4 --n_head=8 --n_embd=128
5 x 192, adamw: --n_layer=5 --n_head=12 --n_embd=192
3 x 96, lamb: --n_layer=3 --n_head=6 --n_embd=96 --import=lab.ideas.lamb --optimizer=lamb
""")
# bfloat16: weights and products (table 11)
PAPER = rows_of("""
234M, adamw: --n_layer=16 --n_hidden=4096
301M, adamw:
435M, adamw: --n_hidden=4096
1.1B, adamw: --n_embd=2048 --head_dim=256 --n_hidden=4096
2.2B, adamw: --n_embd=2048 --head_dim=512 --n_hidden=8192
301M, lamb: --import=lab.ideas.lamb --optimizer=lamb
2.2B, bfloat16: --n_embd=2048 --head_dim=512 --n_hidden=8192 --variant=bfloat16
""")
# rates: the learning rates that each model tries
SCALES = {
    "pocket": {
        "file": CPU,
        "flags": steps_of(1000, 4) | {"log_interval": 1, "min_lr": 0.0},
        "models": POCKET,
        "rates": {
            "2 x 64, adamw": [5e-3, 1.25e-2, 3.1e-2],
            "3 x 96, adamw": [2e-3, 5e-3, 1.25e-2],
            "4 x 128, adamw": [2e-3, 5e-3, 1.25e-2],
            "5 x 192, adamw": [8e-4, 2e-3, 5e-3],
            "3 x 96, lamb": [1e-2, 2e-2, 4e-2],
        },
    },
    "paper": {
        "file": "config/train_laser_301m.py",
        "flags": {"log_interval": 1, "dtype": "float32", "tf32": False},
        "models": PAPER,
        "rates": dict.fromkeys(PAPER, [1e-4, 1e-3, 1e-2]),
    },
}
ATTENTIONS = {"softmax": "black", "laser": "C1"}  # and their colors


def train(make: bool) -> tuple[dict, dict]:
    """Return ({(model, attention): (its best rate, results)}, {model: pair}).

    results: of the compared seeds, at the best rate. pair: the results of softmax and of LASER with
    seed 1, both at softmax's best rate. make: see runs.record.
    """
    rates = SCALES[scale]["rates"]
    keys = list(itertools.product(rates, ATTENTIONS))
    first = results_of([(*key, rate) for key in keys for rate in rates[key[0]]], [1], make)
    best = {}
    for key in keys:
        losses = {rate: final(first[*key, rate][0]) for rate in rates[key[0]]}
        best[key] = min(losses, key=losses.get)
    others = results_of([(*key, best[key]) for key in keys], range(2, seeds + 2), make)
    tuned = {key: (rate, others[*key, rate]) for key, rate in best.items()}
    same_rate = {}
    for model in rates:
        rate = best[model, "softmax"]
        same_rate[model] = [first[model, attention, rate][0] for attention in ATTENTIONS]
    return tuned, same_rate


def results_of(keys: list[tuple], seeds: Iterable[int], make: bool) -> dict:
    """{key: the results of its seeds} of keys (model, attention, rate)."""
    s = SCALES[scale]
    rows = {}
    for model, attention, rate in keys:
        size, recipe = model.split(", ")
        flags = s["flags"] | s["models"][model] | {"attention": attention, "learning_rate": rate}
        name = f"{scale}, {size}, {attention}, {recipe}, {rate:g}, seed "
        rows[model, attention, rate] = name, s["file"], flags
    return by_seed(rows, seeds, out, out_dir, jobs, make, ("val_loss", "norm"))


def parameters(model: str) -> int:
    """The number of parameters of a model, without positions."""
    s = SCALES[scale]
    with torch.device("meta"):
        return num_params(model_of(s["file"], s["flags"] | s["models"][model], 65)[0])


def power_law(n: list[int], losses: list[float]) -> tuple[float, float]:
    """a and b of L = a n^b, by least squares of log L against log n."""
    b, log_a = np.polyfit(np.log(n), np.log(losses), 1)
    return math.exp(log_a), b


def by_size(tuned: dict, attention: str) -> dict[int, list[float]]:
    """{number of parameters: the losses of the seeds} with AdamW."""
    sizes = [model for model in SCALES[scale]["models"] if "adamw" in model]
    return {parameters(model): finals(tuned[model, attention][1]) for model in sizes}


def laws(tuned: dict) -> dict[str, list]:
    """(a, b) of each attention's power law with AdamW, one for each seed."""
    by_attention = {}
    for attention in ATTENTIONS:
        losses = by_size(tuned, attention)
        of_seeds = zip(*losses.values(), strict=True)
        by_attention[attention] = [power_law(list(losses), x) for x in of_seeds]
    return by_attention


def saved_share(loss: float, softmax: tuple, laser: tuple) -> float:
    """By two power laws (a, b), the share of softmax's parameters that LASER saves at a loss."""
    n, fewer = ((loss / a) ** (1 / b) for a, b in (softmax, laser))
    return 1 - fewer / n


def shares(tuned: dict) -> list[float]:
    """What LASER saves at the loss of softmax's largest model, by each seed's power laws."""
    *_, losses = by_size(tuned, "softmax").values()
    return list(map(saved_share, losses, *laws(tuned).values()))


def norm_ratio(softmax: dict, laser: dict) -> list[float]:
    """LASER's gradient norm / softmax's, over the steps of the curves."""
    norms = (r["curves"]["norm"]["norm"] for r in (laser, softmax))
    return [a / b for a, b in zip(*norms, strict=False)]


def draw(tuned: dict, same_rate: dict) -> None:
    """The power law (figure 4), and the ratio of the gradient norms (figure 3)."""
    with drawing(picture, 1, 2, 13, 4) as (law, norm):
        for attention, color in ATTENTIONS.items():
            losses = by_size(tuned, attention)
            n = list(losses)
            a, b = power_law(n, list(map(statistics.mean, losses.values())))
            label = f"{attention}: {a:.2f} n^{b:.4f}"
            law.plot(n, [a * x**b for x in n], color=color, label=label)
            law.plot(n, list(losses.values()), "o", color=color, alpha=0.6)
        for model, pair in same_rate.items():
            size, recipe = model.split(", ")
            if recipe == "adamw":
                ratio = norm_ratio(*pair)
                norm.plot(pair[0]["curves"]["norm"]["iter"][: len(ratio)], ratio, label=size)
        norm.axhline(1, color="0.6", linewidth=1)
        less = ", ".join(f"{share:.1%}" for share in shares(tuned))
        law.set_title(f"power law; fewer parameters: {less} (paper: 15.65%)")
        law.set(xscale="log", yscale="log", xlabel="parameters", ylabel="validation loss")
        norm.set_title("LASER's gradient norm / softmax's, same rate (paper: above 1)")
        norm.set_xlabel("step")


def show(tuned: dict, same_rate: dict) -> None:
    """Print the table of all sizes, and the power laws."""
    rows = []
    for model, pair in same_rate.items():
        size, recipe = model.split(", ")
        cells = [size, f"{parameters(model):,}", recipe]
        losses = []
        spikes = []
        for attention in ATTENTIONS:
            rate, results = tuned[model, attention]
            losses.append(finals(results))
            spikes.append(str(sum(result["spikes"] for result in results)))
            cells += [mean(losses[-1]), f"{rate:g}"]
        cells.append(difference(losses[1], losses[0]))
        cells.append(f"{statistics.median(norm_ratio(*pair)):.2f}")
        rows.append([*cells, ", ".join(spikes)])
    columns = "size | parameters |  | softmax | its rate | LASER | its rate | LASER - softmax"
    show_table(f"{columns} | ratio of norms | spikes: softmax, LASER", rows)
    for attention, laws_of_seeds in laws(tuned).items():
        exponents = ", ".join(f"{b:.4f}" for _, b in laws_of_seeds)
        print(f"\n{attention}: L = a n^b, b = {exponents} (one for each seed)", end="")
    print(f"\nfewer parameters with LASER: {', '.join(f'{x:.1%}' for x in shares(tuned))}")


def main() -> None:
    parts = names(what, ["train", "show"])
    results = train("train" in parts)
    if "show" in parts:
        draw(*results)
        show(*results)


if __name__ == "__main__":
    run_script(globals())
