"""What the lecture on transformer choices says of positions and weight decay.

    OMP_NUM_THREADS=1 python -m lab.experiments.lecture   # about an hour on one core

`positions` trains with a context of 64 characters, and evaluates on windows of up to 16 times that:
ALiBi should go on well, sinusoids should not. `decay` trains on 2% of the text, which the model
sees 77 times, with several weight decays and two schedules: weight decay should not change the gap
between the losses of training and validation, but lower the training loss where the learning rate
falls. (Depth against width is `compare --table=aspect`.) Runs in --out are not repeated.
"""

import itertools
import os
import re
import subprocess
import sys

from configurator import names, run_script
from lab.experiments.beta_post import part_of_the_text
from lab.experiments.results import difference, mean, measured, saved, show_table
from lab.experiments.runs import as_flags, finished, identity, result_of
from lab.experiments.tables import rows_of

# What is measured?
what = "positions,decay,show"  # the parts to run; show: the tables of --out
seeds = 3  # runs of each row
steps: int | None = None  # of each run; None: 1000, and 2000 of the part decay
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
DECAYS = (0.0, 0.1, 1.0)  # weight decays
SCHEDULES = ("cosine", "constant")


def evaluated(folder: str, *flags: str) -> dict[str, float]:
    """{"loss": nats per token} that eval.py prints of the latest checkpoint in a folder."""
    args = ["eval.py", f"--out_dir={folder}", "--which=latest", "--batch_size=16", *flags]
    run = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True)
    loss = re.search(r"^loss +([\d.]+)", run.stdout, re.MULTILINE)
    return {"loss": float(loss[1])}


def rows_of_part(part: str) -> dict[str, dict]:
    """{row: its flags} of a part."""
    if part == "positions":
        return POSITIONS
    rows = {}
    for schedule, x in itertools.product(SCHEDULES, DECAYS):
        rows[f"{schedule} {x:g}"] = {
            "dataset": part_of_the_text(0.02, False),
            "weight_decay": x,
            "schedule": schedule,
            "eval_iters": 73,
        }
    return rows


# {part: (the steps of a run, how the names of its runs begin)}
PARTS = {"positions": (1000, "position "), "decay": (2000, "")}


def make(part: str) -> None:
    """Make the runs of a part, and measure them, unless their numbers are in --out."""
    n, begin = PARTS[part]
    n = steps or n
    if part == "decay":
        part_of_the_text(0.02, True)  # its checksum is in the identity of a run
    common = {"max_iters": n, "lr_decay_iters": n, "eval_interval": n // 5}
    for seed, (row, flags) in itertools.product(range(1, seeds + 1), rows_of_part(part).items()):
        flags = common | flags
        command = [CPU, *as_flags(flags), f"--seed={seed}"]
        name = f"{begin}{row}, seed {seed}"
        args = numbers, part, name, command, flags
        measured(out, part, row, seed, *args, of=identity(command))


def numbers(part: str, name: str, command: list[str], flags: dict) -> dict:
    """What is measured of a run. Make the run, and its data set, if they are missing."""
    folder = os.path.join(out_dir, re.sub("[^a-z0-9]+", "-", name.replace(", seed", "")))
    log = finished(name, command, folder)
    if part == "positions":
        more = [f"--import={flags['import']}"] if "import" in flags else []
        return {str(n): evaluated(folder, f"--block_size={n}", *more)["loss"] for n in LENGTHS}
    result = result_of(log, ("val_loss",), False)
    losses = {key: result[key] for key in ("train", "val", "best")}
    return losses | {"val_losses": result["curves"]["val_loss"]["val_loss"]}


def seeds_of(part: str, row: str) -> list[dict]:
    """The results of a row's seeds in --out."""
    return list(saved(out, {}).get(part, {}).get(row, {}).values())


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
    for schedule in SCHEDULES:
        without = measures(f"{schedule} {DECAYS[0]:g}")
        for x in DECAYS:
            losses = measures(f"{schedule} {x:g}")
            changes = map(difference, losses, without) if x else [""] * len(losses)
            rows.append([schedule, f"{x:g}", *map(mean, losses), *changes])
    columns = "schedule | weight decay | train | gap | best val"
    show_table(f"{columns} | train, against 0 | gap, against 0 | best val, against 0", rows)


def measures(row: str) -> list[list[float]]:
    """The training losses, how far validation's are above them, and validation's best, of seeds."""
    results = seeds_of("decay", row)
    train, val, best = ([result[key] for result in results] for key in ("train", "val", "best"))
    return [train, [a - b for a, b in zip(val, train, strict=True)], best]


def main() -> None:
    parts = names(what, [*PARTS, "show"])
    for part in parts:
        if part != "show":
            make(part)
    if "show" in parts:
        show_positions()
        show_decay()


if __name__ == "__main__":
    run_script(globals())
