"""Beta against softmax where a model overfits (the beta post: 10,000 iterations of nanoGPT's Shakespeare config).

    OMP_NUM_THREADS=1 python -m lab.experiments.beta_post --jobs=2  # on two cores
    python -m lab.experiments.beta_post --scale=paper               # the post's run, on a GPU
    python -m lab.experiments.beta_post --what=show                 # picture and table of --out

The post reports the losses after the last step: 1.0040 (training) and 1.5550 (validation) for beta, 0.7140 and 1.6204
for softmax. Its softmax model has overfitted by then. The pocket scale does the same in small: a model of 0.34M
parameters and 2% of the text, which it sees 77 times (the post: 10.7M, the whole text, 163 times).
"""

import hashlib
import json
import os
import re
import shutil
from typing import Literal

from configurator import at_least_one, names
from lab.experiments.results import check_writable, drawing, show_table, spread, start
from lab.experiments.runs import as_flags, final, record
from text.dataset import Tokens, folder_of, read_meta

# What is measured?
what = "train,show"  # the parts to run, separated by commas; show: the picture and the table
scale: Literal["pocket", "paper", "tiny"] = "pocket"  # pocket: for two CPU cores; paper: the post's; tiny: a test
dataset = "shakespeare_char"  # the data set, or (pocket, tiny) the one whose first part is taken
seeds = 3  # runs of each row
jobs = 1  # runs at the same time; they share the cores of the CPU
out = "lab/experiments/beta_post.json"  # the results
picture = "lab/pictures/beta_post.png"  # the picture
out_dir = "out-beta-post"  # the folder for the runs, each in a folder of its own

POST = {"softmax": (0.7140, 1.6204), "beta": (1.0040, 1.5550)}  # its losses of training and validation
CPU = "config/train_shakespeare_char_cpu.py"
POCKET = {"max_iters": 2000, "lr_decay_iters": 2000, "eval_interval": 250, "eval_iters": 73}
TINY = {"n_layer": 1, "n_embd": 24, "max_iters": 4, "eval_interval": 2, "eval_iters": 1, "block_size": 16}
SCALES = {  # config file, flags, share of the training split
    "paper": ("config/train_shakespeare_char.py", {"max_iters": 10000}, 1.0),  # the learning rate decays in 5000
    "pocket": (CPU, POCKET, 0.02),
    "tiny": (CPU, TINY, 0.1),
}
ROWS = {"softmax": {}, "beta": {"attention": "beta"}}
DROPOUT = (0.2, 0.0)  # the post's, and none


def part_of_the_text(share: float, make: bool) -> str:
    """The data set with a share of its training split: its first tokens; and with all of its validation split.

    make: makes it; False: only its path.
    """
    if share == 1.0:
        return dataset
    folder = os.path.join(out_dir, re.sub("[^A-Za-z0-9]+", "-", f"{dataset}-{share:g}"))
    if make:
        whole, train_bin = folder_of(dataset), os.path.join(folder, "train.bin")
        meta, ids = read_meta(whole), Tokens(whole, "train", 1).ids
        ids = ids[: int(share * len(ids))]
        os.makedirs(folder, exist_ok=True)
        ids.tofile(train_bin)
        shutil.copyfile(os.path.join(whole, "val.bin"), os.path.join(folder, "val.bin"))
        meta["source"] = {"from": f"{share:.1%} of {dataset}"}
        meta["files"]["train.bin"] = {"tokens": len(ids), "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
        with open(os.path.join(folder, "meta.json"), "w", encoding="utf-8") as f:
            json.dump(meta, f)
    return folder


def train(make: bool) -> dict[tuple, list[dict]]:
    """{(attention, dropout): the results of the seeds}. make: see experiments.runs.record."""
    file, flags, share = SCALES[scale]
    data, commands = part_of_the_text(share, make), {}
    keys = [(row, dropout, seed) for seed in range(1, seeds + 1) for dropout in DROPOUT for row in ROWS]
    for row, dropout, seed in keys:
        run = flags | ROWS[row] | {"dataset": data, "dropout": dropout, "seed": seed}
        commands[f"{scale}, {row}, dropout {dropout:g}, seed {seed}"] = [file, *as_flags(run)]
    made = dict(zip(keys, record(out, commands, out_dir, jobs, make, ("val_loss", "train_loss")).values(), strict=True))
    return {key[:2]: [r for other, r in made.items() if other[:2] == key[:2]] for key in keys}


def draw(found: dict) -> None:
    """Losses of both splits over the steps, with dropout and without."""
    with drawing(picture, 1, 2, 12, 4.5) as axes:
        for ax, dropout in zip(axes, DROPOUT, strict=True):
            for row, color in zip(ROWS, ("black", "C0"), strict=True):
                for i, result in enumerate(found[row, dropout]):
                    for split, line in (("val", "-"), ("train", ":")):
                        curve = result["curves"][f"{split}_loss"]
                        style = {"color": color, "linewidth": 1, "label": None if i else f"{row}, {split}"}
                        ax.plot(curve["iter"], curve[f"{split}_loss"], line, **style)
            ax.set(title=f"dropout {dropout:g}", xlabel="step", ylabel="loss", ylim=(0.4, 4.0))


def show(found: dict) -> None:
    """Prints the table."""
    rows = []
    for (row, dropout), results in found.items():
        best, train_losses = ([r[key] for r in results] for key in ("best", "train"))
        cells = [row, f"{dropout:g}", spread(best), spread([*map(final, results)]), spread(train_losses)]
        rows.append([*cells, f"{POST[row][1]:.4f}, {POST[row][0]:.4f}" if dropout else ""])
    columns = ["", "dropout", "best val loss", "last val loss", "last train loss", "the post: val, train"]
    show_table(columns, rows)


def main() -> None:
    at_least_one(jobs=jobs, seeds=seeds)
    check_writable(out, picture)
    parts = names(what, ["train", "show"])
    found = train("train" in parts)
    if "show" in parts:
        draw(found)
        show(found)


if __name__ == "__main__":
    start(globals())
