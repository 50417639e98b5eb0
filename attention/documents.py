"""Attention in windows of several documents: no token sees another document (--pack=document)."""

import itertools

import torch
from torch import Tensor

from attention.heads import HeadGroup
from attention.scores import uncompiled


class Documents:
    """Which tokens of a batch are one document.

    pos (B, T): a token's position in its document, 0 at its beginning.

    attend() runs a group's form once for each document; documents at the same place in several rows
    share a call. No mask is needed, so every attention, window and position works. If an attention
    is quadratic, n documents of T / n tokens cost 1 / n of one document of T tokens.
    """

    length = 0  # tokens before x, as in a Cache; here always 0

    def __init__(self, pos: Tensor):
        self.pos = pos
        self.rows_of = rows_of_documents(pos)

    @uncompiled
    def attend(self, group: HeadGroup, q, k, v, *, bias=None, **settings) -> Tensor:
        """y (B, H, T, Dv) of a group of heads."""
        B, _, T, _ = q.shape
        k, v = group.share(k, v)
        if bias is not None:
            bias = bias.expand(B, -1, T, T)
        documents = [{} for _ in range(B)]  # for each row {start: y of the document there}
        for (start, end), rows in self.rows_of.items():
            picked = slice(None) if len(rows) == B else rows  # a slice makes no copy
            if bias is not None:
                settings["bias"] = bias[picked, :, start:end, start:end]
            parts = [x[picked, :, start:end] for x in (q, k, v)]
            for row, y in zip(rows, group.form(*parts, **settings), strict=True):
                documents[row][start] = y
        joined = []
        for parts in documents:
            in_order = [parts[start] for start in sorted(parts)]
            joined.append(torch.cat(in_order, dim=-2))
        return torch.stack(joined)


@uncompiled  # the shapes change from batch to batch
def rows_of_documents(pos: Tensor) -> dict[tuple[int, int], list[int]]:
    """{(start, end) of a document: the rows of pos (B, T) that have a document there}."""
    rows_of = {}
    for row, places in enumerate(pos.cpu()):
        starts = 1 + (places[1:] == 0).nonzero().flatten()
        for span in itertools.pairwise([0, *starts.tolist(), len(places)]):
            rows_of.setdefault(span, []).append(row)
    return rows_of
