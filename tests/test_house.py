"""The order of the house: what a file may import, how long the core and its main files are, and the lab beside it."""

import ast
import glob
import os
import re
import subprocess
import sys

import pytest
from harness import ROOT
from reference import ONE_QUERY

from model import ATTENTION

# From the bottom up; files of one line do not import each other.
FLOORS = [
    ["errors"],
    ["configurator"],
    ["text.tokenizers", "text.sampling"],
    ["text.dataset"],
    ["text.prepare"],
    ["attention.scores"],
    ["attention.fast"],
    ["attention.sums"],
    ["attention.forms"],
    ["attention.heads"],
    ["attention.cache", "attention.documents", "attention.kernels", "attention.probe"],
    ["positions", "choices"],
    ["rules"],
    ["model"],
    ["training.distributed", "training.optimizers"],
    ["training.estimate", "training.checkpoint"],
    ["training.log", "training.pretrained"],
    ["training.run"],
    ["train", "sample", "eval", "bench"],
    ["scripts.maps", "scripts.plot"],
]
# Heavy, or needed by one call alone: inside the function that needs it. Of our own only these.
INSIDE = {("model", "training.pretrained"), ("training.run", "attention.kernels"), ("bench", "attention.kernels")}
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}


def core() -> list[str]:
    """The paths of the core's Python files: all but the lab, the tests and the settings of runs."""
    paths = glob.glob(os.path.join(ROOT, "**", "*.py"), recursive=True)
    names = (os.path.relpath(path, ROOT) for path in paths)
    return sorted(name for name in names if name.split(os.sep)[0] not in ("lab", "tests", "config", "venv"))


def read(name: str) -> str:
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


def modules() -> dict[str, str]:
    """The core's modules, by name: their paths. data/*/prepare.py are scripts with one name."""
    names = {path.removesuffix(".py").replace(os.sep, "."): path for path in core() if not path.startswith("data")}
    return {name: path for name, path in names.items() if not name.endswith("__init__")}


def imports(path: str) -> list[tuple[str, bool]]:
    """(module, whether imported at the top level) for each of the core's own modules that a file imports."""
    own, found = modules(), []
    tree = ast.parse(read(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found += [(name, node in tree.body) for name in names if name in own]
    return found


def test_every_file_has_its_floor():
    assert set(modules()) == set(LEVEL)


@pytest.mark.parametrize("name", LEVEL)
def test_a_file_imports_what_stands_before_it(name):
    for other, at_top in imports(modules()[name]):
        if (name, other) not in INSIDE:
            assert at_top and LEVEL[other] < LEVEL[name], f"{name} imports {other}"
        else:
            assert not at_top, f"{name} imports {other} at its top"


def test_the_core_is_small():
    """Whoever adds a hundred lines takes a hundred away. (A user's own attention in model.py does not count.)"""
    if set(ATTENTION) != set(ONE_QUERY):
        pytest.skip("model.py has an attention of your own")
    lines = {path: len(read(path).splitlines()) for path in core()}
    assert lines["model.py"] <= 400 and lines["train.py"] <= 300
    assert sum(lines.values()) <= 6500, lines


def test_the_core_does_not_know_the_lab():
    assert not [path for path in core() if re.search(r"\blab[./]", read(path))]


def test_the_model_is_imported_without_torch_compile():
    """Whose import takes as long as PyTorch's own; sample.py and eval.py do not need it."""
    check = "import sys, model, text.sampling, attention.documents; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)
