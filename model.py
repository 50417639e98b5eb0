"""A GPT whose causal self-attention is pluggable: the whole model, to be read from top to bottom.

First the attentions: each is a function of scores, a few lines. Then GPTConfig, with every choice,
and GPT-2, built from these choices: CausalSelfAttention, MLP, Block, GPT. A new attention is one
function and one line in ATTENTION. Where a faster form of a function is known, a GPT runs that
instead (attention/forms.py). If you edit a function here, your own code runs.

Shapes: B batch, T time, C n_embd, H query heads, G key/value heads, D head width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.cache import Cache, Context, why_it_ends
from attention.fast import recompute
from attention.forms import Heads
from errors import UserError, refuse
from parts import (
    ACTIVATION,
    DECAY,
    NORM,
    POSITION,
    QK_NORM,
    QKV,
    WHERE,
    ShortConv,
    TokenNumbers,
    learned_scalars,
    rules,
    with_defaults,
)
from text.sampling import stream

MOST_LOGITS = 2**28  # numbers that a loss holds at once: 1 GiB in float32

# An attention is a function f(s, seen, v) -> y (B, H, Tq, Dv) of Tq queries and T keys, in float32
# or wider. Tq <= T: the queries belong to the last Tq tokens.
#   s (B, H, Tq, T): the scores, scaled, as a position has changed them.
#   seen: broadcasts to s; True where query i sees key j.
#   v (B, H, T, Dv): the values.
# By name it may also have
#   drop(weights), which drops weights in training;
#   fade(x), which multiplies by a decay's gamma^(i - j); without it, a decay lowers s;
#   q (B, H, Tq, D) and k (B, H, T, D), the queries and keys;
#   b=learned(0.0), with scores.learned: a trained scalar for each head, from 0 on, (H, 1, 1)
#     or, in short heads, what broadcasts to s;
#   f=of_token(0.0), with scores.of_token: a number of each key's token, (B, H, T, 1), which is a
#     trained linear function of the layer's input; of_token(0.0, width=n): (B, H, T, n).
# y_i may use row i of s, and the keys and values that query i sees. It must not use T or a key's
# index, since it is called for a few queries at a time, with the keys up to the last of them; the
# number of keys that a query sees is seen.sum(-1). In short heads B counts sequences and heads, and
# H counts blocks of queries.
#
# A class in ATTENTION is a whole layer: a subclass of CausalSelfAttention that names what its heads
# compute, or own(c, layer) with forward(x, context) -> (B, T, C). docs/attention.md says more.


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


ATTENTION: dict[str, Callable] = {
    "softmax": softmax_attention,
    "laser": laser_attention,
    "beta": beta_attention,
    "beta_squared": beta_squared_attention,
    "softcap": softcap_attention,
}


@dataclass
class GPTConfig:
    """Every choice of the model, as it was given. Raises UserError where choices do not fit."""

    # How large is the model?
    block_size: int = 1024  # tokens that the model sees at once
    vocab_size: int = 50304  # number of different tokens: GPT-2's 50257, up to a multiple of 64
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per layer
    n_embd: int = 768  # width of the residual stream
    n_kv_head: int | None = None  # heads of keys and values (GQA); None: n_head; 1: MQA
    head_dim: int | None = None  # width of a head; None: n_embd / n_head
    n_hidden: int | None = None  # width of the MLP; None: 4 n_embd, or 8/3 n_embd if it is gated
    tied: bool = True  # the output head and the token embedding are one matrix
    # Which attention?
    attention: str = "softmax"  # a name in ATTENTION
    heads: str = "L"  # a letter per head: L long, S short; / begins the next layer: SSSL, S/S/L
    short_attention: str | None = None  # that of short heads: a name in ATTENTION; None: the same
    window: int | None = None  # tokens a short head sees before its own; None: 50, 100 above 2048
    qkv: str = "linear"  # how queries, keys and values are made: a name in parts.QKV
    qk_norm: str = "none"  # the norm of queries and keys: a name in parts.QK_NORM
    temperature: float = 1.0  # the attention scores are divided by this number
    conv: int = 0  # width of a convolution over time, added to q, k and v: 4 is usual; 0: none
    # How does the model know the order of the tokens?
    position: str = "learned"  # a name in parts.POSITION
    rope_base: float | None = None  # rope: the base of its wavelengths; None: 10000
    decay: str = "none"  # far keys weigh less, by exp(-slope (i - j)): a name in parts.DECAY
    nope_long: bool = False  # only short heads know positions (Command A: --heads=S/S/S/L)
    # What are the blocks made of?
    norm: str = "layernorm"  # the kind of norm: a name in parts.NORM
    norm_eps: float = 1e-5  # a small number that is added to the variance in a norm
    where: str = "pre"  # where a block has its norms: a name in parts.WHERE
    block: str = "serial"  # serial: the MLP follows attention; parallel: both get one input (PaLM)
    mlp: str = "gelu"  # activation of the MLP (gated: those in glu): a name in parts.ACTIVATION
    bias: bool = True  # biases in Linears and LayerNorms, as in GPT-2
    # What helps against overfitting, unstable training or too little memory?
    dropout: float = 0.0  # probability, on embeddings and on the outputs of attention and MLP
    attn_dropout: float | None = None  # on attention weights; None: as dropout, if all allow it
    zero_init: bool = False  # the last matrix of attention and MLP, or the norm after it, is 0
    logit_softcap: float | None = None  # c: a logit x becomes c tanh(x / c) (Gemma 2: c = 30)
    label_smoothing: float = 0.0  # p: training targets have 1 - p + p / V, other tokens p / V
    z_loss: float = 0.0  # times the mean of (log Z)^2, added to the training loss (PaLM: 1e-4)
    activation_checkpointing: bool = False  # compute blocks again in the backward pass: less memory

    def __post_init__(self):
        refuse(rules(self, ATTENTION))

    def resolved(self) -> "GPTConfig":
        """A copy with every default filled in, which modules read. What is not used stays None."""
        return with_defaults(self, ATTENTION)

    @property
    def scale(self) -> float:
        """Of a resolved configuration: the factor of the scores, 1 / sqrt(D) / temperature."""
        return self.head_dim**-0.5 / self.temperature

    @property
    def scheme(self) -> type | None:
        """The parts.Scheme of the position; None if it is added to the embedding."""
        return POSITION[self.position][1]

    def layer_heads(self, layer: int) -> str:
        """The heads of one layer as they were written, a letter each, such as 'SSSL'."""
        layers = self.heads.split("/")
        return (layers[layer % len(layers)] * self.n_head)[: self.n_head]


class CausalSelfAttention(nn.Module):
    """Every token mixes the values of the tokens that it sees, in many heads at once.

    A layer's short heads come first: they see their own token and the `window` tokens before it
    (LS-attention: Hajra 2025, arXiv 2505.15548). Its long heads see all tokens before.
    """

    attention = "softmax"  # what the heads of a subclass compute: a name in ATTENTION, or f(s, ...)
    endless = True  # a text may go on past block_size, if its heads keep no more and more

    def __init__(self, c: GPTConfig, layer: int):
        super().__init__()
        H, G, D = c.n_head, c.n_kv_head, c.head_dim
        self.sizes = H, G, D
        self.scale = c.scale
        self.attn_dropout = c.attn_dropout

        # queries, keys and values of all heads, side by side; and back
        width = (H + 2 * G) * D
        self.c_attn = QKV[c.qkv](c, width, layer)
        self.c_proj = nn.Linear(H * D, c.n_embd, bias=c.bias)
        self.resid_dropout = nn.Dropout(c.dropout)

        # what happens to them before attention
        self.q_norm, self.k_norm = QK_NORM[c.qk_norm](c, D)
        self.conv = ShortConv(width, c.conv) if c.conv else None

        # how heads know the order of the tokens
        letters = c.layer_heads(layer)
        self.decay = DECAY[c.decay](c)
        self.position = None
        if c.scheme and ("S" in letters or not c.nope_long):
            self.position = c.scheme(c)

        # the short heads and their code, then the long heads and theirs
        self.heads = []
        for letter, name, window in (("S", c.short_attention, c.window), ("L", c.attention, None)):
            indices = [h for h in range(H) if letters[h] == letter]
            if indices:
                # a layer class says itself what its heads compute: a name, or a function
                name = getattr(ATTENTION[name], "attention", name)
                position = None if c.nope_long and letter == "L" else self.position
                heads = Heads(c, name, ATTENTION.get(name, name), window, indices, position)
                self.heads.append(heads)

        # trained numbers that their definitions ask for
        self.numbers = learned_scalars(self.heads)
        self.token_numbers = nn.ModuleList(
            TokenNumbers(c, heads) for heads in self.heads if heads.of_tokens
        )

    def forward(self, x, context=None):
        """x (B, T, C) -> (B, T, C). context: what is known besides x (attention/cache.py)."""
        B, T, C = x.shape
        H, G, D = self.sizes
        context = context or Context()

        # queries, keys and values of all heads
        qkv = self.c_attn(x, context)
        if self.conv:
            qkv = self.conv(qkv, context)
        q, k, v = qkv.split((H * D, G * D, G * D), dim=-1)
        q = self.q_norm(q.view(B, T, H, D).transpose(1, 2))  # (B, H, T, D)
        k = self.k_norm(k.view(B, T, G, D).transpose(1, 2))  # (B, G, T, D)
        v = v.view(B, T, G, D).transpose(1, 2)  # (B, G, T, D)

        # each query head mixes the values that it sees
        y = self.attend(q, k, v, x, context)  # (B, H, T, D)

        # side by side, and back into the residual stream
        y = self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return self.resid_dropout(y) if self.training else y  # a module call costs time in decoding

    def attend(self, q, k, v, x, context):
        """y (B, H, T, D), for q (B, H, T, D), k and v (B, G, T, D), and the layer's input x."""
        outputs = []
        token_numbers = iter(self.token_numbers)
        for heads in self.heads:
            q_h, k_h, v_h = heads.select(q, k, v)
            settings = {"scale": self.scale}
            if heads.window is not None:
                settings["window"] = heads.window
            if self.training and self.attn_dropout:
                settings["dropout"] = self.attn_dropout

            # positions turn queries and keys, or add dimensions to them
            for scheme in (self.position if heads.has_position else None, self.decay):
                if scheme:
                    q_h, k_h, arguments = context.placed(scheme, q_h, k_h, heads)
                    settings |= arguments
            q_h = q_h.to(v.dtype)  # norms and rotations give float32
            k_h = k_h.to(v.dtype)

            # trained numbers: a head's go by name, a token's behind its key, and are not rounded
            for name in heads.scalars:
                settings[name] = self.numbers[name][heads.queries, None, None]
            if heads.of_tokens:
                q_h, k_h = next(token_numbers)(x, q_h, k_h)

            outputs.append(context.attend(heads, q_h, k_h, v_h, **settings))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


