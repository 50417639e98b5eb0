"""A GPT whose causal self-attention is pluggable: the whole model, to be read from top to bottom.

1. Four attentions: each is a function of a few lines, its definition. ATTENTION is their table.
2. GPTConfig, with every choice; then CausalSelfAttention, MLP, Block and GPT: GPT-2, built from these choices.

A new attention is one function and one line in ATTENTION. Nothing else is needed to train it with short and long
heads, to decode it with a cache, to test it and to time it. To save time and memory, a GPT runs fast forms of these
functions (attention/forms.py): other code that computes the same. When a GPT is built, each fast form is compared with
its definition here. If you have changed the definition, the definition runs: what you edit here is what is trained.

Shapes: B batch, T time, C n_embd, H query heads, G key/value heads, D head width, V vocabulary. Attention is
(B, H, T, D) everywhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention.cache import Cache, cache_form, why_it_ends
from attention.documents import Documents
from attention.forms import fast_form, takes
from attention.heads import groups_of, inverse_of
from attention.more import MORE
from attention.probe import probed
from attention.scores import at_least_float32, check_shapes, decayed, scores, visible
from choices import ACTIVATION, DECAY, POSITION, QK_NORM, WHERE, RMSNorm, ShortConv, new_norm
from errors import UserError
from rules import check, with_defaults
from text.sampling import stream

# -----------------------------------------------------------------------------
# Attention: f(q, k, v, *, window=None, scale=None, bias=None) -> y, causal.
#   q (B, H, Tq, D), k (B, H, T, D), v (B, H, T, Dv), y (B, H, Tq, Dv) in v's precision. In training Tq = T. If
#     Tq < T, as in decoding, the queries are those of the last Tq tokens
#   window: key j is seen by query i where 0 <= i - j <= window, window + 1 keys; None: all up to i
#   scale: of the scores, 1 / sqrt(D) if None
#   bias: added to the scaled scores by `scores`; a tensor that broadcasts to (B, H, Tq, T), or a ByDistance, which
#     has a number for each distance i - j (attention/scores.py)
# An attention that can drop its weights takes `dropout` as well: the probability, 0.0 by default, in training alone.
# One that need not be causal takes `causal` and `seen`, and passes them to `visible` (lab/examples/bert.py): with
# causal=False, all keys are seen, or those with |i - j| <= window; seen (B, 1, 1, T) is False where a key is padding.
# One whose weights are not made of exp(s) takes `decay` (H, 1, 1): they are multiplied by exp(-decay (i - j)). For all
# others a decay becomes more dimensions of q and k, which lower the scores of far keys (choices.ALiBi).
# y_i may use q_i and the keys and values that query i sees, but neither T nor a key's index, nor other heads or rows.
# Short heads are computed in blocks of queries: T is then the length of a block, and dimension 1 counts blocks. (To
# count the keys that a query sees, use seen.sum(-1).) The name of an attention that needs more goes into WHOLE.


def softmax_attention(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0, causal=True, seen=None):
    """y = softmax(s) v ("Attention Is All You Need", Vaswani et al. 2017, equation 1)."""
    s, seen = scores(q, k, scale, bias), visible(q, k, window, causal, seen)  # (B, H, Tq, T), (Tq, T)
    weights = s.masked_fill(~seen, -math.inf).softmax(-1)
    return F.dropout(weights, dropout).to(v.dtype) @ v


def laser_attention(q, k, v, *, window=None, scale=None, bias=None, causal=True, seen=None):
    """y = log(softmax(s) exp(v)) ("LASER: Attention with Exponential Transformation", Duvvuri and Dhillon, equation 6).

    The sum is taken in log space, where exp cannot overflow. This needs T x T x D numbers for each head. There is no
    dropout: the first query has a single weight, and dropping it would give log(0).
    """
    s, seen = scores(q, k, scale, bias), visible(q, k, window, causal, seen)
    log_weights = s.masked_fill(~seen, -math.inf).log_softmax(-1)
    return (log_weights[..., None] + at_least_float32(v)[..., None, :, :]).logsumexp(-2).to(v.dtype)


def beta_attention(q, k, v, *, window=None, scale=None, bias=None, decay=None, dropout=0.0, causal=True, seen=None):
    """y = s / (1 + ||s||) v, ||s|| the L2 norm of a query's scores (the blog post on beta attention in nanoGPT).

    Scores that a query does not see are 0. Weights may be negative, and need not sum to 1.
    """
    s, seen = scores(q, k, scale, bias), visible(q, k, window, causal, seen)
    s = decayed(s, decay).masked_fill(~seen, 0.0)
    weights = s / (1 + s.norm(dim=-1, keepdim=True))
    return F.dropout(weights, dropout).to(v.dtype) @ v


def beta2_attention(q, k, v, *, window=None, scale=None, bias=None, decay=None, dropout=0.0, causal=True, seen=None):
    """y = s^2 / (1 + sum s^2) v: beta's square, which gives large scores more weight, and no weight below 0 (ours)."""
    s, seen = scores(q, k, scale, bias), visible(q, k, window, causal, seen)
    s2 = decayed(s.square(), decay).masked_fill(~seen, 0.0)
    weights = s2 / (1 + s2.sum(-1, keepdim=True))
    return F.dropout(weights, dropout).to(v.dtype) @ v


