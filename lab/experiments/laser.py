"""LASER against softmax over model sizes (LASER paper, figures 2, 3, 4, 6, table 11, LAMB).

    OMP_NUM_THREADS=1 python -m lab.experiments.laser --jobs=2   # on two cores
    python -m lab.experiments.laser --scale=paper                # the paper's sizes, large machine
    python -m lab.experiments.laser --what=show                  # picture and tables of --out

At each size each attention is trained with each learning rate of the scale and seed 1, and then at
its best rate with the seeds 2, 3 and so on, which are compared. Both attentions get the same rates.
Finished runs are skipped: you can stop and start again. (`compare --table=laser_settled` has eight
seeds at two sizes.)
"""

import math
import statistics
from collections.abc import Iterable
from typing import Literal

import torch

from configurator import names, run_script
from lab.experiments.results import difference, drawing, mean, show_table
from lab.experiments.runs import by_seed, final, finals
from lab.experiments.times import model_of
from training.estimate import num_params

# What is measured?
what = "train,show"  # the parts to run, separated by commas; show: the picture and the tables
scale: Literal["pocket", "paper"] = "pocket"  # pocket: for two CPU cores; paper: the paper's
seeds = 3  # runs of each attention and size at its best learning rate
jobs = 1  # runs at the same time; they share the cores of the CPU
extra = ""  # more flags of train.py for every run, separated by spaces
out = "lab/experiments/laser.json"  # the results
picture = "lab/experiments/pictures/laser.png"  # the picture
out_dir = "out-laser"  # the folder for the runs, each in a folder of its own

CPU = "config/train_shakespeare_char_cpu.py"
POCKET = {
    "block_size": 64,
    "batch_size": 12,
    "max_iters": 1000,
    "lr_decay_iters": 1000,
    "eval_interval": 250,
    "log_interval": 1,
    "min_lr": 0.0,
}
LAMB = {"optimizer": "lamb", "import": "lab.ideas.lamb"}
PAPER_RATES = [1e-4, 1e-3, 1e-2]
# sizes: {name: (flags, learning rates)}
# more: {name: (a size, other flags, learning rates)}; bfloat16: weights and products (table 11)
SCALES = {
    "pocket": {
        "file": CPU,
        "flags": POCKET,
        "sizes": {
            "2 x 64": ({"n_layer": 2, "n_head": 4, "n_embd": 64}, [5e-3, 1.25e-2, 3.1e-2]),
            "3 x 96": ({"n_layer": 3, "n_head": 6, "n_embd": 96}, [2e-3, 5e-3, 1.25e-2]),
            "4 x 128": ({"n_layer": 4, "n_head": 8, "n_embd": 128}, [2e-3, 5e-3, 1.25e-2]),
            "5 x 192": ({"n_layer": 5, "n_head": 12, "n_embd": 192}, [8e-4, 2e-3, 5e-3]),
        },
        "more": {"lamb": ("3 x 96", LAMB, [1e-2, 2e-2, 4e-2])},
    },
    "paper": {
        "file": "config/train_laser_301m.py",
        "flags": {"log_interval": 1, "dtype": "float32", "tf32": False},
        "sizes": {
            "234M": ({"n_layer": 16, "n_hidden": 4096}, PAPER_RATES),
            "301M": ({}, PAPER_RATES),
            "435M": ({"n_hidden": 4096}, PAPER_RATES),
            "1.1B": ({"n_embd": 2048, "head_dim": 256, "n_hidden": 4096}, PAPER_RATES),
            "2.2B": ({"n_embd": 2048, "head_dim": 512, "n_hidden": 8192}, PAPER_RATES),
        },
        "more": {
            "lamb": ("301M", LAMB, PAPER_RATES),
            "bfloat16": ("2.2B", {"variant": "bfloat16"}, PAPER_RATES),
        },
    },
}
ATTENTIONS = ("softmax", "laser")


