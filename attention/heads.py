"""The heads of a layer in two groups, short and long, and the code that each group runs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.forms import form_of
from attention.scores import has_argument


class HeadGroup:
    """The short heads of a layer or its long ones, and the heads of keys and values that they need.

    c: a model.GPTConfig with its defaults filled in. heads: their numbers in the layer. is_short:
    whether they have a window. definition: their attention. schemes: the positions.Schemes that act
    on their q and k. With grouped queries, neighbouring query heads share a key and a value. With
    differential attention heads 2i and 2i + 1 have a key each, and one value together.

    form: the function that the group runs, chosen here, once; form_name says in words which it is.
    sums: the running sums that a cache keeps of the group; None: it keeps keys and values. linear:
    the running sums that make training linear in time, or None. token_numbers: the module that
    makes the definition's numbers of tokens (positions.TokenNumbers), or None.
    """

    token_numbers = None

    def __init__(
        self, c, heads: list[int], is_short: bool, definition: Callable, schemes: Sequence = ()
    ):
        self.heads = heads
        self.window = c.window if is_short else None
        self.name = c.short_attention if is_short else c.attention
        self.definition = definition
        self.schemes = schemes
        n_map = 2 if c.differential else 1
        self.widths = c.head_dim, n_map * c.head_dim  # of a key and of a value
        queries_per_key = c.n_head // c.n_kv_head
        values = [h // n_map // queries_per_key for h in heads]
        keys = [h // n_map // queries_per_key * n_map + h % n_map for h in heads]
        self.q, _ = places(heads)
        self.k, self.k_of = places(keys)  # k_of, for each query head: which of the keys is its own
        self.v, self.v_of = places(values)
        # Such a definition gets the decay itself: ALiBi's extra dimensions would change q and k
        self.takes_decay = any(has_argument(definition, name) for name in ("fade", "q", "k"))
        self.choose_form(c)

    def choose_form(self, c) -> None:
        """Sets form, form_name, sums and linear for the definition and the schemes."""
        needs = {"dropout"} if c.attn_dropout else set()
        q = torch.zeros(1, len(self.heads), 1, c.head_dim)
        k = torch.zeros(1, len(set(self.k_of)), 1, c.head_dim)
        for scheme in self.schemes:
            q, k, arguments = scheme(q, k, self, 0)
            needs.update(arguments)
        self.form, self.form_name, self.sums = form_of(
            self.name, self.definition, window=self.window, needs=needs, tokens=c.block_size
        )
        self.linear = None
        if self.sums is not None:
            least = self.sums.linear_from(c.head_dim)
            if c.attn_dropout:
                self.form_name = "its definition in training, since attention weights are dropped"
            elif c.block_size < least:
                self.form_name = f"its definition in training, which is faster below {least} tokens"
            else:
                self.linear = self.sums

    def select(self, q, k, v):
        """The group's heads of a layer's q (B, H, T, D), k (B, G, T, D) and v.

        v (B, G / n_map, T, n_map D). Of all heads it is x itself: a slice costs a backward pass.
        """
        pairs = (q, self.q), (k, self.k), (v, self.v)
        return [x if heads == slice(0, x.shape[1]) else x[:, heads] for x, heads in pairs]

    def share(self, k: Tensor, v: Tensor):
        """Keys and values for each query head of the group, from those that `select` gave."""
        return per_head(k, self.k_of), per_head(v, self.v_of)


def places(heads: list[int]) -> tuple[slice | list[int], list[int]]:
    """(The different heads, the place of each head among them).

    Neighbours are a slice, since x[slice] is a view.
    """
    different = sorted(set(heads))
    span = slice(different[0], different[-1] + 1)
    neighbours = span.stop - span.start == len(different)
    return span if neighbours else different, [different.index(h) for h in heads]


def per_head(x: Tensor, heads: list[int]) -> Tensor:
    """For each query head h the head heads[h] of x (B, G, T, D): (B, H, T, D)."""
    G = x.shape[1]
    n = len(heads) // G
    if G == 1:  # MQA: a view, so that decoding copies no keys and values
        return x.expand(-1, n, -1, -1)
    if heads == [g for g in range(G) for _ in range(n)]:
        return x if n == 1 else x.repeat_interleave(n, dim=1)
    return x[:, heads]
