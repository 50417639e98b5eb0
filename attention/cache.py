"""The cache of decoding: what a model keeps of the tokens that it has seen.

Long heads keep all keys and values, short heads those of the last `window` tokens. Long heads of
beta and beta_squared keep running sums instead, if these are smaller. A short convolution keeps its
last inputs, and a layer of your own its state. GPT.new_cache() makes a Cache.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from attention.heads import HeadGroup
from attention.scores import plain_form
from attention.sums import linear_attention


class KeyValues:
    """Keeps the keys and values of all tokens or, with a window, of the last `window`."""

    def __init__(self, window: int | None, capacity: int):
        self.window = window
        self.capacity = capacity
        self.n = 0
        self.k = None
        self.v = None

    def attend(self, group: HeadGroup, q, k, v, **settings) -> Tensor:
        """y (B, H, T, Dv) of the next T tokens, whose keys and values are kept."""
        self.k, k = self.extended(self.k, k)
        self.v, v = self.extended(self.v, v)
        self.n += q.shape[-2]
        if "bias" in settings:  # it has a number for every key so far
            settings["bias"] = settings["bias"][..., -k.shape[-2] :]
        k, v = group.share(k.to(q.dtype), v.to(q.dtype))
        return group.form(q, k, v, **settings)

    def extended(self, kept: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
        """(What to keep of keys or values, all that the new tokens see), (B, G, tokens, D) each."""
        if self.window is None:  # the memory for `capacity` tokens is taken once
            if kept is None:
                kept = new.new_empty(*new.shape[:2], self.capacity, new.shape[-1])
            end = self.n + new.shape[-2]
            kept[:, :, self.n : end] = new
            return kept, kept[:, :, :end]
        if kept is not None:
            new = torch.cat((kept, new), dim=-2)  # (B, G, window + T, D)
        start = max(0, new.shape[-2] - self.window)
        return new[:, :, start:].clone(), new  # a view would keep the memory of all of `new`


class RunningSums:
    """The running sums of beta or beta_squared (sums.py): all that long heads need of the past."""

    def __init__(self, sums: type):
        self.sums = sums
        self.state = None

    def attend(self, group: HeadGroup, q, k, v, **settings) -> Tensor:
        """y (B, H, T, Dv) of the next T tokens, which are added to the sums."""
        k, v = group.share(k, v)
        y, self.state = linear_attention(self.sums, q, k, v, state=self.state, **settings)
        return y


def new_part(group: HeadGroup, capacity: int) -> KeyValues | RunningSums:
    """What a cache keeps of a group: keys and values or, if they are smaller, running sums."""
    if group.sums is None or group.sums.state_size(*group.widths) > capacity * sum(group.widths):
        return KeyValues(group.window, capacity)
    return RunningSums(group.sums)


def groups_of(model: nn.Module) -> list[HeadGroup]:
    """The groups of heads of all layers of a GPT. A layer that is a class of its own has none."""
    return [group for block in model.transformer.h for group in getattr(block.attn, "groups", ())]


def why_it_ends(model: nn.Module) -> str | None:
    """Why a GPT's cache cannot go on past block_size; None if it can, at constant cost."""
    groups = groups_of(model)
    for block in model.transformer.h:
        if not (hasattr(block.attn, "groups") or getattr(block.attn, "endless", False)):
            return f"a layer of {type(block.attn).__name__} is not for endless texts"
    for group in groups:
        if group.window is None and group.sums is None:
            return f"long heads of attention={group.name!r} keep all keys and values"
    endless = all(scheme.endless for group in groups for scheme in group.schemes)
    if "wpe" in model.transformer or not endless:
        return f"position={model.config.position!r} is not for endless texts"
    return None


def run_definitions(model: nn.Module) -> None:
    """Makes a GPT run the definitions of its attentions instead of fast forms (--plain).

    From then on its caches keep all keys and values.
    """
    for group in groups_of(model):
        group.form = plain_form(group.definition)
        group.form_name = "its definition, on all tokens at once"
        group.sums = None
        group.linear = None


class Cache:
    """What all groups of heads of a model keep of the `length` tokens that it has seen.

    capacity: the most tokens that it can hold, in each row of the batch.
    """

    def __init__(self, groups: list[HeadGroup], capacity: int):
        self.capacity = capacity
        self.length = 0
        self.rows = 0
        self.broken = False
        self.parts = {group: new_part(group, capacity) for group in groups}
        self.state = {}  # {a module: a tensor, what it keeps of the past}

    def attend(self, group: HeadGroup, q, k, v, **settings) -> Tensor:
        """y (B, H, T, Dv) of a group's next T tokens, which its part of the cache keeps."""
        return self.parts[group].attend(group, q, k, v, **settings)

    @contextlib.contextmanager
    def extended(self, B: int, T: int) -> Iterator[None]:
        """A context in which a forward pass adds T tokens to B rows, without gradients.

        Raises ValueError if they do not fit.
        """
        if self.broken:
            raise ValueError(
                "the last forward pass with this cache did not finish: make another one with "
                "new_cache()"
            )
        if self.length + T > self.capacity:
            raise ValueError(
                f"{self.length} + {T} tokens do not fit into a cache of {self.capacity}"
            )
        if self.length and B != self.rows:
            raise ValueError(
                f"the cache is for a batch of {self.rows}, but the new tokens are a batch of {B}"
            )
        self.broken = True  # until the pass has finished
        with torch.no_grad():
            yield
        self.broken = False
        self.rows = B
        self.length += T

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        kept = [self.state, *map(vars, self.parts.values())]
        return sum(x.nbytes for part in kept for x in part.values() if isinstance(x, Tensor))
