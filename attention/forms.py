"""Which form of an attention runs: its fast form, if that computes what the definition in model.py computes.

FAST has a function for each attention that can be made faster than `windowed` makes it: it takes the definition and
returns a fast form. fast_form(name, definition) compares the fast form with the definition, and returns it. If they
differ, the definition runs: your edit is never ignored.
"""

import ast
import functools
import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable

import torch

from attention.fast import CHUNK, fused_softmax, laser_by_exp, windowed
from attention.scores import at_least_float32, decayed, scores, spelled_out, visible
from attention.sums import LINEAR_FROM, Beta, Beta2, by_sums
from errors import note

SUMS = {"beta": Beta, "beta2": Beta2}  # the attentions whose past is a few running sums
FAST: dict[str, Callable] = {
    "softmax": fused_softmax,
    "laser": laser_by_exp,
    **{name: functools.partial(by_sums, kind) for name, kind in SUMS.items()},
}
# The fingerprint of the definition that each fast form was written for. tests/test_forms.py says how to renew it.
WRITTEN_FOR = {
    "softmax": "0a2759fda72e993e",
    "laser": "d7b23cdc0e49035f",
    "beta": "fb8d97c6206b3854",
    "beta2": "5713cf217bfc4cef",
}


@functools.cache
def fast_form(name: str, definition: Callable, whole: bool = False, short: bool = True) -> Callable:
    """The form of ATTENTION[name] that runs: FAST[name](definition) or, where there is none, windowed(definition).

    A form is used if it computes what the definition computes. Otherwise the definition runs, and a line says so.
    whole: the definition needs all queries and keys at once (model.WHOLE). short: whether there are short heads.
    """
    if name in FAST and unchanged(name, definition):
        return FAST[name](definition)
    if whole:
        return spelled_out(definition)
    general = windowed(definition)
    try:
        check_causal(name, definition)
    except Exception:  # a bug, or an attention for a fixed number of heads: the model's call will show the error
        return general
    return general if not short or alike_in_blocks(name, definition) else spelled_out(definition)


@functools.cache
def alike_in_blocks(name: str, definition: Callable) -> bool:
    """Whether `windowed` may cut this attention into blocks. If not, a line says so."""
    try:
        alike_there = same(windowed(definition), definition)
    except Exception:  # an error of the blocks: `check_causal` has called the definition as a whole, without one
        alike_there = False
    if not alike_there:
        note(f"attention={name!r}: outputs on blocks of a text differ from those on all of it: short heads cost T^2")
    return alike_there


@functools.cache
def unchanged(name: str, definition: Callable) -> bool:
    """Whether FAST[name] computes what the definition computes. If not, somebody has edited it, and a line says so.

    Comparing outputs cannot prove that two functions are equal. So the code of the definition, without comments and
    docstrings, must be the code that the fast form was written for, and the outputs must agree as well.
    """
    if fingerprint(definition) == WRITTEN_FOR[name] and same(FAST[name](definition), definition):
        return True
    note(f"attention={name!r}: its definition was edited, so the definition runs, not its fast form: more slowly")
    return False


def fingerprint(definition: Callable) -> str:
    """A checksum of the code of a definition and of the functions that it uses, without comments, docstrings, names.

    Empty if the code cannot be read, if another function wraps it, or if its file has other functions by these names.
    """
    codes, made_of = [], (scores, visible, at_least_float32, decayed)
    names = getattr(definition, "__globals__", {})
    if hasattr(definition, "__wrapped__") or any(names.get(f.__name__, f) is not f for f in made_of):
        return ""
    for function in (definition, *made_of):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):  # typed into an interpreter, or no function at all
            return ""
        if not isinstance(tree, ast.FunctionDef):  # a lambda
            return ""
        body = tree.body[1:] if ast.get_docstring(tree) else tree.body
        codes += [ast.unparse(part) for part in (*tree.decorator_list, tree.args, *body)]
    return hashlib.sha256("\n".join(codes).encode()).hexdigest()[:16]


