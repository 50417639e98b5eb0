"""The project in one sitting: a GPT, five attentions, training and a sample, in one file.

    python lab/course/micro.py                  # laser and softmax, about a minute on two cores
    python lab/course/micro.py beta softcap     # any of the names in ATTENTION

Read it from top to bottom. You need to know Python, and the file needs PyTorch, NumPy and the text
in data/shakespeare_char, but no other part of this project. All of it stands in model.py and
train.py again, with more choices, and the numbers are the same.

Shapes: B sequences in a batch, T tokens in a sequence, C numbers for a token, H heads, D = C / H
numbers for a token in a head, V different tokens.
"""

import math
import os
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

BATCH, T, LAYERS, H, C = 8, 64, 3, 4, 64
STEPS, WARM_UP, LEARNING_RATE, SEED = 400, 50, 5e-3, 1337

# -----------------------------------------------------------------------------
# The text
#
# A model reads numbers. Here each character is a token, and its number is its place in the sorted
# alphabet of the text. The model trains on the first nine tenths.

here = os.path.dirname(os.path.abspath(__file__))
text = open(os.path.join(here, "../../data/shakespeare_char/input.txt"), encoding="utf-8").read()
alphabet = sorted(set(text))
number_of = {character: number for number, character in enumerate(alphabet)}
V = len(alphabet)
tokens = torch.tensor([number_of[character] for character in text[: int(len(text) * 0.9)]])


