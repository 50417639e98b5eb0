"""What decides the result of a run: its flags, its config file, the code it executes, its data.

A run of train.py executes train.py, its config file and its --import= modules, what of the project
these import, and so on. Comments, docstrings and layout do not count, nor do installed packages.
Of the data set the checksums in its meta.json count.

A process that measures notes the checksum of each file when it first asks for it. If the file is
another one later, the process stops with a sentence, since its results would mix both.
"""

import ast
import functools
import hashlib
import os
import pathlib
import sys
import threading
from collections.abc import Iterable

from configurator import ROOT

from errors import UserError
from text.dataset import folder_of, prepare_small, read_meta

SEEN = {}  # {a file of code, or the folder of a data set: its checksum when this process began}
PARSING = threading.RLock()  # Python 3.11's ast may fail where two threads parse at once
IMPORT = "import_module", "__import__"
NEIGHBOURS = ".*"  # stands for all files of the folder, where the name of an import is computed
HAVE_DOCSTRINGS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# the path of installed code, which does not count, has one of these parts
INSTALLED = os.path.dirname(os.__file__), *(f"{x}-packages{os.sep}" for x in ("site", "dist"))


def of_text(text: str) -> str:
    """A short checksum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def of_code(modules: Iterable[str], files: Iterable[str] = ()) -> str:
    """A checksum of the code of modules and of files, and of all that they import.

    Raises UserError for a file that is not Python, or that was edited since this process began.
    """
    found = {}
    left = [*files, *(path for module in modules for path in _paths(module, ""))]
    while left:
        path = os.path.abspath(left.pop())
        if path not in found:
            found[path] = _noted(path)
            left += [other for module in _code_of(path)[1] for other in _paths(module, path)]
    return of_text(str(sorted((os.path.relpath(path, ROOT), x) for path, x in found.items())))


def of_data(dataset: str) -> str:
    """A checksum of a data set's files. Raises UserError as of_code, or if it is not prepared."""
    prepare_small(dataset)
    return _noted(folder_of(dataset))


def unchanged() -> None:
    """Raise UserError if code or data was edited since this process began."""
    for path in SEEN:
        _noted(path)


def _noted(path):
    """The checksum of a file of code, or of the data set in a folder."""
    is_data = os.path.isdir(path)
    checksum = of_text(str(read_meta(path)["files"])) if is_data else _code_of(path)[0]
    if SEEN.setdefault(path, checksum) != checksum:
        raise UserError(
            f"{path} was edited while this ran. What was measured before the edit is kept; the "
            "same command again measures the code and the data as they are now"
        )
    return checksum


def parsed(path: str) -> ast.Module:
    """The syntax tree of a file. Raises UserError if it is not Python."""
    try:
        return ast.parse(pathlib.Path(path).read_bytes())
    except SyntaxError as error:
        raise UserError(f"{path} is not Python: {error}") from None


def _code_of(path):
    """(the checksum of a file's code, the names of the modules that it may import)."""
    stat = os.stat(path)
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _read(path, mtime, size):
    """_code_of a file that was written at the time mtime and has this size."""
    tree = parsed(path)
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, HAVE_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (f"{node.module}." if node.module else "")
            imports += [package + alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORT):
            for arg in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if isinstance(arg, ast.Constant):
                    imports.append(arg.value)
                elif not isinstance(arg, ast.Name):  # such as f"{__name__}.{name}"
                    imports.append(NEIGHBOURS)
    return of_text(ast.unparse(tree)), imports


@functools.cache
def _paths(module, importer):
    """The files that the import of a module executes, but for those of Python and of packages."""
    if module == NEIGHBOURS:
        return list(map(str, pathlib.Path(importer).parent.glob("*.py")))
    name = module.lstrip(".")
    folders = [folder or os.getcwd() for folder in sys.path]
    if name != module:  # one dot is the importer's own folder
        folders = [pathlib.Path(importer).parents[len(module) - len(name) - 1]]

    for folder in folders:
        found = []
        path = str(folder)
        for part in name.split("."):
            path = os.path.join(path, part)
            found += filter(os.path.isfile, (f"{path}.py", os.path.join(path, "__init__.py")))
        if found:
            return [] if any(part in found[0] for part in INSTALLED) else found
    return []