ATTENTION: dict[str, Callable] = {
    "softmax": softmax_attention,
    "laser": laser_attention,
    "beta": beta_attention,
    "beta2": beta2_attention,
    **MORE,
}
WHOLE: set[str] = set()  # names of attentions that need all queries and keys at once; short heads cost T^2 too

# -----------------------------------------------------------------------------


@dataclass
class GPTConfig:
    """Every choice of the model, as it was given. Raises UserError where choices do not fit."""

    # How large is the model?
    block_size: int = 1024  # tokens that the model sees at once
    vocab_size: int = 50304  # number of different tokens: GPT-2's 50257, rounded up to a multiple of 64
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per layer
    n_embd: int = 768  # width of the residual stream
    n_kv_head: int | None = None  # heads of keys and values, shared by the query heads (GQA); None: n_head; 1: MQA
    head_dim: int | None = None  # width of a head; None: n_embd / n_head
    n_hidden: int | None = None  # width of the MLP; None: 4 n_embd, or 8/3 n_embd if it is gated (as many weights)
    tied: bool = True  # the output head and the token embedding are one matrix
    # Which attention?
    attention: str = "softmax"  # a name in ATTENTION
    heads: str = "L"  # one letter per head: L long, S short; / goes to the next layer; patterns repeat: SSSSSL, S/S/L
    short_attention: str | None = None  # another attention for short heads: a name in ATTENTION; None: the same
    window: int | None = None  # tokens that a short head sees before its own; None: 50, or 100 if block_size > 2048
    differential: bool = False  # heads work in pairs: the first one's weights minus lambda times the second one's
    qk_norm: str = "none"  # the norm of queries and keys, before their product: a name in choices.QK_NORM
    temperature: float = 1.0  # the attention scores are divided by this number
    per_dim_temperature: bool = False  # each dimension of the queries is multiplied by a learned number, softplus(p)
    conv: int = 0  # width of a short convolution over time, added to q, k and v: 4 is usual; 0: none
    # How does the model know the order of the tokens?
    position: str = "learned"  # a name in choices.POSITION
    rope_base: float | None = None  # rope: the base of its wavelengths; None: 10000
    max_distance: int | None = None  # relative, t5: larger distances count as this one; None: 16 (relative), 128 (t5)
    decay: str = "none"  # beside any position: weights are multiplied by exp(-slope distance): a name in choices.DECAY
    nope_long: bool = False  # only short heads know positions, and long heads do not (Command A: --heads=S/S/S/L)
    # What are the blocks made of?
    norm: str = "layernorm"  # the kind of norm: a name in choices.NORM
    norm_bias: bool | None = None  # biases in the norms; None: as `bias` for layernorm, False for rmsnorm
    norm_eps: float = 1e-5  # a small number that is added to the variance in a norm
    where: str = "pre"  # where a block has its norms: a name in choices.WHERE
    block: str = "serial"  # serial: the MLP gets the output of attention; parallel: both get the same input (PaLM)
    mlp: str = "gelu"  # activation of the MLP (gated: the names that end in glu): a name in choices.ACTIVATION
    bias: bool = True  # biases in Linears and LayerNorms, as in GPT-2
    # What helps against overfitting, unstable training or too little memory?
    dropout: float = 0.0  # dropout on embeddings and on the outputs of attention and MLP: the probability
    attn_dropout: float | None = None  # dropout on attention weights; None: as dropout, or 0 if the attention has none
    zero_init: bool = False  # the last matrix of each attention and MLP (or the norm after it) starts at zero
    logit_softcap: float | None = None  # c: a logit x becomes c tanh(x / c) (Gemma 2: c = 30); None: it stays x
    label_smoothing: float = 0.0  # p: the training loss has the target with 1 - p + p / V, other tokens with p / V
    z_loss: float = 0.0  # this number times the mean of (log Z)^2 is added to the training loss (PaLM: 1e-4)
    activation_checkpointing: bool = False  # compute blocks again in the backward pass: slower, needs far less memory

    def __post_init__(self):
        check(self, ATTENTION)

    def resolved(self) -> "GPTConfig":
        """The same choices with every default filled in. Modules read this copy.

        window stays None without short heads; rope_base and max_distance stay None with positions that do not use them.
        """
        return with_defaults(self, ATTENTION)

    @property
    def scale(self) -> float:
        """The factor of the scores: 1 / sqrt(D), divided by the temperature."""
        return (self.head_dim or self.n_embd // self.n_head) ** -0.5 / self.temperature

    @property
    def scheme(self) -> type | None:
        """The class of the position, a choices.Scheme; None for a position that is added to the embedding."""
        return POSITION[self.position][1]

    @property
    def long_bias(self) -> bool:
        """Whether the position adds a bias to the scores of long heads."""
        return self.scheme is not None and self.scheme.scores and not self.nope_long

    def layer_heads(self, layer: int) -> str:
        """The heads of one layer, a letter each: 'SSSL'."""
        layers = self.heads.split("/")
        pattern = layers[layer % len(layers)]
        return (pattern * self.n_head)[: self.n_head]


# -----------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    """Makes queries, keys and values of all heads; calls the attention once for short heads and once for long ones.

    A short head sees its own token and the `window` tokens before it (LS-attention: "Short-Range Dependency Effects
    on Transformer Instability and a Decomposed Attention Solution").
    Differential attention (Ye et al. 2024): heads 2i and 2i + 1 share a value V twice as wide, and
    y = norm(A_2i V - lambda A_2i+1 V) (1 - lambda_init), with one lambda per layer and an RMSNorm per pair. Each A V is
    an output of the attention, so LASER takes the log of each of the two before the difference.
    """

    def __init__(self, c: GPTConfig, layer: int, shared_position: nn.Module | None):
        super().__init__()
        C, H, G, D = c.n_embd, c.n_head, c.n_kv_head, c.head_dim
        self.sizes = H, G, D
        self.c_attn = nn.Linear(C, (H + 2 * G) * D, bias=c.bias)
        self.c_proj = nn.Linear(H * D, C, bias=c.bias)
        self.resid_dropout = nn.Dropout(c.dropout)
        self.q_norm, self.k_norm = QK_NORM[c.qk_norm](c, D)
        # softplus(p) is 1 at the start (LASER, section 4: softmax(Q diag(softplus(p)) K^T / sqrt(d)))
        p = torch.full((D,), math.log(math.e - 1)) if c.per_dim_temperature else None
        self.per_dim_temperature = None if p is None else nn.Parameter(p)
        self.conv = ShortConv((H + 2 * G) * D, c.conv) if c.conv else None
        self.decay = DECAY[c.decay](c)
        letters = c.layer_heads(layer)
        positioned = c.scheme is not None and ("S" in letters or not c.nope_long)
        self.position = (shared_position or c.scheme(c)) if positioned else None
        self.scale = c.scale
        self.dropout = {"dropout": c.attn_dropout} if c.attn_dropout else {}
        self.n_map = 2 if c.differential else 1  # query heads that share one value
        if c.differential:
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                setattr(self, name, nn.Parameter(0.1 * torch.randn(D)))
            self.ln_head = RMSNorm(2 * D, bias=False, eps=1e-5)
        self.groups = groups_of(letters, H // G, self.n_map, c.window)  # [short heads, long heads], or one of the two
        for group in self.groups:
            long = group.window is None
            group.attention = c.attention if long else c.short_attention
            group.definition = definition = ATTENTION[group.attention]
            group.core = fast_form(group.attention, definition, group.attention in WHOLE, short=not long)
            group.cache = cache_form(group.attention, definition, D, self.n_map * D, c.long_bias or not long)
            group.decays = takes(definition, "decay")
            schemes = (None if long and c.nope_long else self.position, self.decay)
            group.schemes = [scheme for scheme in schemes if scheme is not None]
        self.calls = self.groups  # kernels.use changes this: Triton's kernels take both groups in one call
        self.inverse = inverse_of(letters)  # puts the heads back into the layer's order; None if they are in it already
        self.probe = None  # a function that looks into the layer (attention/probe.py)

    def forward(self, x, memory=None):
        """memory: None, or what else x sees: a Cache of earlier tokens, Documents, Bidirectional (not causal)."""
        (B, T, _), (H, G, D) = x.shape, self.sizes
        q, k, v = self.project(x, memory)
        q = self.q_norm(q.view(B, T, H, D).transpose(1, 2))  # (B, H, T, D)
        k = self.k_norm(k.view(B, -1, G, D).transpose(1, 2))  # (B, G, T, D)
        v = v.view(B, k.shape[2], -1, self.n_map * D).transpose(1, 2)  # (B, G, T, D); differential: (B, G / 2, T, 2 D)
        if self.per_dim_temperature is not None:
            q = q * F.softplus(self.per_dim_temperature)
        past = 0 if memory is None else memory.length
        dropout = self.dropout if self.training else {}
        y = []
        for group in self.calls if memory is None and self.probe is None else self.groups:
            q_part, k_part, v_part = group.take(q, k, v)
            settings = {**group.settings, "scale": self.scale, **dropout}
            for scheme in group.schemes:
                q_part, k_part, more = scheme(q_part, k_part, group, past)
                settings |= more
            q_part, k_part = q_part.to(v.dtype), k_part.to(v.dtype)  # norms and rotations give float32
            core = group.core if self.probe is None else probed(self, group)
            if memory is not None:
                y.append(memory.attend(core, group, q_part, k_part, v_part, **settings))
            else:
                y.append(core(q_part, *group.share(k_part, v_part), **settings))
            check_shapes(q_part, v_part, y[-1])
        y = torch.cat(y, dim=1) if len(y) > 1 else y[0]  # (B, H, T, n_map D)
        if self.inverse is not None:
            y = y[:, self.inverse]
        if self.n_map == 2:  # of each pair of maps the first minus lambda times the second, (B, H / 2, T, 2 D)
            y = self.ln_head(y[:, ::2] - self.lambda_of_pairs() * y[:, 1::2]) * (1 - self.lambda_init)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, H * D))
        return self.resid_dropout(y) if self.training else y  # each module call costs time when decoding one token

    def project(self, x, memory):
        """The rows of q, k and v before they are cut into heads: (B, T, H D), (B, T, G D) and (B, T, G D)."""
        H, G, D = self.sizes
        qkv = self.c_attn(x)
        if self.conv is not None:
            qkv = self.conv(qkv, memory)
        return qkv.split((H * D, G * D, G * D), dim=-1)

    def lambda_of_pairs(self):
        """exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init, of all pairs of the layer."""
        first = (self.lambda_q1 * self.lambda_k1).sum().exp()  # no @: autocast would round it
        second = (self.lambda_q2 * self.lambda_k2).sum().exp()
        return first - second + self.lambda_init


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
    """Attention and an MLP, with norms where choices.WHERE says; in parallel both see the same x (PaLM, section 2)."""

    def __init__(self, c: GPTConfig, layer: int, shared_position: nn.Module | None):
        super().__init__()
        before, after, self.added = WHERE[c.where]
        self.parallel = c.block == "parallel"

        def norm(wanted: bool) -> nn.Module:
            return new_norm(c, c.norm, c.n_embd) if wanted else nn.Identity()

        self.ln_1 = norm(before or self.added)
        self.ln_2 = norm((before or self.added) and not self.parallel)
        self.ln_1_after = norm(after)
        self.ln_2_after = norm(after)
        self.attn = CausalSelfAttention(c, layer, shared_position)
        self.mlp = MLP(c)

    def forward(self, x, memory=None):
        if self.added:
            x = self.ln_1(x + self.attn(x, memory))
            return self.ln_2(x + self.mlp(x))
        h = self.ln_1(x)
        if self.parallel:
            return x + self.ln_1_after(self.attn(h, memory)) + self.ln_2_after(self.mlp(h))
        x = x + self.ln_1_after(self.attn(h, memory))
        return x + self.ln_2_after(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019), with the choices of GPTConfig. block: the class of its blocks."""

    def __init__(self, config: GPTConfig, block: type = Block):
        super().__init__()
        self.config = config
        c = config.resolved()
        embedded = POSITION[c.position][0]
        shared_position = c.scheme(c) if c.scheme is not None and c.scheme.shared else None
        modules = {
            "wte": nn.Embedding(c.vocab_size, c.n_embd),
            "wpe": embedded and embedded(c),
            "drop": nn.Dropout(c.dropout),
            "h": nn.ModuleList([block(c, layer, shared_position) for layer in range(c.n_layer)]),
            "ln_f": nn.Identity() if c.where == "post" else new_norm(c, c.norm, c.n_embd),
        }
        self.transformer = nn.ModuleDict({name: module for name, module in modules.items() if module is not None})
        # Vaswani et al., section 3.4: the embedding is multiplied by sqrt(C) before the sinusoids are added
        self.embedding_scale = c.n_embd**0.5 if c.position == "sinusoidal" else 1.0
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tied:
            self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        # The last matrix of each attention and MLP: GPT-2's std. With zero_init it is 0 or, if a norm follows, the norm
        std = 0.02 / math.sqrt(2 * c.n_layer)
        by_norm = c.zero_init and WHERE[c.where][1]
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.0 if c.zero_init and not by_norm else std)
            elif name.endswith("_after.weight") and by_norm:
                nn.init.zeros_(p)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: Cache | None = None, pos: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(logits, loss) for token ids idx (B, T), T <= block_size.

        With targets (B, T): logits (B, T, V), and the mean cross-entropy in nats over the targets that are not -1.
        In training label_smoothing acts (Szegedy et al. 2016, section 7), and z_loss mean(log^2 Z) is added, Z the sum
        of a token's exp(logits) (PaLM, section 5).
        Without targets: the logits of the last position, (B, 1, V), and None.
        cache: from new_cache; it holds the tokens before idx, and idx is added to it.
        pos (B, T): positions in documents (text.dataset.positions). A document begins where pos is 0; no token sees
        another document. Raises ValueError for more than block_size tokens.
        """
        most = self.config.block_size if cache is None else cache.capacity
        if not 1 <= idx.shape[1] <= most:
            limit = f"block_size={most}" if cache is None else f"{most}, the capacity of the cache"
            raise ValueError(f"{idx.shape[1]} tokens do not fit: this model takes 1 to {limit}")
        if cache is None:
            return self.predict(self.hidden(idx, None if pos is None else Documents(pos), pos), targets)
        if pos is not None:
            raise ValueError("a cache holds one document: give pos or cache, not both")
        with cache.extended(*idx.shape):
            return self.predict(self.hidden(idx, cache), targets)

    def hidden(self, idx: Tensor, memory=None, pos: Tensor | None = None) -> Tensor:
        """The input of the output head, (B, T, C). memory: see CausalSelfAttention.forward."""
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if "wpe" in self.transformer:
            past = 0 if memory is None else memory.length
            at = torch.arange(past, past + idx.shape[1], device=idx.device) if pos is None else pos
            x = x + self.transformer.wpe(at).to(x.dtype)
        x = self.transformer.drop(x)
        recompute = self.config.activation_checkpointing and self.training and not isinstance(memory, Cache)
        for block in self.transformer.h:
            x = checkpoint(block, x, memory, use_reentrant=False) if recompute else block(x, memory)
        return self.transformer.ln_f(x)

    def predict(self, x: Tensor, targets: Tensor | None) -> tuple:
        """The (logits, loss) of `forward`, from the output of `hidden`, x (B, T, C)."""
        logits = self.lm_head(x[:, [-1]] if targets is None else x)  # (B, 1, V) or (B, T, V)
        if (cap := self.config.logit_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        if targets is None:
            return logits, None
        flat, targets = logits.flatten(0, 1).float(), targets.flatten()
        smoothing = self.config.label_smoothing if self.training else 0.0
        loss = F.cross_entropy(flat, targets, ignore_index=-1, label_smoothing=smoothing)
        if self.training and self.config.z_loss:
            log_z, counted = flat.logsumexp(-1), targets != -1
            loss = loss + self.config.z_loss * (log_z.square() * counted).sum() / counted.sum()
        return logits, loss

    def new_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for up to `capacity` tokens, block_size by default; UserError for more than it can hold."""
        most = self.config.block_size
        capacity = most if capacity is None else capacity
        if capacity > most and (why := why_it_ends(self)):
            raise UserError(f"a cache of {capacity} tokens: this model ends at block_size={most}, because {why}")
        return Cache([group for block in self.transformer.h for group in block.attn.groups], capacity)

    def crop_block_size(self, block_size: int) -> None:
        """Shortens the context, for fine-tuning a model at a smaller one. Raises UserError for a larger one."""
        if not 1 <= block_size <= self.config.block_size:
            raise UserError(f"block_size={block_size} is below 1 or larger than the model's {self.config.block_size}")
        self.config.window = self.config.resolved().window  # its default depends on block_size
        self.config.block_size = block_size
        if self.config.position == "learned":
            self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size])

    @classmethod
    def from_pretrained(cls, name: str, override_args: dict | None = None) -> "GPT":
        """A GPT with the weights of a model on the hub, such as gpt2, or in a folder (training/pretrained.py, load)."""
        from training.pretrained import load  # here, since that file imports this one

        return load(name, override_args or {})

    def generate(self, idx: Tensor, max_new_tokens: int, *args, **kwargs) -> Tensor:
        """The prompts idx (B, T), each followed by its new tokens. The arguments are those of text.sampling.stream."""
        return torch.cat((idx, *stream(self, idx, max_new_tokens, *args, **kwargs)), dim=1)
