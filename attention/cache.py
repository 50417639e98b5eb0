"""The cache of decoding: what a model keeps of the tokens that it has seen.

Long heads keep all keys and values, short heads only the last window + 1. Long heads of beta keep running sums
instead. GPT.new_cache() makes a Cache of all groups.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from attention.fast import alike, beta_linear, fixed_inputs, scaled, unchanged
from attention.heads import HeadGroup
from attention.scores import at_least_float32
from configurator import note


class KeyValues:
    """Keeps the keys and values of all tokens or, with a window, of the last window + 1. Works for any attention."""

    def __init__(self, window: int | None, capacity: int):
        self.window, self.capacity = window, capacity
        self.n, self.k, self.v = 0, None, None

    def attend(self, core: Callable, group: HeadGroup, q, k, v, **settings) -> torch.Tensor:
        """y (B, H, T, Dv) of the next T tokens, whose keys and values are kept."""
        k, v = self.with_all(k, v) if self.window is None else self.with_last(k, v)
        return core(q, *group.share(k.to(q.dtype), v.to(q.dtype)), **settings)

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


class BetaSums:
    """[S | G], the running sums of beta (fast.beta_by_sums): all that its long heads need of the past, however long."""

    def __init__(self, window: None, capacity: int):
        self.state = None

    def attend(self, core: Callable, group: HeadGroup, q, k, v, *, window=None, scale=None, bias=None, dropout=0.0):
        """y (B, H, T, Dv) of the next T tokens, which are added to the sums."""
        if dropout:
            raise ValueError("beta's running sums cannot drop attention weights: call eval() before decoding")
        if bias is not None:
            raise ValueError("beta's running sums cannot hold a bias: a Scheme that gives one must have scores = True")
        k, v = group.share(k, v)
        if self.state is None or q.shape[-2] > 1:
            y, self.state = beta_linear(q, k, v, scale=scale, state=self.state)
            return y
        with torch.autocast(q.device.type, enabled=False):  # one token: the equation of beta_by_sums itself
            q, k = scaled(q, scale), at_least_float32(k)
            self.state = self.state + k.mT * torch.cat((v, k), dim=-1)
            y, qG = (q @ self.state).split((v.shape[-1], k.shape[-1]), dim=-1)
            return (y / (1 + (q * qG).sum(-1, keepdim=True).clamp(min=0).sqrt())).to(v.dtype)


# The attentions whose long heads need less than all keys and values.
CACHE: dict[str, Callable] = {"beta": BetaSums}


@functools.cache
def cache_form(name: str, definition: Callable) -> Callable:
    """The cache class of long heads without a bias: CACHE[name] if it agrees with the definition, else KeyValues."""
    if name not in CACHE or not unchanged(name, definition):
        return KeyValues

    def decoded(q, k, v, **settings):
        group, kept = HeadGroup([0, 1], 1, 1, None), CACHE[name](None, q.shape[-2])
        sizes = (5, 1, 1, q.shape[-2] - 7)
        parts = zip(q.split(sizes, dim=-2), k.split(sizes, dim=-2), v.split(sizes, dim=-2), strict=True)
        return torch.cat([kept.attend(definition, group, *part, **settings) for part in parts], dim=-2)

    q, k, v, _ = (x.detach() for x in fixed_inputs(20))
    for settings in ({}, {"scale": 0.3}):
        if not alike(decoded(q, k, v, **settings), definition(q, k, v, **settings)):
            note(f"attention={name!r}: its cache and its definition disagree, so decoding keeps all keys and values")
            return KeyValues
    return CACHE[name]


class Cache:
    """What a model keeps of the `length` tokens that it has seen, for up to `capacity` tokens in each of `rows` rows.

    layers: the model's attention layers, with their `groups` of heads and the `cache_form` of long ones.
    """

    def __init__(self, layers: list, capacity: int):
        self.capacity, self.length, self.rows, self.broken = capacity, 0, 0, False
        self.parts = {}
        for layer in layers:
            for group in layer.groups:
                kind = layer.cache_form if group.window is None else KeyValues
                self.parts[group] = kind(group.window, capacity)

    def attend(self, core: Callable, group: HeadGroup, q, k, v, **settings) -> torch.Tensor:
        """y (B, H, T, Dv) of a group's next T tokens, which its part of the cache keeps."""
        return self.parts[group].attend(core, group, q, k, v, **settings)

    @contextlib.contextmanager
    def extended(self, B: int, T: int) -> Iterator[None]:
        """A context in which a forward pass adds T tokens to each of B rows, without gradients.

        Raises ValueError if they do not fit.
        """
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
        kept = (x for part in self.parts.values() for x in vars(part).values())
        return sum(x.nbytes for x in kept if isinstance(x, torch.Tensor))
