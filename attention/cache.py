"""What a forward pass knows besides its tokens: nothing, or in decoding the tokens before them.

A Cache keeps this of each layer: long heads keep the keys and values of all tokens, short heads
those of the last `window` tokens; long heads of beta and beta_squared keep running sums instead,
where these are smaller. A short convolution keeps its last inputs, and a layer of your own its
state. GPT.new_cache() makes a Cache.
"""

import collections
import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from attention.forms import Heads
from attention.scores import plain_form
from attention.sums import linear_attention


class Context:
    """The context of a forward pass over a whole text, and the base of others.

    kept: what a layer keeps for the layers after it, in this forward pass. length: the number of
    tokens before x.
    """

    length = 0

    def __init__(self):
        self.kept = {}

    @property
    def state(self) -> dict:
        """{a module: a tensor}, what modules keep of the tokens before x; here always empty.

        What is written into it is lost: with activation checkpointing a block runs twice.
        """
        return {}

    def adding(self, B: int, T: int) -> contextlib.AbstractContextManager:
        """Around a forward pass of T tokens in B rows. A Cache counts its tokens here."""
        return contextlib.nullcontext()

    def positions(self, x: Tensor) -> Tensor:
        """The positions of the tokens x (B, T, C): (T), or (B, T)."""
        return torch.arange(self.length, self.length + x.shape[1], device=x.device)

    def placed(self, scheme, q, k, heads) -> tuple:
        """(q, k, arguments) of a parts.Scheme, which knows the tokens' positions."""
        return scheme(q, k, heads, self.length)

    def earlier(self, module: nn.Module, x: Tensor, n: int) -> list[Tensor]:
        """[x_(t - 1), ..., x_(t - n)] of what a module gets, x (B, T, C); 0 before the first."""
        B, T, C = x.shape
        before = self.state.get(module, x.new_zeros(B, n, C))
        padded = torch.cat((before, x), dim=1)  # (B, n + T, C)
        self.state[module] = padded[:, T:].clone()  # a view would keep all of x
        return [padded[:, n - offset : -offset] for offset in range(1, n + 1)]

    def attend(self, heads: Heads, q, k, v, **settings) -> Tensor:
        """y (B, H, T, D) of some heads: q (B, H, T, D), k and v (B, G, T, D)."""
        return heads.run(q, heads.expand(k), heads.expand(v), **settings)


class Cache(Context):
    """What a GPT keeps of the `length` tokens that it has seen, in each row of a batch.

    capacity: the most tokens that it can hold. parts: what it keeps of some Heads, by name: their
    keys k and values v, or their running sums.
    """

    state = None  # an attribute here

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.state = {}
        self.parts = collections.defaultdict(dict)

    def attend(self, heads: Heads, q, k, v, **settings) -> Tensor:
        """y (B, H, T, D) of the next T tokens of some heads, which are kept."""
        kept = self.parts[heads]
        if not heads.sums or heads.sums.tokens(q.shape[-1]) * heads.n > self.capacity * k.shape[1]:
            k = self.extended(kept, "k", k, heads.window).to(k.dtype)
            v = self.extended(kept, "v", v, heads.window).to(v.dtype)
            return super().attend(heads, q, k, v, **settings)

        settings.pop("dropout", None)  # running sums drop no weights
        y, kept["sums"] = linear_attention(
            heads.sums, q, heads.expand(k), heads.expand(v), state=kept.get("sums"), **settings
        )
        return y

    def extended(self, kept: dict, name: str, new: Tensor, window: int | None) -> Tensor:
        """All keys or values that the new tokens see, (B, G, tokens, D); the last are kept."""
        # long heads: the memory for all tokens is taken once
        if window is None:
            if name not in kept:
                kept[name] = new.new_empty(*new.shape[:2], self.capacity, new.shape[-1])
            end = self.length + new.shape[-2]
            kept[name][:, :, self.length : end] = new
            return kept[name][:, :, :end]

        # short heads: a view of the last tokens would keep the memory of all of them
        if name in kept:
            new = torch.cat((kept[name], new), dim=-2)  # (B, G, window + T, D)
        kept[name] = new[:, :, max(0, new.shape[-2] - window) :].clone()
        return new

    @contextlib.contextmanager
    def adding(self, B: int, T: int) -> Iterator[None]:
        """A context in which a forward pass adds T tokens to B rows, without gradients.

        Raises ValueError if they do not fit. After another error the cache is of no use.
        """
        if self.length == 0:
            self.rows = B
        if self.length + T > self.capacity or B != self.rows:
            raise ValueError(
                f"{self.length} + {T} tokens do not fit into a cache of {self.capacity}, "
                f"or {B} rows into one of {self.rows}"
            )
        with torch.no_grad():
            yield
        self.length += T

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(x.nbytes for kept in (self.state, *self.parts.values()) for x in kept.values())


# -----------------------------------------------------------------------------
# the heads of a whole model


def heads_of(model: nn.Module) -> list[Heads]:
    """The short and the long heads of all layers of a GPT. A layer that is no subclass of
    CausalSelfAttention has none.
    """
    return [heads for block in model.transformer.h for heads in getattr(block.attn, "heads", ())]


def why_it_ends(model: nn.Module) -> str | None:
    """Why a GPT's cache cannot go on past block_size; None if it can, at constant cost."""
    if "wpe" in model.transformer:
        return f"position={model.config.position!r} is not for endless texts; --position=none is"
    for block in model.transformer.h:
        if not getattr(block.attn, "endless", False):
            return f"a layer of {type(block.attn).__name__} is not for endless texts"
    for heads in heads_of(model):
        if heads.window is None and not heads.sums:
            return f"long heads of attention={heads.name!r} keep all keys and values"


def run_definitions(model: nn.Module) -> None:
    """Makes a GPT run the definitions of its attentions instead of fast code (--plain).

    From then on its caches keep keys and values, and no running sums.
    """
    for heads in heads_of(model):
        heads.run = plain_form(heads.definition)
        heads.words = "its definition, on all tokens at once"
        heads.sums = None
