"""Windows of several documents, in which no token sees another document. packed.py trains so."""

import itertools

import torch
from torch import Tensor

from attention.cache import Context
from attention.forms import Heads
from attention.scores import uncompiled


class Documents(Context):
    """The context of a batch whose rows have several documents.

    pos (B, T): a token's position in its document, 0 at its beginning.

    attend() runs the heads' code once for each document; documents at the same place in several
    rows share a call. No mask is needed, so every attention, window and position works. If an
    attention is quadratic, n documents of T / n tokens cost 1 / n of one document of T tokens.
    """

    def __init__(self, pos: Tensor):
        super().__init__()
        self.pos = pos
        self.rows_of = rows_of_documents(pos)

    def positions(self, x: Tensor) -> Tensor:
        """The position of each token in its document, (B, T)."""
        return self.pos

    def earlier(self, module, x, n) -> list[Tensor]:
        """As Context.earlier; 0 before a document's first token."""
        shifted = super().earlier(module, x, n)
        return [y * (self.pos >= offset)[..., None] for offset, y in enumerate(shifted, 1)]

    @uncompiled
    def attend(self, heads: Heads, q, k, v, **settings) -> Tensor:
        """y (B, H, T, D) of some heads."""
        k, v = heads.expand(k), heads.expand(v)

        y = v.new_empty(*q.shape[:-1], v.shape[-1])
        for (start, end), rows in self.rows_of.items():
            picked = slice(None) if len(rows) == len(q) else rows  # a slice makes no copy
            parts = [x[picked, :, start:end] for x in (q, k, v)]
            y[picked, :, start:end] = heads.run(*parts, **settings)
        return y


@uncompiled  # the shapes change from batch to batch
def rows_of_documents(pos: Tensor) -> dict[tuple[int, int], list[int]]:
    """{(start, end) of a document: the rows of pos (B, T) that have a document there}."""
    rows_of = {}
    for row, places in enumerate(pos.cpu()):
        starts = 1 + (places[1:] == 0).nonzero().flatten()
        for span in itertools.pairwise([0, *starts.tolist(), len(places)]):
            rows_of.setdefault(span, []).append(row)
    return rows_of


def positions_in_documents(x: Tensor, eot: int) -> Tensor:
    """The position (B, T) of each token of x (B, T) in its document.

    The eot before a document is the document's position 0.
    """
    index = torch.arange(x.shape[1], device=x.device).expand_as(x)
    return index - torch.where(x == eot, index, 0).cummax(1).values
