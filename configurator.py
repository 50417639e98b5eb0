"""Flags for every script: `python X.py config/file.py --key=value`.

A script's own top-level assignments are its flags, together with the fields of a dataclass that it
names. Config files (plain Python assignments) override them, and --key=value overrides both:

    batch_size = 12  # sequences per step                <- a flag, its default and its help
    config, given = configure(globals(), GPTConfig)
    globals().update(config)

Flags have the type of their annotation or, without one, of their default: bool, int, float, str, a
Literal of strings, each of them `| None`. A mistake is a sentence on stderr and exit code 2.
"""

import ast
import contextlib
import difflib
import inspect
import io
import math
import os
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class UserError(ValueError):
    """A mistake of the user's, raised on purpose: the scripts print its sentence and exit with code 2."""


class NotInstalled(UserError, ImportError):
    """An optional package is missing; the sentence says how to install it."""


class NotFinite(UserError):
    """A NaN or an infinity where a model or its loss should have numbers: the training has diverged."""


def refuse(rules: Iterable[tuple[bool, str]]) -> None:
    """Raises UserError with the sentence of the first of (what is wrong, the sentence) that is wrong."""
    for wrong, sentence in rules:
        if wrong:
            raise UserError(sentence)


@dataclass
class Flag:
    default: object
    hint: object
    comment: str
    section: str


def note(message: str) -> None:
    """Prints a line on stderr; of the processes that torchrun starts on a machine, the first one speaks for all."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


def fail(message: object) -> typing.NoReturn:
    """Prints a user's mistake on stderr and exits with code 2."""
    note(f"{os.path.basename(sys.argv[0])}: {message}")
    sys.exit(2)


def first_line(error: BaseException) -> str:
    """Of an error's message, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Within it a UserError, or an error of the file system or the network, becomes a sentence and exit code 2.

    Every other error is a bug, perhaps of someone who is editing the code, and keeps Python's traceback.
    """
    try:
        yield
    except BrokenPipeError:  # `| head` has closed the pipe: _excepthook knows
        raise
    except (UserError, OSError) as error:
        fail(error)