@functools.cache
def check_causal(name: str, definition: Callable) -> None:
    """Prints a line, once, if a query's output changes when later tokens or earlier queries are left out."""
    T, n = 40, 25
    q, k, v, _ = (x.detach() for x in fixed_inputs(T))
    y = definition(q, k, v)
    first = definition(q[..., :n, :], k[..., :n, :], v[..., :n, :])
    last = definition(q[..., n:, :], k, v)
    if not alike(first, y[..., :n, :]) or not alike(last, y[..., n:, :]):
        note(
            f"attention={name!r}: a query's output changes with later tokens, or with their number. "
            "If it sees later tokens, its losses mean nothing"
        )


def same(fast: Callable, definition: Callable) -> bool:
    """Whether two attentions give the same outputs and gradients, in float64 on the CPU.

    The program's own random numbers stay as they are.
    """
    short, long = 2 * CHUNK + 2, LINEAR_FROM  # enough for blocks, and for running sums
    cases = [(long, {}), (short, {"window": 20, "scale": 0.3, "bias": True})]
    if takes(definition, "dropout"):
        cases.append((short, {"dropout": 0.3}))
    if takes(definition, "decay"):
        cases += [(long, {"decay": True}), (short, {"window": 20, "decay": True})]
    if takes(definition, "causal"):
        both_sides = {"causal": False, "seen": True}
        cases += [(long, both_sides), (short, {"window": 20} | both_sides)]
    for T, settings in cases:
        found = []
        for attend in (fast, definition):
            with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                q, k, v, dy = fixed_inputs(T)
                made = {"bias": (q @ k.mT).detach(), "decay": q.detach()[0, :, :1, :1].abs().requires_grad_()}
                made["seen"] = (torch.arange(T, device="cpu") % 3 != 1).view(1, 1, 1, T)
                x = (q, k, v, *([made["decay"]] if "decay" in settings else []))
                y = attend(q, k, v, **{name: made.get(name, value) for name, value in settings.items()})
                found.append((y, *torch.autograd.grad(y, x, dy, allow_unused=True, materialize_grads=True)))
        if not all(alike(a, b) for a, b in zip(*found, strict=True)):
            return False
    return True


def fixed_inputs(T: int) -> list[torch.Tensor]:
    """q, k (1, 2, T, 4), v and dy (1, 2, T, 3), which look random, to compare attentions with. Scores go up to 50."""
    x = torch.arange(1, 28 * T + 1, dtype=torch.float64, device="cpu").square().mul(0.37).sin()
    q, k, v, dy = (part.view(1, 2, T, -1) for part in x.split((8 * T, 8 * T, 6 * T, 6 * T)))
    return [part.detach().requires_grad_() for part in (10 * q, 3 * k, v, dy)]


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal but for the rounding of float64."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-9 * max(1.0, b.abs().max().item()))


@functools.cache
def linear_in_values(definition: Callable) -> bool:
    """Whether y is linear in v, as an attention must be for values by distance (ByDistance.v)."""
    q, k, v, other = (x.detach() for x in fixed_inputs(9))
    try:
        return alike(definition(q, k, v + other), definition(q, k, v) + definition(q, k, other))
    except Exception:  # a bug, or an attention for a fixed number of heads: the model's call will show the error
        return True


@functools.cache
def takes(definition: Callable, argument: str) -> bool:
    """Whether an attention's function takes this argument: `dropout` if it can drop weights, `decay` if they decay."""
    return argument in inspect.signature(definition).parameters


def linear(config: object) -> bool:
    """Whether training a GPTConfig takes linear time in long heads: by running sums, if nothing needs the weights."""
    c = config.resolved()
    least = SUMS[c.attention].linear_from(c.head_dim) if c.attention in SUMS else math.inf
    return not c.long_bias and c.block_size >= least and not c.attn_dropout
