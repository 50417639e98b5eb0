"""Attention that is not causal: every token sees the whole text, or another text (lab/examples/)."""

from collections.abc import Callable

from torch import Tensor

from attention.forms import takes
from attention.heads import HeadGroup
from errors import refuse


class Bidirectional:
    """Makes the attention layers that get it as their `memory` see the tokens on both sides, and no padding.

    seen (B, T): False where a key is padding; None: there is none. A short head sees the keys with |i - j| <= window
    (LS-attention, equation 4). other (B, T, C): the text that a layer's keys and values come from, if it is not x
    itself: a layer that looks at another text reads it (lab/examples/seq2seq.py).
    Raises UserError for an attention, a position or a decay that has no meaning for later tokens.
    """

    length = 0  # tokens before x, as in a Cache; here always 0

    def __init__(self, seen: Tensor | None = None, other: Tensor | None = None):
        self.seen = None if seen is None else seen[:, None, None, :]
        self.other = other

    def attend(self, core: Callable, group: HeadGroup, q, k, v, **settings) -> Tensor:
        """y (B, H, Tq, Dv) of a group of heads."""
        of_past = [type(scheme).__name__ for scheme in group.schemes if not scheme.both_sides(group)]
        refuse([
            (not takes(group.definition, "causal"),
             f"attention={group.attention!r} is causal: its function takes no `causal` (model.py, Attention)"),
            (bool(of_past),
             f"{', '.join(of_past)} counts how far a key lies behind a query, so it cannot see later tokens: use "
             "--position=learned, sinusoidal, rope or none"),
        ])  # fmt: skip
        return core(q, *group.share(k, v), causal=False, seen=self.seen, **settings)
