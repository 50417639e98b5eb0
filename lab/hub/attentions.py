"""The attentions of this repository in other people's models, those of transformers.

    import lab.hub.attentions

    model = AutoModelForCausalLM.from_pretrained("gpt2", attn_implementation="nanoattn:laser")

Importing this file registers each function of model.ATTENTION. What another module adds is
registered by register() afterwards. Trained numbers keep what they begin as.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from attention.scores import caller, scores
from model import ATTENTION


def attention_of(name: str):
    """f(module, q, k, v, mask, ...) -> (y, None), as transformers asks of an attention.

    q (B, H, Tq, D), k and v (B, G, T, D), mask (B or 1, 1, Tq, T), True where a query sees a key;
    y (B, Tq, H, D). A query that sees no key, as padding does, is taken to see all. Without a mask,
    as in a vision transformer, all see all.
    """
    run = caller(ATTENTION[name])

    def attend(module, q, k, v, mask, scaling=None, dropout=0.0, **others):
        if mask is None:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        each = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))
        seen = mask[..., : k.shape[-2]]
        seen = seen | ~seen.any(-1, keepdim=True)
        y = run(scores(q, k, scaling), seen, q, k, v, dropout=dropout)
        return y.to(q.dtype).transpose(1, 2).contiguous(), None

    return attend


def mask(*args, **settings):
    """transformers' mask, which is always made."""
    settings |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **settings)


def register() -> None:
    """Make "nanoattn:NAME" an attn_implementation, for each function NAME of ATTENTION."""
    for name, definition in ATTENTION.items():
        if not isinstance(definition, type):
            AttentionInterface.register(f"nanoattn:{name}", attention_of(name))
            AttentionMaskInterface.register(f"nanoattn:{name}", mask)


register()
