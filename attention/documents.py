"""Attention in windows of several documents: no token sees another document (train.py --pack=document)."""

import torch

from attention.heads import HeadGroup
from attention.scores import uncompiled


class Documents:
    """Which tokens of a batch are one document. pos (B, T): a token's position in its document, 0 at its beginning.

    attend() calls a core once for each document; documents of several rows at the same place share one call. No mask
    is needed, so every attention, window and position works. If an attention is quadratic, n documents of T / n tokens
    cost 1 / n of one document of T tokens.
    """

    length = 0  # tokens before x, as in a Cache; here always 0

    def __init__(self, pos: torch.Tensor):
        self.pos = pos
        self.rows_at = rows_at(pos)

    @uncompiled
    def attend(self, group: HeadGroup, q, k, v, *, bias=None, **settings) -> torch.Tensor:
        """y (B, H, T, Dv) of a group of heads."""
        k, v = group.share(k, v)
        if bias is not None:
            bias = bias.expand(len(q), -1, q.shape[-2], q.shape[-2])
        found = [{} for _ in q]  # for each row: start -> y of the document that begins there
        for (start, end), rows in self.rows_at.items():
            few = slice(None) if len(rows) == len(q) else rows
            own = slice(start, end)
            parts = (x[few, :, own] for x in (q, k, v))
            y = group.core(*parts, bias=None if bias is None else bias[few, :, own, own], **settings)
            for row, part in zip(rows, y, strict=True):
                found[row][start] = part
        return torch.stack([torch.cat([parts[start] for start in sorted(parts)], dim=-2) for parts in found])


@uncompiled  # the shapes change from batch to batch
def rows_at(pos: torch.Tensor) -> dict[tuple[int, int], list[int]]:
    """(start, end) of each document -> the rows of pos (B, T) that have a document there."""
    starts = [[0] for _ in pos]
    for row, start in (pos[:, 1:] == 0).nonzero().tolist():
        starts[row].append(start + 1)
    found = {}
    for row, begins in enumerate(starts):
        for span in zip(begins, [*begins[1:], pos.shape[1]], strict=True):
            found.setdefault(span, []).append(row)
    return found
