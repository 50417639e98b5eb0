"""A GPT whose causal self-attention is pluggable: the whole model, read from top to bottom.

Shapes: B batch, T time, C n_embd, H heads, D head dim, V vocabulary. Attention is (B, H, T, D) everywhere.

1. ATTENTION: the cores, one function each. A new attention is one function and one line in this table
   (and its definition, one line in ONE_QUERY, which the tests and bench.py hold it against).
2. GPTConfig: every choice, and which of them go together.
3. CausalSelfAttention, MLP, Block, GPT: GPT-2, where the choices are made.

Sources: softmax, "Attention Is All You Need" (Vaswani et al. 2017); LASER, "LASER: Attention with
Exponential Transformation" (Duvvuri and Dhillon); long and short heads, "Short-Range Dependency Effects on
Transformer Instability and a Decomposed Attention Solution" (LS-attention); beta, the blog post that
replaces softmax by s / (1 + ||s||) in nanoGPT.
"""

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# -----------------------------------------------------------------------------
# Attention cores. f(q, k, v, *, window=None, scale=None, bias=None) -> y, causal:
#   q, k (B, H, T, D), v (B, H, T, Dv), y (B, H, T, Dv)
#   window: key j is seen by query i where 0 <= i - j <= window, window + 1 keys; None: all up to i
#   scale: of the scores, 1 / sqrt(D) if None; bias: added to the scaled scores, broadcast to (B, H, T, T)
# A core that can drop attention weights takes `dropout` as well, the probability, 0.0 by default.


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is where it is float64: the precision of attention's statistics."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def visible(T: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where query i sees key j: 0 <= i - j <= window. (T, T)."""
    i = torch.arange(T, device=device)
    distance = i[:, None] - i
    return (distance >= 0) if window is None else (distance >= 0) & (distance <= window)


def scores(q: torch.Tensor, k: torch.Tensor, scale: float | None, bias: torch.Tensor | None) -> torch.Tensor:
    """s = scale q k^T + bias, unmasked, in float32 or wider also under autocast: (B, H, T, T)."""
    with torch.autocast(q.device.type, enabled=False):
        s = at_least_float32(q) @ at_least_float32(k).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return s if bias is None else s + bias


def softmax_attention(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0):
    """y = softmax(s) v (Vaswani et al., equation 1), fused."""
    if window is None and bias is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=scale)
    mask = visible(q.shape[-2], window, q.device)
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


LASER_RANGE = 60.0  # exp(-60) = 9e-27, and its inverse, are far from float32's limits


