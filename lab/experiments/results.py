"""What the experiments share: results in a JSON file, tables and pictures of them."""

import contextlib
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator

from configurator import configure, user_errors
from errors import UserError, optional

SHORT = (",", ":")  # what separates numbers in a JSON file


def start(script: dict) -> None:
    """Sets the flags of a script, given by its globals(), and calls its main()."""
    script.update(configure(script)[0])
    with user_errors():
        script["main"]()


def saved(path: str, new: dict) -> dict:
    """The results in a JSON file, with what it lacks of `new`. Raises UserError if its tables have other types."""
    if not os.path.exists(path):
        return new
    try:
        with open(path, encoding="utf-8") as f:
            results = json.load(f)
    except ValueError:
        results = None
    if not isinstance(results, dict) or any(type(results.get(key, x)) is not type(x) for key, x in new.items()):
        raise UserError(f"{path} is damaged; delete it, or name another file")
    return new | results


def save(path: str, results: dict[str, dict | list]) -> None:
    """Writes tables of results, {table: {row: numbers}} or {table: [row]}, to a JSON file, with one row on each line.

    The file is written beside its place and renamed: a program that is killed leaves the old file as it was.
    """
    tables = []
    for name, table in results.items():
        if isinstance(table, dict):
            rows = [f"  {json.dumps(str(key))}: {json.dumps(row, separators=SHORT)}" for key, row in table.items()]
        else:
            rows = [f"  {json.dumps(row, separators=SHORT)}" for row in table]
        opened, closed = "{}" if isinstance(table, dict) else "[]"
        tables.append(f" {json.dumps(name)}: {opened}\n" + ",\n".join(rows) + f"\n {closed}")
    with open(f"{path}.tmp", "w", encoding="utf-8") as f:
        f.write("{\n" + ",\n".join(tables) + "\n}\n")
    os.replace(f"{path}.tmp", path)


def short(x: object, digits: int = 7) -> object:
    """x with its numbers rounded to so many digits."""
    if isinstance(x, dict):
        return {key: short(value, digits) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [short(value, digits) for value in x]
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x


def measured(path: str, part: str, row: str, size: int, measure: Callable[[], dict]) -> dict:
    """The numbers of a row in a JSON file, {part: {row: {size: numbers}}}. Without them, adds those of measure()."""
    found = saved(path, {}).get(part, {}).get(row, {}).get(str(size))
    if found is None:
        found = short(measure())
        print(f"{part}, {row}, {size}: {json.dumps(found)}", flush=True)
        results = saved(path, {})  # another process may have added to it
        results.setdefault(part, {}).setdefault(row, {})[str(size)] = found
        save(path, results)
    return found


def difference(x: list[float], y: list[float], digits: int = 3) -> str:
    """The mean of x - y, pair by pair, and its 95% interval by Student's t (n - 1 degrees of freedom), as tables show
    it: in bold type if the interval lies on one side of 0. Of a single pair its difference. x and y: of equal seeds.
    """
    changes = [a - b for a, b in zip(x, y, strict=False)]
    if len(changes) < 2 or not all(map(math.isfinite, changes)):
        return f"{changes[0]:+.{digits}f}, one seed" if len(changes) == 1 else ""
    stats = optional("scipy.stats", "an interval")
    low, high = stats.ttest_1samp(changes, 0.0).confidence_interval()
    text = f"{statistics.mean(changes):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def spread(x: list[float]) -> str:
    """The mean of the seeds, the lowest and the highest, as tables show them; of a single seed its number."""
    if len(x) < 2:
        return f"{x[0]:.3f}" if x else ""
    return f"{statistics.mean(x):.3f} ({min(x):.3f} to {max(x):.3f})"


def show_table(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table in Markdown."""
    columns = [str(column) for column in columns]
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


@contextlib.contextmanager
def drawing(path: str, rows: int, columns: int, width: float, height: float) -> Iterator[list]:
    """Gives a picture's axes, row by row, to draw in. Adds grids and legends, and writes the picture.

    width, height: in inches.
    """
    optional("matplotlib", "a picture")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    yield axes
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.title.set_fontsize(10)
        if ax.get_legend() is None and ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def check_writable(*paths: str) -> None:
    """Raises UserError where no file can be written at a path, before there is anything to lose."""
    for out in paths:
        target = out if os.path.exists(out) else os.path.dirname(os.path.abspath(out))
        if os.path.isdir(out) or not os.access(target, os.W_OK):
            raise UserError(f"{out}: no file can be written there")
