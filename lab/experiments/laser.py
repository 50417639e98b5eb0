"""LASER against softmax over model sizes (LASER paper, figures 2, 3, 4 and 6, table 11, and its ablation with LAMB).

    OMP_NUM_THREADS=1 python -m lab.experiments.laser --jobs=2   # on two cores
    python -m lab.experiments.laser --scale=paper                # the paper's sizes, large machine
    python -m lab.experiments.laser --what=show                  # picture and tables of --out

At each size each attention is trained with each learning rate of the scale and seed 1, and then at its best rate with
the seeds 2, 3 and so on, which are compared. Both attentions get the same rates. Finished runs are not repeated: you
can stop and start again. (`compare --table=laser_settled` has eight seeds at two sizes.)
"""

import math
import statistics
from typing import Literal

import torch

from configurator import at_least_one, names
from lab.experiments.results import check_writable, difference, drawing, show_table, spread, start
from lab.experiments.runs import as_flags, final, record
from lab.experiments.times import model_of
from training.estimate import num_params

# What is measured?
what = "train,show"  # the parts to run, separated by commas; show: the picture and the tables
scale: Literal["pocket", "paper"] = "pocket"  # pocket: for two CPU cores; paper: the paper's
seeds = 3  # runs of each attention and size at its best learning rate
jobs = 1  # runs at the same time; they share the cores of the CPU
extra = ""  # more flags of train.py for every run, separated by spaces
out = "lab/experiments/laser.json"  # the results
picture = "lab/pictures/laser.png"  # the picture
out_dir = "out-laser"  # the folder for the runs, each in a folder of its own

CPU = "config/train_shakespeare_char_cpu.py"
POCKET = {"block_size": 64, "batch_size": 12, "max_iters": 1000, "lr_decay_iters": 1000, "eval_interval": 250}
SCALES = {  # sizes: {name: (flags, learning rates)}. more: {name: (a size, other flags, learning rates)}
    "pocket": {
        "file": CPU,
        "flags": POCKET | {"log_interval": 1, "min_lr": 0.0},
        "sizes": {
            "2 x 64": ({"n_layer": 2, "n_head": 4, "n_embd": 64}, [5e-3, 1.25e-2, 3.1e-2]),
            "3 x 96": ({"n_layer": 3, "n_head": 6, "n_embd": 96}, [2e-3, 5e-3, 1.25e-2]),
            "4 x 128": ({"n_layer": 4, "n_head": 8, "n_embd": 128}, [2e-3, 5e-3, 1.25e-2]),
            "5 x 192": ({"n_layer": 5, "n_head": 12, "n_embd": 192}, [8e-4, 2e-3, 5e-3]),
        },
        "more": {"lamb": ("3 x 96", {"optimizer": "lamb"}, [1e-2, 2e-2, 4e-2])},
    },
    "paper": {
        "file": "config/train_laser_301m.py",
        "flags": {"log_interval": 1, "dtype": "float32", "tf32": False},
        "sizes": {
            "234M": ({"n_layer": 16, "n_hidden": 4096}, [1e-4, 1e-3, 1e-2]),
            "301M": ({}, [1e-4, 1e-3, 1e-2]),
            "435M": ({"n_hidden": 4096}, [1e-4, 1e-3, 1e-2]),
            "1.1B": ({"n_embd": 2048, "head_dim": 256, "n_hidden": 4096}, [1e-4, 1e-3, 1e-2]),
            "2.2B": ({"n_embd": 2048, "head_dim": 512, "n_hidden": 8192}, [1e-4, 1e-3, 1e-2]),
        },
        "more": {
            "lamb": ("301M", {"optimizer": "lamb"}, [1e-4, 1e-3, 1e-2]),
            "bfloat16": ("2.2B", {"variant": "bfloat16"}, [1e-4, 1e-3, 1e-2]),  # weights and products (table 11)
        },
    },
}
ATTENTIONS = ("softmax", "laser")


def train(make: bool) -> tuple[dict, dict]:
    """({(size, how, attention): (its best rate, the results of all seeds)}, {(size, how): [the results of softmax and
    of LASER with seed 1, both at softmax's best rate]}). how: adamw, or a name in `more`. make: see runs.record."""
    s = SCALES[scale]
    rates = {(size, "adamw"): tried for size, (_, tried) in s["sizes"].items()}
    rates |= {(size, how): tried for how, (size, _, tried) in s["more"].items()}

    def results_of(runs: list[tuple]) -> dict[tuple, dict]:
        commands = {}
        for size, how, attention, rate, seed in runs:
            own = {"attention": attention, "optimizer": "adamw"} | (s["more"][how][1] if how in s["more"] else {})
            own |= {"learning_rate": rate, "seed": seed}
            name = f"{scale}, {size}, {attention}, {how}, {rate:g}, seed {seed}"
            commands[name] = [s["file"], *as_flags(s["flags"] | s["sizes"][size][0] | own), *extra.split()]
        made = record(out, commands, out_dir, jobs, make, keep=("val_loss", "loss", "norm", "first"))
        return dict(zip(runs, made.values(), strict=True))

    keys = [(*key, attention) for key in rates for attention in ATTENTIONS]
    first = results_of([(*key, rate, 1) for key in keys for rate in rates[key[:2]]])
    best = {key: min(rates[key[:2]], key=lambda rate: final(first[*key, rate, 1])) for key in keys}
    more = results_of([(*key, best[key], seed) for seed in range(2, seeds + 2) for key in keys])
    found = {key: (best[key], [r for run, r in more.items() if run[:3] == key]) for key in keys}
    same = {key: [first[*key, a, best[*key, "softmax"], 1] for a in ATTENTIONS] for key in rates}
    return found, same