def laser_attention(q, k, v, *, window=None, scale=None, bias=None):
    """y = log(softmax(s) exp(v)) (Duvvuri and Dhillon, equation 6), for any v.

    exp and log go around ordinary softmax attention, as in the paper, with v shifted by its largest value
    per channel. The paper's shift alone is not enough: a maximum taken over the whole sequence lets one
    large v at a future token underflow every earlier output to log(0). The weights of a row sum to 1, so
    its sum of exponentials is at least exp(min v - max v): where that is far from underflow (it is, in
    any healthy model), the shift is harmless; elsewhere the sum is taken in log space, slowly.

    All of it is in float32 or wider: rounding exp(v) to bfloat16 would be an error of 2^-9 in y however
    small y is, and would depend on the shift, that is on future tokens.
    Dropout on the weights is excluded: position 0 has a single one, and dropping it gives log(0).
    """
    q, k, values = (at_least_float32(t) for t in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        if _wider_than(values, LASER_RANGE):
            return _laser_in_log_space(q, k, values, window=window, scale=scale, bias=bias).to(v.dtype)
        shift = values.detach().amax(-2, keepdim=True)  # (B, H, 1, Dv)
        y = softmax_attention(q, k, (values - shift).exp(), window=window, scale=scale, bias=bias)
        return (y.log() + shift).to(v.dtype)


@torch.compiler.disable
def _wider_than(v: torch.Tensor, limit: float) -> bool:
    """Whether some channel of v spans more than limit over time; warns once. False where v holds a NaN."""
    v = v.detach()
    wide = bool((v.amax(-2) - v.amin(-2)).max() > limit)
    if wide:
        warnings.warn(f"LASER's values span more than {limit:.0f}: sums are taken in log space, slowly", stacklevel=3)
    return wide


def _laser_in_log_space(q, k, v, *, window, scale, bias):
    """y = logsumexp_j(log_softmax(s)_ij + v_j): O(T^2 Dv) exponentials, computed again in the backward pass."""
    mask = visible(q.shape[-2], window, q.device)
    log_weights = scores(q, k, scale, bias).masked_fill(~mask, -math.inf).log_softmax(-1)  # (B, H, T, T)
    rows = max(1, 2**24 // v.numel())  # query rows at a time: 64 MiB of exponentials in float32
    parts = [
        checkpoint(lambda log_w: (log_w[..., None] + v[:, :, None]).logsumexp(-2), part, use_reentrant=False)
        for part in log_weights.split(rows, dim=-2)
    ]
    return torch.cat(parts, dim=-2)


def beta_attention(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0):
    """y = beta(s) v with beta(s) = s / (1 + ||s||_2) per row, masked scores 0 (the beta post).

    The post derives its gradient from a "homogeneity", d beta(x) h = f(x, h) beta(x), that its own example
    does not have: d beta(x) h = h / (1+r) - <x, h> x / (r (1+r)^2), r = ||x||, is parallel to x only where
    h is. Autograd takes the true one, with <x, h> x / r = 0 at r = 0.
    """
    s = scores(q, k, scale, bias).masked_fill(~visible(q.shape[-2], window, q.device), 0.0)
    weights = s / (1 + torch.linalg.vector_norm(s, dim=-1, keepdim=True))
    return F.dropout(weights, dropout, training=dropout > 0).to(v.dtype) @ v


ATTENTION: dict[str, Callable] = {
    "softmax": softmax_attention,
    "laser": laser_attention,
    "beta": beta_attention,
}

# What each core means, one query at a time: its scores s (B, H, n) over the n keys that it sees and their
# values v (B, H, n, Dv) give y (B, H, Dv). No masks, no tricks: obviously right, and what the tests hold
# the cores against.
ONE_QUERY: dict[str, Callable] = {
    "softmax": lambda s, v: (s.softmax(-1)[..., None] * v).sum(-2),
    "laser": lambda s, v: (s.log_softmax(-1)[..., None] + v).logsumexp(-2),  # = log(softmax(s) exp(v))
    "beta": lambda s, v: (s[..., None] * v).sum(-2) / (1 + s.norm(dim=-1, keepdim=True)),
}


def naive_attention(core, q, k, v, *, window=None, scale=None, bias=None):
    """What ATTENTION[core] must equal, one query after the other. Slow; for tests.

    Raises ValueError for a core that has no line in ONE_QUERY.
    """
    if core not in ONE_QUERY:
        raise ValueError(f"{core} has no line in ONE_QUERY, its definition for one query, to be held against")
    rows = []
    for i in range(q.shape[-2]):
        seen = slice(0 if window is None else max(0, i - window), i + 1)
        s = (q[..., i, None, :] * k[..., seen, :]).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        s = s if bias is None else s + bias[..., i, seen]
        rows.append(ONE_QUERY[core](s, v[..., seen, :]))
    return torch.stack(rows, dim=-2)


# -----------------------------------------------------------------------------
# Choices

ACTIVATION: dict[str, Callable] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's own
    "gelu_exact": F.gelu,  # nanoGPT's
}


@dataclass
class GPTConfig:
    """Every choice of the model. Raises ValueError, naming what is legal, where choices do not fit."""

    block_size: int = 1024  # tokens that the model sees at once
    vocab_size: int = 50304  # 50257 of GPT-2, padded to a multiple of 64
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads per layer
    n_embd: int = 768  # width of the residual stream
    dropout: float = 0.0  # on embeddings and on what attention and MLP add to the residual stream
    attn_dropout: float | None = None  # on attention weights; None: as dropout, where the core allows it
    bias: bool = True  # in Linears and LayerNorms, as GPT-2
    attention: str = "softmax"  # the core: a name in ATTENTION
    heads: str = "L"  # L long, S short; tiled over heads, / between layers, tiled over layers: SSSSSL, S/S/L
    window: int | None = None  # span of short heads: i sees j where 0 <= i - j <= window; None: 50, 100 past 2048
    mlp: str = "gelu"  # the MLP's activation: a name in ACTIVATION

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            near = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            near = sorted(sorted(near, key=lambda h: abs(h - self.n_head))[:3])
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}, but of {near} it is")
        for name, table in (("attention", ATTENTION), ("mlp", ACTIVATION)):
            if getattr(self, name) not in table:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(table)}")
        for name in ("dropout", "attn_dropout"):
            if not 0 <= (getattr(self, name) or 0.0) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.attn_dropout and not self._drops_weights():
            raise ValueError(
                f"attention={self.attention!r} allows no dropout on attention weights (its function takes no "
                f"`dropout`; in LASER a dropped weight can be log(0)): leave attn_dropout out, or set it to 0"
            )
        self._check_heads()

    def _check_heads(self):
        layers = self.heads.split("/")
        if not all(layers) or set(self.heads) - set("SL/"):
            raise ValueError(
                f"heads={self.heads!r} must be made of S (short) and L (long) with / between layers: L, SSSL, S/S/L"
            )
        if len(layers) > self.n_layer or any(len(layer) > self.n_head for layer in layers):
            raise ValueError(
                f"heads={self.heads!r} has {len(layers)} layer(s) of up to {max(map(len, layers))} head(s), more than "
                f"n_layer={self.n_layer} and n_head={self.n_head} hold: the end of the pattern would be lost"
            )
        if "S" not in self.heads and self.window is not None:
            raise ValueError(
                f"window={self.window} needs a short head, but heads={self.heads!r} has no S: --heads=SSSL"
            )
        if self.window is not None and self.window < 0:
            raise ValueError(f"window={self.window} must be 0 (a token sees itself alone) or more")

    def _drops_weights(self) -> bool:
        return "dropout" in inspect.signature(ATTENTION[self.attention]).parameters

    @property
    def weight_dropout(self) -> float:
        """The dropout on attention weights: attn_dropout, else dropout where the core allows it."""
        if self.attn_dropout is not None:
            return self.attn_dropout
        return self.dropout if self._drops_weights() else 0.0

    @property
    def span(self) -> int | None:
        """The window of the short heads, if there are any: by default the LS paper's (section 5.1)."""
        if "S" not in self.heads:
            return None
        return self.window if self.window is not None else 50 if self.block_size <= 2048 else 100

    def layer_heads(self, layer: int) -> str:
        """The heads of one layer, a letter each: 'SSSL'."""
        layers = self.heads.split("/")
        pattern = layers[layer % len(layers)]
        return (pattern * self.n_head)[: self.n_head]


