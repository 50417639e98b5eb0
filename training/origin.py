"""What made a run: its command, the code of its attentions, the files that it imported, versions.

Checkpoints and logs keep it. A checksum of code ignores comments, docstrings and layout.
"""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable

import numpy
import torch

from attention.forms import print_of
from configurator import ROOT, is_users
from errors import note
from model import ATTENTION, GPTConfig
from rules import attentions


def imported() -> list[str]:
    """The modules that this process's flags --import= name."""
    return [arg.removeprefix("--import=") for arg in sys.argv if arg.startswith("--import=")]


def files_of(modules: Iterable[str]) -> dict[str, str]:
    """{module: the text of its file} of modules, and of the user's modules that these import."""
    texts = {}
    left = list(modules)
    for name in left:
        path = getattr(sys.modules.get(name), "__file__", None) or ""
        if name in texts or not path.endswith(".py") or not is_users(path):
            continue
        texts[name] = pathlib.Path(path).read_text(encoding="utf-8")
        package = sys.modules[name].__package__
        for node in ast.walk(ast.parse(texts[name])):
            if isinstance(node, ast.Import):
                left += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                relative = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(relative, package)
                left += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return texts


def checksum(text: str) -> str:
    """A checksum of Python code, without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_docstring = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if has_docstring and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def fingerprints(names: Iterable[str], modules: Iterable[str]) -> dict[str, str]:
    """{an attention or a module: its checksum} of attentions and of imported modules.

    An attention's covers scores() and visible() as well; that of a class, or of what is no plain
    function, all of model.py.
    """
    model_py = pathlib.Path(ROOT, "model.py")
    prints = {
        name: print_of(ATTENTION[name]) or checksum(model_py.read_text(encoding="utf-8"))
        for name in names
    }
    return prints | {module: checksum(text) for module, text in files_of(modules).items()}


def commit() -> str:
    """The commit of this repository; it ends in -dirty if files were edited. "" without git."""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    with contextlib.suppress(OSError):  # git is not installed
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def origin(config: GPTConfig) -> dict:
    """What makes the run of this process, with a model of this configuration."""
    sources = {}
    for name in attentions(config):
        with contextlib.suppress(OSError, TypeError):  # not from a file; no function
            sources[name] = inspect.getsource(ATTENTION[name])
    return {
        "command": shlex.join(["python", *sys.argv]).replace(f"{ROOT}/", ""),
        "import": imported(),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
        },
        "fingerprints": fingerprints(attentions(config), imported()),
        "sources": sources | files_of(imported()),
    }


def note_changes(saved: dict, config: GPTConfig, path: str) -> None:
    """Says which code of a checkpoint's model is another now. saved: its origin, or {}."""
    now = fingerprints(attentions(config), imported())
    trained = saved.get("fingerprints", {})
    changed = [name for name, code in now.items() if trained.get(name, code) != code]
    if changed:
        note(
            f"{path}: the code of {', '.join(changed)} (or of scores() or visible()) is not what "
            f"was trained; {command_for(path)} prints what was"
        )


def command_for(path: str) -> str:
    """The command that prints the origin of a checkpoint."""
    return f"python -m training.checkpoint {shlex.quote(path)}"
