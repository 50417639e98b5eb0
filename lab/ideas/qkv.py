"""How queries, keys and values are made: papers of 2024 to 2026, for --qkv=.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.qkv --qkv=tpa \
        --position=rope
    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.qkv --qkv=mla \
        --position=half_rope

mla               queries, keys and values from short vectors
gta               half of each key is half of its value
tpa               products of a vector for the heads and a vector for their dimensions
tied              the values are the keys
value_residual    half of the first layer's values in every layer
cla               every second layer takes the keys and values of the layer before

Importing this file adds them to parts.QKV, and --position=half_rope, which mla and gta need: it
turns the first half of each head's dimensions. Norms of q and k and a convolution come after. Our
cache keeps the keys and values of all heads; a docstring says what the paper's keeps.

Shapes: B batch, T time, C n_embd, H heads, G heads of keys, D head width. W: a matrix.
"""

import torch
from torch import nn

from errors import UserError
from model import ATTENTION
from parts import POSITION, QKV, RMSNorm, RoPE, attentions, definition_of


class HalfRoPE(RoPE):
    """RoPE on the first half of each head's dimensions."""

    def __init__(self, c):
        if c.head_dim % 4:
            raise UserError(
                f"half_rope turns half a head in pairs: head_dim={c.head_dim} is no multiple of 4"
            )
        super().__init__(c, width=c.head_dim // 2)

    def forward(self, q, k, heads, past):
        (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        q1, k1, _ = super().forward(q1, k1, heads, past)
        return torch.cat((q1, q2), dim=-1), torch.cat((k1, k2), dim=-1), {}


class SharedKey(nn.Module):
    """Half of each key, k_R, is the same for all heads, and positions turn only that half."""

    def __init__(self, c):
        super().__init__()
        self.sizes = c.n_kv_head, c.head_dim
        if c.position != "half_rope":
            raise UserError(
                "mla and gta need --position=half_rope: only the half of a key that is the same "
                "for all heads may be turned"
            )

    def with_shared(self, k_r, rest):
        """(k_R, rest): k_r (B, T, D / 2), rest (B, T, G, n) -> (B, T, G, D / 2 + n)."""
        return torch.cat((k_r[:, :, None].expand(*rest.shape[:3], -1), rest), dim=-1)


class MLA(SharedKey):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, equations 9 to 17).

    q = W_UQ c_Q and (k_C, v) = W_UKV c_KV of short vectors c_Q = W_DQ x and c_KV = W_DKV x, with
    RMSNorms (section 3.1.2); a key is (k_R, k_C), k_R = W_KR x. The paper's cache holds c_KV and
    k_R. Chosen: c_Q and c_KV have 2/3 and 1/3 of C numbers, k_R half of a head's D (in the paper it
    comes on top, and is half of D as well).
    """

    def __init__(self, c, width, layer):
        super().__init__(c)
        self.parts = n, m, r = 2 * c.n_embd // 3, c.n_embd // 3, c.head_dim // 2
        self.down = nn.Linear(c.n_embd, n + m + r, bias=False)
        self.up_q = nn.Sequential(RMSNorm(n), nn.Linear(n, c.n_head * c.head_dim, bias=False))
        self.up_kv = nn.Sequential(RMSNorm(m), nn.Linear(m, c.n_kv_head * 3 * r, bias=False))

    def forward(self, x, context):
        c_q, c_kv, k_r = self.down(x).split(self.parts, dim=-1)
        kv = self.up_kv(c_kv).unflatten(-1, (self.sizes[0], -1))  # (B, T, G, 3 D / 2)
        k, v = self.with_shared(k_r, kv).chunk(2, dim=-1)  # (B, T, G, D) each
        return torch.cat((self.up_q(c_q), k.flatten(2), v.flatten(2)), dim=-1)


class GTA(SharedKey):
    """Grouped-tied attention (arXiv 2505.21487, section 3.3.1): k = (k_R, second half of v).

    k_R = W_KR x. The paper's cache holds v and k_R, and it groups keys.
    """

    def __init__(self, c, width, layer):
        super().__init__(c)
        self.parts = c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.head_dim // 2
        self.qv = nn.Linear(c.n_embd, sum(self.parts), bias=c.bias)

    def forward(self, x, context):
        q, v, k_r = self.qv(x).split(self.parts, dim=-1)
        tied = v.unflatten(-1, self.sizes).chunk(2, dim=-1)[1]  # (B, T, G, D / 2)
        return torch.cat((q, self.with_shared(k_r, tied).flatten(2), v), dim=-1)


class TPA(nn.Module):
    """Tensor product attention (arXiv 2501.06425, equation 3.1): q, k and v are products.

    Ranks are the paper's: 6 for q, 2 for k and v. The paper's cache holds the factors of k and v.
    """

    def __init__(self, c, width, layer):
        super().__init__()
        self.q = Product(c.n_embd, c.n_head, c.head_dim, 6)
        self.k = Product(c.n_embd, c.n_kv_head, c.head_dim, 2)
        self.v = Product(c.n_embd, c.n_kv_head, c.head_dim, 2)

    def forward(self, x, context):
        return torch.cat((self.q(x), self.k(x), self.v(x)), dim=-1)


class Product(nn.Module):
    """1/R sum_r a_r b_r^T, with a_r = A_r x, a number for each of n heads, and b_r = B_r x (D)."""

    def __init__(self, C, n, D, R):
        super().__init__()
        self.sizes = (n, R), (R, D)
        self.a = nn.Linear(C, n * R, bias=False)
        self.b = nn.Linear(C, R * D, bias=False)
        # a GPT begins Linears with 0.02, the paper with Xavier's deviation (appendix G)
        self.factor = 2 / 0.02**2 * ((C + n * R) * (C + R * D)) ** -0.5 / R

    def forward(self, x):
        a = self.a(x).unflatten(-1, self.sizes[0])  # (B, T, n, R)
        b = self.b(x).unflatten(-1, self.sizes[1])  # (B, T, R, D)
        return self.factor * (a @ b).flatten(2)


class Tied(nn.Module):
    """v = k, before norms and positions (Kayyam, Madan Gopal and Lewis, arXiv 2606.04032)."""

    def __init__(self, c, width, layer):
        super().__init__()
        self.n = c.n_kv_head * c.head_dim
        self.qk = nn.Linear(c.n_embd, width - self.n, bias=c.bias)

    def forward(self, x, context):
        qk = self.qk(x)
        return torch.cat((qk, qk[..., -self.n :]), dim=-1)


class ValueResidual(nn.Module):
    """v = (v_1 + W_V x) / 2, v_1 the first layer's values (ResFormer, arXiv 2410.17897)."""

    def __init__(self, c, width, layer):
        super().__init__()
        self.n = c.n_kv_head * c.head_dim
        self.qkv = nn.Linear(c.n_embd, width, bias=c.bias)

    def forward(self, x, context):
        qk, v = self.qkv(x).tensor_split([-self.n], dim=-1)
        first = context.kept.setdefault("first v", v)
        return torch.cat((qk, (first + v) / 2), dim=-1)


def all_have_keys(c) -> None:
    """Raise UserError for a layer of its own, which makes no keys."""
    if any(definition_of(ATTENTION[name], ATTENTION) is None for name in attentions(c)):
        raise UserError("cla takes keys from the layer before, so every layer must have keys")


class CLA(nn.Module):
    """Cross-layer attention (arXiv 2405.12981), CLA2: layers 1, 3, ... use k and v of 0, 2, ..."""

    def __init__(self, c, width, layer):
        super().__init__()
        all_have_keys(c)
        self.pair, self.reuses = divmod(layer, 2)
        self.n = c.n_head * c.head_dim
        self.qkv = nn.Linear(c.n_embd, self.n if self.reuses else width, bias=c.bias)

    def forward(self, x, context):
        q, kv = self.qkv(x).tensor_split([self.n], dim=-1)
        if not self.reuses:
            context.kept["pair", self.pair] = kv
        return torch.cat((q, context.kept["pair", self.pair]), dim=-1)


POSITION["half_rope"] = (None, HalfRoPE)
QKV |= {
    "mla": MLA,
    "gta": GTA,
    "tpa": TPA,
    "tied": Tied,
    "value_residual": ValueResidual,
    "cla": CLA,
}
