"""What the lecture on transformer choices says of positions, weight decay and vocabularies.

    OMP_NUM_THREADS=1 python -m lab.experiments.lecture --source=books   # about an hour on one core

`positions` trains with a context of 64 characters, and evaluates on windows of up to 16 times that:
ALiBi should go on well, sinusoids should not. `decay` trains on 2% of the text, which the model
sees 77 times, with several weight decays and two schedules: weight decay should not change the gap
between the losses of training and validation, but lower the training loss where the learning rate
falls. `vocabulary` trains on the novels with several numbers of SentencePiece tokens. (Depth
against width is `compare --table=aspect`.) Runs in --out are not repeated.
"""

import itertools
import os
import re
import subprocess
import sys

from configurator import at_least_one, names, run_script
from lab.experiments.beta_post import part_of_the_text
from lab.experiments.results import (
    check_writable,
    difference,
    measured,
    saved,
    show_table,
    spread,
)
from lab.experiments.runs import as_flags, finished, result_of

# What is measured?
what = "positions,decay,vocabulary,show"  # the parts to run; show: the tables of --out
source = "books"  # vocabulary: a folder with the novels, a text file each
seeds = 3  # runs of each row
steps: int | None = None  # of each run; None: 1000, and 2000 of the part decay
out = "lab/experiments/lecture.json"  # the results
out_dir = "out-lecture"  # the folder for the runs, each in a folder of its own

CPU = "config/train_shakespeare_char_cpu.py"
# learned positions end at block_size; Shaw's take n^3
POSITIONS = ("none", "sinusoidal", "rope", "alibi", "t5")
LENGTHS = (64, 256, 1024)  # tokens in a window of the evaluation
DECAYS = (0.0, 0.1, 1.0)  # weight decays
SCHEDULES = ("cosine", "constant")
VOCABULARIES = (500, 2000, 8000)  # numbers of tokens


def run(name: str, flags: dict, seed: int, n: int) -> tuple[str, dict]:
    """(the folder of a run of train.py with n steps, its results). Make it if it is missing."""
    folder = os.path.join(out_dir, f"{re.sub('[^a-z0-9]+', '-', name)}-{seed}")
    flags = {"max_iters": n, "lr_decay_iters": n, "eval_interval": n // 5} | flags
    log = finished(f"{name}, seed {seed}", [CPU, *as_flags(flags), f"--seed={seed}"], folder)
    return folder, result_of(log, ("val_loss", "train_loss"), False)


def evaluated(folder: str, *flags: str) -> dict[str, float]:
    """What eval.py prints of the latest checkpoint in a folder.

    {"loss": nats per token, "bits": bits per byte}.
    """
    args = ["eval.py", f"--out_dir={folder}", "--which=latest", "--batch_size=16", *flags]
    run = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True)
    loss = re.search(r"^loss +([\d.]+)", run.stdout, re.MULTILINE)
    bits = re.search(r"^bits per byte +([\d.]+)", run.stdout, re.MULTILINE)
    return {"loss": float(loss[1]), "bits": float(bits[1])}


def position(name: str, seed: int) -> dict:
    """{length of the windows: the validation loss} of a model with this position."""
    folder = run(f"position {name}", {"position": name}, seed, steps or 1000)[0]
    return {str(n): evaluated(folder, f"--block_size={n}")["loss"] for n in LENGTHS}


def decay(weight_decay: float, schedule: str, seed: int) -> dict:
    """The losses of a model that overfits."""
    flags = {
        "dataset": part_of_the_text(0.02, True),
        "weight_decay": weight_decay,
        "schedule": schedule,
        "eval_iters": 73,
    }
    result = run(f"{schedule} {weight_decay:g}", flags, seed, steps or 2000)[1]
    losses = {key: result[key] for key in ("train", "val", "best")}
    return losses | {"val_losses": result["curves"]["val_loss"]["val_loss"]}


def vocabulary(size: int, seed: int) -> dict:
    """What `evaluated` returns of a model with this many SentencePiece tokens."""
    folder = os.path.join(out_dir, f"novels-{size}")
    if not os.path.exists(os.path.join(folder, "meta.json")):
        flags = [f"--source={source}", f"--vocab_size={size}", f"--out_dir={folder}"]
        command = [sys.executable, "data/pg19/prepare.py", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    flags = {"dataset": folder, "position": "rope", "eval_iters": 20}
    return evaluated(run(f"vocabulary {size}", flags, seed, steps or 1000)[0])


def part(name: str, row: str) -> list[dict]:
    """The results of a row's seeds in --out."""
    return list(saved(out, {}).get(name, {}).get(row, {}).values())


def show_positions() -> None:
    """Print the table of the positions."""
    rows = []
    for name in POSITIONS:
        results = part("positions", name)
        losses = [[result[str(n)] for result in results] for n in LENGTHS]
        rows.append([name, *map(spread, losses), difference(losses[-1], losses[0])])
    windows = " | ".join(f"windows of {n}" for n in LENGTHS)
    show_table(f"position | {windows} | {LENGTHS[-1]} against {LENGTHS[0]}", rows)


def show_decay() -> None:
    """Print the table of the weight decays."""
    rows = []
    for schedule in SCHEDULES:
        without = measures(f"{schedule} {DECAYS[0]:g}")
        for x in DECAYS:
            losses = measures(f"{schedule} {x:g}")
            changes = map(difference, losses, without) if x else [""] * len(losses)
            rows.append([schedule, f"{x:g}", *map(spread, losses), *changes])
    columns = "schedule | weight decay | train | val | gap | best val"
    show_table(
        f"{columns} | train, against 0 | val, against 0 | gap, against 0 | best val, against 0",
        rows,
    )


def measures(row: str) -> list[list[float]]:
    """The training and validation losses, their gaps and the best validation losses of seeds."""
    train, val, best = ([r[key] for r in part("decay", row)] for key in ("train", "val", "best"))
    return [train, val, [a - b for a, b in zip(val, train, strict=True)], best]


def show_vocabulary() -> None:
    """Print the table of the vocabularies, compared with the second one."""
    bits = {n: [r["bits"] for r in part("vocabulary", str(n))] for n in VOCABULARIES}
    middle = VOCABULARIES[1]
    rows = []
    for n, x in bits.items():
        rows.append([f"{n:,}", spread(x), "" if n == middle else difference(x, bits[middle])])
    show_table(f"tokens | bits per byte | against {middle:,}", rows)


def main() -> None:
    at_least_one(seeds=seeds)
    check_writable(out)
    parts = names(what, ["positions", "decay", "vocabulary", "show"])
    for seed in range(1, seeds + 1):
        if "positions" in parts:
            for name in POSITIONS:
                measured(out, "positions", name, seed, position, name, seed)
        if "decay" in parts:
            for schedule, x in itertools.product(SCHEDULES, DECAYS):
                measured(out, "decay", f"{schedule} {x:g}", seed, decay, x, schedule, seed)
        if "vocabulary" in parts:
            for size in VOCABULARIES:
                measured(out, "vocabulary", str(size), seed, vocabulary, size, seed)
    if "show" in parts:
        show_positions()
        show_decay()
        show_vocabulary()


if __name__ == "__main__":
    run_script(globals())
