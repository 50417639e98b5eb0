"""Gated DeltaNet (Yang et al., arXiv 2412.06464), and Kimi Delta Attention: layers of linear time.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.gated_delta \
        --attention=gated_delta --position=none --conv=4

Each head has a state S (D, D), a memory from which a key reads a value. A token t lets all of S
fade, erases what its key read from S, and writes its value there (equation 10 of the paper, whose S
is the transpose):

    S_t = alpha_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T      y_t = q_t S_t

The paper's: q, k and v are SiLU of a short convolution (--conv) of x W; q and k are divided by
their length; beta = sigmoid(x w_b); alpha = exp(-e^A softplus(x w_a + dt)), with the initial A and
dt of Mamba-2; the output is W_o (RMSNorm(y) * SiLU(x W_g)), with one norm for all heads.
What differs: values are as wide as keys, not twice as wide; --conv adds to x, and is off by
default; alpha is at least e^-40.

--attention=kda is Kimi Delta Attention, whose alpha has a number for each channel of a key.

Read one_token first, then chunked, the same for many tokens, then GatedDelta.
Shapes: B batch, H heads, T time, D head width; q, k, v (B, H, T, D); beta (B, H, T, 1); log_alpha
(B, H, T, 1), or (B, H, T, D) in KDA.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.cache import Context
from attention.fast import CHUNK
from attention.scores import at_least_float32
from lab.ideas.documents import Documents
from model import ATTENTION
from parts import RMSNorm, ShortConv

LEAST_LOG_ALPHA = -40.0  # e^-40 is lost in the rounding of a float64; log 0 would give NaN


def one_token(q, k, v, beta, log_alpha, S: Tensor) -> tuple[Tensor, Tensor]:
    """(y (B, H, 1, D), the next state) of one token and the state S (B, H, D, D) before it.

    u = beta (v - k alpha S) is what the token adds to the state, at its key.
    """
    S = log_alpha.exp().mT * S
    u = beta * (v - k @ S)
    S = S + k.mT * u
    return q @ S, S


def chunked(q, k, v, beta, log_alpha, S: Tensor) -> tuple[Tensor, Tensor]:
    """(y (B, H, T, D), the last state) of T tokens and the state S before them.

    64 tokens at once; in KDA, whose alpha costs more, 16.

    Section 3.3 of the paper. Let g_i be the sum of log alpha from the first token of a chunk to
    token i, and S the state before the chunk. All u of the chunk solve a triangular system:

        u_i + sum_j<i e^(g_i - g_j) beta_i (k_i . k_j) u_j = beta_i (v_i - e^g_i k_i S)
        y_i = e^g_i q_i S + sum_j<=i e^(g_i - g_j) (q_i . k_j) u_j

    No exponent is above 0.
    """
    outputs = []
    size = CHUNK if log_alpha.shape[-1] == 1 else CHUNK // 4
    chunks = [x.split(size, dim=2) for x in (q, k, v, beta, log_alpha)]
    for q, k, v, beta, log_alpha in zip(*chunks, strict=True):
        g = log_alpha.cumsum(2)  # (B, H, c, 1 or D)
        fade = (g[..., :, None, :] - g[..., None, :, :]).clamp(max=0).exp()  # (B, H, c, c, 1 or D)
        from_start = g.exp()
        to_end = (g[:, :, -1:] - g).exp()

        # unitriangular: only what is below the diagonal of the system is read
        erased = beta * k
        system = faded_product(erased, k, fade)
        u = beta * v - from_start * erased @ S
        u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)

        y = from_start * q @ S + faded_product(q, k, fade) @ u
        outputs.append(y)
        S = from_start[:, :, -1:].mT * S + (to_end * k).mT @ u
    return torch.cat(outputs, dim=2), S


def faded_product(x, k, fade) -> Tensor:
    """sum over channels n of x_in k_jn fade_ijn for j <= i, else 0: (B, H, c, c)."""
    if fade.shape[-1] == 1:
        return (x @ k.mT * fade[..., 0]).tril()
    return torch.einsum("bhin,bhjn,bhijn->bhij", x, k, fade).tril()


class GatedDelta(nn.Module):
    """The layer. c: a GPTConfig with its defaults filled in.

    A cache keeps the layer's state in its `state`, (B, H, D, D) in float32 or wider.
    """

    uses = ("head_dim", "conv")  # the fields of GPTConfig that it reads, beside sizes
    endless = True  # a text can go on at constant cost
    gate = staticmethod(F.silu)

    def __init__(self, c, layer: int):
        super().__init__()
        self.sizes = H, D = c.n_head, c.head_dim

        self.c_attn = nn.Linear(c.n_embd, 4 * H * D, bias=c.bias)  # q, k, v and the output's gate
        self.c_rates = nn.Linear(c.n_embd, 2 * H, bias=False)  # w_b and w_a
        self.conv = ShortConv(3 * H * D, c.conv) if c.conv else None

        self.log_A = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        self.dt = nn.Parameter(torch.empty(H).uniform_(-6.9, -2.26))  # softplus: 0.001 to 0.1

        self.ln_head = RMSNorm(D, eps=1e-5)
        self.c_proj = nn.Linear(H * D, c.n_embd, bias=c.bias)
        self.resid_dropout = nn.Dropout(c.dropout)

    def rates(self, x):
        """x w_b, (B, T, H), and log alpha, (B, T, H, 1)."""
        b, a = at_least_float32(self.c_rates(x)).chunk(2, dim=-1)
        return b, (-self.log_A.exp() * F.softplus(a + self.dt))[..., None]

    def forward(self, x, context=None):
        """x (B, T, C) -> (B, T, C). context: an attention.cache.Context."""
        H, D = self.sizes
        context = context or Context()

        qkv, gate = self.c_attn(x).split((3 * H * D, H * D), dim=-1)
        if self.conv is not None:
            qkv = self.conv(qkv, context)
        b, log_alpha = self.rates(x)

        with torch.autocast(x.device.type, enabled=False):
            # queries and keys of length 1, and values
            qkv = F.silu(at_least_float32(qkv)).unflatten(-1, (3, H, D))
            qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
            q, k = F.normalize(qkv[:2], dim=-1)

            # how much is written, and what stays; nothing does where a document begins
            beta = b.sigmoid().mT[..., None]
            if isinstance(context, Documents):
                begins = context.pos[..., None, None] == 0
                log_alpha = log_alpha.masked_fill(begins, -math.inf)
            log_alpha = log_alpha.clamp(min=LEAST_LOG_ALPHA).transpose(1, 2)  # (B, H, T, 1 or D)

            before = context.state.get(self, q.new_zeros(len(x), H, D, D))
            form = one_token if x.shape[1] == 1 else chunked
            y, context.state[self] = form(q, k, qkv[2], beta, log_alpha, before)

        y = self.ln_head(y).transpose(1, 2).flatten(2)  # (B, T, H D)
        y = y.to(x.dtype) * self.gate(gate)
        return self.resid_dropout(self.c_proj(y))


class KDA(GatedDelta):
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, equations 1 and 10).

    alpha = exp(-e^A softplus(W_2 W_1 x + dt)) has a number for each channel of a key; the output's
    gate is a sigmoid. Chosen: its matrix is whole, not of low rank.
    """

    gate = staticmethod(torch.sigmoid)

    def __init__(self, c, layer):
        super().__init__(c, layer)
        H, D = self.sizes
        self.c_rates = nn.Linear(c.n_embd, H, bias=False)
        low = nn.Linear(c.n_embd, D, bias=False)
        self.c_alpha = nn.Sequential(low, nn.Linear(D, H * D, bias=False))
        # of one dimension, so that no optimizer decays it
        self.dt = nn.Parameter(torch.empty(H * D).uniform_(-6.9, -2.26))

    def rates(self, x):
        b, a = map(at_least_float32, (self.c_rates(x), self.c_alpha(x)))
        steps = F.softplus(a + self.dt).unflatten(-1, self.sizes)  # (B, T, H, D)
        return b, -self.log_A.exp()[:, None] * steps


ATTENTION["gated_delta"] = GatedDelta
ATTENTION["kda"] = KDA
