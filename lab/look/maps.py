"""Draws attention maps: the weight that each token of a text gives to itself and to earlier tokens,
for each head of each layer.

    python -m lab.look.maps --out_dir=out-shakespeare-char-cpu --start="To be, or not to be"
    python -m lab.look.maps --out_dir=out-laser,out-beta --layer=2 --head=4
    python -m lab.look.maps --init_from=gpt2 --layer=5 --start="The cat sat on the mat"

Of several runs with --head the maps stand side by side, one row for each layer; without it each run
has its own rows.

A row of a map is a query, a column is a key. A query does not see the grey keys. Weights from 0 to
1 go from pale yellow to blue. If a picture has weights below 0, its positive weights are blue and
its negative weights are red. LASER's weights are those of the softmax inside it. The heads of a
layer stand as in its tensors: short ones first.

In Python, with ids a list of token ids:

    rows = weights_of(model, torch.tensor([ids]))
    rows[layer][head].weights  # a tensor (T, T)
    draw(rows, labels(tok, ids)).savefig("maps.png")
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from itertools import zip_longest
from typing import Literal, NamedTuple

from configurator import run_script

import torch
from torch import Tensor

from attention.scores import plain_form, visible
from errors import UserError, note
from lab.experiments.results import write_picture
from lab.look.probe import Probe
from model import ATTENTION, GPT, GPTConfig, softmax_attention
from parts import attentions
from sample import prompt_of
from text.tokenizers import Tokenizer
from training.checkpoint import open_model

# Which models?
init_from = "resume"  # resume: the runs in out_dir; or gpt2, local folders, ..., with commas
out_dir = "out"  # folders of runs of train.py, with commas between them
which: Literal["best", "latest"] = "best"  # best: the lowest validation loss; latest: the last step
# Which text, and which maps?
start = "To be, or not to be"  # the text; FILE:path reads it from a file
layer: int | None = None  # only this layer, counted from 0; None: all layers
head: int | None = None  # only this head, counted from 0; None: all heads
# What is written?
out = "maps.png"  # the picture; its name ends in .png, .pdf or .svg


class Run(NamedTuple):
    """A model that the flags name."""

    name: str
    about: str  # which checkpoint it is, and its loss
    model: GPT


class Map(NamedTuple):
    """The attention weights of one head for one text."""

    layer: int
    head: int  # its number in the layer, where short heads come first
    title: str
    window: int | None  # None: a long head
    weights: Tensor  # (T, T): row i has the weights of query i; 0 for keys that it cannot see


# {attention: (f, definition)}: f(y) = W f(v), with the weights W of the definition.
# An attention that is not here is linear in its values: y = W v.
LINEAR_IN: dict[str, tuple[Callable, Callable]] = {"laser": (torch.exp, softmax_attention)}


@torch.no_grad()
def weights_of(model: GPT, idx: Tensor) -> list[list[Map]]:
    """The maps of each layer of a GPT for token ids idx (1, T), in the order of the heads.

    Dropout is off. Raises UserError for an attention that has no weights.
    """
    # which layer each of the heads are in, and the code that gives their weights
    known = {}
    for layer, block in enumerate(model.transformer.h):
        has_maps = getattr(block.attn, "has_maps", hasattr(block.attn, "heads"))
        if not has_maps:
            note(f"layer {layer} is a {type(block.attn).__name__}, without weights to draw")
        for heads in block.attn.heads if has_maps else ():
            definition = ATTENTION.get(heads.name, heads.definition)
            definition = linear_part(heads.name, definition)
            wrap = getattr(block.attn.position, "wrap", None)
            known[heads] = layer, weights_form(definition, wrap)
    if not known:
        name = model.config.attention
        raise UserError(f"attention={name!r} is a layer of its own, without weights to draw")

    rows = defaultdict(list)

    def keep(heads, q, k, v, **settings):
        if heads not in known:
            return
        layer, form = known[heads]
        span = "" if heads.window is None else f": S, window {heads.window}"
        for w in form(q, k, v, **settings)[0].cpu():
            head = len(rows[layer])
            title = f"layer {layer}, head {head}{span}"
            rows[layer].append(Map(layer, head, title, heads.window, w))

    was_training = model.training
    model.eval().hidden(idx, Probe(keep))
    model.train(was_training)
    return list(rows.values())


@functools.cache
def weights_form(definition: Callable, wrap: Callable | None = None) -> Callable:
    """f(q, k, v, ...) -> the weights (B, H, Tq, T) of a definition that is linear in its values.

    One-hot values become its weights: W I = W. The arguments are those of
    attention.scores.plain_form. wrap: see parts.Scheme.
    """
    found = []

    @functools.wraps(definition)
    def with_one_hot(s, seen, v, **arguments):
        one_hot = torch.eye(v.shape[-2]).to(v).expand(*v.shape[:-1], -1)
        found.append(definition(s, seen, one_hot, **arguments))
        return definition(s, seen, v, **arguments)

    attend = plain_form(wrap(with_one_hot) if wrap else with_one_hot)

    def weights(q, k, v, **settings):
        attend(q, k, v, **settings)
        return found.pop()

    return weights


@functools.cache
def linear_part(name: str, definition: Callable) -> Callable:
    """The definition of the weights W in f(y) = W f(v), for y of the definition of ATTENTION[name].

    Raises UserError if this does not hold.
    """
    f, inside = LINEAR_IN.get(name, (torch.clone, definition))
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 4, generator=random, dtype=torch.float64)
    y = plain_form(definition)(q, k, v)
    if not torch.allclose(f(y), weights_form(inside)(q, k, v) @ f(v)):
        raise UserError(
            f"attention={name!r} has no weights to draw: it is not linear in its values v, "
            "nor in an f(v) that is known here"
        )
    return inside


def labels(tok: Tokenizer, ids: list[int]) -> list[str]:
    """Each token as Python writes it, a space as \u2423; half a character and no text as #id.

    tok: a tokenizer.
    """
    texts = []
    first = len(tok.decode(ids[:1]))
    for i in ids:
        text = tok.decode([ids[0], i])[first:]  # some tokenizers drop the first token's space
        if not text or "\ufffd" in text:
            text = f"#{i}"
        texts.append(repr(text.replace(" ", "\u2423"))[1:-1])
    return texts


def draw(rows: list[list[Map]], tokens: list[str]) -> object:
    """A matplotlib Figure of a grid of maps, with the tokens on its outer axes where they fit.

    All maps share one scale of colours, so that the same colour is the same weight.
    """
    from matplotlib.colors import AsinhNorm
    from matplotlib.figure import Figure

    maps = sum(rows, [])
    columns = max(map(len, rows))
    # Inches of a map: of a few maps enough for a label at each token.
    side = 2.0 if len(maps) > 4 else max(3.5, min(20.0, len(tokens) / 10))
    size = columns * side + 0.7, len(rows) * (side + 0.5) + 1.7
    figure = Figure(size, layout="compressed")
    font = min(11.0, 115 * side / max(len(line) for m in maps for line in m.title.split("\n")))
    stack = torch.stack([m.weights for m in maps])
    signed = stack.min() < 0
    most = stack.abs().max().clamp(min=1e-6).item()
    # asinh is linear near 0 and a logarithm further out: a tenth of the largest weight still has
    # a colour.
    norm = AsinhNorm(most / 10, -most if signed else 0.0, most)
    for r, row in enumerate(rows):
        for column, m in enumerate(row, 1):
            ax = figure.add_subplot(len(rows), columns, r * columns + column)
            ax.set_title(m.title, fontsize=font, parse_math=False)
            seen = visible(m.weights, m.weights, m.window) | (m.weights != 0)  # shows a leak too
            weights = m.weights.where(seen, math.nan).numpy()
            image = ax.imshow(weights, cmap="RdBu" if signed else "YlGnBu", norm=norm)
            _label(ax, tokens, side * 72 / len(tokens))
    figure.colorbar(
        image,
        ax=figure.axes,
        location="bottom",
        label="weight (asinh scale)",
        ticks=[-most, -most / 10, 0, most / 10, most],
        format="%.2g",
        aspect=40,
    )
    return figure


def _label(ax, tokens, point):
    """Names the axes of a map, and labels them with the tokens, or with numbers if they are many.

    point: the room of a token, in points.
    """
    ax.set(xlabel="key", ylabel="query", facecolor=("0.5", 0.3))
    if point >= 5:
        font = min(10.0, 0.92 * point)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_ticks(
                range(len(tokens)), tokens, fontsize=font, family="monospace", parse_math=False
            )
        if max(map(len, tokens)) > 1:
            ax.tick_params("x", rotation=90)
    ax.label_outer(remove_inner_ticks=True)


def in_words(c: GPTConfig) -> str:
    """The attention of a configuration: "softmax, heads SSSL"."""
    names = []
    for name in attentions(c):
        computed = getattr(ATTENTION[name], "attention", name)
        names.append(f"{name} (its softmax)" if computed in LINEAR_IN else name)
    words = ", short heads: ".join(names)
    if "S" in c.heads:
        words += f", heads {c.heads}"
    return words


def chosen_maps(
    model: GPT, tok: Tokenizer, start: str, layer: int | None, head: int | None
) -> tuple:
    """(the labels of the tokens, the maps of each layer) of a GPT, as the flags choose them.

    Raises UserError for a text that is too long, and for a layer or a head that the model lacks.
    """
    c = model.config
    _, ids = prompt_of(start, tok)
    if len(ids) > c.block_size:
        raise UserError(
            f"--start has {len(ids)} tokens, but this model sees at most {c.block_size} at once"
        )
    rows = [
        [m for m in row if head in (None, m.head)]
        for row in weights_of(model, torch.tensor([ids]))
        if layer in (None, row[0].layer)
    ]
    if not any(rows):
        raise UserError(
            f"this model has the layers 0 to {c.n_layer - 1} and the heads 0 to {c.n_head - 1}"
        )
    return labels(tok, ids), rows


def open_runs(init_from: str, out_dir: str, which: str) -> tuple[list[Run], Tokenizer]:
    """The models that the flags name, and their tokenizer.

    Raises UserError if the models have different tokenizers.
    """
    runs = {}
    metas = []
    resume = init_from == "resume"
    for name in (out_dir if resume else init_from).split(","):
        name = name.strip().rstrip("/")
        model, tok, _, about = open_model(init_from if resume else name, name, which)
        print(about)
        runs[name] = Run(name, about, model.eval())
        metas.append((tok.meta, tok.n_vocab))
        if metas[-1] != metas[0]:
            raise UserError(f"{', '.join(runs)} have different tokenizers: look at them one by one")
    return list(runs.values()), tok


def main() -> None:
    runs, tok = open_runs(init_from, out_dir, which)
    names = [in_words(run.model.config) for run in runs]
    of_runs = []
    for run, name in zip(runs, names, strict=True):
        tokens, rows = chosen_maps(run.model, tok, start, layer, head)

        # of several runs each map names its own
        if names.count(name) > 1:
            name += f", {run.name}"
        if len(runs) > 1:
            rows = [[m._replace(title=f"{name}\n{m.title}") for m in row] for row in rows]
        of_runs.append(rows)

    # one run below another, or side by side
    if head is None:
        rows = sum(of_runs, [])
    else:
        rows = [sum(layers, []) for layers in zip_longest(*of_runs, fillvalue=[])]
    figure = draw(rows, tokens)
    if len(runs) == 1:
        figure.suptitle(f"{runs[0].about}\n{names[0]}", parse_math=False)
    write_picture(figure, out, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    run_script(globals())
