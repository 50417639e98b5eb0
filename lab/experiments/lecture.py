"""What the lecture on transformer choices says of positions and weight decay.

    OMP_NUM_THREADS=1 python -m lab.experiments.lecture   # about an hour on one core

`positions` trains with a context of 64 characters, and evaluates on windows of up to 16 times that:
ALiBi should go on well, sinusoids should not. `decay` trains on 2% of the text, which the model
sees 77 times, with several weight decays and two schedules: weight decay should not change the
ratio of the training loss to that of validation, but lower the training loss where the learning
rate falls. (Depth against width is `compare --table=aspect`.) Runs in --out are not repeated.
"""

import itertools
import re
import subprocess
import sys

from configurator import names, run_script

from lab.experiments.beta_post import part_of_the_text
from lab.experiments.results import difference, mean, measured, show_table, stored
from lab.experiments.runs import as_flags, finished, folder_of, identity, result_of
from lab.experiments.tables import rows_of, steps_of

# What is measured?
what = "positions,decay,show"  # the parts to run; show: the tables of --out
seeds = 3  # runs of each row
out = "lab/experiments/lecture.json"  # the results
out_dir = "out-lecture"  # the folder for the runs, each in a folder of its own

CPU = "config/train_shakespeare_char_cpu.py"
# learned positions end at block_size; Shaw's take n^3
POSITIONS = rows_of("""
none: --position=none
sinusoidal: --position=sinusoidal --import=lab.ideas.positions
rope: --position=rope
alibi: --position=alibi
t5: --position=t5 --import=lab.ideas.positions
rope, decay: --position=rope --decay=alibi
stick-breaking, none: --attention=stick_breaking --position=none --import=lab.ideas
""")
LENGTHS = (64, 256, 1024)  # tokens in a window of the evaluation
# "schedule weight_decay"
DECAYS = rows_of("""
cosine 0: --schedule=cosine --weight_decay=0.0
cosine 0.1: --schedule=cosine --weight_decay=0.1
cosine 1: --schedule=cosine --weight_decay=1.0
constant 0: --schedule=constant --weight_decay=0.0
constant 0.1: --schedule=constant --weight_decay=0.1
constant 1: --schedule=constant --weight_decay=1.0
""")
# {part: (its rows, the steps of a run)}
PARTS = {"positions": (POSITIONS, 1000), "decay": (DECAYS, 2000)}


def make(part: str) -> None:
    """Make the runs of a part, and measure them, unless their numbers are in --out."""
    rows, steps = PARTS[part]
    common = steps_of(steps, 5)
    if part == "decay":
        common |= {"dataset": part_of_the_text(0.02, True), "eval_iters": 73}
    for seed, (row, flags) in itertools.product(range(1, seeds + 1), rows.items()):
        command = [CPU, *as_flags(common | flags), f"--seed={seed}"]
        measured(out, part, row, seed, numbers, part, row, command, of=identity(command))


def numbers(part: str, row: str, command: list[str]) -> dict[str, float]:
    """The losses of a run, in nats per token. Make the run if it is missing."""
    folder = folder_of(row, command, out_dir)
    log = finished(f"{part}, {row}", command, folder)
    if part == "positions":
        return {str(n): evaluated(folder, n, command) for n in LENGTHS}
    result = result_of(log, (), False)
    return {key: result[key] for key in ("train", "val", "best")}


def evaluated(folder: str, n: int, command: list[str]) -> float:
    """The loss that eval.py prints of the latest checkpoint of a run, on windows of n tokens."""
    args = ["eval.py", f"--out_dir={folder}", "--which=latest", "--batch_size=16"]
    args += [f"--block_size={n}", *(word for word in command if word.startswith("--import="))]
    run = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True)
    return float(re.search(r"^loss +([\d.]+)", run.stdout, re.MULTILINE)[1])


def seeds_of(part: str, row: str) -> list[dict]:
    """The results of a row's seeds in --out."""
    return list(stored(out, part, row).values())


def show_positions() -> None:
    """Print the table of the positions."""
    rows = []
    for name in POSITIONS:
        results = seeds_of("positions", name)
        losses = [[result[str(n)] for result in results] for n in LENGTHS]
        rows.append([name, *map(mean, losses), difference(losses[-1], losses[0])])
    windows = " | ".join(f"windows of {n}" for n in LENGTHS)
    show_table(f"position | {windows} | {LENGTHS[-1]} against {LENGTHS[0]}", rows)


def show_decay() -> None:
    """Print the table of the weight decays."""
    rows = []
    for row in DECAYS:
        schedule, x = row.split()
        losses = measures(row)
        changes = map(difference, losses, measures(f"{schedule} 0")) if x != "0" else [""] * 3
        rows.append([schedule, x, *map(mean, losses), *changes])
    columns = "schedule | weight decay | train | train / val | best val"
    show_table(f"{columns} | train, against 0 | ratio, against 0 | best val, against 0", rows)


def measures(row: str) -> list[list[float]]:
    """The training losses, their ratios to those of validation, and validation's best, of seeds."""
    results = seeds_of("decay", row)
    train, val, best = ([result[key] for result in results] for key in ("train", "val", "best"))
    return [train, [a / b for a, b in zip(train, val, strict=True)], best]


def main() -> None:
    for part in names(what, [*PARTS, "show"]):
        if part == "show":
            show_positions()
            show_decay()
        else:
            make(part)


if __name__ == "__main__":
    run_script(globals())
