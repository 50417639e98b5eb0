"""What the experiments share: results in a JSON file, tables and pictures of them.

What is measured is not measured again: `measured` takes it from the file.
"""

import contextlib
import json
import os
import statistics
from collections.abc import Callable, Iterator

from errors import UserError, optional
from text.files import replace


def saved(path: str, new: dict) -> dict:
    """The results in a JSON file; `new` if there is no file. Raises UserError if it is made otherwise than `new`."""
    if not os.path.exists(path):
        return new
    try:
        with open(path, encoding="utf-8") as f:
            results = json.load(f)
    except ValueError:
        results = None
    if not isinstance(results, dict) or any(type(results.get(key)) is not type(x) for key, x in new.items()):
        raise UserError(f"{path} is damaged; delete it, or name another file")
    return results


def save(path: str, results: dict) -> None:
    """Writes results to a JSON file, in one step: a program that is killed leaves the file as it was."""
    replace(path, (json.dumps(results, indent=1) + "\n").encode())


def measured(path: str, part: str, row: str, size: int, measure: Callable[[], dict]) -> dict:
    """The numbers of a row in a JSON file, {part: {row: {size: numbers}}}. Without them, adds those of measure()."""
    found = saved(path, {}).get(part, {}).get(row, {}).get(str(size))
    if found is None:
        found = measure()
        print(f"{part}, {row}, {size}: {json.dumps(found)}", flush=True)
        results = saved(path, {})  # another process may have added to it
        results.setdefault(part, {}).setdefault(row, {})[str(size)] = found
        save(path, results)
    return found


def spread(x: list[float]) -> str:
    """The mean of the seeds, the lowest and the highest, as tables show them; of a single seed its number."""
    if len(x) < 2:
        return f"{x[0]:.3f}" if x else ""
    return f"{statistics.mean(x):.3f} ({min(x):.3f} to {max(x):.3f})"


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
