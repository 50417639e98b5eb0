"""An idea of 2026: LUCID.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.recent --attention=lucid

Importing this file adds it to model.ATTENTION.
"""

import torch
from torch.nn import functional as F

from lab.ideas.scores import with_updates
from model import ATTENTION


def lucid_attention(s, seen, v, k):
    """y = softmax(s) P^-1 v, P_jl = exp(sqrt(D) (cos(k_j, k_l) - 1)) for l <= j (2602.10410).

    So a value that is read by its own key alone comes back as it is, also beside similar keys.
    """
    unit = F.normalize(k, dim=-1)
    system = (k.shape[-1] ** 0.5 * (unit @ unit.mT - 1)).exp().tril()
    return with_updates(s.where(seen, -torch.inf).softmax(-1), seen, system, v)


ATTENTION["lucid"] = lucid_attention
