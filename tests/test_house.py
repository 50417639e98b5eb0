"""The order of the house: each file imports only what stands before it, and the two files to read first stay short."""

import ast
import glob
import os
import subprocess
import sys

import pytest
from harness import ROOT

# From the bottom up; files of one line do not import each other, but for those of a folder, in the order below.
FLOORS = [
    ["errors"],
    ["configurator"],
    ["text.files", "text.sampling"],
    ["text.tokenizers"],
    ["text.sources"],
    ["text.dataset"],
    ["text.corpus"],
    ["text.shakespeare"],
    ["attention.scores", "attention.heads"],
    ["attention.fast", "attention.documents", "attention.more"],
    ["attention.sums"],
    ["attention.forms"],
    ["attention.cache", "attention.probe", "attention.kernels"],
    ["choices"],
    ["rules"],
    ["model"],
    ["training.distributed", "training.optimizers"],
    ["training.checkpoint"],
    ["training.estimate"],
    ["training.pretrained"],
    ["training.log", "training.timing"],
    ["training.run"],
    ["train", "sample", "eval", "bench"],
]
# Optional, and heavy or not for every machine: inside the function that needs it. Of our own only this one.
INSIDE = {
    ("model", "training.pretrained"),
    ("training.run", "attention.kernels"),
    ("bench", "attention.kernels"),
}
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}


def modules() -> dict[str, str]:
    """The project's own modules, by name: their paths."""
    paths = [
        path
        for folder in (".", "text", "attention", "training")
        for path in glob.glob(os.path.join(ROOT, folder, "*.py"))
    ]
    names = {os.path.relpath(p, ROOT).removesuffix(".py").replace(os.sep, "."): p for p in paths}
    return {name: path for name, path in names.items() if not name.endswith("__init__")}


def imports(path: str) -> list[tuple[str, bool]]:
    """(module, whether imported at the top level) for each of the project's own modules that a file imports."""
    own, found = modules(), []
    tree = ast.parse(open(path, encoding="utf-8").read())
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


@pytest.mark.parametrize(
    ("file", "most"),
    [("model.py", 450), ("train.py", 300)],
)  # fmt: skip
def test_what_is_read_is_short(file, most):
    assert len(open(os.path.join(ROOT, file), encoding="utf-8").readlines()) <= most


def test_the_model_is_imported_without_torch_compile():
    """Whose import takes as long as PyTorch's own; sample.py and eval.py do not need it."""
    check = "import sys, model, text.sampling, attention.documents; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)
