"""Draws the curves of one or several runs, from their log.jsonl.

    python scripts/plot.py --runs=out-shakespeare-char-cpu
    python scripts/plot.py --runs=out-a,out-b --y=loss,norm,logit --x=tokens --out=curves.png

A training loss is drawn twice: each value as a faint line, and the running mean as a strong one. Validation losses are
points.
"""

import contextlib
import json
import math
import os
import sys
from typing import Literal

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure, user_errors
from errors import UserError, optional, refuse

# What is drawn, and where does it go?
runs = "out"  # folders of runs of train.py, separated by commas
y = "loss,norm,logit,speed"  # loss, norm (of the gradient), logit (needs --log_logits), speed (tokens/s), lr
x: Literal["steps", "tokens", "time"] = "steps"  # horizontal axis; time: hours of training, without evaluations
out = "curves.png"  # the file of the picture

KEYS = {"loss": "loss", "norm": "norm", "logit": "max_logit", "speed": "tokens_per_s", "lr": "lr"}  # of the log
LABELS = {"loss": "loss (nats per token)", "norm": "gradient norm", "logit": "largest |attention score|"}
LABELS |= {"speed": "tokens per second", "lr": "learning rate"}


def read(folder: str) -> list[dict]:
    """The rows of a run's log, each with the steps, tokens and hours until then. Raises UserError if it has none."""
    path = os.path.join(folder, "log.jsonl")
    if not os.path.exists(path):
        raise UserError(f"there is no {path}: --runs= are folders that train.py wrote, with commas between them")
    rows = []
    with open(path, encoding="utf-8") as f:
        for line in f:
            with contextlib.suppress(json.JSONDecodeError):  # train.py is writing this line
                row = json.loads(line)
                rows.append(row | {"steps": row["iter"] + ("ms" in row)})  # an evaluation comes before its step
    if not rows:
        raise UserError(f"{path} is empty: the run has logged nothing yet")
    timed = [{"steps": 0, "ms": 0.0, "tokens_per_s": 0.0}, *(row for row in rows if "ms" in row)]
    timed.append(timed[-1] | {"steps": max(row["steps"] for row in rows)})  # steps after the last timed one are as fast
    steps = np.array([row["steps"] for row in timed])
    seconds = np.diff(steps, prepend=0) * [row["ms"] / 1000 for row in timed]
    hours = np.cumsum(seconds) / 3600
    tokens = np.cumsum(seconds * [row["tokens_per_s"] for row in timed])
    for row in rows:
        row |= {"time": np.interp(row["steps"], steps, hours), "tokens": np.interp(row["steps"], steps, tokens)}
    return rows


def running_mean(values: list[float], steps: list[int], width: float) -> list[float]:
    """The mean of the values up to each, with weights that fall by a factor e every `width` steps."""
    means, total, weight, before = [], 0.0, 0.0, 0
    for value, step in zip(values, steps, strict=True):
        keep, before = math.exp((before - step) / width), step
        if math.isfinite(value):  # in float16 the first norms are infinite
            total, weight = keep * total + value, keep * weight + 1.0
        means.append(total / weight if weight else math.nan)
    return means


def draw(ax, name: str, logs: dict[str, list[dict]]) -> None:
    """Draws the curves of one quantity, a colour for each run. All are smoothed over a 50th of the longest run."""
    width = max(rows[-1]["steps"] for rows in logs.values()) / 50
    for i, (run, rows) in enumerate(logs.items()):
        at = [row[x] for row in rows if KEYS[name] in row]
        values = [np.max(row[KEYS[name]]) for row in rows if KEYS[name] in row]  # of all layers' scores the largest
        if name in ("loss", "norm", "speed"):
            ax.plot(at, values, color=f"C{i}", alpha=0.25, linewidth=0.8)
            values = running_mean(values, [row["steps"] for row in rows if KEYS[name] in row], width)
        ax.plot(at, values, color=f"C{i}", label=run)
        if name == "loss":
            at = [row[x] for row in rows if "val_loss" in row]
            ax.plot(at, [row["val_loss"] for row in rows if "val_loss" in row], "o", color=f"C{i}", markersize=4)
    ax.set(xlabel="hours of steps" if x == "time" else x, ylabel=LABELS[name])
    ax.grid(alpha=0.3)


def main() -> None:
    what = y.split(",")
    refuse((name not in KEYS, f"--y={name} is not one of {', '.join(KEYS)}") for name in what)
    logs = {folder.rstrip("/"): read(folder) for folder in runs.split(",") if folder}
    optional("matplotlib", "a plot")
    from matplotlib.figure import Figure

    logged = {key for rows in logs.values() for row in rows for key in row}
    shown = [name for name in what if KEYS[name] in logged or (name == "loss" and "val_loss" in logged)]
    if not shown:
        raise UserError(f"none of these runs has logged {' or '.join(what)} (logit needs train.py --log_logits)")
    print(*(f"no run has logged {name}: left out\n" for name in what if name not in shown), sep="", end="")
    figure = Figure(figsize=(5 * len(shown), 4), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for ax, name in zip(axes, shown, strict=True):
        draw(ax, name, logs)
    if "loss" in shown:
        axes[shown.index("loss")].plot([], [], "o", color="grey", markersize=4, label="validation")
    axes[0].legend()
    figure.savefig(out, dpi=120)
    for run, rows in logs.items():
        last = max(rows, key=lambda row: row["steps"])
        best = min((row["val_loss"] for row in rows if "val_loss" in row), default=math.nan)
        print(f"{run}: {last['steps']:,} steps, {last['tokens']:,.0f} tokens, best validation loss {best:.4f}")
    print(f"wrote {out}")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
