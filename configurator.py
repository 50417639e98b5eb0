"""Flags for every script: `python X.py config/file.py --key=value`.

A script's own top-level assignments are its flags, together with the fields of a dataclass that it names. Config files
(plain Python assignments) override them, and --key=value overrides both:

    # How large is a step?                               <- a group of flags in --help: a question, with its mark
    batch_size = 12  # sequences per step                <- a flag, its default and its help
    config, given = configure(globals(), GPTConfig)
    globals().update(config)

--import=my.ideas imports a module first, which may add to tables such as model.ATTENTION.

A flag has the type of its annotation or, without one, of its default: bool, int, float, str or a Literal of strings,
each of them `| None`. In a flag's help, "a name in TABLE" or "a name in module.TABLE" becomes the names in that table.
A mistake of the user is answered with a sentence on stderr and exit code 2.
"""

import contextlib
import difflib
import importlib
import inspect
import math
import os
import pathlib
import re
import runpy
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator

from errors import UserError, first_line, note, refuse

WORDS = {"none": None, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}  # in flags
WIDTH = 100  # columns of --help
COLUMN = 36  # where --help begins the text of a flag
PLAIN = types.NoneType | bool | int | float | str  # what a flag may be


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """A UserError or OSError becomes a sentence and exit code 2; any other error is a bug and keeps its traceback."""
    try:
        yield
    except BrokenPipeError:  # an OSError, but not the user's: see _excepthook
        raise
    except (UserError, OSError) as error:
        note(f"{os.path.basename(sys.argv[0].removesuffix('/__main__.py'))}: {error}")
        sys.exit(2)


