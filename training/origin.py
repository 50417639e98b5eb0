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

from configurator import ROOT

import torch

from attention.forms import code_of
from errors import note
from model import ATTENTION, GPTConfig
from parts import attentions


def imported() -> dict[str, str]:
    """{a module of this process's flags --import=: its source, "" if it has none}."""
    names = [arg.removeprefix("--import=") for arg in sys.argv if arg.startswith("--import=")]
    return {name: sys.modules[name].__loader__.get_source(name) or "" for name in names}


def fingerprints(config: GPTConfig) -> dict[str, str]:
    """{an attention or a module: a checksum of its code} of attentions and of imported modules.

    An attention's covers attention/scores.py as well. It is empty for a class.
    """
    code = {name: code_of(ATTENTION[name]) for name in attentions(config)}
    for module, source in imported().items():
        code[module] = hashlib.sha256(ast.unparse(ast.parse(source)).encode()).hexdigest()[:16]
    return code


def origin(config: GPTConfig) -> dict:
    """What makes the run of this process, with a model of this configuration."""
    sources = imported()
    for name in attentions(config):
        with contextlib.suppress(OSError, TypeError):  # not from a file; no function
            sources[name] = inspect.getsource(ATTENTION[name])

    return {
        "command": shlex.join(["python", *sys.argv]),
        # the commit ends in -dirty if files were edited; without git it is git's error
        "commit": subprocess.getoutput(
            f'git -C "{ROOT}" describe --always --dirty --exclude="*" --abbrev=40'
        ),
        "versions": {"torch": str(torch.__version__)},
        "fingerprints": fingerprints(config),
        "sources": sources,
    }


def note_changes(saved: dict, config: GPTConfig, path: str) -> None:
    """Says which code of a checkpoint's model is another now. saved: its origin, or {}."""
    trained = saved.get("fingerprints", {})
    changed = [
        name for name, code in fingerprints(config).items() if trained.get(name, code) != code
    ]
    if changed:
        note(
            f"{path}: the code of {', '.join(changed)} (or of attention/scores.py) is not what "
            f"was trained; python -m training.checkpoint {shlex.quote(path)} prints what was"
        )