def parameters(size: str) -> int:
    """How many a model of this size has, without positions."""
    s = SCALES[scale]
    with torch.device("meta"):
        return num_params(model_of(s["file"], s["flags"] | s["sizes"][size][0], 65)[0])


def power_law(n: list[int], losses: list[float]) -> tuple[float, float]:
    """a and b of L = a n^b, by least squares of log L against log n."""
    b, log_a = statistics.linear_regression(*(list(map(math.log, numbers)) for numbers in (n, losses)))
    return math.exp(log_a), b


def laws(found: dict) -> dict[str, list[tuple[float, float]]]:
    """(a, b) of each attention's power law with AdamW, one for each seed."""
    sizes, of = list(SCALES[scale]["sizes"]), {}
    for attention in ATTENTIONS:
        by_seed = zip(*(map(final, found[size, "adamw", attention][1]) for size in sizes), strict=True)
        of[attention] = [power_law([parameters(size) for size in sizes], losses) for losses in by_seed]
    return of


def saved_share(loss: float, softmax: tuple[float, float], laser: tuple[float, float]) -> float:
    """By two power laws (a, b), the share of softmax's parameters that LASER does not need for the same loss."""
    n, fewer = ((loss / a) ** (1 / b) for a, b in (softmax, laser))
    return 1 - fewer / n


def shares(found: dict) -> list[float]:
    """What LASER saves at the loss of softmax's largest model, by each seed's power laws."""
    losses = map(final, found[list(SCALES[scale]["sizes"])[-1], "adamw", "softmax"][1])
    return list(map(saved_share, losses, *laws(found).values()))


def norm_ratio(softmax: dict, laser: dict) -> list[float]:
    """LASER's gradient norm / softmax's, over the steps of the curves."""
    norms = (r["curves"]["norm"]["norm"] for r in (laser, softmax))
    return [a / b for a, b in zip(*norms, strict=False)]


def draw(found: dict, same: dict) -> None:
    """The power law (figure 4), losses (2), the gradient norm's ratio (3) and the loss of the first steps (6)."""
    sizes = list(SCALES[scale]["sizes"])
    n, large = [parameters(size) for size in sizes], sizes[-1]
    with drawing(picture, 2, 2, 13, 8) as (law, loss, norm, first):
        for i, (a, color) in enumerate(zip(ATTENTIONS, ("black", "C1"), strict=True)):
            by_size = [list(map(final, found[size, "adamw", a][1])) for size in sizes]
            k, b = power_law(n, [statistics.mean(losses) for losses in by_size])
            law.plot(n, [k * x**b for x in n], color=color, label=f"{a}: {k:.2f} n^{b:.4f}")
            law.plot(n, by_size, "o", color=color, alpha=0.6)
            for key, line in (("val_loss", "-"), ("loss", ":")):
                curve = same[large, "adamw"][i]["curves"][key]
                loss.plot(curve["iter"], curve[key], line, color=color, label=f"{a}, {key}")
            for j, size in enumerate(sizes):
                curve = same[size, "adamw"][i]["curves"]["first"]
                first.plot(curve["iter"], [x + 2 * j for x in curve["first"]], color=color, label=None if j else a)
        for size in sizes:
            ratio = norm_ratio(*same[size, "adamw"])
            norm.plot(same[size, "adamw"][0]["curves"]["norm"]["iter"][: len(ratio)], ratio, label=size)
        norm.axhline(1, color="0.6", linewidth=1)
        less = ", ".join(f"{share:.1%}" for share in shares(found))
        title = f"power law; fewer parameters: {less} (paper: 15.65%)"
        law.set(title=title, xscale="log", yscale="log", xlabel="parameters", ylabel="validation loss")
        title = f"losses, {large} (paper's 301M: LASER 2.595, softmax 2.641)"
        loss.set(title=title, xlabel="step", ylabel="loss", ylim=(None, 3.5))
        norm.set(title="LASER's gradient norm / softmax's, same rate (paper: above 1)", xlabel="step")
        title = "first losses, the largest of 5 steps, sizes 2 apart (paper: LASER has fewer spikes)"
        first.set(title=title, xlabel="step")


def show(found: dict, same: dict) -> None:
    """Prints the table of all sizes, and the power laws."""
    rows = []
    for (size, how), pair in same.items():
        cells, both = [size, f"{parameters(size):,}", how], [found[size, how, a] for a in ATTENTIONS]
        for rate, results in both:
            cells += [spread(list(map(final, results))), f"{rate:g}"]
        cells.append(difference([*map(final, both[1][1])], [*map(final, both[0][1])]))
        cells.append(f"{statistics.median(norm_ratio(*pair)):.2f}")
        rows.append([*cells, ", ".join(str(sum(r["spikes"] for r in results)) for _, results in both)])
    columns = "size, parameters, , softmax, its rate, LASER, its rate".split(", ")
    show_table([*columns, "LASER - softmax", "ratio of norms", "spikes: softmax, LASER"], rows)
    for attention, law in laws(found).items():
        print(f"\n{attention}: L = a n^b, b = {', '.join(f'{b:.4f}' for _, b in law)} (one for each seed)", end="")
    print(f"\nfewer parameters with LASER: {', '.join(f'{x:.1%}' for x in shares(found))}")


def main() -> None:
    at_least_one(jobs=jobs, seeds=seeds)
    check_writable(out, picture)
    parts = names(what, ["train", "show"])
    results = train("train" in parts)
    if "show" in parts:
        draw(*results)
        show(*results)


if __name__ == "__main__":
    start(globals())
