"""Two ideas of 2026: LUCID, and XSA with a learned strength.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.recent --attention=lucid

and --after=xsa_learned.

Importing this file adds them to model.ATTENTION and to choices.AFTER.
"""

import torch
from torch.nn import functional as F

from choices import AFTER, Exclusive
from lab.ideas.scores import with_updates
from model import ATTENTION


def lucid_attention(s, seen, v, k):
    """y = softmax(s) P^-1 v, P_jl = exp(sqrt(D) (cos(k_j, k_l) - 1)) for l <= j (2602.10410).

    So a value that is read by its own key alone comes back as it is, also beside similar keys.
    """
    unit = F.normalize(k, dim=-1)
    system = (k.shape[-1] ** 0.5 * (unit @ unit.mT - 1)).exp().tril()
    return with_updates(s.where(seen, -torch.inf).softmax(-1), seen, system, v)


class LearnedExclusive(Exclusive):
    """y - tanh(a) (y . v^) v^: XSA (arXiv 2603.09078) with a strength of each head, from 0."""

    def __init__(self, c):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(c.n_head, 1, 1))

    def forward(self, y, x, v):
        return y.lerp(super().forward(y, x, v), self.a.tanh().to(y.dtype))


ATTENTION["lucid"] = lucid_attention
AFTER["xsa_learned"] = LearnedExclusive
