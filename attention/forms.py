"""Which code the heads of a layer run: fast code, if their definition is what it was written for.

FORM has the fast code of attentions. If you edit a definition, a function that it calls, or
scores.py, your code runs, and a line says so: nobody's edit is ignored. tests/test_forms.py
compares each form with its definition, and prints the checksums anew.
"""

import ast
import hashlib
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from attention import scores
from attention.fast import by_rows, general_form, laser_by_exp, sdpa, windowed
from attention.scores import asked_by, has_argument, learned, of_token
from attention.sums import BETA, BETA_SQUARED, Sums, by_sums
from errors import note, refuse


@dataclass
class Form:
    """The fast code of an attention.

    long, short: make(definition) -> attend(q, k, v, *, scale, ...), as scores.plain_form describes
    it, for long heads and for short ones (with window); None: the general form.
    """

    written_for: str  # code_of(its definition)
    words: str  # which code it is, for the first lines of a run
    long: Callable | None = None
    short: Callable | None = None
    sums: Sums | None = None  # the running sums of long heads, which a cache keeps


FORM: dict[str, Form] = {
    "softmax": Form(
        written_for="9f1ac299e169a0bd",
        words="PyTorch's fused attention",
        long=lambda definition: sdpa,
        short=lambda definition: windowed,
    ),
    "laser": Form(
        written_for="5c72199ff6e615a7",
        words="expm1 and log1p around PyTorch's fused attention",
        long=partial(laser_by_exp, sdpa),
        short=partial(laser_by_exp, windowed),
    ),
    "beta": Form(
        written_for="85232c70f067c203",
        words="running sums, for few tokens its definition",
        long=partial(by_sums, BETA),
        sums=BETA,
    ),
    "beta_squared": Form(
        written_for="a7fb26fbc9631513",
        words="running sums, for few tokens its definition",
        long=partial(by_sums, BETA_SQUARED),
        sums=BETA_SQUARED,
    ),
}

# -----------------------------------------------------------------------------
# has a definition been edited?


def code_of(definition: Callable) -> str:
    """A checksum of a definition's code and of scores.plain_form, which calls it.

    With all functions of their own files that they call. Names of functions, comments and
    docstrings do not count. Empty if the code cannot be read.
    """
    code = []
    left = [definition, scores.plain_form]
    for function in left:
        tree = _tree(function)

        # unreadable, another function around it, a class or a lambda
        is_wrapped = hasattr(function, "__wrapped__") or getattr(function, "__closure__", None)
        if is_wrapped or not isinstance(tree, ast.FunctionDef):
            return ""
        body = tree.body[1:] if ast.get_docstring(tree) else tree.body
        code += [ast.unparse(part) for part in (*tree.decorator_list, tree.args, *body)]

        # the functions of its own file that it calls
        for node in ast.walk(tree):
            called = inspect.unwrap(function.__globals__.get(getattr(node, "id", ""), len))
            is_own = inspect.isfunction(called) and called.__module__ == function.__module__
            if is_own and called not in left:
                left.append(called)
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


@cache
def _tree(function):
    """The syntax tree of a function; None for no function, or one typed into an interpreter."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None


note_once = cache(note)

# -----------------------------------------------------------------------------
# the heads of a layer


class Heads:
    """The short heads of a layer or its long ones: which they are, and the code that they run.

    c: a model.GPTConfig with its defaults filled in. name: their attention's name, or the function
    itself. definition: the function. indices: their places among the letters of the layer, by
    which a position may tell them apart. position: the parts.Scheme that tells them the order of
    the tokens, or None.

    run: the code, as attend(q, k, v, ...). words: which code it is. sums: the running sums that a
    cache keeps of them; None: it keeps keys and values. takes_decay: whether the definition is
    given a decay: it has `fade`, `q` or `k`. For all others ALiBi lowers the scores, by more
    dimensions of q and k. scalars, of_tokens: the trained numbers that its arguments ask for.
    """

    def __init__(self, c, name, definition, window, indices, position=None):
        self.name = getattr(name, "__name__", name)
        self.has_position = position is not None
        wrap = getattr(position, "wrap", None)
        self.definition = wrap(definition) if wrap else definition
        self.window = window
        self.n = len(indices)
        self.indices = indices
        self.takes_decay = any(has_argument(definition, name) for name in ("fade", "q", "k"))
        self.scalars = asked_by(definition, learned)
        self.of_tokens = asked_by(definition, of_token)
        taken = self.scalars.keys() & "window scale decay dropout".split()
        refuse([(taken, f"attention={self.name!r}: no learned number may have the name {taken}")])

        # with grouped queries, r neighbours share a key and a value
        r = c.n_head // c.n_kv_head
        start = c.n_head - self.n if window is None else 0  # short heads come first
        stop = start + self.n
        self.queries = slice(start, stop)
        self.keys = slice(start // r, (stop - 1) // r + 1)
        self.queries_of_key = Counter(h // r for h in range(start, stop))  # {a key: how many}

        # the fast code, unless somebody has edited the definition
        form = FORM.get(name)
        if form and form.written_for != code_of(definition):
            note_once(
                f"attention={name!r}: its definition was edited, or attention/scores.py, so the "
                "definition runs, not its fast code: more slowly"
            )
            form = None
        make = form and (form.long if window is None else form.short)
        self.sums = None
        self.words = "its definition"
        if wrap:
            self.run = by_rows(self.definition)
        elif make:
            self.run = make(definition)
            self.words = form.words
            self.sums = form.sums if window is None else None
        else:
            self.run = general_form(definition)

    def select(self, q, k, v) -> list[Tensor]:
        """Their own heads of a layer's q (B, H, T, D), k and v (B, G, T, D).

        No slice where they are all heads: slicing copies in the backward pass.
        """
        return [
            x if part == slice(0, x.shape[1]) else x[:, part]
            for x, part in ((q, self.queries), (k, self.keys), (v, self.keys))
        ]

    def expand(self, x: Tensor) -> Tensor:
        """A key or a value for each of their query heads, from those that `select` gave."""
        if x.shape[1] == self.n:
            return x
        each = zip(x.split(1, dim=1), self.queries_of_key.values(), strict=True)
        parts = [head.expand(-1, n, -1, -1) for head, n in each]
        # of a single head a view: decoding copies no keys and values
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
