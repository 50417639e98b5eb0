"""Draws attention maps: how much each token of a text takes from the tokens before it, in each head of each layer.

    python scripts/maps.py --out_dir=out-shakespeare-char-cpu --start="To be, or not to be"
    python scripts/maps.py --out_dir=out-shakespeare-char-cpu,out-laser,out-beta --layer=2 --head=0
    python scripts/maps.py --init_from=gpt2 --layer=5 --start="The cat sat on the mat"

A row of a map is a query, a column is a key. Grey keys are not seen by the query. Weights from 0 to 1 go from pale
yellow to blue; if an attention has weights below 0, blue is above 0 and red is below. LASER's weights are those of the
softmax inside it. A pair of differential heads has three maps: A1, A2 and their difference A1 - lambda A2.

--json writes {"tokens": [...], "maps": [...]}; a map has its "run", the run's "attention" and the fields of Map below.
In Python: draw(weights_of(model, idx), labels(tok, idx[0])).savefig("maps.png")
"""

import math
import os
import sys
from collections.abc import Iterable
from itertools import pairwise, zip_longest
from json import dump
from typing import Literal, NamedTuple

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from attention.forms import alike, fixed_inputs
from attention.probe import probing
from attention.scores import at_least_float32, plain_form, visible
from configurator import configure, user_errors
from errors import UserError, optional, refuse
from model import ATTENTION, GPT
from rules import attentions
from sample import prompt_of
from text.tokenizers import Tokenizer
from training.checkpoint import open_model

# Which model?
init_from = "resume"  # resume: the checkpoints in out_dir; or gpt2, gpt2-xl, ..., a model of the hub, a local folder
out_dir = "out"  # the folder of a run of train.py; several, with commas between them, are drawn together
which: Literal["best", "latest"] = "best"  # the checkpoint with the lowest validation loss, or the latest one
# Which text, and which maps?
start = "To be, or not to be"  # the text; FILE:path reads it from a file
layer: int | None = None  # only this layer; the first one is 0; None: all layers
head: int | None = None  # only this head; the first one is 0; of a differential model its pair; None: all heads
# What is written, and where?
out = "maps.png"  # the picture; its name ends in .png, .pdf or .svg
json: str | None = None  # a file for the weights as numbers; None: no such file

# An attention that is linear in its values turns one-hot values into its weights: y = W I = W. One that has the weights
# of another attention inside, f(y) = W f(v), stands here: {its name: (f, the other one's name)}.
LINEAR_IN = {"laser": (torch.exp, "softmax")}


class Map(NamedTuple):
    """The attention weights of one head for one text."""

    layer: int
    head: int  # its number in the layer; of a difference the number of the pair's first head
    kind: str  # "weights"; "signed weights" if the model has weights below 0; "difference" of a differential pair
    letter: str  # S short, L long
    window: int | None  # of a short head
    title: str
    weights: torch.Tensor  # (T, T): row i has what query i takes from each key; 0 from a key that it does not see

    @property
    def signed(self) -> bool:
        return self.kind != "weights"


@torch.no_grad()
def weights_of(model: GPT, idx: torch.Tensor) -> list[list[Map]]:
    """For each layer of a GPT its maps for token ids idx (1, T), in the order of the heads.

    A differential pair is followed by its difference, but not with LASER, which subtracts logarithms. Dropout is off.
    Raises UserError for an attention that has no weights.
    """
    c = model.config.resolved()
    for name in attentions(c):
        check_linear(name)
    found = {block.attn: {} for block in model.transformer.h}  # {layer: {head: (weights (T, T), its group)}}

    def look(attn, group, q, k, v, *, far=None, **settings):
        weights = weights_at_once(group.name, q, k, **settings)[0].cpu()
        found[attn] |= {head: (w, group) for head, w in zip(group.heads, weights, strict=True)}

    training = model.training
    with probing(model.eval(), look):
        model(idx)
    model.train(training)
    below_0 = any(w.min() < -1e-6 for heads in found.values() for w, _ in heads.values())
    kind = "signed weights" if below_0 else "weights"
    layers = []
    for layer, (attn, heads) in enumerate(found.items()):
        layers.append(maps := [])
        for head, (w, group) in sorted(heads.items()):
            letter = "L" if group.window is None else "S"
            span = {"S": f": S, window {group.window}", "L": ": L"}[letter] if "S" in c.heads else ""
            maps.append(Map(layer, head, kind, letter, group.window, f"layer {layer}, head {head}{span}", w))
            if c.differential and head % 2 == 1 and group.name not in LINEAR_IN:
                factor = attn.lambda_of_pairs().item()
                pair = f"head {head - 1} {'-' if factor >= 0 else '+'} {abs(factor):.2f} head {head}"
                title, between = f"layer {layer}, {pair}{span}", maps[-2].weights - factor * w
                maps.append(Map(layer, head - 1, "difference", letter, group.window, title, between))
    return layers


