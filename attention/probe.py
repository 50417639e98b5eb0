"""Looking into a model's attention layers: what each group of heads gives to its core, the attention that it runs."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch

from attention.fast import few_rows_at_a_time, in_blocks
from attention.heads import HeadGroup
from attention.scores import scores, visible


@contextlib.contextmanager
def probing(model: torch.nn.Module, probe: Callable) -> Iterator[None]:
    """A context in which probe(layer, group, q, k, v, window=, scale=, bias=, ...) is called before each group's core.

    It gets the core's arguments: q (B, H, Tq, D), k (B, H, T, D), v (B, H, T, Dv) of a group of heads.
    """

    def probed(layer: torch.nn.Module, group: HeadGroup, core: Callable, q, k, v, **settings) -> torch.Tensor:
        probe(layer, group, q, k, v, **settings)
        return core(q, k, v, **settings)

    layers = [block.attn for block in model.transformer.h]
    before = [(group, group.core) for layer in layers for group in layer.groups]
    try:
        for layer in layers:
            for group in layer.groups:
                group.core = partial(probed, layer, group, group.core)
        yield
    finally:
        for group, core in before:
            group.core = core


@torch.no_grad()
def largest_logits(model: torch.nn.Module, idx: torch.Tensor, pos: torch.Tensor | None = None) -> list[float]:
    """The largest absolute attention score of each layer of a GPT on idx and pos (B, T), which are its forward's.

    This score explodes if training is unstable (long-short paper, figure 1b). Costs a forward pass, in which q k^T is
    computed once more, in float32, a few queries at a time.
    """
    found = {block.attn: [] for block in model.transformer.h}

    def look(layer, group, q, k, v, *, window=None, scale=None, bias=None, **_):
        found[layer].append(largest_scores(q, k, k[..., :1], window=window, scale=scale, bias=bias).max())

    with probing(model, look):
        model(idx, pos=pos)
    return [torch.stack(largest).max().item() for largest in found.values()]


def largest_of_rows(q, k, v, *, window=None, scale=None, bias=None, decay=None):
    return scores(q, k, scale, bias).abs().masked_fill_(~visible(q, k, window), 0.0).amax(-1, keepdim=True)


# max_j |s_ij| of each query i, (B, H, Tq, 1), as an attention whose values are not used: short heads cost O(T window),
# and long ones hold no (T, T) matrix.
largest_scores = in_blocks(few_rows_at_a_time(largest_of_rows, lambda q, k, v: q.shape[0] * q.shape[1] * k.shape[-2]))
