"""A user's mistake is a sentence. Any other error is a bug and keeps its traceback."""

import importlib
import os
import sys
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the user: the scripts print its sentence and exit with code 2."""


class NotFinite(UserError):
    """A NaN or an infinity in a model or its loss: the training has diverged."""


def refuse(rules: Iterable[tuple]) -> None:
    """Raise UserError for the first rule (wrong, sentence) that is wrong, with its sentence."""
    for wrong, sentence in rules:
        if wrong:
            raise UserError(sentence)


def note(message: str) -> None:
    """Print a line on stderr; on each machine only the first of torchrun's processes prints it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def optional(module: str, what: str) -> object:
    """Import and return an optional module, which `what` needs. Raises UserError without it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        raise UserError(f"{what} needs {name}: pip install {name} ({error})") from None
