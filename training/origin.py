"""What made a run: its command, the code of its attentions, the files that it imported, versions.

Checkpoints and logs keep it. A checksum of code ignores comments and layout, and an attention's
docstring.
"""

import ast
import contextlib
import hashlib
import inspect
import shlex
import subprocess
import sys
from collections.abc import Iterable

import torch

from attention.forms import code_of
from configurator import ROOT
from errors import note
from model import ATTENTION, GPTConfig
from parts import attentions


def imported() -> list[str]:
    """The modules that this process's flags --import= name."""
    return [arg.removeprefix("--import=") for arg in sys.argv if arg.startswith("--import=")]


def fingerprints(names: Iterable[str], modules: Iterable[str]) -> dict[str, str]:
    """{an attention or a module: a checksum of its code} of attentions and of imported modules.

    An attention's covers attention/scores.py as well. It is empty for a class.
    """
    code = {name: code_of(ATTENTION[name]) for name in names}
    for module in modules:
        text = ast.unparse(ast.parse(inspect.getsource(sys.modules[module])))
        code[module] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return code


def origin(config: GPTConfig) -> dict:
    """What makes the run of this process, with a model of this configuration."""
    sources = {module: inspect.getsource(sys.modules[module]) for module in imported()}
    for name in attentions(config):
        with contextlib.suppress(OSError, TypeError):  # not from a file; no function
            sources[name] = inspect.getsource(ATTENTION[name])

    # the commit ends in -dirty if files were edited; without git it is git's error
    command = f'git -C "{ROOT}" describe --always --dirty --exclude="*" --abbrev=40'
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": subprocess.getoutput(command),
        "versions": {"torch": str(torch.__version__)},
        "fingerprints": fingerprints(attentions(config), imported()),
        "sources": sources,
    }


def note_changes(saved: dict, config: GPTConfig, path: str) -> None:
    """Says which code of a checkpoint's model is another now. saved: its origin, or {}."""
    now = fingerprints(attentions(config), imported())
    trained = saved.get("fingerprints", {})
    changed = [name for name, code in now.items() if trained.get(name, code) != code]
    if changed:
        note(
            f"{path}: the code of {', '.join(changed)} (or of attention/scores.py) is not what "
            f"was trained; python -m training.checkpoint {shlex.quote(path)} prints what was"
        )
