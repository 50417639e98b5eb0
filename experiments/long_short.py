"""Do short heads keep the training of long texts stable? (long-short paper, figures 1, 3, 4, 5 and 6)

    OMP_NUM_THREADS=1 python experiments/long_short.py --jobs=2  # on two cores
    python experiments/long_short.py --scale=paper               # the paper's model on PG-19, on a GPU
    python experiments/long_short.py --what=draw,print           # picture and tables of --out

The part `lengths` trains long heads, short heads and one long head (LS), short heads alone, and long heads with
normalised queries and keys: at each length, with 6 heads and with 2. The part `border` trains long heads and LS on
long texts with higher and higher learning rates, until both break. Finished runs are not repeated: you can stop and
start again.
"""

import math
import os
import statistics
import sys
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import at_least_one, configure, names, user_errors
from experiments.results import drawing, spread
from experiments.runs import as_flags, record
from text.dataset import ROOT

# What is measured?
what = "lengths,border,draw,print"  # the parts to run, separated by commas
scale: Literal["pocket", "paper", "tiny"] = "pocket"  # the model's size and the length of training
seeds = 3  # runs of each row with 6 heads
jobs = 1  # runs at the same time; they share the cores of the CPU
extra = ""  # more flags of train.py for every run, separated by spaces
out = "experiments/long_short.json"  # the results
picture = "docs/long_short.png"  # the picture
out_dir = "out-long-short"  # the folder for the runs, each in a folder of its own

KINDS = {  # {name: flags for 6 heads, for 2 heads}
    "long": ({"heads": "L"}, {"heads": "L"}),
    "LS": ({"heads": "SSSSSL"}, {"heads": "SL"}),
    "short": ({"heads": "S"}, {"heads": "S"}),
    "QK-norm": ({"heads": "L", "qk_norm": "l2"}, {"heads": "L", "qk_norm": "l2"}),
}
CPU = "config/train_shakespeare_char_cpu.py"
POCKET = {"eval_interval": 100, "max_iters": 500, "lr_decay_iters": 500, "log_logits": True, "eval_iters": 20}
TINY = {"eval_interval": 2, "max_iters": 4, "lr_decay_iters": 4, "log_logits": True, "eval_iters": 1}
SCALES = {  # lengths: {length: sequences in a batch}. border: its length, and its learning rates
    "pocket": {
        "file": CPU,
        "flags": POCKET,
        "two": {"n_head": 2, "head_dim": 16, "n_hidden": 512},
        "lengths": {128: 16, 512: 4, 2048: 1},
        "border": (2048, [6e-3, 1.2e-2, 2.4e-2, 4.8e-2, 9.6e-2, 0.2, 0.4]),
    },
    "paper": {
        "file": "config/train_pg19_ls.py",
        "flags": {"gradient_accumulation_steps": 16, "eval_interval": 1000},
        "two": {"n_head": 2, "head_dim": 32, "n_hidden": 1024},
        "lengths": {128: 256, 512: 64, 2048: 16, 8192: 4},
        "border": (2048, [6e-4, 1.2e-3, 2.4e-3, 4.8e-3]),
    },
    "tiny": {
        "file": CPU,
        "flags": TINY | {"n_embd": 24, "n_layer": 1, "log_interval": 1, "warmup_iters": 1},
        "two": {"n_head": 2, "head_dim": 4, "n_hidden": 112},
        "lengths": {16: 2, 32: 1},
        "border": (32, [6e-3, 1e18]),
    },
}  # With 2 heads a layer has as many weights as with 6: the MLP gets what attention loses (section 5.1).


def command(kind: str, heads: int, n: int, **more: object) -> list[str]:
    """The arguments of train.py. The window is the paper's, or shorter than the text."""
    s, own = SCALES[scale], KINDS[kind][heads == 2]
    flags = s["flags"] | {"block_size": n, "batch_size": s["lengths"][n]} | ({} if heads == 6 else s["two"]) | own
    window = {"window": min(n - 1, 50 if n <= 2048 else 100)} if "S" in own["heads"] else {}
    return [s["file"], *as_flags(flags | window | more), *extra.split()]


def results(commands: dict[str, list[str]], make: bool) -> dict[str, dict]:
    """The results of runs, {name: command}. make: makes missing ones (experiments.runs.record)."""
    return record(out, commands, out_dir, jobs, make, keep=("norm", "max_logit"))


def lengths(make: bool) -> dict[tuple, list[dict]]:
    """{(n, heads, kind): results of the seeds}. With 2 heads: long heads and LS, one seed."""
    keys = [(n, 6, kind) for n in SCALES[scale]["lengths"] for kind in KINDS]
    keys += [(n, 2, kind) for n in SCALES[scale]["lengths"] for kind in ("long", "LS")]
    commands = {}
    for seed in range(1, seeds + 1):
        for n, heads, kind in keys:
            if heads == 6 or seed == 1:
                commands[f"{n}, {heads} heads, {kind}, seed {seed}"] = command(kind, heads, n, seed=seed)
    made = results(commands, make)
    return {key: [made[name] for name in made if name.startswith("{}, {} heads, {}, ".format(*key))] for key in keys}


