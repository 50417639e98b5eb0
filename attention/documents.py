"""Several documents in one window, each of which is attended alone (train.py --pack=document)."""

from collections.abc import Callable

import torch

from attention.heads import HeadGroup
from attention.scores import part_of


class Documents:
    """Which tokens of a batch are one document: pos (B, T) are their positions in it, and it begins where pos is 0.

    attend() calls a core once for each document (or once for those of several rows that lie at the same place). No
    mask is needed, so every attention, window and position can be used, and n documents of T / n tokens cost an
    attention that is quadratic an n-th.
    """

    length = 0  # tokens before these, as a Cache has them

    def __init__(self, pos: torch.Tensor):
        self.rows_at = rows_at(pos)

    @torch.compiler.disable
    def attend(self, core: Callable, group: HeadGroup, q, k, v, *, bias=None, **settings) -> torch.Tensor:
        """y (B, H, T, Dv) of a group of heads."""
        k, v = group.share(k, v)
        if isinstance(bias, torch.Tensor):
            bias = bias.expand(torch.broadcast_shapes(bias.shape, (1, 1, q.shape[-2], q.shape[-2])))
        found = [{} for _ in q]  # for each row: start -> y of the document that begins there
        for (start, end), rows in self.rows_at.items():
            few = slice(None) if len(rows) == len(q) else rows
            own = slice(start, end)
            parts = (x[few, :, own] for x in (q, k, v))
            y = core(*parts, bias=part_of(bias, own, own, few), **settings)
            for row, part in zip(rows, y, strict=True):
                found[row][start] = part
        return torch.stack([torch.cat([parts[start] for start in sorted(parts)], dim=-2) for parts in found])


@torch.compiler.disable  # the shapes are others in every batch
def rows_at(pos: torch.Tensor) -> dict[tuple[int, int], list[int]]:
    """(start, end) of each document -> the rows of pos (B, T) that have one there."""
    starts = [[0] for _ in pos]
    for row, start in (pos[:, 1:] == 0).nonzero().tolist():
        starts[row].append(start + 1)
    found = {}
    for row, begins in enumerate(starts):
        for span in zip(begins, [*begins[1:], pos.shape[1]], strict=True):
            found.setdefault(span, []).append(row)
    return found
