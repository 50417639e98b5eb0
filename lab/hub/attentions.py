"""The attentions of this repository in other people's models, those of transformers.

    import lab.hub.attentions

    model = AutoModelForCausalLM.from_pretrained("gpt2", attn_implementation="nanoattn:laser")

Importing this file registers each function of model.ATTENTION. What another module adds is
registered by register() afterwards. Trained numbers of a definition are not trained: they keep what
they begin as. A definition takes all scores at once (LASER T^2 D numbers).
"""

import torch

from attention.scores import caller, has_argument, scores
from errors import UserError, optional
from lab.hub.gpt2 import USER
from model import ATTENTION

transformers = optional("transformers", USER)
MORE = "softcap", "s_aux", "sinks", "position_bias"  # what some models change scores by


def attention_of(name: str):
    """f(module, q, k, v, mask, ...) -> (y, None), as transformers asks of an attention.

    q (B, H, Tq, D), k and v (B, G, T, D), mask (B or 1, 1, Tq, T), True where a query sees a key;
    y (B, Tq, H, D). A query that sees no key, as padding does, is taken to see all. Without a mask,
    as in a vision transformer, all see all. Raises UserError for what a definition cannot do.
    """
    run = caller(ATTENTION[name])
    drops = has_argument(ATTENTION[name], "drop")

    def attend(module, q, k, v, mask, scaling=None, dropout=0.0, **others):
        for option in MORE:
            if others.get(option) is not None:
                raise UserError(f"nanoattn:{name} knows no {option}, which this model has")
        if dropout and not drops:
            raise UserError(f"nanoattn:{name} drops no weights: set the dropout of attention to 0")

        if mask is None:
            if q.shape[-2] > 1 and getattr(module, "is_causal", False):
                raise UserError(f"nanoattn:{name} needs a mask: call the whole model")
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        if mask.dtype != torch.bool:
            raise UserError(f"nanoattn:{name} takes masks of True and False, not {mask.dtype}")
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
    return transformers.masking_utils.sdpa_mask(*args, **settings)


def register() -> None:
    """Make "nanoattn:NAME" an attn_implementation, for each function NAME of ATTENTION."""
    for name, definition in ATTENTION.items():
        if not isinstance(definition, type):
            transformers.AttentionInterface.register(f"nanoattn:{name}", attention_of(name))
            transformers.AttentionMaskInterface.register(f"nanoattn:{name}", mask)


register()