def train(make: bool) -> tuple[dict, dict]:
    """Return ({(size, recipe, attention): (its best rate, results)}, {(size, recipe): pair}).

    recipe: adamw, or a name in `more`. results: of the compared seeds, at the best rate. pair: the
    results of softmax and of LASER with seed 1, both at softmax's best rate. make: see runs.record.
    """
    s = SCALES[scale]
    rates = {(size, "adamw"): tried for size, (_, tried) in s["sizes"].items()}
    for recipe, (size, _, tried) in s["more"].items():
        rates[size, recipe] = tried
    keys = [(*key, attention) for key in rates for attention in ATTENTIONS]
    first = results_of([(*key, rate) for key in keys for rate in rates[key[:2]]], [1], make)
    best = {}
    for key in keys:
        losses = {rate: final(first[*key, rate][0]) for rate in rates[key[:2]]}
        best[key] = min(losses, key=losses.get)
    others = results_of([(*key, best[key]) for key in keys], range(2, seeds + 2), make)
    tuned = {key: (rate, others[*key, rate]) for key, rate in best.items()}
    same_rate = {}
    for key in rates:
        rate = best[*key, "softmax"]
        same_rate[key] = [first[*key, attention, rate][0] for attention in ATTENTIONS]
    return tuned, same_rate


def results_of(keys: list[tuple], seeds: Iterable[int], make: bool) -> dict:
    """{key: the results of its seeds} of keys (size, recipe, attention, rate)."""
    s = SCALES[scale]
    rows = {}
    for key in keys:
        size, recipe, attention, rate = key
        flags = s["flags"] | s["sizes"][size][0] | {"attention": attention, "optimizer": "adamw"}
        if recipe in s["more"]:
            flags |= s["more"][recipe][1]
        name = f"{scale}, {size}, {attention}, {recipe}, {rate:g}, seed "
        rows[key] = name, s["file"], flags | {"learning_rate": rate}
    keep = ("val_loss", "norm")
    return by_seed(rows, seeds, extra, out, out_dir, jobs, make, keep)


def parameters(size: str) -> int:
    """The number of parameters of a model of this size, without positions."""
    s = SCALES[scale]
    with torch.device("meta"):
        return num_params(model_of(s["file"], s["flags"] | s["sizes"][size][0], 65)[0])


def power_law(n: list[int], losses: list[float]) -> tuple[float, float]:
    """a and b of L = a n^b, by least squares of log L against log n."""
    x = list(map(math.log, n))
    b, log_a = statistics.linear_regression(x, list(map(math.log, losses)))
    return math.exp(log_a), b


def laws(tuned: dict) -> dict[str, list]:
    """(a, b) of each attention's power law with AdamW, one for each seed."""
    sizes = list(SCALES[scale]["sizes"])
    n = list(map(parameters, sizes))
    by_attention = {}
    for attention in ATTENTIONS:
        by_size = [finals(tuned[size, "adamw", attention][1]) for size in sizes]
        by_attention[attention] = [power_law(n, losses) for losses in zip(*by_size, strict=True)]
    return by_attention


def saved_share(loss: float, softmax: tuple, laser: tuple) -> float:
    """By two power laws (a, b), the share of softmax's parameters that LASER saves at a loss."""
    n, fewer = ((loss / a) ** (1 / b) for a, b in (softmax, laser))
    return 1 - fewer / n


def shares(tuned: dict) -> list[float]:
    """What LASER saves at the loss of softmax's largest model, by each seed's power laws."""
    largest = list(SCALES[scale]["sizes"])[-1]
    losses = finals(tuned[largest, "adamw", "softmax"][1])
    return list(map(saved_share, losses, *laws(tuned).values()))


def norm_ratio(softmax: dict, laser: dict) -> list[float]:
    """LASER's gradient norm / softmax's, over the steps of the curves."""
    norms = (r["curves"]["norm"]["norm"] for r in (laser, softmax))
    return [a / b for a, b in zip(*norms, strict=False)]


def draw(tuned: dict, same_rate: dict) -> None:
    """The power law (figure 4), and the ratio of the gradient norms (figure 3)."""
    sizes = list(SCALES[scale]["sizes"])
    n = list(map(parameters, sizes))
    with drawing(picture, 1, 2, 13, 4) as (law, norm):
        for i, color in enumerate(("black", "C1")):
            attention = ATTENTIONS[i]
            by_size = [finals(tuned[size, "adamw", attention][1]) for size in sizes]
            a, b = power_law(n, list(map(statistics.mean, by_size)))
            label = f"{attention}: {a:.2f} n^{b:.4f}"
            law.plot(n, [a * x**b for x in n], color=color, label=label)
            law.plot(n, by_size, "o", color=color, alpha=0.6)
        for size in sizes:
            pair = same_rate[size, "adamw"]
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
    for (size, recipe), pair in same_rate.items():
        cells = [size, f"{parameters(size):,}", recipe]
        losses = []
        spikes = []
        for attention in ATTENTIONS:
            rate, results = tuned[size, recipe, attention]
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
