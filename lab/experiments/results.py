"""What the experiments share: results in a JSON file, tables and pictures of them."""

import contextlib
import functools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from filelock import FileLock

from errors import UserError, optional
from lab.experiments.identity import unchanged

CONFIDENCE = 0.95  # of the intervals in tables


def saved(path: str, defaults: dict) -> dict:
    """The results in a JSON file, and the `defaults` that it lacks.

    Raises UserError if the file is no JSON.
    """
    if not os.path.exists(path):
        return defaults
    try:
        with open(path, encoding="utf-8") as f:
            return defaults | json.load(f)
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged; delete it, or name another file") from None


def stored(path: str, *keys: str) -> dict:
    """What {key: {key: ...}} of a JSON file has under these keys; {} where there is nothing."""
    place = saved(path, {})
    for key in keys:
        place = place.get(key, {})
    return place


compact = functools.partial(json.dumps, separators=(",", ":"))  # JSON without spaces


def save(path: str, results: dict) -> None:
    """Write tables, {table: {row: numbers}} or {table: [row]}, to a JSON file, one row a line.

    The file is written beside its place and renamed: a program that is killed leaves the old file.
    """
    tables = []
    for name, table in results.items():
        if isinstance(table, dict):
            rows = [f"  {json.dumps(str(key))}: {compact(row)}" for key, row in table.items()]
            opened, closed = "{}"
        else:
            rows = [f"  {compact(row)}" for row in table]
            opened, closed = "[]"
        lines = ",\n".join(rows)
        tables.append(f" {json.dumps(name)}: {opened}\n{lines}\n {closed}")
    with open(f"{path}.tmp", "w", encoding="utf-8") as f:
        f.write("{\n" + ",\n".join(tables) + "\n}\n")
    os.replace(f"{path}.tmp", path)


def short(x: object, digits: int = 7) -> object:
    """x, in which each float is rounded to so many significant digits."""
    if isinstance(x, dict):
        return {key: short(value, digits) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [short(value, digits) for value in x]
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x


def add(path: str, value: object, *keys: str) -> None:
    """Write a value into {key: {key: ...}} of a JSON file, to which other processes add as well."""
    with FileLock(f"{path}.lock"):
        results = saved(path, {})
        place = results
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        save(path, results)


def is_current(stored: dict | None, of: str) -> bool:
    """Whether a stored result was made by what has this checksum."""
    return stored is not None and stored.get("of", "") == of


def measured(
    path: str, part: str, row: str, size: object, measure: Callable, *args: object, of: str = ""
) -> dict:
    """Return the numbers of {part: {row: {size: numbers}}} in a JSON file.

    If the file lacks them, or has those of other code, measure(*args) gives them, and they are
    added to the file. of: a checksum of what made them; see identity.py.
    """
    numbers = stored(path, part, row).get(str(size))
    if not is_current(numbers, of):
        numbers = short(measure(*args))
        print(f"{part}, {row}, {size}: {json.dumps(numbers)}", flush=True)
        if of:
            unchanged()
            numbers["of"] = of
        add(path, numbers, part, row, str(size))
    return numbers


class Interval(NamedTuple):
    """A mean difference, its standard error, and the degrees of freedom of this error."""

    mean: float
    error: float
    df: float

    def half(self, level: float) -> float:
        """Half the width of the interval that has this level, such as 0.95."""
        return quantile((1 + level) / 2, round(self.df, 1)) * self.error

    def side(self, level: float) -> int:
        """-1: the interval is below 0, 1: above 0; 0: it contains 0."""
        return (self.mean > self.half(level)) - (self.mean < -self.half(level))

    def shown(self, level: float) -> float:
        """The true difference that an interval of this level shows with a power of 80%."""
        return self.half(level) + quantile(0.8, round(self.df, 1)) * self.error

    @property
    def p(self) -> float:
        """Of Student's t test."""
        t = optional("scipy.stats", "an interval").t
        return 2 * t.sf(abs(self.mean) / self.error, self.df)

    def text(self, level: float) -> str:
        """The mean, and the interval of this level."""
        half = self.half(level)
        return f"{self.mean:+.3f} ({self.mean - half:+.3f} to {self.mean + half:+.3f})"

    def __str__(self) -> str:
        return self.text(CONFIDENCE)


@functools.cache
def quantile(p: float, df: float) -> float:
    """Of Student's t distribution."""
    return float(optional("scipy.stats", "an interval").t.ppf(p, df))


def interval(changes: list[float], *more: tuple[float, float]) -> Interval:
    """The mean of paired differences. more: (variance, its degrees of freedom) of other errors.

    The degrees of freedom are Satterthwaite's.
    """
    n = len(changes)
    parts = [(statistics.variance(changes) / n, n - 1), *more]
    variance = sum(part for part, _ in parts) or 1e-24
    df = variance**2 / (sum(part**2 / d for part, d in parts) or 1e-48)
    return Interval(statistics.fmean(changes), math.sqrt(variance), df)


def difference(x: list[float], y: list[float]) -> Interval | str:
    """Of x - y, numbers of the same seeds. A text where there are no two pairs, or no numbers."""
    changes = [a - b for a, b in zip(x, y, strict=False)]
    if len(changes) < 2:
        return f"{changes[0]:+.3f}, one seed" if changes else ""
    return interval(changes) if math.isfinite(sum(changes)) else "diverged"


def mean(x: list[float]) -> str:
    """The mean of the seeds' numbers as text for a table; nothing where there are none."""
    return f"{statistics.mean(x):.3f}" if x else ""


def show_table(columns: str, rows: Iterable[list]) -> None:
    """Print a table in Markdown, without empty columns. columns: its head, "size | loss".

    An Interval is in bold type if it is not 0 by Holm's correction for all in the table.
    """
    rows = [columns.split(" | "), *rows]
    full = [cells for cells in zip(*rows, strict=True) if {*cells[1:]} != {""}]
    head, *rows = zip(*full, strict=True)
    found = [x for row in rows for x in row if isinstance(x, Interval)]
    found.sort(key=lambda x: x.p)
    bold = set()
    for n, x in enumerate(found):
        if x.p > 0.05 / (len(found) - n):
            break
        bold.add(x)
    print(f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for row in rows:
        print(f"| {' | '.join(f'**{x}**' if x in bold else str(x) for x in row)} |")
    shown = [x.shown(CONFIDENCE) for x in found]
    if shown:
        print(f"\n80% power: {min(shown):.3f} to {max(shown):.3f}")


@contextlib.contextmanager
def drawing(path: str, rows: int, columns: int, width: float, height: float) -> Iterator[list]:
    """Give a picture's axes, row by row, to draw in; then add grids and legends and write the file.

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
            for text in ax.legend(fontsize=8).get_texts():
                text.set_parse_math(False)  # a $ in a name is a $
    write_picture(figure, path, dpi=110)


def write_picture(figure: object, path: str, **settings: object) -> None:
    """Write a figure of matplotlib. Raises UserError for an ending that it does not know."""
    try:
        figure.savefig(path, **settings)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    print(f"wrote {path}")
