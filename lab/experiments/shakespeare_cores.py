"""The README's first table: five attentions on Tiny Shakespeare, three seeds each, with the CPU config.

    python -m lab.experiments.shakespeare_cores
    python -m lab.experiments.shakespeare_cores --table=laser  # as in the LASER paper's tables 4, 5, 7

It runs train.py for each attention and seed: first all attentions with seed 1, then with seed 2, and so on. So an hour
in which the machine is slow slows all attentions alike. The script prints the mean and the range of the best validation
loss, the mean of the last validation loss, and the median time per step. Runs that finished with the same command and
config are skipped.
"""

import os
import statistics
from typing import Literal

from configurator import at_least_one, configure, user_errors
from lab.experiments.results import spread
from lab.experiments.runs import finished, last
from text.dataset import ROOT

# What is measured?
table: Literal["cores", "laser"] = "cores"  # cores: five attentions; laser: softmax and LASER with variants
config_file = "config/train_shakespeare_char_cpu.py"  # the config file of every run
seeds = 3  # runs per attention, with the seeds 1, 2, ...
out_dir = "out-shakespeare-cores"  # the folder for the runs, each in a folder of its own
extra = ""  # more flags of train.py for every run, separated by spaces

LASER = ["--attention=laser"]
CORES = {
    "softmax": [],
    "LASER": LASER,
    "beta": ["--attention=beta"],
    "LS": ["--heads=SSSL", "--window=16"],
    "LASER + LS": [*LASER, "--heads=SSSL", "--window=16"],
}
VARIANTS = {
    "": [],
    " + temperature": ["--temperature=0.7"],  # the paper tunes it, and does not name what it found
    " + temperature per dimension": ["--per_dim_temperature"],
    " + QK-norm": ["--qk_norm=layernorm"],
    " + differential": ["--differential"],
}
BOTH = {"softmax": [], "LASER": LASER}
RUNS = {"cores": CORES, "laser": {a + b: x + y for b, y in VARIANTS.items() for a, x in BOTH.items()}}


def main() -> None:
    at_least_one(seeds=seeds)
    os.chdir(ROOT)
    logs = {name: [] for name in RUNS[table]}
    for seed in range(1, seeds + 1):
        for name, flags in RUNS[table].items():
            folder = os.path.join(out_dir, f"{name.replace(' ', '')}-{seed}")
            command = [config_file, *flags, f"--seed={seed}", *extra.split()]
            logs[name].append(finished(f"{name}, seed {seed}", command, folder))
    print("\n| attention | flags | best val loss, mean (range) | last val loss | ms per step |\n|---|---|---|---|---|")
    for name, runs in logs.items():
        curves = [[row["val_loss"] for row in rows if "val_loss" in row] for rows in runs]
        best = [min(curve) for curve in curves]
        at_end = statistics.mean(map(last, runs))
        ms = statistics.median(row["ms"] for rows in runs for row in rows if "ms" in row)
        flags = " ".join(RUNS[table][name])
        print(f"| {name} | {f'`{flags}`' if flags else ''} | {spread(best)} | {at_end:.3f} | {ms:.0f} |")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