def border(make: bool) -> dict[tuple, dict]:
    """{(kind, learning rate): result with "breaks"}, for rates up to the first at which both kinds break.

    A run breaks if its loss is not finite, or ends half a nat above the lowest validation loss of its kind.
    """
    n, rates = SCALES[scale]["border"]
    found, lowest = {}, dict.fromkeys(("long", "LS"), math.inf)
    for rate in rates:
        made = results({f"border, {kind}, {rate:g}": command(kind, 6, n, learning_rate=rate) for kind in lowest}, make)
        for kind, r in zip(lowest, made.values(), strict=True):
            lowest[kind] = min(lowest[kind], r["best"])
            breaks = r["diverged"] is not None or not r["val"] < lowest[kind] + 0.5
            found[kind, rate] = r | {"breaks": breaks}
        if all(found[kind, rate]["breaks"] for kind in lowest):
            break
    return found


def largest(result: dict) -> float:
    """The largest absolute score of the whole run."""
    return max(result["curves"]["max_logit"]["max_logit"])


def draw(by_length: dict, by_rate: dict) -> None:
    """Training losses and largest scores over steps (figures 1, 3, 4); losses at the end (5, 6); the border."""
    n, colors = max(SCALES[scale]["lengths"]), dict(zip(KINDS, ("black", "C0", "C2", "C3"), strict=True))
    with drawing(picture, 2, 3, 15, 8) as (loss, score, at_border, end, score_end, score_border):
        for (length, heads, kind), found in by_length.items():
            if length == n:
                style = {"color": colors[kind], "label": f"{kind}, {heads} heads", "ls": "-" if heads == 6 else ":"}
                for ax, key in ((loss, "loss"), (score, "max_logit")):
                    ax.plot(found[0]["curves"][key]["iter"], found[0]["curves"][key][key], **style)
        for kind, color in colors.items():
            rows, style = {k[0]: x for k, x in by_length.items() if k[1:] == (6, kind)}, {"color": color, "label": kind}
            end.plot([*rows], [statistics.mean(math.exp(r["val"]) for r in x) for x in rows.values()], "o-", **style)
            score_end.plot([*rows], [statistics.mean(map(largest, x)) for x in rows.values()], "o-", **style)
            rates = {rate: r for (k, rate), r in by_rate.items() if k == kind}
            at_border.plot([*rates], [r["val"] for r in rates.values()], "o-", **style)
            score_border.plot([*rates], [largest(r) for r in rates.values()], "o-", **style)
        for ax, title, x in (
            (loss, f"training loss, n = {n} (figures 1a, 3, 4)", "step"),
            (score, f"largest score, n = {n} (figures 1b, 4c)", "step"),
            (at_border, "last validation loss", "learning rate"),
            (end, "validation perplexity (figures 5, 6)", "n"),
            (score_end, "largest score of the whole run", "n"),
            (score_border, "largest score of the whole run", "learning rate"),
        ):
            ax.set_title(title, fontsize=10)
            ax.set(xlabel=x, yscale="log" if "score" in title else "linear")
            if x != "step":
                ax.set_xscale("log", base=10 if x == "learning rate" else 2)
        loss.legend(fontsize=8)
        end.legend(fontsize=8)


def show(by_length: dict, by_rate: dict) -> None:
    """Prints the table of the lengths, and that of the border."""
    print("\n| n | heads | | val loss | perplexity | largest score | ms per step |\n" + "|---" * 7 + "|")
    for (n, heads, kind), found in by_length.items():
        val, ms = [r["val"] for r in found], statistics.median(r["ms"] for r in found)
        print(f"| {n} | {heads} | {kind} | {spread(val)} | {statistics.mean(map(math.exp, val)):.2f}", end="")
        print(f" | {statistics.mean(map(largest, found)):.1f} | {ms:.0f} |")
    print("\n| learning rate | | last val loss | lowest | largest score | spikes | |\n" + "|---" * 7 + "|")
    for (kind, rate), r in by_rate.items():
        cells = [f"{rate:g}", kind, f"{r['val']:.3f}", f"{r['best']:.3f}", f"{largest(r):.1f}", str(r["spikes"])]
        print(f"| {' | '.join(cells)} | {'breaks' if r['breaks'] else ''} |")


def main() -> None:
    os.chdir(ROOT)
    at_least_one(jobs=jobs, seeds=seeds)
    parts = names(what, ["lengths", "border", "draw", "print"])
    found = lengths("lengths" in parts), border("border" in parts)
    if "draw" in parts:
        draw(*found)
    if "print" in parts:
        show(*found)


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
