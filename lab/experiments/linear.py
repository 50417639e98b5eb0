"""Is attention in linear time as good as softmax? Losses at equal steps and in equal time, as a table.

    python -m lab.experiments.linear                      # Tiny Shakespeare, contexts of 64 and of 256
    python -m lab.experiments.linear --table=novels       # n = 2048, after data/pg19/prepare.py
    python -m lab.experiments.linear --what=print         # the tables of what is in --out

For each row and seed train.py makes two runs: one of --steps steps, and one of as many steps as fit into the time that
softmax with the same positions takes for --steps. The times are medians of training steps in one process, in rounds.
Runs that finished with the same command are skipped, so you can stop the script and start it again. Results are added
to the JSON file --out.
"""

import os
import re
import statistics

from configurator import at_least_one, configure, names, user_errors
from lab.experiments.results import save, saved, spread
from lab.experiments.runs import as_flags, last, logs
from lab.experiments.times import step_times
from text.dataset import ROOT

# What is measured?
what = "steps,times,equal,print"  # the parts: runs of equal steps, times of steps, runs of equal time, the tables
table = "64,256"  # the tables, separated by commas: 64, 256, novels
only = ""  # the rows to run, separated by semicolons, without their positions; empty: all
seeds = 3  # runs per row, with the seeds 1, 2, ...
jobs = 2  # runs at the same time; they share the cores of the CPU
repeats = 40  # number of timed steps per row
extra = ""  # more flags of train.py for every run, separated by spaces
out = "lab/experiments/linear.json"  # the results
out_dir = "out-linear"  # the folder for the runs, each in a folder of its own

SHORT = {"heads": "SSSL", "window": 16}
CONV = {"conv": 4}
BETA = {"attention": "beta"}
BETA2 = {"attention": "beta2"}
LEARNED = {"decay": "learned"}
MIXED = {"short_attention": "softmax"} | SHORT
ROWS = {
    "softmax": {},
    "softmax, conv": CONV,
    "softmax, learned decay, conv": LEARNED | CONV,
    "LS": SHORT,
    "LS, conv": SHORT | CONV,
    "beta": BETA,
    "beta, decay": BETA | {"decay": "alibi"},
    "beta, learned decay": BETA | LEARNED,
    "beta, conv": BETA | CONV,
    "beta, learned decay, conv": BETA | LEARNED | CONV,
    "beta2, conv": BETA2 | CONV,
    "beta2, learned decay, conv": BETA2 | LEARNED | CONV,
    "softmax short, beta long, conv": MIXED | BETA | CONV,
    "softmax short, beta2 long": MIXED | BETA2,
    "softmax short, beta2 long, conv": MIXED | BETA2 | CONV,
}
LINEAR = [name for name in ROWS if "beta" in name]  # their time is linear in the length
CPU = {"file": "config/train_shakespeare_char_cpu.py", "vocab_size": 65, "steps": 1500}
CPU |= {"positions": ["learned", "rope"], "window": 16}
FAST = ["beta, learned decay, conv", "softmax short, beta long, conv", "softmax short, beta2 long, conv"]
BEST = ["softmax", "softmax, conv", "softmax, learned decay, conv", "LS, conv", *FAST]
LONG = {"n_layer": 4, "n_head": 8, "n_embd": 128, "heads": "L", "batch_size": 1, "gradient_accumulation_steps": 1}
LONG |= {"learning_rate": 3e-3, "min_lr": 3e-4, "warmup_iters": 50, "eval_iters": 40, "log_logits": False}
TABLES = {
    "64": CPU | {"flags": {}, "rows": list(ROWS)},
    "256": CPU
    | {"positions": ["rope"], "flags": {"block_size": 256, "batch_size": 3, "eval_iters": 145}, "rows": BEST},
    "novels": {"file": "config/train_pg19_ls.py", "vocab_size": 10000, "steps": 400, "window": 50}
    | {"positions": ["rope"], "flags": LONG, "rows": ["softmax, conv", *FAST]},
}


