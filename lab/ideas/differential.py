"""Differential attention (Ye et al. 2024, arXiv 2410.05258), alone, with LASER and with beta.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.differential \
        --attention=differential

and --attention=differential_laser or differential_beta. after.py has the second version.

Importing this file adds them to model.ATTENTION. Each is a layer, whose heads compute the attention
that the class names. To combine another one, write two lines as those of DifferentialLASER.
With grouped keys that attention may ask for no numbers of tokens (of_token).
"""

import math

import torch
from torch import nn

from errors import UserError
from model import ATTENTION, CausalSelfAttention
from parts import RMSNorm


class Differential(CausalSelfAttention):
    """y = norm(A_2i V - lambda A_2i+1 V) (1 - lambda_init) (equations 1 to 3).

    Heads 2i and 2i + 1 are a pair: each has a query and a key, and they share a value V, which is
    twice as wide as a key. With grouped heads pairs share the keys and the value of a pair. lambda
    is one number of a layer. LASER takes the logarithm of each A V.
    """

    attention = "softmax"

    def __init__(self, c, layer):
        for name in ("n_head", "n_kv_head"):
            if getattr(c, name) % 2:
                raise UserError(
                    f"differential attention pairs the heads, but {name}={getattr(c, name)} is odd"
                )
        letters = c.layer_heads(layer)
        if letters[::2] != letters[1::2]:
            raise UserError(
                "heads 2i and 2i + 1 of differential attention are a pair and need the same "
                f"letter, but the letters of a layer are {letters}: write each twice, as SSLL"
            )
        super().__init__(c, layer)

        D = c.head_dim
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(0.1 * torch.randn(D)))
        self.ln_head = RMSNorm(2 * D, eps=1e-5)

        # attend gives each query head a key and a value of its own
        for heads in self.heads:
            heads.keys = heads.queries

    def attend(self, q, k, v, x, context):
        H, G, D = self.sizes
        r = H // G

        # heads 2i and 2i + 1 have two keys, and one value, which is the two values side by side
        k = k.unflatten(1, (-1, 2)).repeat_interleave(r, dim=1).flatten(1, 2)  # (B, H, T, D)
        v = v.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)  # (B, G / 2, T, 2 D)
        v = v.repeat_interleave(2 * r, dim=1)  # (B, H, T, 2 D)

        y = super().attend(q, k, v, x, context)
        y = y[:, ::2] - self.lambda_of_pairs() * y[:, 1::2]  # (B, H / 2, T, 2 D)
        y = self.ln_head(y) * (1 - self.lambda_init)
        return y.unflatten(-1, (2, D)).transpose(2, 3).flatten(1, 2)  # (B, H, T, D)

    def lambda_of_pairs(self):
        """exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init."""
        first = (self.lambda_q1 * self.lambda_k1).sum().exp()  # no @: autocast would round it
        second = (self.lambda_q2 * self.lambda_k2).sum().exp()
        return first - second + self.lambda_init


class DifferentialLASER(Differential):
    attention = "laser"


class DifferentialBeta(Differential):
    attention = "beta"


ATTENTION |= {
    "differential": Differential,
    "differential_laser": DifferentialLASER,
    "differential_beta": DifferentialBeta,
}
