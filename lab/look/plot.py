"""Draws the curves of one or several runs, from their log.jsonl.

    python -m lab.look.plot --runs=out-shakespeare-char-cpu
    python -m lab.look.plot --runs=out-a,out-b --y=loss,norm,logit --x=tokens --out=curves.png

A training loss is drawn twice: each value as a faint line, and the running mean as a strong one.
Validation losses are points.
"""

import json
import pathlib
from typing import Literal

from configurator import names, run_script

import numpy as np

from errors import UserError
from lab.experiments.results import drawing

# What is drawn, and where does it go?
runs = "out"  # folders of runs of train.py, separated by commas
y = "loss,norm,logit,speed"  # loss, norm (of the gradient), logit (lab.loggers.logits), speed, lr
x: Literal["steps", "tokens", "time"] = "steps"  # time: hours of training, without evaluations
out = "curves.png"  # the file of the picture

CURVES = {  # each curve's key in the log, and the words on its axis
    "loss": ("loss", "loss (nats per token)"),
    "norm": ("norm", "gradient norm"),
    "logit": ("max_logit", "largest |attention score|"),
    "speed": ("tokens_per_s", "tokens per second"),
    "lr": ("lr", "learning rate"),
}


def read(folder: str) -> list[dict]:
    """The rows of a run's log, with "steps", "tokens" and "time" (hours) from the start until each.

    Raises UserError for a folder without a log, or with an empty one.
    """
    path = pathlib.Path(folder, "log.jsonl")
    if not path.exists():
        raise UserError(
            f"there is no {path}: --runs= are folders that train.py wrote, with commas between them"
        )
    # train.py may be writing the last line.
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    rows = [json.loads(line) for line in complete.splitlines()]
    if not rows:
        raise UserError(f"{path} is empty: the run has logged nothing yet")
    for row in rows:
        row["steps"] = row["iter"] + ("ms" in row)  # an evaluation comes before its step
    timed = [{"steps": 0, "ms": 0.0, "tokens_per_s": 0.0}]
    timed += [row for row in rows if "ms" in row]
    # Steps after the last timed one are taken to be as fast.
    timed.append(timed[-1] | {"steps": rows[-1]["steps"]})
    steps = [row["steps"] for row in timed]
    seconds = np.diff(steps, prepend=0) * [row["ms"] / 1000 for row in timed]
    tokens = seconds * [row["tokens_per_s"] for row in timed]
    for row in rows:
        row["time"] = np.interp(row["steps"], steps, seconds.cumsum() / 3600)
        row["tokens"] = np.interp(row["steps"], steps, tokens.cumsum())
    return rows


def running_mean(values: list[float], steps: list[int], width: float) -> np.ndarray:
    """The mean of the values up to each; weights fall by a factor e every `width` steps."""
    finite = np.isfinite(values)  # in float16 the first norms are infinite
    weights = np.exp(np.divide(steps, width)) * finite
    with np.errstate(invalid="ignore"):  # no finite value yet: nan
        return np.cumsum(weights * np.where(finite, values, 0)) / np.cumsum(weights)


def _column(rows, key, where):
    """A key's values in the rows that have the key `where`; of a list of layers the largest."""
    return [np.max(row[key]) for row in rows if where in row]


def _draw(ax, name, logs):
    """Draws one curve for each run, smoothed over a 50th of the longest run."""
    key, words = CURVES[name]
    width = max(rows[-1]["steps"] for rows in logs.values()) / 50
    for i, (run, rows) in enumerate(logs.items()):
        if run.startswith("_"):  # matplotlib would leave it out of the legend
            run = f" {run}"
        places = _column(rows, x, key)
        values = _column(rows, key, key)
        if name in ("loss", "norm", "speed"):
            ax.plot(places, values, color=f"C{i}", alpha=0.25)
            values = running_mean(values, _column(rows, "steps", key), width)
        ax.plot(places, values, color=f"C{i}", label=run)
        if name == "loss":
            places = _column(rows, x, "val_loss")
            values = _column(rows, "val_loss", "val_loss")
            ax.plot(places, values, "o", color=f"C{i}", label=f"{run}, validation")
    ax.set(xlabel="hours of steps" if x == "time" else x, ylabel=words)


def main() -> None:
    logs = {
        folder.strip().rstrip("/"): read(folder.strip()) for folder in runs.split(",") if folder
    }
    keys = {key for rows in logs.values() for row in rows for key in row}
    if "val_loss" in keys:
        keys.add("loss")
    shown = []
    for name in names(y, CURVES):
        if CURVES[name][0] in keys:
            shown.append(name)
        else:
            print(f"no run has logged {name}: left out")
    if not shown:
        raise UserError(
            f"none of these runs has logged {y} (logit needs --import=lab.loggers.logits)"
        )

    with drawing(out, 1, len(shown), 5 * len(shown), 4) as axes:
        for ax, name in zip(axes, shown, strict=True):
            _draw(ax, name, logs)
        for run, rows in logs.items():
            best = min(_column(rows, "val_loss", "val_loss"), default=np.nan)
            print(
                f"{run}: {rows[-1]['steps']:,} steps, {rows[-1]['tokens']:,.0f} tokens, "
                f"best validation loss {best:.4f}"
            )


if __name__ == "__main__":
    run_script(globals())