def _excepthook(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """A sentence for what is nobody's bug: Ctrl-C, a reader or a process that went away, too little memory."""
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
    elif issubclass(kind, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    elif issubclass(kind, MemoryError) or kind.__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        name = os.path.basename(sys.argv[0])
        print(f"{name}: out of memory ({first_line(error)}): a smaller batch or model fits", file=sys.stderr)
    elif kind.__name__ in ("DistBackendError", "DistNetworkError") or "gloo/transport" in str(error):
        print(f"another process has died or cannot be reached ({first_line(error)})", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _excepthook


def configure(script: dict, *dataclasses: type) -> tuple[dict, dict]:
    """Reads the config files and flags of the command line.

    script: the calling script's globals(). dataclasses: classes whose fields are flags as well; where
    the script assigns the same name, the script's default wins.
    Returns (config, given): every flag's value, and for each flag that was set where: "command line" or
    the config file's path. Exits with code 2 on a mistake and with 0 after --help.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a ?
    flags = _flags(script, dataclasses)
    args = sys.argv[1:]
    if "--help" in args or "-h" in args:
        _print_help(script, flags)
        sys.exit(0)
    values, given = {}, {}
    for arg in args:
        if not arg.startswith("-"):
            for name, value in _read_config(arg, flags, script).items():
                values[name], given[name] = value, arg
    for arg in args:
        if arg.startswith("-"):
            name, value = _read_flag(arg, flags)
            values[name], given[name] = value, "command line"
    return {name: flag.default for name, flag in flags.items()} | values, given


# -----------------------------------------------------------------------------
# what the flags are


def _flags(script: dict, dataclasses: tuple) -> dict[str, Flag]:
    flags = {}
    for name, hint, comment, _ in _assignments(ast.parse(source := _source(script)).body, source):
        if name in script and name not in flags and not name.startswith("_") and not name.isupper():
            default = script[name]
            hint = eval(hint, script) if hint else type(default)
            if default is None or isinstance(default, (bool, int, float, str)):
                flags[name] = Flag(default, hint, comment, "flags")
    for cls in dataclasses:
        hints = typing.get_type_hints(cls)
        source = textwrap.dedent(inspect.getsource(cls))
        for name, _, comment, _ in _assignments(ast.parse(source).body[0].body, source):
            if name in cls.__dataclass_fields__:
                field = Flag(cls.__dataclass_fields__[name].default, hints[name], comment, "")
                flags[name] = flags.get(name, field)  # the script's own default and comment win
                flags[name].comment = flags[name].comment or comment
                flags[name].section = f"fields of {cls.__name__}"
    return flags


def _source(script: dict) -> str:
    with open(script["__file__"], encoding="utf-8") as f:
        return f.read()


def constants(path: str) -> dict:
    """The constants that a script or a config file assigns at its top level, without running it.

    Raises ValueError for a file that is not Python, OSError for one that is not there.
    """
    with open(path, encoding="utf-8") as f:
        source = f.read()
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise UserError(f"{path} is no config file: {error}") from None
    return {name: value.value for name, _, _, value in _assignments(body, source) if isinstance(value, ast.Constant)}


def _assignments(body: list, source: str) -> Iterator[tuple[str, str | None, str, ast.expr | None]]:
    """Yields (name, annotation, trailing comment, value) of each `name = value` and `name: type = value`."""
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for node in body:
        comment = comments.get(getattr(node, "end_lineno", 0), "")
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation), comment, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, None, comment, node.value


# -----------------------------------------------------------------------------
# where their values come from


def _read_config(path: str, flags: dict[str, Flag], script: dict) -> dict:
    """The assignments of a config file, run in a namespace of its own."""
    beside = os.path.join(os.path.dirname(os.path.abspath(script["__file__"])), path)
    found = path if os.path.isfile(path) else beside
    if not os.path.isfile(found):
        folder = os.path.dirname(beside)
        known = sorted(f for f in os.listdir(folder) if f.endswith(".py")) if os.path.isdir(folder) else []
        near = difflib.get_close_matches(os.path.basename(path), known, 1)
        hint = f"; did you mean {os.path.join(os.path.dirname(path), near[0])}?" if near else ""
        fail(f"there is no config file {path}{hint} (flags are written --key=value)")
    if not found.endswith(".py"):  # and it would be run
        fail(f"{path} is no config file, whose names end in .py; flags are written --key=value")
    namespace = {"__file__": found, "__name__": "config"}
    try:
        with open(found, encoding="utf-8") as f:
            exec(compile(f.read(), found, "exec"), namespace)
    except (Exception, SystemExit) as error:
        fail(f"{path} does not run: {type(error).__name__}: {error}")
    values = {}
    for name, value in namespace.items():
        if name.startswith("_") or isinstance(value, (types.ModuleType, types.FunctionType, type)):
            continue
        if name not in flags:
            fail(f"{path} sets `{name}`, {_unknown(name, flags)} (names that begin with _ are your own)")
        try:
            values[name] = _checked(value, flags[name].hint)
        except ValueError as error:
            fail(f"{path}: {name} = {value!r}: {error}")
    return values


def _read_flag(arg: str, flags: dict[str, Flag]) -> tuple[str, object]:
    """(name, value) of --name=value, --name or --no-name."""
    if not arg.startswith("--"):
        fail(f"{arg}: flags begin with two dashes: -{arg}")
    name, equals, text = arg[2:].partition("=")
    positive = name[3:] if name[:3] in ("no-", "no_") else name
    if not equals and positive != name and positive in flags and bool in _types(flags[positive].hint):
        return positive, False
    if name not in flags:
        fail(f"--{name}: {_unknown(name, flags)}; --help lists them")
    hint = flags[name].hint
    if not equals and bool in _types(hint):
        return name, True
    if not equals:
        fail(f"--{name} needs a value, {_legal(hint)}: --{name}=...")
    try:
        return name, _parsed(text, hint)
    except ValueError as error:
        fail(f"--{name}={text}: {error}")


def _unknown(name: str, flags: dict[str, Flag]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), flags, 1)
    return "an unknown flag" + (f"; did you mean `{near[0]}`?" if near else "")


# -----------------------------------------------------------------------------
# types


def _types(hint: object) -> list:
    """The alternatives of a hint: int | None -> [int, NoneType]; Literal['a', 'b'] -> ['a', 'b']."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) in (typing.Union, typing.Literal):
        return [t for arg in typing.get_args(hint) for t in _types(arg)]
    return [hint]


def _legal(hint: object) -> str:
    words = {bool: "True or False", int: "an integer", float: "a number", str: "text", type(None): "None"}
    names = [words.get(t, t) if not isinstance(t, str) else t for t in _types(hint)]
    return ("one of " + ", ".join(names)) if isinstance(_types(hint)[0], str) else " or ".join(names)


def _parsed(text: str, hint: object) -> object:
    """A command line's text as a value of the hint's type. Raises ValueError naming what is legal."""
    legal = _types(hint)
    if type(None) in legal and text.lower() == "none":
        return None
    if bool in legal and text.lower() in ("true", "false", "1", "0", "yes", "no"):
        return text.lower() in ("true", "1", "yes")
    if int in legal or float in legal:
        with contextlib.suppress(ValueError):
            text = int(text) if text.lstrip("+-").isdigit() else float(text)
        if not isinstance(text, str):
            return _checked(text, hint)
    if text in legal or str in legal:
        return text
    raise UserError(f"needs {_legal(hint)}")


def _checked(value: object, hint: object) -> object:
    """A value, as the hint's type: an int is taken for a float, 1e3 for an int; nan and inf for nothing."""
    legal = _types(hint)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"needs {_legal(hint)}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UserError("is too large: integers have 64 bits")
    if type(value) in legal or (isinstance(value, str) and value in legal):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and float in legal:
        return float(value)
    if isinstance(value, float) and int in legal and value.is_integer():
        return int(value)
    raise UserError(f"needs {_legal(hint)}")


# -----------------------------------------------------------------------------


def _print_help(script: dict, flags: dict[str, Flag]) -> None:
    name = os.path.basename(script["__file__"])
    print(f"{(script.get('__doc__') or '').strip()}\n\nusage: python {name} [config/file.py] [--flag=value ...]")
    for section in dict.fromkeys(flag.section for flag in flags.values()):
        print(f"\n{section}, with their defaults:")
        for key, flag in flags.items():
            if flag.section == section:
                choices = f" ({_legal(flag.hint)})" if isinstance(_types(flag.hint)[0], str) else ""
                print(f"  --{key}={flag.default!r}".ljust(40) + f"  {flag.comment}{choices}")


# -----------------------------------------------------------------------------
# what the flags --out, --device and --dtype mean, to every script that has them


def check_writable(out: str) -> None:
    """Raises ValueError where no file can be written at the path of --out, before there is anything to lose."""
    target = out if os.path.exists(out) else os.path.dirname(os.path.abspath(out))
    if os.path.isdir(out) or not os.access(target, os.W_OK):
        raise UserError(f"--out={out}: no file can be written there")


def pick_device(device: str, dtype: str) -> tuple[str, str, contextlib.AbstractContextManager]:
    """(device, dtype, autocast context) of the flags: auto is cuda, mps or cpu, the first that there is.

    auto dtype: bfloat16 on a GPU that really has it (not emulated), float16 on other CUDA GPUs, else
    float32. Raises ValueError for a device that is not there.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or not (index.isdigit() or ":" not in device):
        raise UserError(f"--device={device} is none of auto, cpu, cuda, cuda:N, mps")
    count = getattr(torch, kind).device_count()
    if int(index or 0) >= count:
        raise UserError(
            f"--device={device}: this PyTorch ({torch.__version__}) sees {count} {kind} devices; --device=cpu works"
        )
    if dtype == "auto" and kind == "cuda":
        dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    elif dtype == "auto":
        dtype = "float32"
    if dtype == "float32":
        return device, dtype, contextlib.nullcontext()
    return device, dtype, torch.autocast(kind, dtype=getattr(torch, dtype))
