"""Draws the curves of one run or of many, out of their log.jsonl.

    python scripts/plot.py --runs=out-shakespeare-char-cpu
    python scripts/plot.py --runs=out-a,out-b --y=loss,norm,logit --x=tokens --out=curves.png

Training losses are drawn faintly as they are, and their running mean over them; validation losses as points.
"""

import bisect
import json
import math
import os
import sys
from typing import Literal

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import NotInstalled, UserError, configure, user_errors  # noqa: E402

runs = "out"  # folders of runs, with commas between them
y = "loss,norm,logit,speed"  # loss, norm (of the gradient), logit (the largest, of --log_logits), speed (tokens/s), lr
x: Literal["steps", "tokens", "time"] = "steps"  # time: hours of steps, without evaluations
smooth: float | None = None  # of the running mean, what stays from one log line to the next; None: over a 50th of all
out = "curves.png"  # the picture

KEYS = {"loss": "loss", "norm": "norm", "logit": "max_logit", "speed": "tokens_per_s", "lr": "lr"}  # of the log
LABELS = {"loss": "loss (nats per token)", "norm": "gradient norm", "logit": "largest |attention score|"}
LABELS |= {"speed": "tokens per second", "lr": "learning rate"}


def read(folder: str) -> list[dict]:
    """The rows of a run's log, each with steps, tokens and hours so far. Raises ValueError where there are none."""
    path = os.path.join(folder, "log.jsonl")
    if not os.path.exists(path):
        raise UserError(f"there is no {path}: --runs= are folders that train.py wrote, with commas between them")
    rows, known = [], [(0, 0.0, 0.0)]  # steps that were done, tokens and hours until then
    with open(path, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            try:
                row = json.loads(line)
                for key in ({"iter", "val_loss", "ms", "tokens_per_s"} | set(KEYS.values())) & row.keys():
                    math.fsum(row[key] if isinstance(row[key], list) else [row[key]])
                done = row["iter"] + ("ms" in row)  # an evaluation is before its step
                if "ms" in row:
                    steps, (_, tokens, hours) = done - known[-1][0], known[-1]
                    hour = row["ms"] / 3.6e6
                    known.append((done, tokens + steps * row["tokens_per_s"] * hour * 3600, hours + steps * hour))
            except (ValueError, TypeError, KeyError, AttributeError):
                if not line.endswith("\n"):  # it is being written
                    continue
                raise UserError(f"{path}: line {number} is no row of a log") from None
            rows.append(row | {"steps": done})
    if not rows:
        raise UserError(f"{path} is empty: the run has logged nothing yet")
    for row in rows:
        row["tokens"], row["time"] = between(known, row["steps"])
    return rows


def between(known: list[tuple], steps: float) -> tuple[float, float]:
    """(tokens, hours) after so many steps, on the lines between what is known, or beyond it."""
    after = min(max(1, bisect.bisect_left(known, (steps,))), len(known) - 1)
    (a, *start), (b, *end) = known[max(0, after - 1)], known[after]
    share = (steps - a) / (b - a) if b > a else 0.0
    return tuple(x + share * (y - x) for x, y in zip(start, end, strict=True))


def running_mean(values: list[float], smooth: float | None) -> list[float]:
    """Exponentially weighted, without the bias of its beginning."""
    means, total, weight = [], 0.0, 0.0
    keep = max(0.0, 1 - 50 / max(1, len(values))) if smooth is None else smooth
    for value in values:
        if math.isfinite(value):  # float16's first norms are not
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(total / weight if weight else math.nan)
    return means


def main() -> None:
    names = [folder.rstrip("/") for folder in runs.split(",") if folder]
    what = y.split(",")
    if unknown := [name for name in what if name not in KEYS]:
        raise UserError(f"--y={unknown[0]} is none of {', '.join(KEYS)}")
    if smooth is not None and not 0 <= smooth < 1:
        raise UserError(f"--smooth={smooth} must be in [0, 1)")
    logs = {name: read(name) for name in names}
    if not logs:
        raise UserError("--runs= names no folder")
    try:
        import matplotlib
    except ImportError:
        raise NotInstalled("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    logged = {key for rows in logs.values() for row in rows for key in row}
    shown = [name for name in what if KEYS[name] in logged or (name == "loss" and "val_loss" in logged)]
    if not shown:
        raise UserError(f"none of these runs has logged {' or '.join(what)} (logit needs train.py --log_logits)")
    for name in set(what) - set(shown):
        print(f"no run has logged {name}: left out{' (it needs train.py --log_logits)' if name == 'logit' else ''}")
    figure, axes = pyplot.subplots(1, len(shown), figsize=(5 * len(shown), 4), squeeze=False, layout="constrained")
    ends = [os.path.basename(run) for run in logs]
    for ax, name in zip(axes[0], shown, strict=True):
        for i, (run, rows) in enumerate(logs.items()):
            rows_with = [row for row in rows if KEYS[name] in row]
            at = [row[x] for row in rows_with]
            values = [max(v) if isinstance(v, list) else v for v in (row[KEYS[name]] for row in rows_with)]
            label = os.path.basename(run) if ends.count(os.path.basename(run)) == 1 else run
            if name in ("loss", "norm", "speed"):
                ax.plot(at, values, color=f"C{i}", alpha=0.25, linewidth=0.8)
                values = running_mean(values, smooth)
            ax.plot(at, values, color=f"C{i}", label=label)
            if name == "loss":
                evaluated = [row for row in rows if "val_loss" in row]
                ax.plot([r[x] for r in evaluated], [r["val_loss"] for r in evaluated], "o", color=f"C{i}", markersize=4)
        ax.set(xlabel="hours of steps" if x == "time" else x, ylabel=LABELS[name])
        ax.grid(alpha=0.3)
    if "loss" in shown:
        axes[0][shown.index("loss")].plot([], [], "o", color="grey", markersize=4, label="validation")
    axes[0][0].legend()
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
