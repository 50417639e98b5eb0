"""The order of the house: what a file may import, how much the code weighs, the lab beside it."""

import ast
import glob
import io
import os
import re
import subprocess
import sys
import tokenize

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
    ["attention.cache"],
    ["parts"],
    ["model"],
    ["training.distributed", "training.optimizers", "training.origin", "training.estimate"],
    ["training.checkpoint", "training.context"],
    ["training.log", "training.pretrained"],
    ["training.run"],
    ["train", "sample", "eval", "bench"],
]
# Inside the function that needs it, since that file imports this one. Of our own only this one.
INSIDE = {("model", "training.pretrained")}
FOLDERS = (["attention"], ["training"], ["text"], ["data"])
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def files() -> dict[str, str]:
    """The project's Python files: {path: its part}, core, lab or tests.

    A file of your own beside train.py is in no part, nor is README's folder venv.
    """
    parts = {}
    for path in sorted(glob.glob(os.path.join(ROOT, "**", "*.py"), recursive=True)):
        path = os.path.relpath(path, ROOT)
        *folders, name = path.split(os.sep)
        if folders in (["tests"], ["lab", "tests"]):
            parts[path] = "tests"
        elif folders[:1] == ["lab"]:
            parts[path] = "lab"
        elif folders[:1] in FOLDERS or (not folders and name.removesuffix(".py") in LEVEL):
            parts[path] = "core"
    return parts


CORE = [path for path, part in files().items() if part == "core"]


def read(path: str) -> str:
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def modules() -> dict[str, str]:
    """The core's modules, by name: their paths. data/*/prepare.py are scripts with one name."""
    paths = [path for path in CORE if not path.startswith("data") and "__init__" not in path]
    return {path.removesuffix(".py").replace(os.sep, "."): path for path in paths}


def imports(path: str) -> list[tuple[str, bool]]:
    """(module, whether imported at the top level) for each of the core's modules in a file."""
    tree = ast.parse(read(path))
    imported = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        imported += [(name, node in tree.body) for name in names if name in modules()]
    return imported


def weight(text: str) -> int:
    """The tokens of Python in a file without comments, docstrings and layout."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = getattr(node.body[0], "value", None)
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                docstrings.add((first.lineno, first.col_offset))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type not in LAYOUT and t.start not in docstrings for t in tokens)


def test_every_file_has_its_floor():
    assert set(modules()) == set(LEVEL)


@pytest.mark.parametrize("name", LEVEL)
def test_a_file_imports_what_stands_before_it(name):
    for other, at_top in imports(modules()[name]):
        if (name, other) in INSIDE:
            assert not at_top, f"{name} imports {other} at its top"
        else:
            assert at_top and LEVEL[other] < LEVEL[name], f"{name} imports {other}"


@pytest.mark.parametrize("path", [path for path, part in files().items() if part != "tests"])
def test_openmp_is_set_up_before_torch_is_loaded(path):
    """So a file that imports configurator does it before torch, whatever sorts its imports."""
    before, imports, _ = read(path).partition("\nfrom configurator import")
    if imports:
        names = re.findall(r"^(?:import|from) (\w+)", before, re.M)
        assert {*names} <= sys.stdlib_module_names
    else:
        assert path not in ("train.py", "sample.py", "eval.py", "bench.py")


YOURS = set(ATTENTION) != set(ONE_QUERY)  # asked before a test imports the lab's


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="an f-string is several tokens there")
@pytest.mark.parametrize(("part", "most"), [("core", 32_000), ("lab", 70_000), ("tests", 88_000)])
def test_the_code_is_light(part, most):
    """Whoever adds tokens takes as many away. Lines do not count: more lines are better."""
    if part == "core" and YOURS:
        pytest.skip("model.py has an attention of your own")
    tokens = {path: weight(read(path)) for path, of in files().items() if of == part}
    assert sum(tokens.values()) <= most, sorted(tokens.items(), key=lambda item: -item[1])


def test_the_core_does_not_know_the_lab():
    """But for the table of fields that moved there."""
    assert [path for path in CORE if re.search(r"\blab[./]", read(path))] == [
        "training/checkpoint.py"
    ]


def test_the_model_is_imported_without_torch_compile():
    """Whose import takes as long as PyTorch's own; sample.py and eval.py do not need it."""
    check = "import sys, model, text.sampling; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)