def check_linear(attention: str) -> None:
    """Raises UserError if what an attention computes is not W v with its weights W, nor as LINEAR_IN says."""
    f, _ = LINEAR_IN.get(attention, (torch.clone, None))
    q, k, v = fixed_inputs(9)
    if not alike(weights_at_once(attention, q, k) @ f(v), f(plain_form(ATTENTION[attention])(q, k, v))):
        of = "the f(v) that LINEAR_IN in scripts/maps.py has for it" if attention in LINEAR_IN else "its values"
        raise UserError(f"attention={attention!r} has no weights to draw: it is not linear in {of}")


def weights_at_once(attention: str, q: torch.Tensor, k: torch.Tensor, **settings) -> torch.Tensor:
    """The weights (B, H, Tq, T) of ATTENTION[attention] for q and k. settings: of scores.plain_form."""
    _, name = LINEAR_IN.get(attention, (None, attention))
    one_hot = at_least_float32(torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)).expand(*k.shape[:-1], -1)
    return plain_form(ATTENTION[name])(q, k, one_hot, **settings)


def labels(tok: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Each token as it is printed: a space as \u2423, a newline as \\n; no text, or half a character, by its number."""
    ids = [int(i) for i in ids]
    until = [tok.decode(ids[:n]) for n in range(len(ids) + 1)]  # some tokenizers drop a text's first space
    texts = [until[n + 1][len(until[n]) :] or tok.decode([i]) for n, i in enumerate(ids)]
    texts = [text if text and "\ufffd" not in text else f"#{i}" for text, i in zip(texts, ids, strict=True)]
    return ["".join(x if x.isprintable() else ascii(x)[1:-1] for x in text.replace(" ", "\u2423")) for text in texts]


def draw(rows: list[list[Map]], tokens: list[str], title: str = ""):
    """A matplotlib Figure of a grid of maps, with the tokens on its outer axes where they fit.

    All maps without weights below 0 have one scale of colours, and all others another. Raises UserError without
    matplotlib.
    """
    optional("matplotlib", "a map")
    from matplotlib.figure import Figure

    maps = [m for row in rows for m in row]
    columns, T = max(map(len, rows)), len(tokens)
    size = max(1.4, min(5.5 if len(rows) == 1 else 3.5, 11 / columns))  # of a map, in inches
    if len(rows) * columns <= 4:  # there is room for a label at each token
        size = max(size, min(20.0, T * 7 / 72))
    norms = colour_scales(maps)
    titles = [m.title.split("\n") for m in maps]
    kinds = [m.signed for m in maps]
    apart = sum(a != b for a, b in pairwise(kinds)) == 1  # all maps of one kind before all of the other
    width, bars = columns * size + 0.7, 0.9 * (1 if apart else len(set(kinds)))
    height = len(rows) * (size + 0.05 + 0.2 * max(map(len, titles))) + bars + (0.7 if title else 0.4)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    font = min(11.0, 115 * size / max(len(line) for lines in titles for line in [*lines, " "]))  # all titles fit
    point = size * 72 / T  # a token's room, in points
    images = []
    for r, row in enumerate(rows):
        for column, ax in enumerate(axes[r]):
            if column >= len(row):
                ax.set_axis_off()
                continue
            m = row[column]
            unseen = ~visible(m.weights, m.weights, m.window) & (m.weights == 0)
            grey_unseen = m.weights.masked_fill(unseen, math.nan).numpy()
            images.append(ax.imshow(grey_unseen, cmap="RdBu" if m.signed else "YlGnBu", norm=norms[m.signed]))
            ax.set_facecolor("0.85")
            ax.spines[:].set_color("0.6")
            ax.set_title(m.title, fontsize=font, parse_math=False)
            lowest = r + 1 == len(rows) or column >= len(rows[r + 1])
            label(ax.xaxis, tokens if lowest else [], point, "key" if lowest else "")
            label(ax.yaxis, tokens if column == 0 else [], point, "query" if column == 0 else "")
    for signed in sorted(set(kinds)):
        some = [image for image in images if image.norm is norms[signed]]
        colour_bar(figure, some[0], [image.axes for image in some] if apart else [*axes.flat])
    if title:
        figure.suptitle(title, fontsize=12, parse_math=False)
    return figure


def colour_scales(maps: list[Map]) -> dict:
    """The matplotlib AsinhNorm of all maps that are not signed, and the one of all that are, by Map.signed."""
    from matplotlib.colors import AsinhNorm

    norms = {}
    for signed, least in ((False, 1.0), (True, 1e-6)):
        most = max([least, *(m.weights.abs().max().item() for m in maps if m.signed == signed)])
        # asinh is linear near 0 and a logarithm further out: a tenth of the largest weight still has a colour
        norms[signed] = AsinhNorm(most / 10, -most if signed else 0.0, most)
    return norms


def colour_bar(figure, image, axes: list) -> None:
    """Draws the colour bar of an image below axes."""
    least, most = image.norm.vmin, image.norm.vmax
    ticks = [n * 10**k for k in range(-8, 8) for n in (1, 3) if 0.1 <= n * 10**k / most <= 1.001]
    ticks = [-x for x in ticks if least < 0] + [0] + ticks
    name = "weight (asinh scale)" + (", red below 0" if least < 0 else "")
    bar = figure.colorbar(image, ax=axes, label=name, location="bottom", shrink=0.7, aspect=30)
    bar.set_ticks(ticks, labels=[f"{x:g}" for x in ticks])
    bar.minorticks_off()


def label(axis, tokens: list[str], point: float, name: str) -> None:
    """Writes the tokens along an axis, if each has 5 points of room, and its name."""
    axis.set_label_text(name)
    tokens = tokens if point >= 5 else []
    upright = axis.axis_name == "y" or max(map(len, tokens), default=1) == 1
    font = min(10.0, (1.05 if upright and axis.axis_name == "x" else 0.92) * point)
    axis.set_ticks(range(len(tokens)), tokens, fontsize=font, family="monospace", parse_math=False)
    axis.set_tick_params(length=0, rotation=0 if upright else 90)


def open_maps(folder: str) -> tuple[str, list[str], list[list[Map]]]:
    """(the name of the attention, the printed tokens, the maps of the chosen layers and heads) of a run."""
    model, tok, _, about = open_model(init_from, folder, which)
    print(about)
    c = model.config
    for name, value, n in (("layer", layer, c.n_layer), ("head", head, c.n_head)):
        if value is not None and not 0 <= value < n:
            raise UserError(f"--{name}={value}: {folder} has the {name}s 0 to {n - 1}")
    _, prompt = prompt_of(start, tok)
    if len(prompt) > c.block_size:
        raise UserError(f"--start has {len(prompt)} tokens, but {folder} sees at most {c.block_size} at once")
    rows = weights_of(model, torch.tensor([prompt]))
    rows = [rows[layer]] if layer is not None else rows
    if head is not None:
        n_map = 2 if c.differential else 1
        rows = [[m for m in row if m.head // n_map == head // n_map] for row in rows]
    long, *short = [f"{name} (its softmax)" if name == "laser" else name for name in attentions(c)]
    name = f"{short[0]} in S, {long} in L" if short else long
    name += (f", heads {c.heads}" if "S" in c.heads else "") + (", differential" if c.differential else "")
    return name, labels(tok, prompt), rows


def together(grids: dict[str, list[list[Map]]], side_by_side: bool) -> list[list[Map]]:
    """Several runs' maps as one grid, with the runs' names, which are the keys, in the titles."""
    titled = [[[m._replace(title=f"{name}\n{m.title}") for m in row] for row in rows] for name, rows in grids.items()]
    return [sum(layers, []) for layers in zip_longest(*titled, fillvalue=[])] if side_by_side else sum(titled, [])


def main() -> None:
    refuse([(not out.endswith((".png", ".pdf", ".svg")), f"--out={out} must end in .png, .pdf or .svg")])
    folders = [folder.strip().rstrip("/") for folder in out_dir.split(",")] if init_from == "resume" else [init_from]
    runs = {folder: open_maps(folder) for folder in folders}
    names, tokens, grids = zip(*runs.values(), strict=True)
    if any(other != tokens[0] for other in tokens):
        raise UserError("these runs have different tokenizers: draw their maps one by one")
    if len(runs) == 1:
        figure = draw(grids[0], tokens[0], f"{[*runs][0]}: {names[0]}")
    else:
        named = [name if names.count(name) == 1 else f"{name}, {folder}" for folder, (name, _, _) in runs.items()]
        figure = draw(together(dict(zip(named, grids, strict=True)), head is not None), tokens[0])
    if json is not None:
        maps = ((folder, name, m) for folder, (name, _, rows) in runs.items() for row in rows for m in row)
        entries = [{"run": r, "attention": name, **m._asdict(), "weights": m.weights.tolist()} for r, name, m in maps]
        with open(json, "w", encoding="utf-8") as f:
            dump({"tokens": tokens[0], "maps": entries}, f)
    figure.savefig(out, dpi=120)
    print(f"wrote {out}")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
