"""What follows attention: gates, XSA, and the difference of two heads.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.after --attention=gate
    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.after \
        --attention=beta_xsa

Importing this file adds layers to model.ATTENTION: for each function NAME that is there before,
NAME_gate, NAME_gate_head, NAME_xsa, NAME_xsa_learned and NAME_differential_v2. Without NAME_ they
are softmax's. For a function of your own, put its --import first.
"""

import torch
from torch import nn
from torch.nn import functional as F

from attention.scores import at_least_float32
from errors import UserError
from lab.ideas.scores import forgetting_attention  # noqa: F401, adds attentions
from model import ATTENTION, CausalSelfAttention


class Gate(CausalSelfAttention):
    """y sigmoid(x W), with a gate for each channel (Qiu et al., arXiv 2505.06708)."""

    per_head = False

    def __init__(self, c, layer):
        super().__init__(c, layer)
        n = c.n_head if self.per_head else c.n_head * c.head_dim
        self.c_gate = nn.Linear(c.n_embd, n, bias=False)

    def attend(self, q, k, v, x, context):
        y = super().attend(q, k, v, x, context)
        gate = self.c_gate(x).sigmoid()  # (B, T, H D), or (B, T, H) per head
        return y * gate.unflatten(-1, (y.shape[1], -1)).transpose(1, 2)


class GatePerHead(Gate):
    """y sigmoid(x W), with a gate for each head."""

    per_head = True


class XSA(CausalSelfAttention):
    """y - (y . v^) v^, v^ = v / ||v||, takes out the token's own value (arXiv 2603.09078)."""

    def attend(self, q, k, v, x, context):
        y = super().attend(q, k, v, x, context)
        v = F.normalize(at_least_float32(v), dim=-1)
        v = v.repeat_interleave(y.shape[1] // v.shape[1], dim=1)  # (B, H, T, D)
        own = (y * v).sum(-1, keepdim=True) * v
        return (y - self.strength() * own).to(y.dtype)

    def strength(self):
        return 1.0


class LearnedXSA(XSA):
    """y - tanh(a) (y . v^) v^: XSA with a strength of each head, from 0 on (ours)."""

    def __init__(self, c, layer):
        super().__init__(c, layer)
        self.a = nn.Parameter(torch.zeros(c.n_head, 1, 1))

    def strength(self):
        return self.a.tanh()


class DifferentialV2(CausalSelfAttention):
    """y_2i - sigmoid(x w_i) y_2i+1 of the heads 2i and 2i + 1 (Ye et al. 2026).

    The two heads share keys and values. Where short and long heads meet, a pair may have one of
    each. The formula is that of microsoft/unilm, Diff-Transformer-V2, multihead_flashdiffv2.py.
    With --n_head twice as large, --n_kv_head and --head_dim as before, keys, values and the output
    keep their sizes.
    """

    def __init__(self, c, layer):
        if c.n_head // c.n_kv_head % 2:
            raise UserError(
                "the heads of a pair of differential_v2 share a key and a value: n_kv_head must "
                "divide n_head / 2"
            )
        super().__init__(c, layer)
        n = c.n_head // 2
        self.c_proj = nn.Linear(n * c.head_dim, c.n_embd, bias=c.bias)
        self.c_lambda = nn.Linear(c.n_embd, n, bias=False)

    def attend(self, q, k, v, x, context):
        y = super().attend(q, k, v, x, context)
        factor = self.c_lambda(x).sigmoid().mT[..., None]  # (B, H / 2, T, 1)
        return y[:, ::2] - factor * y[:, 1::2]  # (B, H / 2, T, D)


AFTER = {
    "gate": Gate,
    "gate_head": GatePerHead,
    "xsa": XSA,
    "xsa_learned": LearnedXSA,
    "differential_v2": DifferentialV2,
}
for name, definition in [*ATTENTION.items()]:
    if not isinstance(definition, type):
        for suffix, layer in AFTER.items():
            ATTENTION[f"{name}_{suffix}"] = type(layer.__name__, (layer,), {"attention": name})
ATTENTION |= {suffix: ATTENTION[f"softmax_{suffix}"] for suffix in AFTER}
