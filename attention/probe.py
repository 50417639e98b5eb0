"""Looking into attention layers: what each group of heads gives to the form that it runs."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from attention.fast import general_form
from attention.heads import HeadGroup
from attention.scores import at_least_float32


@contextlib.contextmanager
def probing(model: nn.Module, probe: Callable) -> Iterator[None]:
    """A context in which probe(layer, group, q, k, v, scale=, ...) is called before each form.

    It gets the form's arguments: q (B, H, Tq, D), k (B, H, T, D), v (B, H, T, Dv) of a group of
    heads, and by name scale, window (short heads), bias and others.
    """

    def probed(layer: nn.Module, group: HeadGroup, form: Callable, q, k, v, **settings):
        probe(layer, group, q, k, v, **settings)
        return form(q, k, v, **settings)

    changed = []  # (a group, the form that it had)
    try:
        for block in model.transformer.h:
            for group in getattr(block.attn, "groups", ()):
                changed.append((group, group.form))
                group.form = partial(probed, block.attn, group, group.form)
        yield
    finally:
        for group, form in changed:
            group.form = form


@torch.no_grad()
def largest_logits(model: nn.Module, idx: Tensor, pos: Tensor | None = None) -> list[float]:
    """The largest absolute attention score of each layer of a GPT on idx and pos (B, T).

    A layer that is a class of its own has no scores, and no number here.

    This score explodes if training is unstable (long-short paper, figure 1b). Costs a forward pass,
    in which q k^T is computed once more, in float32, a few queries at a time.
    """
    largest = {}

    def look(layer, group, q, k, v, *, window=None, scale=None, bias=None, **_):
        no_values = at_least_float32(k[..., :1])
        s = largest_scores(q, k, no_values, window=window, scale=scale, bias=bias).max()
        largest[layer] = s.maximum(largest.get(layer, s))

    with probing(model, look):
        model(idx, pos=pos)
    return [s.item() for s in largest.values()]


def largest_score(s, seen, v):
    """max_j |s_ij| of each query i, as an attention whose values are not used."""
    return s.abs().where(seen, 0.0).amax(-1, keepdim=True)


# short heads cost O(T window), and long ones hold no T x T scores
largest_scores = general_form(largest_score, holds_values=True)
