"""Do short heads keep the training of long texts stable? (long-short paper, figures 1 and 3 to 6)

    OMP_NUM_THREADS=1 python -m lab.experiments.long_short --jobs=2  # on two cores
    python -m lab.experiments.long_short --scale=paper               # the paper's model, on a GPU
    python -m lab.experiments.long_short --what=show                 # picture and tables of --out

The part `lengths` trains long heads, short heads and one long head (LS), short heads alone, and long heads with
normalised queries and keys: at each length, with 6 heads and with 2. `border` trains long heads and LS on long texts
with higher and higher learning rates, until both break. `bfloat16` does both again in bfloat16, as the paper trains:
products in bfloat16 (mixed precision), and weights in it too. Finished runs are not repeated: you can stop and start
again.
"""

import functools
import itertools
import math
import statistics
from typing import Literal

from configurator import at_least_one, names
from lab.experiments.results import check_writable, difference, drawing, measured, show_table, spread, start
from lab.experiments.runs import as_flags, constants, final, record, sooner
from lab.experiments.times import step_times

# What is measured?
what = "lengths,border,bfloat16,show"  # the parts to run, separated by commas; show: the picture and the tables
scale: Literal["pocket", "paper"] = "pocket"  # pocket: for two CPU cores; paper: the paper's
seeds = 3  # runs of each row, and of each learning rate of the border
jobs = 1  # runs at the same time; they share the cores of the CPU
extra = ""  # more flags of train.py for every run (not for the times), separated by spaces
out = "lab/experiments/long_short.json"  # the results
picture = "lab/pictures/long_short.png"  # the picture
out_dir = "out-long-short"  # the folder for the runs, each in a folder of its own

KINDS = {
    "long": {"heads": "L"},
    "LS": {"heads": "SSSSSL"},
    "short": {"heads": "S"},
    "QK-norm": {"heads": "L", "qk_norm": "l2"},
    "long, float32": {"heads": "L", "dtype": "float32", "tf32": False},  # where the others run in bfloat16, on a GPU
}
MIXED, PURE = {"dtype": "bfloat16"}, {"dtype": "float32", "variant": "bfloat16"}  # products; weights too
BFLOAT16 = {"": {}, ", bfloat16": MIXED, ", bfloat16 weights": PURE}
CPU = "config/train_shakespeare_char_cpu.py"
POCKET = {"eval_interval": 100, "max_iters": 400, "lr_decay_iters": 400, "log_logits": True, "eval_iters": 20}
SCALES = {  # lengths: {length: sequences in a batch}. border: its length and learning rates. bfloat16: its lengths,
    # with the usual learning rate, and its learning rates, at the border's length
    "pocket": {
        "file": CPU,
        "flags": POCKET,
        "two": {"n_head": 2, "head_dim": 16, "n_hidden": 512},
        "kinds": ("long", "LS", "short", "QK-norm"),
        "lengths": {128: 16, 512: 4, 2048: 1},
        "border": (2048, [2e-2, 6e-2, 0.2, 0.6]),
        "bfloat16": ([512, 2048], [6e-2]),
    },
    "paper": {
        "file": "config/train_pg19_ls.py",
        "flags": {"gradient_accumulation_steps": 16, "eval_interval": 1000},
        "two": {"n_head": 2, "head_dim": 32, "n_hidden": 1024},
        "kinds": tuple(KINDS),
        "lengths": {128: 256, 512: 64, 2048: 16, 8192: 4},
        "border": (2048, [1.2e-3, 2.4e-3, 4.8e-3]),
        "bfloat16": ([], []),  # all rows but one are in bfloat16
    },
}  # With 2 heads a layer has as many weights as with 6: the MLP gets what attention loses (section 5.1).


def flags(n: int, heads: int, kind: str) -> dict:
    """The flags of a run. The window is the paper's, or shorter than the text."""
    s, own = SCALES[scale], KINDS[kind] | ({"heads": "SL"} if heads == 2 and kind == "LS" else {})
    short = {"window": min(n - 1, 50 if n <= 2048 else 100)} if "S" in own["heads"] else {}
    sizes = {"block_size": n, "batch_size": s["lengths"][n]} | (s["two"] if heads == 2 else {})
    return s["flags"] | sizes | own | short