# -----------------------------------------------------------------------------
# The model


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, n_embd: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.bias = nn.Parameter(torch.zeros(n_embd)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    """Projections and head grouping around a core: short heads and long heads are two calls of it."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.core, self.weight_dropout, self.n_head = ATTENTION[config.attention], config.weight_dropout, config.n_head
        # Two calls of the core, the short heads first, as the LS paper numbers them. Where `heads` mixes them
        # in another order, they are permuted before and back after.
        letters = config.layer_heads(layer)
        n_short = letters.count("S")
        groups = ((slice(0, n_short), config.span, n_short), (slice(n_short, None), None, self.n_head - n_short))
        self.groups = [(heads, window) for heads, window, count in groups if count]
        order = torch.tensor(sorted(range(self.n_head), key=lambda h: letters[h] == "L"))
        self.in_order = letters == "".join(sorted(letters, reverse=True))  # SS...LL
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("inverse", order.argsort(), persistent=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        if not self.in_order:
            q, k, v = q[:, self.order], k[:, self.order], v[:, self.order]
        kwargs = {"dropout": self.weight_dropout} if self.training and self.weight_dropout else {}
        y = [self.core(q[:, h], k[:, h], v[:, h], window=window, **kwargs) for h, window in self.groups]
        y = torch.cat(y, dim=1) if len(y) > 1 else y[0]
        if not self.in_order:
            y = y[:, self.inverse]
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.act = ACTIVATION[config.mlp]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = LayerNorm(config.n_embd, config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019), with the choices of GPTConfig."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)]),
                "ln_f": LayerNorm(config.n_embd, config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # tied
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # what adds to the residual stream, as GPT-2
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        """(logits, loss) for token ids idx (B, T), T <= block_size.

        With targets (B, T), where -1 is ignored: logits (B, T, V) and the mean cross-entropy in nats.
        Without: the logits of the last position (B, 1, V) and None. Raises ValueError past block_size.
        """
        T = idx.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}")
        pos = torch.arange(T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))  # (B, T, C)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)  # (B, T, V)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    def num_params(self, non_embedding: bool = True) -> int:
        """Parameters; without the position embedding unless asked (the token embedding is the head's)."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.transformer.wpe.weight.numel() if non_embedding else n

    def flops(self) -> int:
        """FLOPs per token, forward and backward: 6 N + 12 D sum over heads of keys (PaLM, appendix B).

        keys: block_size for a long head, window + 1 for a short one.
        """
        c = self.config
        letters = "".join(c.layer_heads(layer) for layer in range(c.n_layer))
        short = min(c.block_size, (c.span or 0) + 1)
        keys = letters.count("L") * c.block_size + letters.count("S") * short
        return 6 * self.num_params() + 12 * (c.n_embd // c.n_head) * keys

    def crop_block_size(self, block_size: int) -> None:
        """Shortens the context, for fine-tuning a model at a smaller one."""
        if block_size > self.config.block_size:
            raise ValueError(f"block_size={block_size} is larger than the model's, {self.config.block_size}")
        self.config.block_size = block_size
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size])

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple, device_type: str
    ) -> torch.optim.AdamW:
        """AdamW; matrices and embeddings are decayed, biases and norms are not."""
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type in ("cuda", "cpu"))

    @classmethod
    def from_pretrained(cls, name: str, override_args: dict | None = None) -> "GPT":
        """GPT-2's weights through transformers: 'gpt2', 'gpt2-medium', ... or a local folder.

        override_args: fields of GPTConfig that do not change the weights' shapes (dropout, attention, ...).
        Raises ValueError for another model, ImportError without transformers, OSError without the weights.
        """
        known = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
        if name not in known and not os.path.isdir(name):
            raise ValueError(f"{name!r} is none of {', '.join(known)}, nor a local folder")
        try:
            from transformers import GPT2LMHeadModel
        except ImportError:
            raise ImportError("GPT-2's weights come through transformers: pip install transformers") from None
        try:
            theirs = GPT2LMHeadModel.from_pretrained(name)
        except OSError as error:
            raise OSError(f"cannot load {name} through transformers: {str(error).splitlines()[0]}") from None
        c = theirs.config
        activations = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
        if c.model_type != "gpt2" or c.activation_function not in activations or c.n_inner not in (None, 4 * c.n_embd):
            raise ValueError(f"{name} is no GPT-2: {c.model_type}, {c.activation_function}, n_inner={c.n_inner}")
        args = {"block_size": c.n_positions, "vocab_size": c.vocab_size, "mlp": activations[c.activation_function]}
        args |= {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "bias": True}
        model = cls(GPTConfig(**args | (override_args or {})))
        state = theirs.state_dict()
        for key, ours in model.state_dict().items():
            transposed = key.endswith(("attn.c_attn.weight", "c_proj.weight", "c_fc.weight"))  # Conv1D
            ours.copy_(state[key].T if transposed else state[key])
        return model

    @classmethod
    def from_checkpoint(cls, checkpoint: dict, **overrides) -> "GPT":
        """The model of a checkpoint of train.py's, or of nanoGPT's, as checkpoint.load gives it."""
        known = {field.name for field in fields(GPTConfig)}
        if unknown := set(checkpoint["model_args"]) - known:
            raise ValueError(f"the checkpoint's model has fields unknown here: {', '.join(sorted(unknown))}")
        model = cls(GPTConfig(**checkpoint["model_args"] | overrides))
        try:
            model.load_state_dict(checkpoint["model"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint's weights do not fit its model: {str(error).splitlines()[-1]}") from None
        return model

    @torch.no_grad()
    def stream(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | None = None,
        vocab_size: int | None = None,
        seed: int | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yields one new token per row, (B, 1), up to max_new_tokens times, after the prompts idx (B, T).

        temperature: 0 is greedy. top_k: sample from the k most likely. top_p: from the fewest that hold
        this probability. stop: a token that ends its row (repeated until every row has ended).
        vocab_size: the tokenizer's; ids past it (padding) are never sampled. seed: of a generator of its
        own; None draws from torch's. The model sees the last block_size tokens.
        Raises ValueError for an empty prompt or an impossible argument.
        """
        if idx.shape[1] == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        if not temperature >= 0 or not (top_k is None or top_k >= 1) or not (top_p is None or 0 < top_p <= 1):
            raise ValueError(
                f"sampling needs temperature >= 0, top_k >= 1 and 0 < top_p <= 1; got {temperature}, {top_k}, {top_p}"
            )
        generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        ended = torch.zeros(len(idx), 1, dtype=torch.bool, device=idx.device)
        for _ in range(max_new_tokens):
            idx = idx[:, -self.config.block_size :]
            logits = self(idx)[0][:, -1].float()[:, :vocab_size]  # (B, V)
            token = _sample(logits, temperature, top_k, top_p, generator)
            if stop is not None:
                token = torch.where(ended, stop, token)
                ended = ended | (token == stop)
            idx = torch.cat((idx, token), dim=1)
            yield token
            if stop is not None and ended.all():
                return

    def generate(self, idx: torch.Tensor, max_new_tokens: int, *args, **kwargs) -> torch.Tensor:
        """The prompts idx (B, T) and what `stream`, which takes the same arguments, adds to them."""
        return torch.cat((idx, *self.stream(idx, max_new_tokens, *args, **kwargs)), dim=1)


def _sample(logits, temperature, top_k, top_p, generator):
    """One token per row, (B, 1), from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0, whatever the temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, [-1]]
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        ranked, order = probs.sort(descending=True)
        beyond = ranked.cumsum(-1) - ranked >= top_p  # what came before already holds top_p
        probs = probs.scatter(-1, order, ranked.masked_fill(beyond, 0.0))
    return torch.multinomial(probs, 1, generator=generator)
