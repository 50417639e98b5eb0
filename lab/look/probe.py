"""Looking into attention layers: what each layer's heads get, and how large their scores are."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attention.cache import Context
from attention.fast import general_form
from attention.forms import Heads
from attention.scores import at_least_float32


class Probe(Context):
    """A context that calls look(heads, q, k, v, scale=, ...) before the heads' code.

    look gets the arguments of this code: q, k, v (B, H, T, D), and by name scale, window (short
    heads) and others.
    """

    def __init__(self, look: Callable):
        super().__init__()
        self.look = look

    def attend(self, heads: Heads, q, k, v, **settings) -> Tensor:
        """y (B, H, T, D) of some heads."""
        self.look(heads, q, heads.expand(k), heads.expand(v), **settings)
        return super().attend(heads, q, k, v, **settings)


@torch.no_grad()
def max_abs_scores(model: nn.Module, idx: Tensor) -> list[float]:
    """The largest absolute attention score of each layer of a GPT, on idx (B, T).

    A layer that is a class of its own has no scores, and no number here; neither has a layer whose
    scores are not q k (has_scores = False). The largest score explodes if training is unstable
    (long-short paper, figure 1b). This costs a forward pass, in which q k^T is computed once more,
    in float32, a few queries at a time. What a position adds to scores (t5, relative) is left out.
    """
    of_heads = {}

    def look(heads, q, k, v, *, window=None, scale=None, **_):
        k = k[..., : q.shape[-1]]  # without the numbers of tokens
        s = of_row(q, k, at_least_float32(k[..., :1]), window=window, scale=scale).max()
        of_heads[heads] = max(s.item(), of_heads.get(heads, 0.0))

    model.hidden(idx, Probe(look))
    layers = [block.attn for block in model.transformer.h]
    layers = [x.heads for x in layers if hasattr(x, "heads") and getattr(x, "has_scores", True)]
    return [max(of_heads[part] for part in heads) for heads in layers]


def max_abs_score(s, seen, v):
    """max_j |s_ij| of each query i, in each channel: an attention that does not use its values."""
    largest = s.abs().where(seen, 0.0).amax(-1, keepdim=True)
    return largest.expand(*s.shape[:-1], v.shape[-1])


of_row = general_form(max_abs_score)
