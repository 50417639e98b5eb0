"""What every file may raise or say. A user's mistake is a sentence; any other error is a bug, with its traceback."""

import importlib
import os
import sys
import types
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the user's, raised on purpose: the scripts print its sentence and exit with code 2."""


class NotFinite(UserError):
    """A NaN or an infinity where a model or its loss should have numbers: the training has diverged."""


def refuse(rules: Iterable[tuple[bool, str]]) -> None:
    """Raises UserError with the sentence of the first of (what is wrong, the sentence) that is wrong."""
    for wrong, sentence in rules:
        if wrong:
            raise UserError(sentence)


def note(message: str) -> None:
    """Prints a line on stderr; of the processes that torchrun starts on a machine, the first one speaks for all."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Of an error's message, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


PIP = {"PIL": "pillow", "google": "protobuf", "sklearn": "scikit-learn"}  # packages with another name in pip


def optional(module: str, what: str) -> types.ModuleType:
    """An optional module, imported. Raises UserError where its package is missing: `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        name = PIP.get(package, package)
        raise UserError(f"{what} needs {name}: pip install {name}") from None