def _excepthook(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """No traceback for what is nobody's bug: Ctrl-C, a closed pipe (`| head`), too little memory."""
    if isinstance(error, KeyboardInterrupt) or isinstance(
        error.__context__, KeyboardInterrupt
    ):  # a library's own error
        print("\ninterrupted", file=sys.stderr)
    elif issubclass(kind, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    elif issubclass(kind, MemoryError) or kind.__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        note(f"out of memory ({first_line(error)}). Make the batch or the model smaller")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _excepthook


class Flag(typing.NamedTuple):
    default: object
    legal: list  # types, None's included, and the strings of a Literal
    comment: str
    group: str  # the question that it answers


@user_errors()
def configure(script: dict, *dataclasses: type) -> tuple[dict, dict]:
    """(config, given): every flag's value, and for each flag that was set where: a config file, or "command line".

    script: the calling script's globals(). dataclasses: classes whose fields are flags as well; where the script
    assigns the same name, the script's default wins. Exits with code 2 on a mistake and with 0 after --help.
    """
    imported = [arg for arg in sys.argv[1:] if arg.startswith("--import=")]
    try:
        for arg in imported:
            importlib.import_module(arg.removeprefix("--import="))
    except ModuleNotFoundError as error:
        raise UserError(f"{error} (--import needs a module's name, such as my.ideas)") from None
    flags, args = _flags(script, dataclasses), [arg for arg in sys.argv[1:] if arg not in imported]
    if "--help" in args or "-h" in args:
        _print_help(script, flags)
        sys.exit(0)
    config, given = {name: flag.default for name, flag in flags.items()}, {}
    for path in (arg for arg in args if not arg.startswith("-")):
        values = _read_config(path, flags, script)
        config |= values
        given |= dict.fromkeys(values, path)
    for name, value in (_read_flag(arg, flags) for arg in args if arg.startswith("-")):
        config[name], given[name] = value, "command line"
    return config, given


def _flags(script: dict, dataclasses: tuple) -> dict[str, Flag]:
    """Every flag, in the order of --help: the fields of the dataclasses, then what only the script assigns.

    A flag is an assignment on one line. A group begins with a comment on a line of its own, a question.
    """
    sources = [("    ", inspect.getsource(cls), vars(cls), vars(sys.modules[cls.__module__])) for cls in dataclasses]
    sources.append(("", pathlib.Path(script["__file__"]).read_text(encoding="utf-8"), script, script))
    flags = {}
    for indent, source, values, scope in sources:
        own, group = {}, "Flags"
        for line in source.splitlines():
            if re.fullmatch(indent + r"# .*\?", line):
                group = line.strip("# ")
            found = re.fullmatch(indent + r"([a-z]\w*)(?:: (.+?))? = .+?(?:  # (.*))?", line)
            if not found or found[1] in own or not isinstance(values.get(found[1], ()), PLAIN):
                continue
            name, annotation, comment = found.groups()
            default = values[name]
            legal = _legal(eval(annotation, scope) if annotation else type(default))
            first = flags.get(name) or Flag(default, legal, "", group)
            own[name] = Flag(default, legal, _with_names(comment, scope) if comment else first.comment, first.group)
        flags |= own
    return flags


def _with_names(comment: str, scope: dict) -> str:
    """The comment, with the names themselves in the place of "a name in TABLE" and "a name in module.TABLE"."""
    for text, module, name in re.findall(r"(a name in (?:(\w+)\.)?([A-Z][A-Z0-9_]*))\b", comment):
        table = (vars(sys.modules[module]) if module in sys.modules else scope).get(name)
        if isinstance(table, dict | list | tuple):
            comment = comment.replace(text, ", ".join(map(str, table)))
    return comment


def _legal(hint: object) -> list:
    """What a flag of this hint may be: int | None -> [int, NoneType]; Literal['a', 'b'] -> ['a', 'b']."""
    parts = typing.get_args(hint)
    return [t for part in parts for t in _legal(part)] if parts else [hint]


def _words(legal: list) -> str:
    words = {bool: "True or False", int: "an integer", float: "a number", str: "text", types.NoneType: "None"}
    names = [words.get(t, t) for t in legal]
    return ("one of " + ", ".join(names)) if isinstance(legal[0], str) else " or ".join(names)


def _print_help(script: dict, flags: dict[str, Flag]) -> None:
    command = f"-m {script['__spec__'].name.removesuffix('.__main__')}" if script.get("__spec__") else sys.argv[0]
    print(f"""{(script.get("__doc__") or "").strip()}

usage: python {command} [config/file.py] [--flag=value ...]

Each flag stands here with its default value. A flag on the command line wins over a config file.
--flag is short for --flag=True, and --no-flag for --flag=False. --import=my.ideas imports a module
first, which may add to the model's tables.""")
    for group in dict.fromkeys(flag.group for flag in flags.values()):
        print(f"\n{group}")
        for name, flag in flags.items():
            if flag.group == group:
                values = f" ({_words(flag.legal)})" if isinstance(flag.legal[0], str) else ""
                head, margin = f"  --{name}={flag.default!r}", " " * COLUMN
                text = textwrap.fill(flag.comment + values, WIDTH, initial_indent=margin, subsequent_indent=margin,
                                     break_on_hyphens=False)  # fmt: skip
                print(head.ljust(COLUMN) + text[COLUMN:] if len(head) < COLUMN - 1 else f"{head}\n{text}")


def _read_config(path: str, flags: dict[str, Flag], script: dict) -> dict:
    """The assignments of a config file, run in a namespace of its own."""
    beside = pathlib.Path(script["__file__"]).resolve().parent / path
    found = next((str(p) for p in (pathlib.Path(path), beside) if p.is_file()), None)
    if found is None or not found.endswith(".py"):  # another file may be the text that was meant with --source=
        raise UserError(f"there is no config file {path} that ends in .py (A flag is written --key=value.)")
    try:
        namespace = runpy.run_path(found, run_name="config_file")
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} could not be run: {type(error).__name__}: {error}") from None
    values = {}
    for name, value in namespace.items():
        if name.startswith("_") or isinstance(value, types.ModuleType | types.FunctionType | type):
            continue
        if name not in flags:
            raise UserError(f"{path} sets `{name}`: {_unknown(name, flags)} (Begin your own variables' names with _.)")
        values[name] = _checked(value, flags[name].legal, f"{path}: {name} = {value!r}")
    return values


def _read_flag(arg: str, flags: dict[str, Flag]) -> tuple[str, object]:
    """(name, value) of --name=value, --name or --no-name."""
    if not arg.startswith("--"):
        raise UserError(f"{arg}: flags begin with two dashes: -{arg}")
    name, equals, text = arg[2:].partition("=")
    off = re.sub("^no[-_]", "", name)
    if not equals and off != name and off in flags and bool in flags[off].legal:
        return off, False
    if name not in flags:
        raise UserError(f"--{name}: {_unknown(name, flags)} (--help lists all flags.)")
    legal = flags[name].legal
    if not equals and bool not in legal:
        raise UserError(f"--{name} needs a value, {_words(legal)}: --{name}=...")
    word = WORDS.get(text.lower(), text) if equals else True
    value = word if type(word) in legal else text
    if value is text and (int in legal or float in legal):
        with contextlib.suppress(ValueError):
            value = int(text) if text.lstrip("+-").isdigit() else float(text)
    return name, _checked(value, legal, f"--{name}={text}")


def _unknown(name: str, flags: dict[str, Flag]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), flags, 1)
    return "unknown flag" + (f"; did you mean `{near[0]}`?" if near else "")


