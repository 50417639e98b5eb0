"""Draws attention maps of several runs in one picture: the first picture of README.md.

    python -m lab.maps --out_dir=out-laser,out-beta --layer=2 --head=4 --start="To be, or not to be"

With --head the runs stand side by side, one row for each layer. Without it each run has its own
rows. The maps of one run are drawn by scripts/maps.py, whose docstring says what they show.
"""

from itertools import zip_longest
from typing import Literal

from errors import UserError
from lab.experiments import results
from scripts.maps import chosen_maps, draw, in_words, save
from training.checkpoint import open_model

# Which models?
out_dir = "out"  # folders of runs of train.py, with commas between them
which: Literal["best", "latest"] = "best"  # best: the lowest validation loss; latest: the last step
# Which text, and which maps?
start = "To be, or not to be"  # the text; FILE:path reads it from a file
layer: int | None = None  # only this layer, counted from 0; None: all layers
head: int | None = None  # only this head, counted from 0, or its differential pair; None: all heads
# Where does the picture go?
out = "maps.png"  # its name ends in .png, .pdf or .svg


def titled(grids: dict, names: dict[str, str]) -> list:
    """The rows of each run, {folder: rows}, with the run's name above each title.

    A run's name is its attention. Runs with the same attention have their folders' names too.
    """
    of_runs = []
    for folder, rows in grids.items():
        name = names[folder]
        if list(names.values()).count(name) > 1:
            name += f", {folder}"
        of_runs.append([[m._replace(title=f"{name}\n{m.title}") for m in row] for row in rows])
    return of_runs


def main() -> None:
    names = {}
    grids = {}
    texts = []
    for folder in out_dir.split(","):
        folder = folder.strip().rstrip("/")
        model, tok, _, about = open_model("resume", folder, which)
        print(about)
        names[folder] = in_words(model.config)
        tokens, grids[folder] = chosen_maps(model, tok, start, layer, head)
        texts.append(tokens)
    if any(tokens != texts[0] for tokens in texts):
        raise UserError("these runs have different tokenizers: draw their maps one by one")
    of_runs = titled(grids, names)
    if head is None:
        rows = sum(of_runs, [])
    else:
        rows = [sum(layers, []) for layers in zip_longest(*of_runs, fillvalue=[])]
    save(draw(rows, texts[0]), out)


if __name__ == "__main__":
    results.start(globals())
