"""Which code an attention runs: its fast form, while its definition is the one it was made for.

FORM has a record for each attention that can be made faster than `general_form` makes it. If you
edit the definition, or scores() or visible(), your code runs, and a line says so: nobody's edit is
ignored. tests/test_forms.py compares each form with its definition.
"""

import ast
import hashlib
import inspect
import textwrap
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch

from attention.fast import general_form, laser_by_exp, sdpa, windowed
from attention.scores import plain_form
from attention.sums import Beta, BetaSquared, by_sums
from attention.trial import is_row_local, works_in_blocks
from errors import note


@dataclass(frozen=True)
class Form:
    """The fast code of an attention.

    long, short: make(definition) -> attend(q, k, v, *, scale, ...), as scores.plain_form describes
    it, for long heads and for short ones (with window); None: the general form.
    """

    written_for: str  # fingerprint(its definition); tests/test_forms.py says how to renew it
    name: str  # of the code, for the first lines of a run
    long: Callable | None = None
    short: Callable | None = None
    arguments: tuple[str, ...] = ()  # of attend, besides scale and window
    sums: type | None = None  # its running sums (sums.py), which a cache can keep
    # (f, inner): f(y) = W f(v), with the weights W of the attention inner. LASER: exp(y) = W exp(v)
    linear_in: tuple[Callable, str] | None = None


FORM: dict[str, Form] = {
    "softmax": Form(
        written_for="07d39b51b8a4bf9f",
        name="PyTorch's fused attention",
        long=lambda definition: sdpa,  # it never needs the definition
        short=lambda definition: windowed,
        arguments=("bias", "dropout"),
    ),
    "laser": Form(
        written_for="9404a840506e40a8",
        name="exp and log around PyTorch's fused attention",
        long=partial(laser_by_exp, sdpa, fused=True),
        short=partial(laser_by_exp, windowed, fused=True),
        arguments=("bias",),
        linear_in=(torch.exp, "softmax"),
    ),
    "beta": Form(
        written_for="081180dc15324c9f",
        name="running sums",
        long=partial(by_sums, Beta),
        arguments=("decay", "dropout"),
        sums=Beta,
    ),
    "beta_squared": Form(
        written_for="f1c466aae466a8b5",
        name="running sums",
        long=partial(by_sums, BetaSquared),
        arguments=("decay", "dropout"),
        sums=BetaSquared,
    ),
}


@cache
def fingerprint(*functions: Callable) -> str:
    """A checksum of functions' code, and of the functions and numbers of their own files in it.

    Names of functions, comments and docstrings do not count. Empty if code cannot be read.
    """
    code = []
    left = list(functions)
    for function in left:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):  # typed into an interpreter, or no function
            return ""
        is_wrapped = hasattr(function, "__wrapped__") or getattr(function, "__closure__", None)
        if is_wrapped or not isinstance(tree, ast.FunctionDef):
            return ""  # another function around it, a class or a lambda
        body = tree.body[1:] if ast.get_docstring(tree) else tree.body
        code += [ast.unparse(part) for part in (*tree.decorator_list, tree.args, *body)]
        for name in function.__code__.co_names:
            called = function.__globals__.get(name)
            is_function = inspect.isfunction(called)
            if is_function and called.__module__ == function.__module__ and called not in left:
                left.append(called)
            elif isinstance(called, int | float | str):
                code.append(f"{name} = {called!r}")
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def print_of(definition: Callable) -> str:
    """The fingerprint of a definition together with the scores and the mask that it gets."""
    module = inspect.getmodule(plain_form)  # with scores and visible as they are now
    return fingerprint(definition, module.scores, module.visible)


def unchanged(name: str, definition: Callable) -> bool:
    """Whether FORM[name] was written for this definition, scores() and visible() as they are."""
    return name in FORM and FORM[name].written_for == print_of(definition)


note_once = cache(note)


def form_of(
    name: str,
    definition: Callable,
    *,
    window: int | None = None,
    needs: Iterable[str] = (),
    tokens: int = 0,
) -> tuple[Callable, str, type | None]:
    """(attend, which code it is, in words, its running sums) of ATTENTION[name].

    window: that of the heads. needs: the arguments that attend must take besides scale and window.
    tokens: the model's block_size, at which a definition without a fast form is tried. The running
    sums are None where a cache must keep keys and values.
    """
    windows = "" if window is None else " with a window"
    if unchanged(name, definition):
        form = FORM[name]
        make = form.long if window is None else form.short
        if make is not None and set(needs) <= set(form.arguments):
            return make(definition), form.name + windows, form.sums if window is None else None
    else:
        if name in FORM:
            note_once(
                f"attention={name!r}: its definition was edited, or scores() or visible(), so the "
                "definition runs, not its fast form: more slowly"
            )
        why_not = why_not_cut(definition, tokens, in_blocks=window is not None)
        if why_not:
            note_once(f"attention={name!r}: {why_not}")
            return plain_form(definition), "its definition, on all tokens at once", None
    return general_form(definition), "its definition" + windows, None


def why_not_cut(definition: Callable, tokens: int, in_blocks: bool) -> str | None:
    """Why the general form must not cut a text into parts; None if it may."""
    cost = "Short heads cost T^2, and text needs use_cache=False"
    try:
        if not is_row_local(definition, tokens):
            return (
                "a query's output changes with later tokens, or with their number, or is not "
                f"finite. If it sees later tokens, its losses mean nothing. {cost}"
            )
        if in_blocks and not works_in_blocks(definition, tokens):
            return f"outputs on blocks of a text differ from those on all of it. {cost}"
    except Exception:  # of float64 or few queries alone: the model's own call may not raise it
        return f"whether it sees later tokens could not be tried:\n{traceback.format_exc()}"
    return None