def batch_of(step):
    """x and y (B, T): B pieces of the text, and what follows each of their tokens.

    The pieces begin at random places. A step always gets the same ones, so two models that train
    side by side read the same text, and a difference between them is a difference between models.
    """
    random = np.random.default_rng([SEED, step])
    starts = random.integers(0, len(tokens) - T, BATCH)
    pieces = torch.stack([tokens[start : start + T + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


# -----------------------------------------------------------------------------
# Attention
#
# A token has a query q: what it looks for. It has a key k: what it can be found by. And it has a
# value v: what it says to those who find it. The score of query i and key j is the product of both,
#
#     s_ij = q_i . k_j / sqrt(D)
#
# and an attention makes of a row of scores, and of the values, what token i learns from the others.
# The five definitions differ in this alone. `seen` is True where query i may see key j: at j <= i,
# since the model is to guess the next token, and must not look at it.
#
# (`drop` can leave out weights in training, and `fade` can let far keys count less. Here both
# change nothing: they are the function `unchanged`.)


def softmax_attention(s, seen, v, drop):
    """y = softmax(s) v ("Attention Is All You Need", Vaswani et al. 2017, equation 1)."""
    return drop(s.where(seen, -math.inf).softmax(-1)) @ v


# LASER's sum is taken in log space, where exp cannot overflow: T x T x Dv numbers for each head.
# It has no drop: the first query has a single weight, and without it y would be log(0).
def laser_attention(s, seen, v):
    """y = log(softmax(s) exp(v)) (LASER, Duvvuri and Dhillon, arXiv 2411.03493, equation 6)."""
    log_weights = s.where(seen, -math.inf).log_softmax(-1)
    return (log_weights[..., None] + v[..., None, :, :]).logsumexp(-2)


def beta_attention(s, seen, v, drop, fade):
    """y = s / (1 + ||s||) v, ||s|| the L2 norm of a query's scores (a post of dscamiss 2024).

    Weights may be negative, and need not sum to 1.
    """
    s = fade(s).where(seen, 0.0)
    return drop(s / (1 + s.norm(dim=-1, keepdim=True))) @ v


def beta_squared_attention(s, seen, v, drop, fade):
    """y = s^2 / (1 + sum s^2) v: beta's square, in which large scores weigh more (ours)."""
    s2 = fade(s.square()).where(seen, 0.0)
    return drop(s2 / (1 + s2.sum(-1, keepdim=True))) @ v


def softcap_attention(s, seen, v, drop):
    """y = softmax(c tanh(s / c)) v: no score is above c = 50 (Gemma 2, Riviere et al. 2024)."""
    s = 50.0 * torch.tanh(s / 50.0)
    return drop(s.where(seen, -math.inf).softmax(-1)) @ v


ATTENTION = {
    "softmax": softmax_attention,
    "laser": laser_attention,
    "beta": beta_attention,
    "beta_squared": beta_squared_attention,
    "softcap": softcap_attention,
}


def unchanged(x):
    return x


# -----------------------------------------------------------------------------
# The model
#
# Each token is a vector of C numbers. In every block it first hears from earlier tokens
# (attention), then thinks about it alone (an MLP). Both add to the vector, so that what was known
# is kept.


class Attention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.c_attn = nn.Linear(C, 3 * C, bias=False)  # queries, keys and values of all heads
        self.c_proj = nn.Linear(C, C, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (
            part.view(B, T, H, C // H).transpose(1, 2) for part in self.c_attn(x).split(C, 2)
        )
        s = q * (C // H) ** -0.5 @ k.mT  # (B, H, T, T)
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        others = [unchanged] * (self.attention.__code__.co_argcount - 3)  # drop and fade, if any
        y = self.attention(s, seen, v, *others)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(C, 4 * C, bias=False)
        self.c_proj = nn.Linear(4 * C, C, bias=False)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln_1 = nn.LayerNorm(C, bias=False)
        self.ln_2 = nn.LayerNorm(C, bias=False)
        self.attn = Attention(attention)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.wte = nn.Embedding(V, C)  # a vector for each token
        self.wpe = nn.Embedding(T, C)  # and one for each place
        self.h = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(C, bias=False)
        self.lm_head = nn.Linear(C, V, bias=False)
        self.wte.weight = self.lm_head.weight  # what a token means when it is read and guessed

        # weights begin small, and those that add to the vectors smaller, as there are many
        self.apply(begin)
        for name, weight in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS))

    def forward(self, x):
        """Scores of what comes next, (B, T, V): a softmax makes probabilities of them."""
        x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def begin(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


# -----------------------------------------------------------------------------
# Training
#
# The loss is how surprised the model is by the next token: minus the logarithm of the probability
# that it gave to it, in the mean. A model that knows nothing has log(65) = 4.17. Each step computes
# how the loss changes with each weight, and moves all of them a little downhill (AdamW).


def new(name):
    """A model with an attention, and its optimizer. All models begin with the same weights."""
    torch.manual_seed(SEED)
    model = GPT(ATTENTION[name])
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, LEARNING_RATE, (0.9, 0.99), fused=True)


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train_step(model, optimizer, step):
    # short steps at first: the optimizer does not know yet how large the gradients are
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / (WARM_UP + 1))
    loss = loss_of(model, *batch_of(step))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # one strange batch must not go far
    optimizer.step()
    return loss.item()


@torch.no_grad()
def write(model, n=200):
    """A text of n characters: each one is drawn from what the model expects, then read."""
    torch.manual_seed(SEED)
    x = torch.tensor([[number_of["\n"]]])
    for _ in range(n):
        p = (model(x[:, -T:])[:, -1] / 0.8).softmax(-1)  # dividing makes likely ones likelier
        x = torch.cat((x, torch.multinomial(p, 1)), dim=1)
    return "".join(alphabet[i] for i in x[0].tolist())


def main(names):
    for name in names:
        if name not in ATTENTION:
            sys.exit(f"there is no attention {name!r} here, but {', '.join(ATTENTION)}")
    runs = {name: new(name) for name in names}
    began = time.time()
    print(
        f"  step {' '.join(f'{name:>12}' for name in names)}   the mean loss of the last 50 steps"
    )
    losses = {name: [] for name in names}
    for step in range(STEPS):
        for name, run in runs.items():
            losses[name].append(train_step(*run, step))
        if step % 50 == 49:
            means = " ".join(f"{sum(losses[name][-50:]) / 50:12.3f}" for name in names)
            print(f"{step + 1:6} {means}", flush=True)
    print(f"{time.time() - began:.0f} seconds")
    for name, (model, _) in runs.items():
        print(f"\n--- {name}", write(model), sep="")


if __name__ == "__main__":
    main(sys.argv[1:] or ["laser", "softmax"])