def _checked(value: object, legal: list, given: str) -> object:
    """A value, as a legal type: an int is taken for a float, 1e3 for an int; nan and inf for nothing."""
    finite = not isinstance(value, float) or math.isfinite(value)
    if finite and (type(value) in legal or (isinstance(value, str) and value in legal)):
        return value
    if type(value) is int and float in legal:
        return float(value)
    if finite and isinstance(value, float) and int in legal and value.is_integer():
        return int(value)
    raise UserError(f"{given}: the flag needs {_words(legal)}")


def names(given: str, known: Iterable[str], separator: str = ",") -> list[str]:
    """The names that a flag lists; all known ones if it lists none. Raises UserError for a name that is not known."""
    found = [name.strip() for name in given.split(separator) if name.strip()]
    if unknown := [name for name in found if name not in known]:
        raise UserError(f"{unknown[0]!r} is not one of {f'{separator} '.join(known)}")
    return found or list(known)


def positive(flag: str, given: str) -> list[int]:
    """The integers that a flag lists. Raises UserError for anything but positive integers below 2^31."""
    words = given.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) < 2**31 for word in words):
        raise UserError(f"--{flag} must be positive integers below 2^31, separated by commas; got {given}")
    return [int(word) for word in words]


def at_least_one(**flags: int) -> None:
    """Raises UserError for a flag below 1: at_least_one(jobs=jobs)."""
    refuse((n < 1, f"--{name}={n} must be at least 1") for name, n in flags.items())


def pick_device(device: str, dtype: str) -> tuple[str, str, contextlib.AbstractContextManager]:
    """(device, dtype, autocast context) of the flags. Raises UserError for a device that is not there."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if not re.fullmatch(r"(cpu|cuda|mps)(:\d+)?", device):
        raise UserError(f"--device={device} is not one of auto, cpu, cuda, cuda:N, mps")
    kind, _, index = device.partition(":")
    if int(index or 0) >= (count := getattr(torch, kind).device_count()):
        here = f"this PyTorch ({torch.__version__}) sees {count} {kind} devices"
        raise UserError(f"--device={device}: {here}; --device=cpu works")
    if dtype == "auto":
        bfloat16 = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if bfloat16 else "float16" if kind == "cuda" else "float32"
    amp = contextlib.nullcontext() if dtype == "float32" else torch.autocast(kind, dtype=getattr(torch, dtype))
    return device, dtype, amp