def results(rows: dict[tuple, dict], make: bool) -> dict[tuple, list[dict]]:
    """The results of the seeds of each row, {key: flags of train.py}. make: see experiments.runs.record."""
    commands = {}
    for seed, (key, own) in itertools.product(range(1, seeds + 1), rows.items()):
        run = [SCALES[scale]["file"], *as_flags(own | {"seed": seed}), *extra.split()]
        commands[", ".join(map(str, (scale, *key, seed)))] = run
    made = list(record(out, commands, out_dir, jobs, make, keep=("val_loss", "loss", "max_logit")).values())
    return {key: made[i :: len(rows)] for i, key in enumerate(rows)}


def lengths(make: bool) -> dict[tuple, list[dict]]:
    """{(n, heads, kind): results of the seeds}."""
    s = SCALES[scale]
    rows = [(n, heads, kind) for heads in (6, 2) for n in s["lengths"] for kind in s["kinds"]]
    return results({row: flags(*row) for row in rows}, make)


def times() -> dict[tuple, list[float]]:
    """{(n, heads, kind): [ms of a training step, its ratio to long heads]}, on a CPU; none for the paper's scale."""
    s, found = SCALES[scale], {}
    for n, heads in itertools.product(s["lengths"], (6, 2) if s["file"] == CPU else ()):
        rows = {kind: flags(n, heads, kind) for kind in s["kinds"]}
        of = functools.partial(step_times, s["file"], rows, 65, 15, dict.fromkeys(rows, "long"))
        ms = measured(out, "times", f"{scale}, {heads} heads", n, of)
        found |= {(n, heads, kind): ms[kind] for kind in rows}
    return found


def border(make: bool, by_length: dict[tuple, list[dict]]) -> dict[tuple, list[dict]]:
    """{(learning rate, kind): results of the seeds}, from the usual rate up to the first at which every run breaks."""
    n, rates = SCALES[scale]["border"]
    usual = constants(SCALES[scale]["file"])["learning_rate"]
    found = {(usual, kind): by_length[n, 6, kind] for kind in ("long", "LS")}
    for rate in rates:
        rows = {("border", rate, kind): flags(n, 6, kind) | {"learning_rate": rate} for kind in ("long", "LS")}
        made = results(rows, make)
        found |= {key[1:]: of for key, of in made.items()}
        if all(breaks(r, found[usual, "LS"]) for of in made.values() for r in of):
            break
    return found


def bfloat16(make: bool, by_length: dict, by_rate: dict) -> dict[tuple, list[dict]]:
    """{(n, learning rate, kind): results of the seeds}, of long heads and LS in float32 and in bfloat16."""
    (sizes, rates), usual = SCALES[scale]["bfloat16"], constants(SCALES[scale]["file"])["learning_rate"]
    rows = [(n, usual) for n in sizes] + [(SCALES[scale]["border"][0], rate) for rate in rates]
    found, runs = {}, {}
    for (n, rate), x, kind in itertools.product(rows, BFLOAT16, ("long", "LS")):
        found[n, rate, kind + x] = by_length[n, 6, kind] if rate == usual else by_rate[rate, kind]  # of float32
        if x:
            runs[n, rate, kind + x] = flags(n, 6, kind) | BFLOAT16[x]
            runs[n, rate, kind + x] |= {} if rate == usual else {"learning_rate": rate}
    return found | results(runs, make)


def breaks(result: dict, usual: list[dict]) -> bool:
    """Whether a run's loss is not finite, or ends half a nat above the lowest of LS at the usual learning rate."""
    return not final(result) < min(map(final, usual)) + 0.5


def largest(results: list[dict]) -> float:
    """The largest absolute score of whole runs, the mean of the seeds."""
    return statistics.mean(r.get("max_logit", math.nan) for r in results)


def perplexity(results: list[dict]) -> float:
    """The mean of the seeds."""
    return statistics.mean(math.exp(final(r)) for r in results)