def of_table(name: str) -> dict[str, dict]:
    """The flags of each row of a table; its positions are a part of its name."""
    t = TABLES[name]
    chosen = names(only, ROWS, ";") if only else t["rows"]
    rows = {f"{row}; {p}": t["flags"] | ROWS[row] | {"position": p} for p in t["positions"] for row in chosen}
    return {row: flags | ({"window": t["window"]} if "window" in flags else {}) for row, flags in rows.items()}


def command(name: str, flags: dict, steps: int, seed: int) -> list[str]:
    """train.py's arguments for a run, but for its folder."""
    n = {"max_iters": steps, "lr_decay_iters": steps, "eval_interval": steps, "seed": seed}
    return [TABLES[name]["file"], *as_flags(flags | n), *extra.split()]


def results() -> dict:
    """The results so far: {"losses": {a run's command: loss}, "times": {table: {row: [ms, ratio to softmax's]}}}."""
    return saved(out, {"losses": {}, "times": {}})


def run(name: str, rows: dict[str, dict], steps: dict[str, int]) -> None:
    """Makes the runs of each row and seed whose loss is not known yet; seeds in the outer loop."""
    runs, known = {}, results()["losses"]
    for seed in range(1, seeds + 1):
        for row, flags in rows.items():
            arguments = command(name, flags, steps[row], seed)
            folder = os.path.join(out_dir, name, f"{re.sub('[^a-z0-9]+', '-', row.lower())}-{steps[row]}-{seed}")
            if (key := " ".join(arguments)) not in known:
                runs[key] = f"{name}, {row}, seed {seed}: {steps[row]} steps", arguments, folder

    def then(key: str, log: list[dict]) -> None:
        found = results()
        found["losses"][key] = last(log)
        save(out, found)

    logs(runs, jobs, then)


def take_times(name: str, rows: dict[str, dict]) -> None:
    """The times of steps, for each kind of positions together, softmax first."""
    t, found = TABLES[name], results()
    for p in t["positions"]:
        mine = {f"softmax; {p}": t["flags"] | ROWS["softmax"] | {"position": p}}  # also if it is not in --only
        mine |= {row: flags for row, flags in rows.items() if row.endswith(f"; {p}")}
        found["times"].setdefault(name, {}).update(step_times(t["file"], mine, t["vocab_size"], repeats))
    save(out, found)


def in_equal_time(name: str) -> dict[str, int]:
    """How many steps each row makes in the time that softmax with the same positions takes for the table's steps."""
    times = results()["times"].get(name, {})
    return {row: round(TABLES[name]["steps"] / ratio) for row, (_, ratio) in times.items()}


def show(name: str, rows: dict[str, dict]) -> None:
    """Prints a table, the lowest loss first: mean of the seeds, lowest to highest."""
    known, times, equal = results()["losses"], results()["times"].get(name, {}), in_equal_time(name)

    def found(row: str, steps: int) -> list[float]:
        commands = (" ".join(command(name, rows[row], steps, seed)) for seed in range(1, seeds + 1))
        return [known[key] for key in commands if key in known]

    measured = {row: x for row in rows if (x := found(row, TABLES[name]["steps"]))}
    print(f"\n| {name}: attention | positions | seeds | loss | time of a step | steps | loss in equal time |")
    print("|---" * 7 + "|")
    for row, x in sorted(measured.items(), key=lambda item: statistics.mean(item[1])):
        attention, position = row.split("; ")
        time = f"{times[row][1]:.2f}x | {equal[row]} | {spread(found(row, equal[row]))}" if row in times else " | | "
        mark = "**" if attention in LINEAR else ""
        print(f"| {mark}{attention}{mark} | {position} | {len(x)} | {spread(x)} | {time} |")


def main() -> None:
    os.chdir(ROOT)
    parts = names(what, ["steps", "times", "equal", "print"])
    at_least_one(jobs=jobs, seeds=seeds, repeats=repeats)
    for name in names(table, TABLES):
        rows = of_table(name)
        if "steps" in parts:
            run(name, rows, dict.fromkeys(rows, TABLES[name]["steps"]))
        if "times" in parts:
            take_times(name, rows)
        if "equal" in parts:
            steps = in_equal_time(name)
            run(name, {row: flags for row, flags in rows.items() if row in steps}, steps)
        if "print" in parts:
            show(name, rows)


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
