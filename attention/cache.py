"""The cache of decoding: what a model keeps of the tokens that it has seen.

Long heads keep all keys and values, short heads only the last window + 1. Long heads of beta and beta_squared keep
running sums instead, if these are smaller. A short convolution keeps its last inputs. GPT.new_cache() makes a Cache.
"""

import contextlib
from collections.abc import Iterator

import torch

from attention.heads import HeadGroup
from attention.scores import at_least_float32, plain_form
from attention.sums import linear_attention, scaled


class KeyValues:
    """Keeps the keys and values of all tokens or, with a window, of the last window + 1. Works for any attention."""

    def __init__(self, window: int | None, capacity: int):
        self.window, self.capacity = window, capacity
        self.n, self.k, self.v = 0, None, None

    def attend(self, group: HeadGroup, q, k, v, *, bias=None, **settings) -> torch.Tensor:
        """y (B, H, T, Dv) of the next T tokens, whose keys and values are kept."""
        k, v = self.with_all(k, v) if self.window is None else self.with_last(k, v)
        bias = None if bias is None else bias[..., -k.shape[-2] :]  # it has a number for every key so far
        return group.attend(q, k.to(q.dtype), v.to(q.dtype), bias=bias, **settings)

    def with_all(self, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the new k and v, in memory for `capacity` tokens; returns all keys and values so far."""
        if self.k is None:
            self.k = k.new_empty(*k.shape[:2], self.capacity, k.shape[-1])
            self.v = v.new_empty(*v.shape[:2], self.capacity, v.shape[-1])
        end = self.n + k.shape[-2]
        self.k[:, :, self.n : end] = k
        self.v[:, :, self.n : end] = v
        self.n = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def with_last(self, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the last `window` keys and values and the new ones; keeps the last window + 1 of them."""
        new = k.shape[-2]
        if self.k is not None:
            at = max(0, self.k.shape[-2] - self.window)
            k = torch.cat((self.k[:, :, at:].to(k.dtype), k), dim=-2)
            v = torch.cat((self.v[:, :, at:].to(v.dtype), v), dim=-2)
        at = max(0, k.shape[-2] - self.window - 1)
        self.k, self.v = k[:, :, at:], v[:, :, at:]
        if new > 1:  # a copy, so that the memory of a long prompt is freed
            self.k, self.v = self.k.clone(), self.v.clone()
        return k, v


class RunningSums:
    """The state of beta or beta_squared (attention/sums.py): all that long heads need of the past, however long."""

    def __init__(self, kind: type):
        self.kind, self.state = kind, None

    def attend(self, group: HeadGroup, q, k, v, *, window=None, scale=None, decay=None, dropout=0.0):
        """y (B, H, T, Dv) of the next T tokens, which are added to the sums. They hold no window and no bias."""
        if dropout:
            raise ValueError("running sums cannot drop attention weights: call eval() before decoding")
        k, v = group.share(k, v)
        if self.state is None or q.shape[-2] > 1:
            y, self.state = linear_attention(self.kind, q, k, v, scale=scale, decay=decay, state=self.state)
            return y
        with torch.autocast(q.device.type, enabled=False):
            one = scaled(q, scale), at_least_float32(k), at_least_float32(v)
            y, self.state = self.kind.one_token(*one, decay, self.state)
        return y.to(v.dtype)


def new_part(group: HeadGroup, capacity: int) -> KeyValues | RunningSums:
    """What a cache keeps of a group of heads: keys and values or, if they are smaller, running sums."""
    if group.sums is not None and group.sums.state_size(*group.widths) <= capacity * sum(group.widths):
        return RunningSums(group.sums)
    return KeyValues(group.window, capacity)


def why_it_ends(model: torch.nn.Module) -> str | None:
    """Why a GPT's cache cannot go on past block_size; None if it can, with constant memory and speed."""
    groups = [group for block in model.transformer.h for group in block.attn.groups]
    for group in groups:
        if group.window is None and group.sums is None:
            return f"long heads of attention={group.name!r} keep all keys and values"
    schemes = [scheme for group in groups for scheme in group.schemes]
    if "wpe" in model.transformer or not all(scheme.endless for scheme in schemes):
        return f"position={model.config.position!r} is not for endless texts"
    return None


def run_definitions(model: torch.nn.Module) -> None:
    """Makes a GPT run the definitions of its attentions, not fast forms, and keep all keys and values (--plain)."""
    for group in (group for block in model.transformer.h for group in block.attn.groups):
        group.core, group.sums = plain_form(group.definition), None


class Cache:
    """What all groups of heads of a model keep of the `length` tokens that it has seen; at most `capacity`, per row."""

    def __init__(self, groups: list[HeadGroup], capacity: int):
        self.capacity, self.length, self.rows, self.broken = capacity, 0, 0, False
        self.parts = {group: new_part(group, capacity) for group in groups}
        self.last = {}  # {a short convolution: its inputs of the last tokens}

    def attend(self, group: HeadGroup, q, k, v, **settings) -> torch.Tensor:
        """y (B, H, T, Dv) of a group's next T tokens, which its part of the cache keeps."""
        return self.parts[group].attend(group, q, k, v, **settings)

    def before(self, conv: object, x: torch.Tensor, n: int) -> torch.Tensor:
        """The inputs (B, n, C) of a short convolution for the n tokens before x (B, T, C), whose last n are kept."""
        x = torch.cat((self.last.get(conv, x.new_zeros(len(x), n, x.shape[-1])), x), dim=1)
        self.last[conv] = x[:, x.shape[1] - n :].clone()  # not -n: for n = 0 it would keep all
        return x[:, :n]

    @contextlib.contextmanager
    def extended(self, B: int, T: int) -> Iterator[None]:
        """In this context a forward pass adds T tokens to B rows, without gradients. ValueError if they do not fit."""
        if self.broken:
            raise ValueError("the last forward pass with this cache did not finish: make another one with new_cache()")
        if self.length + T > self.capacity:
            raise ValueError(f"{self.length} + {T} tokens do not fit into a cache of {self.capacity}")
        if self.length and B != self.rows:
            raise ValueError(f"the cache is for a batch of {self.rows}, but the new tokens are a batch of {B}")
        self.broken = True
        with torch.no_grad():
            yield
        self.broken, self.rows, self.length = False, B, self.length + T

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        kept = [x for part in self.parts.values() for x in vars(part).values()] + [*self.last.values()]
        return sum(x.nbytes for x in kept if isinstance(x, torch.Tensor))
