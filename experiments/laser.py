"""LASER against softmax over model sizes (LASER paper, figures 2, 3, 4 and 6, and its ablation with LAMB).

    OMP_NUM_THREADS=1 python experiments/laser.py --jobs=2   # on two cores
    python experiments/laser.py --scale=paper                # the paper's sizes, on a large machine
    python experiments/laser.py --what=draw,print            # picture and tables of --out

At each size each attention is trained with each learning rate of the scale and seed 1, and then at its best rate with
the other seeds. Both attentions get the same rates. Finished runs are not repeated: you can stop and start again.
"""

import math
import os
import statistics
import sys
from typing import Literal

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import at_least_one, configure, names, user_errors
from experiments.results import drawing, spread
from experiments.runs import as_flags, record
from experiments.times import model_of
from text.dataset import ROOT
from training.estimate import num_params

# What is measured?
what = "train,draw,print"  # the parts to run, separated by commas
scale: Literal["pocket", "paper", "tiny"] = "pocket"  # the models' sizes and the length of training
seeds = 3  # runs of each attention and size at its best learning rate
jobs = 1  # runs at the same time; they share the cores of the CPU
extra = ""  # more flags of train.py for every run, separated by spaces
out = "experiments/laser.json"  # the results
picture = "docs/laser.png"  # the picture
out_dir = "out-laser"  # the folder for the runs, each in a folder of its own

CPU = "config/train_shakespeare_char_cpu.py"
POCKET = {"block_size": 64, "batch_size": 12, "max_iters": 1000, "lr_decay_iters": 1000, "eval_interval": 250}
TINY = {"block_size": 16, "batch_size": 2, "max_iters": 4, "lr_decay_iters": 4, "eval_interval": 4, "eval_iters": 1}
SCALES = {
    "pocket": {
        "file": CPU,
        "flags": POCKET | {"log_interval": 1, "min_lr": 0.0},
        "sizes": {
            "2 x 64": {"n_layer": 2, "n_head": 4, "n_embd": 64},
            "3 x 96": {"n_layer": 3, "n_head": 6, "n_embd": 96},
            "4 x 128": {"n_layer": 4, "n_head": 8, "n_embd": 128},
            "5 x 192": {"n_layer": 5, "n_head": 12, "n_embd": 192},
        },
        "rates": [2e-3, 5e-3, 1.25e-2],
        "lamb": ("3 x 96", [1e-2, 2e-2, 4e-2]),
    },
    "paper": {
        "file": "config/train_laser_301m.py",
        "flags": {"log_interval": 1},
        "sizes": {
            "16 x 1024, MLP 4096": {"n_layer": 16, "n_hidden": 4096},
            "32 x 1024": {},
            "32 x 1024, MLP 4096": {"n_hidden": 4096},
        },
        "rates": [1e-4, 1e-3, 1e-2],
        "lamb": ("32 x 1024", [1e-3, 1e-2]),
    },
    "tiny": {
        "file": CPU,
        "flags": TINY | {"log_interval": 1, "warmup_iters": 1, "n_layer": 1, "n_head": 2},
        "sizes": {"1 x 8": {"n_embd": 8}, "1 x 16": {"n_embd": 16}},
        "rates": [1e-3, 1e-2],
        "lamb": ("1 x 8", [1e-2]),
    },
}
ATTENTIONS = ("softmax", "laser")


def train(make: bool) -> dict[tuple, list[dict]]:
    """{(size, optimizer, attention): the results at its best rate, one for each seed}. make: see experiments.runs."""
    s = SCALES[scale]
    groups = [(size, "adamw", s["rates"]) for size in s["sizes"]] + [(s["lamb"][0], "lamb", s["lamb"][1])]

    def results_of(runs: list[tuple]) -> dict[tuple, dict]:
        commands = {}
        for size, optimizer, attention, rate, seed in runs:
            own = {"attention": attention, "optimizer": optimizer, "learning_rate": rate, "seed": seed}
            flags = as_flags(s["flags"] | s["sizes"][size] | own)
            commands[f"{size}, {attention}, {optimizer}, {rate:g}, seed {seed}"] = [s["file"], *flags, *extra.split()]
        return dict(zip(runs, record(out, commands, out_dir, jobs, make).values(), strict=True))

    first = results_of([(size, o, a, rate, 1) for size, o, rates in groups for rate in rates for a in ATTENTIONS])
    best = {}
    for run, result in first.items():
        if run[:3] not in best or result["val"] < first[best[run[:3]]]["val"]:
            best[run[:3]] = run
    more = results_of([(*run[:4], seed) for seed in range(2, seeds + 1) for run in best.values()])
    return {key: [first[run], *(more[r] for r in more if r[:3] == key)] for key, run in best.items()}


def parameters(size: str) -> int:
    """How many a model of this size has, without positions."""
    s = SCALES[scale]
    with torch.device("meta"):
        return num_params(model_of(s["file"], s["flags"] | s["sizes"][size], 65)[0])


def power_law(n: list[int], losses: list[float]) -> tuple[float, float]:
    """a and b of L = a n^b, by least squares of log L against log n."""
    x, y = (torch.tensor(numbers, dtype=torch.float64).log() for numbers in (n, losses))
    b = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    return math.exp(y.mean() - b * x.mean()), b.item()


