"""Is attention in linear time as good as softmax? Losses at equal steps and in equal time, as a table.

    python experiments/linear.py                      # Tiny Shakespeare, contexts of 64 and of 256
    python experiments/linear.py --table=novels       # n = 2048, after data/pg19/prepare.py
    python experiments/linear.py --what=print         # the tables of what is in --out

For each row and seed train.py makes two runs: one of --steps steps, and one of as many steps as fit into the time that
softmax with the same positions takes for --steps. The times are medians of training steps in one process, in rounds.
Runs that finished with the same command are skipped, so you can stop the script and start it again. Results are added
to the JSON file --out.
"""

import json
import os
import re
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import UserError, configure, user_errors
from experiments.runs import as_flags, losses, step_times
from text.dataset import ROOT

# What is measured?
what = "steps,times,equal,print"  # the parts: runs of equal steps, times of steps, runs of equal time, the tables
table = "64,256"  # the tables, separated by commas: 64, 256, novels
only = ""  # the rows to run, separated by semicolons, without their positions; empty: all
seeds = 3  # runs per row, with the seeds 1, 2, ...
jobs = 2  # runs at the same time; they share the cores of the CPU
repeats = 40  # number of timed steps per row
extra = ""  # more flags of train.py for every run, separated by spaces
out = "experiments/linear.json"  # the results
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
CPU |= {"positions": ["learned", "rope"]}
TABLES = {
    "64": CPU | {"flags": {}, "rows": list(ROWS)},
    "256": CPU | {"flags": {"block_size": 256, "batch_size": 3, "eval_iters": 145}, "rows": list(ROWS)},
    "novels": {
        "file": "config/train_pg19_ls.py",
        "vocab_size": 10000,
        "steps": 600,
        "positions": ["rope"],
        "flags": {"heads": "L", "n_layer": 4, "n_head": 8, "n_embd": 128, "batch_size": 1, "learning_rate": 3e-3}
        | {"gradient_accumulation_steps": 1, "min_lr": 3e-4, "warmup_iters": 50, "eval_iters": 40, "mlp": "gelu"},
        "rows": list(ROWS),
    },
}


def of_table(name: str) -> dict[str, dict]:
    """The flags of each row of a table; its positions are a part of its name."""
    t = TABLES[name]
    chosen = [part.strip() for part in only.split(";") if part.strip()] or t["rows"]
    return {f"{row}; {p}": t["flags"] | ROWS[row] | {"position": p} for p in t["positions"] for row in chosen}


def runs_of(name: str, rows: dict[str, dict], steps: dict[str, int], kind: str) -> dict:
    """The runs (experiments/runs.py, losses) of each row and seed; seeds in the outer loop."""
    found = {}
    for seed in range(1, seeds + 1):
        for row, flags in rows.items():
            folder = os.path.join(out_dir, name, kind, f"{re.sub('[^a-z0-9]+', '-', row.lower())}-{seed}")
            n = {"max_iters": steps[row], "lr_decay_iters": steps[row], "eval_interval": steps[row], "seed": seed}
            command = [TABLES[name]["file"], *as_flags(flags | n), *extra.split()]
            found[row, seed] = f"{name}, {row}, seed {seed}: {steps[row]} steps", command, folder
    return found


def saved() -> dict:
    """{table: {row: {"steps": {seed: loss}, "equal": {seed: loss}, "ms": , "ratio": , "n": steps in equal time}}}."""
    if not os.path.exists(out):
        return {}
    with open(out, encoding="utf-8") as f:
        return json.load(f)


def note_result(name: str, row: str, **result: object) -> None:
    """Adds a row's results to the file; dictionaries are merged."""
    results = saved()
    entry = results.setdefault(name, {}).setdefault(row, {})
    for key, value in result.items():
        entry[key] = entry.get(key, {}) | value if isinstance(value, dict) else value
    with open(f"{out}.tmp", "w", encoding="utf-8") as f:
        json.dump(results, f, indent=1, sort_keys=True)
    os.replace(f"{out}.tmp", out)


def spread(found: dict[str, float]) -> str:
    """mean (lowest to highest) of the losses of some seeds."""
    return f"{statistics.mean(found.values()):.3f} ({min(found.values()):.3f} to {max(found.values()):.3f})"


def show(name: str) -> None:
    """Prints a table, the lowest loss first."""
    rows = {row: entry for row, entry in saved().get(name, {}).items() if entry.get("steps")}
    print(f"\n| {name}: attention | positions | loss, equal steps | time of a step | steps | loss, equal time |")
    print("|---|---|---|---|---|---|")
    for row, entry in sorted(rows.items(), key=lambda item: statistics.mean(item[1]["steps"].values())):
        attention, position = row.split("; ")
        time = f"{entry['ratio']:.2f}x | {entry['n']}" if "n" in entry else " | "
        equal = spread(entry["equal"]) if entry.get("equal") else ""
        mark = "**" if attention in LINEAR else ""
        print(f"| {mark}{attention}{mark} | {position} | {spread(entry['steps'])} | {time} | {equal} |")


def main() -> None:
    os.chdir(ROOT)
    parts, tables = what.split(","), table.split(",")
    for given, known in ((parts, ["steps", "times", "equal", "print"]), (tables, TABLES)):
        if unknown := [x for x in given if x not in known]:
            raise UserError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    for name in tables:
        t, rows = TABLES[name], of_table(name)
        steps = {row: t["steps"] for row in rows}
        if "steps" in parts:
            then = lambda key, loss, name=name: note_result(name, key[0], steps={str(key[1]): loss})  # noqa: E731
            losses(runs_of(name, rows, steps, "steps"), jobs, then)
        if "times" in parts:
            for p in t["positions"]:
                mine = {row: flags for row, flags in rows.items() if row.endswith(p)}
                for row, (ms, ratio) in step_times(t["file"], mine, t["vocab_size"], repeats).items():
                    note_result(name, row, ms=ms, ratio=ratio, n=round(t["steps"] / ratio))
        if "equal" in parts:
            n = {row: entry["n"] for row, entry in saved()[name].items() if "n" in entry}
            then = lambda key, loss, name=name: note_result(name, key[0], equal={str(key[1]): loss})  # noqa: E731
            losses(runs_of(name, rows, n, "equal"), jobs, then)
        if "print" in parts:
            show(name)


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
