"""Which form of an attention runs: its fast form, as long as its definition is the one that it was made for.

FAST has a function for each attention that can be made faster than `general_form` makes it: it takes the definition
and returns a fast form. tests/test_forms.py compares each with its definition. If you edit the definition, your code
runs, and a line says so: nobody's edit is ignored.
"""

import ast
import functools
import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable

import torch

from attention.fast import CHUNK, fused_softmax, general_form, in_blocks, laser_by_exp
from attention.scores import plain_form
from attention.sums import SUMS, by_sums
from errors import first_line, note

FAST: dict[str, Callable] = {
    "softmax": fused_softmax,
    "laser": laser_by_exp,
    **{name: functools.partial(by_sums, kind) for name, kind in SUMS.items()},
}
# The fingerprint of the definition that each fast form was written for. tests/test_forms.py says how to renew it.
WRITTEN_FOR = {
    "softmax": "b8b89c879aa63feb",
    "laser": "967b3e79eef92af7",
    "beta": "080655bbb0644642",
    "beta_squared": "6eb552cbdb090e17",
}
SUSPECTS: list[str] = []  # names of attentions that may see later tokens


@functools.cache
def fast_form(name: str, definition: Callable) -> Callable:
    """The form of ATTENTION[name] that runs: attend(q, k, v, ...), with the arguments of scores.plain_form's."""
    if unchanged(name, definition):
        return FAST[name](definition)
    try:
        return general_form(definition) if is_row_local(name, definition) else plain_form(definition)
    except Exception as error:  # of float64, few queries or blocks alone: the model's call may not show it
        note(f"attention={name!r}: whether it sees later tokens could not be tried ({first_line(error)})")
        return plain_form(definition)


@functools.cache
def unchanged(name: str, definition: Callable) -> bool:
    """Whether there is a fast form of ATTENTION[name], written for this definition. A line says if it was edited."""
    if name not in FAST or fingerprint(definition) == WRITTEN_FOR[name]:
        return name in FAST
    note(f"attention={name!r}: its definition was edited, so the definition runs, not its fast form: more slowly")
    return False


def fingerprint(definition: Callable) -> str:
    """A checksum of a definition's code, without its name, comments and docstring; empty if it cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(definition))).body[0]
    except (OSError, TypeError, SyntaxError):  # typed into an interpreter, or no function at all
        return ""
    if hasattr(definition, "__wrapped__") or not isinstance(tree, ast.FunctionDef):  # another function; a lambda
        return ""
    body = tree.body[1:] if ast.get_docstring(tree) else tree.body
    code = "\n".join(ast.unparse(part) for part in (*tree.decorator_list, tree.args, *body))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def is_row_local(name: str, definition: Callable) -> bool:
    """Whether an output depends only on its query and on the keys that it sees; if not, a line says so.

    It is found out by trying: without later tokens, without earlier queries, and in blocks.
    """
    plain, T, n = plain_form(definition), 2 * CHUNK + 2, 25
    q, k, v = fixed_inputs(T)
    y, short = plain(q, k, v), plain(q, k, v, window=20)
    first, last = plain(q[..., :n, :], k[..., :n, :], v[..., :n, :]), plain(q[..., n:, :], k, v)
    cost = "Short heads cost T^2, and text needs use_cache=False"
    if not alike(first, y[..., :n, :]) or not alike(last, y[..., n:, :]):
        what = "a query's output changes with later tokens, or with their number, or is not finite"
        SUSPECTS.append(name)
        note(f"attention={name!r}: {what}. If it sees later tokens, its losses mean nothing. {cost}")
        return False
    blocks_are_alike = alike(in_blocks(plain)(q, k, v, window=20), short)
    if not blocks_are_alike:
        note(f"attention={name!r}: outputs on blocks of a text differ from those on all of it. {cost}")
    return blocks_are_alike


def fixed_inputs(T: int) -> tuple[torch.Tensor, ...]:
    """q, k (1, 2, T, 4) and v (1, 2, T, 3) in float64, which look random, to try attentions. Scores go up to 50."""
    x = torch.arange(1, 22 * T + 1, dtype=torch.float64, device="cpu").square().mul(0.37).sin()
    q, k, v = (part.view(1, 2, T, -1) for part in x.split((8 * T, 8 * T, 6 * T)))
    return 10 * q, 3 * k, v


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal but for the rounding of float64."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-9 * max(1.0, b.abs().max().item()))


@functools.cache
def linear_in_values(definition: Callable) -> bool:
    """Whether y is linear in v, as an attention must be for values by distance (`far`)."""
    plain, (q, k, v) = plain_form(definition), fixed_inputs(9)
    other = v.flip(-2)
    return alike(plain(q, k, v + other), plain(q, k, v) + plain(q, k, other))


def linear(config: object) -> bool:
    """Whether training a GPTConfig takes linear time in long heads: by running sums, if nothing needs the weights."""
    c = config.resolved()
    least = SUMS[c.attention].linear_from(c.head_dim) if c.attention in SUMS else math.inf
    biased = c.scheme is not None and c.scheme.biased and not c.nope_long
    return not biased and c.block_size >= least and not c.attn_dropout