def laws(found: dict) -> dict[str, list[tuple[float, float]]]:
    """(a, b) of each attention's power law, one for each seed."""
    sizes = list(SCALES[scale]["sizes"])
    n = [parameters(size) for size in sizes]
    seeds_of = {a: zip(*(found[size, "adamw", a] for size in sizes), strict=True) for a in ATTENTIONS}
    return {a: [power_law(n, [r["val"] for r in results]) for results in seeds_of[a]] for a in ATTENTIONS}


def saved_shares(found: dict) -> list[float]:
    """The share of parameters that LASER saves at softmax's loss of the second largest size, by each seed's laws."""
    size, law = list(SCALES[scale]["sizes"])[-2], laws(found)
    pairs = zip((r["val"] for r in found[size, "adamw", "softmax"]), law["softmax"], law["laser"], strict=True)
    return [1 - (loss / a2) ** (1 / b2) / (loss / a) ** (1 / b) for loss, (a, b), (a2, b2) in pairs]


def norm_ratio(softmax: list[dict], laser: list[dict]) -> tuple[list[int], list[float]]:
    """(steps, LASER's gradient norm / softmax's), the mean over seeds."""
    norms = [[r["curves"]["norm"]["norm"] for r in runs] for runs in (laser, softmax)]
    ratios = [[a / b for a, b in zip(x, y, strict=False)] for x, y in zip(*norms, strict=True)]
    return softmax[0]["curves"]["norm"]["iter"], [statistics.mean(x) for x in zip(*ratios, strict=False)]


def draw(found: dict) -> None:
    """The power law (figure 4), losses (2), the gradient norm's ratio (3) and the loss of the first steps (6)."""
    sizes = list(SCALES[scale]["sizes"])
    n = [parameters(size) for size in sizes]
    with drawing(picture, 2, 2, 13, 8) as (law, loss, norm, first):
        for a, color in zip(ATTENTIONS, ("black", "C1"), strict=True):
            means = [statistics.mean(r["val"] for r in found[size, "adamw", a]) for size in sizes]
            for size, x in zip(sizes, n, strict=True):
                results = found[size, "adamw", a]
                law.plot([x] * len(results), [r["val"] for r in results], "o", color=color, alpha=0.6)
            k, b = power_law(n, means)
            law.plot(n, [k * x**b for x in n], color=color, label=f"{a}: {k:.2f} n^{b:.4f}")
            val, train_loss = (found[sizes[-1], "adamw", a][0]["curves"][key] for key in ("val_loss", "loss"))
            loss.plot(val["iter"], val["val_loss"], color=color, label=f"{a}, validation")
            loss.plot(train_loss["iter"], train_loss["loss"], ":", color=color, label=f"{a}, training")
            first.plot(train_loss["iter"][:20], train_loss["loss"][:20], color=color, label=a)
        for i, size in enumerate(sizes):
            curve = norm_ratio(found[size, "adamw", "softmax"], found[size, "adamw", "laser"])
            norm.plot(*curve, color=f"C{i}", label=size)
        norm.axhline(1, color="0.6", linewidth=1)
        shares = ", ".join(f"{share:.0%}" for share in saved_shares(found))
        law.set(xscale="log", yscale="log", xlabel="parameters", ylabel="validation loss")
        law.set_title(f"power law; fewer parameters: {shares} (paper: 15.65%)", fontsize=10)
        loss.set(xlabel="step", ylabel="loss", ylim=(None, train_loss["loss"][:9][-1]))
        loss.set_title(f"losses, {sizes[-1]} (paper's 32 x 1024: 2.595, softmax 2.641)", fontsize=10)
        norm.set(xlabel="step", ylabel="LASER / softmax")
        norm.set_title("ratio of gradient norms (paper: above 1)", fontsize=10)
        first.set(xlabel="step", ylabel="training loss")
        first.set_title(f"the first steps, {sizes[-1]} (paper: LASER has fewer spikes)", fontsize=10)
        for ax in (law, loss, norm, first):
            ax.legend(fontsize=8)


def show(found: dict) -> None:
    """Prints the table of all sizes, and the power laws."""
    head = "size | parameters | optimizer | softmax | its rate | LASER | its rate | LASER - softmax, each seed"
    print(f"\n| {head} | ratio of norms | spikes: softmax, LASER |\n{'|---' * 10}|")
    for size, optimizer in dict.fromkeys(key[:2] for key in found):
        both, cells = [found[size, optimizer, a] for a in ATTENTIONS], [size, f"{parameters(size):,}", optimizer]
        for results in both:
            rate = results[0]["command"].split("--learning_rate=")[1].split()[0]
            cells += [spread([r["val"] for r in results]), rate]
        cells.append(", ".join(f"{y['val'] - x['val']:+.3f}" for x, y in zip(*both, strict=True)))
        cells.append(f"{statistics.median(norm_ratio(*both)[1]):.2f}")
        cells.append(", ".join(str(sum(r["spikes"] for r in results)) for results in both))
        print(f"| {' | '.join(cells)} |")
    for attention, law in laws(found).items():
        print(f"\n{attention}: L = a n^b, b = {', '.join(f'{b:.4f}' for _, b in law)} (one for each seed)", end="")
    print(f"\nfewer parameters with LASER: {', '.join(f'{x:.1%}' for x in saved_shares(found))}")


def main() -> None:
    os.chdir(ROOT)
    at_least_one(jobs=jobs, seeds=seeds)
    parts = names(what, ["train", "draw", "print"])
    found = train("train" in parts)
    if "draw" in parts:
        draw(found)
    if "print" in parts:
        show(found)


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