def draw(by_length: dict, by_rate: dict) -> None:
    """Training losses and largest scores over steps (figures 1, 3, 4); losses at the end (5, 6); the border."""
    s, n = SCALES[scale], max(SCALES[scale]["lengths"])
    x = [*map(str, s["lengths"])]
    with drawing(picture, 2, 3, 15, 8) as (loss, score, at_border, end, score_end, score_border):
        for i, kind in enumerate(s["kinds"]):
            color = "black" if i == 0 else f"C{i - 1}"
            for heads, line in ((6, "-"), (2, ":")):
                style = {"color": color, "ls": line, "label": f"{kind}, {heads} heads"}
                for ax, key in ((loss, "loss"), (score, "max_logit")):
                    curve = by_length[n, heads, kind][0]["curves"][key]
                    ax.plot(curve["iter"], curve[key], **style)
                rows = [by_length[m, heads, kind] for m in s["lengths"]]
                end.plot(x, [*map(perplexity, rows)], marker="o", **style)
                score_end.plot(x, [*map(largest, rows)], marker="o", **style)
            style = {"color": color, "marker": "o", "label": f"{kind}, 6 heads"}
            if rates := {rate: found for (rate, of), found in by_rate.items() if of == kind}:
                at_border.plot([*rates], [statistics.mean(map(final, found)) for found in rates.values()], **style)
                score_border.plot([*rates], [*map(largest, rates.values())], **style)
        loss.set(title=f"training loss, n = {n} (figures 1a, 3b, 4a, 4b)", xlabel="step")
        score.set(title=f"largest score, n = {n} (figures 1b, 4c)", xlabel="step", yscale="log")
        end.set(title="perplexity (figures 5, 6: LS 36, short 42, QK-norm 112)", xlabel="n")
        score_end.set(title="largest score of the whole run (figure 4c)", xlabel="n", yscale="log")
        at_border.set(title=f"last validation loss, n = {s['border'][0]}", xlabel="learning rate", xscale="log")
        score_border.set(title="largest score of the whole run", xlabel="learning rate", xscale="log", yscale="log")


def show(by_length: dict, by_rate: dict, in_bfloat16: dict, ms: dict) -> None:
    """Prints the tables of the lengths, of the border and of bfloat16."""
    rows = []
    for row, found in by_length.items():
        long, losses = by_length[*row[:2], "long"], [*map(final, found)]
        cells = [*row, spread(losses), "" if found is long else difference(losses, [*map(final, long)])]
        cells += [sooner(found, long), f"{perplexity(found):.2f}", f"{largest(found):.1f}"]
        rows.append(cells + ([f"{ms[row][0]:.0f}", f"{ms[row][1]:.2f}x"] if row in ms else ["", ""]))
    columns = ["n", "heads", "", "val loss", "against long", "share of the steps to long's last loss"]
    show_table([*columns, "perplexity", "largest score", "ms per step", ""], rows)
    usual, rows = next(found for (_, kind), found in by_rate.items() if kind == "LS"), []
    for (rate, kind), found in by_rate.items():
        broken = f"{sum(breaks(r, usual) for r in found)} of {len(found)}"
        rows.append([f"{rate:g}", kind, spread([*map(final, found)]), f"{largest(found):.1f}", broken])
    show_table(["learning rate", "", "last val loss", "largest score", "breaks"], rows)
    rows = []
    for (n, rate, kind), found in in_bfloat16.items():
        losses, same = [*map(final, found)], in_bfloat16[n, rate, kind.partition(",")[0]]
        change = "" if found is same else difference(losses, [*map(final, same)])
        lost = f"{sum('diverged' in r for r in found)} of {len(found)}"
        rows.append([n, f"{rate:g}", kind, spread(losses), change, f"{largest(found):.1f}", lost])
    show_table(["n", "learning rate", "", "last val loss", "against float32", "largest score", "not finite"], rows)


def main() -> None:
    at_least_one(jobs=jobs, seeds=seeds)
    check_writable(out, picture)
    parts = names(what, ["lengths", "border", "bfloat16", "show"])
    by_length = lengths("lengths" in parts)
    by_rate = border("border" in parts, by_length)
    in_bfloat16 = bfloat16("bfloat16" in parts, by_length, by_rate)
    if "show" in parts:
        draw(by_length, by_rate)
        show(by_length, by_rate, in_bfloat16, times())


if __name__ == "__main__":
    start(globals())