class MLP(nn.Module):
    """W2 f(W1 x) or, gated, W2 (f(W1 x) * (W3 x)), with W1 and W3 in c_fc."""

    def __init__(self, c: GPTConfig):
        super().__init__()
        self.act, self.gated = ACTIVATION[c.mlp]
        self.c_fc = nn.Linear(c.n_embd, (1 + self.gated) * c.n_hidden, bias=c.bias)
        self.c_proj = nn.Linear(c.n_hidden, c.n_embd, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            x = self.act(gate) * x
        else:
            x = self.act(x)
        x = self.c_proj(x)
        return self.dropout(x) if self.training else x


class Block(nn.Module):
    """Attention and an MLP, with norms where parts.WHERE says.

    In a parallel block both get the same input (PaLM, section 2).
    """

    def __init__(self, c: GPTConfig, layer: int):
        super().__init__()
        before, after, self.added = WHERE[c.where]
        self.parallel = c.block == "parallel"

        def norm(wanted: bool) -> nn.Module:
            return NORM[c.norm](c, c.n_embd) if wanted else nn.Identity()

        self.ln_1 = norm(before or self.added)
        self.ln_2 = norm((before or self.added) and not self.parallel)
        self.ln_1_after = norm(after)
        self.ln_2_after = norm(after)
        is_short = c.layer_heads(layer)[0] == "S"
        own = ATTENTION[c.short_attention if is_short else c.attention]
        self.attn = (own if isinstance(own, type) else CausalSelfAttention)(c, layer)
        self.mlp = MLP(c)

    def forward(self, x, context=None):
        if self.added:
            x = self.ln_1(x + self.attn(x, context))
            return self.ln_2(x + self.mlp(x))
        h = self.ln_1(x)
        x = x + self.ln_1_after(self.attn(h, context))
        if not self.parallel:
            h = self.ln_2(x)
        return x + self.ln_2_after(self.mlp(h))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019), with the choices of GPTConfig."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        c = config.resolved()
        # its own; the default of window depends on block_size, which may change
        self.config = replace(config, window=c.window)
        self.transformer = nn.ModuleDict()
        self.transformer.wte = nn.Embedding(c.vocab_size, c.n_embd)
        if embedded := POSITION[c.position][0]:
            self.transformer.wpe = embedded(c)
        self.transformer.drop = nn.Dropout(c.dropout)
        self.transformer.h = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.transformer.ln_f = nn.Identity() if c.where == "post" else NORM[c.norm](c, c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tied:
            self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        # The last matrix of each attention and MLP begins with GPT-2's std, or with zero_init at 0.
        # If a norm follows the matrix (sandwich, olmo2), the norm begins at 0 instead.
        std = 0.02 / math.sqrt(2 * c.n_layer)
        if c.zero_init and not WHERE[c.where][1]:
            std = 0.0
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=std)
            elif name.endswith("_after.weight") and c.zero_init:
                nn.init.zeros_(p)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        cache: Context | None = None,
    ) -> tuple:
        """(logits, loss) for token ids idx (B, T).

        With targets (B, T): logits (B, T, V), or None where they are over MOST_LOGITS numbers; and
        the mean cross-entropy in nats over the targets that are not -1, in training with
        label_smoothing (Szegedy et al. 2016, section 7) and z_loss (PaLM, section 5). Without
        targets: the logits of the last position, (B, 1, V), and None. cache: from new_cache; it
        holds the tokens before idx, and idx is added to it; or another Context. Raises ValueError
        for more than block_size tokens without a cache.
        """
        T = idx.shape[1]
        if T > self.config.block_size and cache is None:
            raise ValueError(
                f"{T} tokens do not fit: this model takes 1 to block_size={self.config.block_size}"
            )
        context = cache or Context()
        with context.adding(*idx.shape):
            return self.predict(self.hidden(idx, context), targets)

    def hidden(self, idx: Tensor, context: Context) -> Tensor:
        """The input of the output head, (B, T, C). context: what is known besides idx (B, T)."""
        context.kept = {}

        # tokens and, if they are added to these, their positions
        x = self.transformer.wte(idx)  # (B, T, C)
        if "wpe" in self.transformer:
            x = self.transformer.wpe(x, context.positions(x))
        x = self.transformer.drop(x)

        checkpointing = self.config.activation_checkpointing and self.training
        for block in self.transformer.h:
            x = recompute(block, x, context) if checkpointing else block(x, context)
        return self.transformer.ln_f(x)

    def predict(self, x: Tensor, targets: Tensor | None) -> tuple:
        """The (logits, loss) of `forward`, from the output of `hidden`, x (B, T, C)."""
        if targets is None:
            return self.logits(x[:, [-1]]), None
        targets = targets.flatten()
        n = (targets != -1).sum()
        rows = MOST_LOGITS // self.config.vocab_size
        if len(targets) <= rows:
            logits = self.logits(x)
            return logits, self.total(logits, targets) / n

        # some rows at a time, and their logits once more in the backward pass
        parts = zip(*(part.split(rows // 8) for part in (x.flatten(0, 1), targets)), strict=True)
        losses = (recompute(lambda x, y: self.total(self.logits(x), y), *part) for part in parts)
        return None, sum(losses) / n

    def logits(self, x: Tensor) -> Tensor:
        """(..., V) of x (..., C)."""
        logits = self.lm_head(x)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of the targets that are not -1."""
        logits = logits.flatten(0, -2).float()
        smoothing = self.config.label_smoothing if self.training else 0.0
        loss = F.cross_entropy(
            logits, targets, ignore_index=-1, reduction="sum", label_smoothing=smoothing
        )
        if self.training and self.config.z_loss:  # Z: the sum of a token's exp(logits)
            log_z = logits.logsumexp(-1)
            loss = loss + self.config.z_loss * (log_z.square() * (targets != -1)).sum()
        return loss

    def new_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for up to `capacity` tokens, block_size by default.

        Raises UserError for more than block_size if the model's cache cannot go on past it.
        """
        most = self.config.block_size
        capacity = capacity or most
        why = why_it_ends(self)
        if capacity > most and why:
            raise UserError(
                f"a cache of {capacity} tokens: this model ends at block_size={most}, because {why}"
            )
        return Cache(capacity)

    def crop_block_size(self, block_size: int) -> None:
        """Shortens the context; lengthens it, if the positions are not learned.

        Raises UserError where it cannot.
        """
        c = self.config
        if block_size > c.block_size and c.position == "learned":
            raise UserError(
                f"block_size={block_size} is above {c.block_size}, and positions are learned"
            )
        c.block_size = block_size
        if "wpe" in self.transformer:
            self.transformer.wpe.resize(block_size)

    @classmethod
    def from_pretrained(cls, name: str, override_args: dict | None = None) -> "GPT":
        """A GPT with the weights of a model on the hub, such as gpt2, or of a folder.

        See training/pretrained.py, load.
        """
        from training.pretrained import load  # here, since that file imports this one

        return load(name, override_args or {})

    def generate(self, idx: Tensor, max_new_tokens: int, *args, **kwargs) -> Tensor:
        """The prompts idx (B, T), each followed by new tokens; arguments: text.sampling.stream."""
        return torch.cat((idx, *stream(self, idx, max_new_tokens, *args, **kwargs)), dim=1)
