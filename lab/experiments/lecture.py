"""What the lecture on transformer choices says of positions, weight decay and vocabularies, in small.

    OMP_NUM_THREADS=1 python -m lab.experiments.lecture --source=books   # about an hour on one core

`positions` trains with a context of 64 characters, and evaluates on windows of up to 16 times that: ALiBi should go on
well, sinusoids should not. `decay` trains on 2% of the text, which the model sees 77 times, with several weight decays
and two schedules: weight decay should not change the gap between the losses of training and validation, but lower the
training loss where the learning rate falls. `vocabulary` trains on the novels with several numbers of SentencePiece
tokens. (Depth against width is `compare --table=aspect`.) Runs in --out are not repeated.
"""

import os
import re
import subprocess
import sys

from configurator import at_least_one, names
from lab.experiments.beta_post import part_of_the_text
from lab.experiments.results import check_writable, difference, measured, saved, show_table, spread, start
from lab.experiments.runs import as_flags, finished, result_of

# What is measured?
what = "positions,decay,vocabulary,show"  # the parts to run, separated by commas; show: the tables of --out
source = "books"  # vocabulary: a folder with the novels, a text file each
seeds = 3  # runs of each row
steps: int | None = None  # of each run; None: 1000, and 2000 of the part decay
out = "lab/experiments/lecture.json"  # the results
out_dir = "out-lecture"  # the folder for the runs, each in a folder of its own

CPU = "config/train_shakespeare_char_cpu.py"
POSITIONS = ("none", "sinusoidal", "rope", "alibi", "t5")  # learned positions end at block_size; Shaw's take n^3
LENGTHS = (64, 256, 1024)  # tokens in a window of the evaluation
DECAYS = (0.0, 0.1, 1.0)  # weight decays
SCHEDULES = ("cosine", "constant")
VOCABULARIES = (500, 2000, 8000)  # numbers of tokens


def run(name: str, flags: dict, seed: int, n: int) -> tuple[str, dict]:
    """(the folder of a run of train.py with n steps, its results). Trains it if it is missing."""
    folder = os.path.join(out_dir, f"{re.sub('[^a-z0-9]+', '-', name)}-{seed}")
    flags = {"max_iters": n, "lr_decay_iters": n, "eval_interval": n // 5} | flags
    log = finished(f"{name}, seed {seed}", [CPU, *as_flags(flags), f"--seed={seed}"], folder)
    return folder, result_of(log, ("val_loss", "train_loss"), False)


def evaluated(folder: str, *flags: str) -> dict[str, float]:
    """What eval.py prints of the latest checkpoint in a folder: {"loss": nats per token, "bits": bits per byte}."""
    command = [sys.executable, "eval.py", f"--out_dir={folder}", "--which=latest", "--batch_size=16", *flags]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (re.search(rf"^{name} +([\d.]+)", text, re.MULTILINE) for name in ("loss", "bits per byte"))
    return {key: float(m[1]) for key, m in zip(("loss", "bits"), found, strict=True)}


def position(name: str, seed: int) -> dict:
    """{length of the windows: the validation loss} of a model with this position."""
    folder = run(f"position {name}", {"position": name}, seed, steps or 1000)[0]
    return {str(n): evaluated(folder, f"--block_size={n}")["loss"] for n in LENGTHS}


def decay(weight_decay: float, schedule: str, seed: int) -> dict:
    """The losses of a model that overfits."""
    data = {"dataset": part_of_the_text(0.02, True), "weight_decay": weight_decay, "schedule": schedule}
    r = run(f"{schedule} {weight_decay:g}", data | {"eval_iters": 73}, seed, steps or 2000)[1]
    return {key: r[key] for key in ("train", "val", "best")} | {"val_losses": r["curves"]["val_loss"]["val_loss"]}


def vocabulary(size: int, seed: int) -> dict:
    """The bits per byte of a model with this many SentencePiece tokens, and the bytes in a token of its text."""
    folder = os.path.join(out_dir, f"novels-{size}")
    if not os.path.exists(os.path.join(folder, "meta.json")):
        flags = [f"--source={source}", f"--vocab_size={size}", f"--out_dir={folder}"]
        subprocess.run([sys.executable, "data/pg19/prepare.py", *flags], check=True, stdout=subprocess.DEVNULL)
    data = {"dataset": folder, "position": "rope", "eval_iters": 20}
    return evaluated(run(f"vocabulary {size}", data, seed, steps or 1000)[0])


def part(name: str, row: str) -> list[dict]:
    """The results of a row's seeds in --out."""
    return list(saved(out, {}).get(name, {}).get(row, {}).values())


def show() -> None:
    """Prints the tables."""
    rows = []
    for name in POSITIONS:
        losses = [[r[str(n)] for r in part("positions", name)] for n in LENGTHS]
        rows.append([name, *map(spread, losses), difference(losses[-1], losses[0])])
    show_table(["position", *(f"windows of {n}" for n in LENGTHS), f"{LENGTHS[-1]} against {LENGTHS[0]}"], rows)
    rows = []
    for schedule in SCHEDULES:
        none = part("decay", f"{schedule} {DECAYS[0]:g}")
        for x in DECAYS:
            found = part("decay", f"{schedule} {x:g}")
            pairs = [([f(r) for r in found], [f(r) for r in none]) for f in MEASURES]
            rows.append([schedule, f"{x:g}", *(spread(mine) for mine, _ in pairs)])
            rows[-1] += [difference(*pair) if x else "" for pair in pairs]
    columns = ["train", "val", "gap", "best val"]
    show_table(["schedule", "weight decay", *columns, *(f"{column}, against 0" for column in columns)], rows)
    rows = []
    for size in VOCABULARIES:
        bits, first = ([r["bits"] for r in part("vocabulary", str(n))] for n in (size, VOCABULARIES[1]))
        rows.append([f"{size:,}", spread(bits), "" if size == VOCABULARIES[1] else difference(bits, first)])
    show_table(["tokens", "bits per byte", f"against {VOCABULARIES[1]:,}"], rows)


MEASURES = (lambda r: r["train"], lambda r: r["val"], lambda r: r["val"] - r["train"], lambda r: r["best"])


def main() -> None:
    at_least_one(seeds=seeds)
    check_writable(out)
    parts = names(what, ["positions", "decay", "vocabulary", "show"])
    for seed in range(1, seeds + 1):
        for name in POSITIONS if "positions" in parts else ():
            measured(out, "positions", name, seed, lambda name=name, seed=seed: position(name, seed))
        for schedule in SCHEDULES if "decay" in parts else ():
            for x in DECAYS:
                row = f"{schedule} {x:g}"
                measured(out, "decay", row, seed, lambda x=x, a=schedule, seed=seed: decay(x, a, seed))
        for size in VOCABULARIES if "vocabulary" in parts else ():
            measured(out, "vocabulary", str(size), seed, lambda size=size, seed=seed: vocabulary(size, seed))
    if "show" in parts:
        show()


if __name__ == "__main__":
    start(globals())
