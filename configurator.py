"""Flags for every script: `python X.py config/file.py --key=value`.

A script's own top-level assignments are its flags, and so are the fields of dataclasses that the
script names. Config files (plain Python assignments) override them, and --key=value overrides both:

    # How large is a step?               <- a group of flags in --help: a question, with its mark
    batch_size = 12  # sequences per step          <- a flag, its default and its help on one line
    config, given = configure(globals(), GPTConfig)
    globals().update(config)

--import=my.ideas imports a module first. The module may add to tables such as model.ATTENTION.

A flag has the type of its annotation or, without one, of its default: bool, int, float, str or a
Literal of strings, each of them `| None`. The annotation "Literal[*TABLE]", in quotes, is read when
the flags are, so --import can add to the table. A user's mistake is answered with a sentence on
stderr and exit code 2.
"""

import ast
import configparser
import contextlib
import difflib
import inspect
import math
import os
import re
import runpy
import sys
import sysconfig
import textwrap
import traceback
import types
import typing
from collections.abc import Iterable, Iterator

from errors import UserError, first_line, note, refuse

HOME = re.compile(r"(?<![^,:])~(?=[/\\])")  # in a path, in a list of paths, in FILE:~/path
WORDS = configparser.ConfigParser.BOOLEAN_STATES | {"none": None}  # "yes": True, "off": False, ...
PLAIN = types.NoneType | bool | int | float | str  # the types of a flag's value

ROOT = os.path.dirname(os.path.abspath(__file__))
# The files of the core, by their paths below ROOT, and of libraries. All other files are the user's
OURS = (
    "^(attention|data|text|training)/"
    r"|^(bench|choices|configurator|errors|eval|model|positions|rules|sample|train)\.py$"
    f"|^<|site-packages|dist-packages|torchinductor|{sysconfig.get_path('stdlib')}"
)


def is_users(path: str) -> bool:
    """Whether a Python file is the user's: no file of the core or of a library."""
    return not re.search(OURS, path.removeprefix(f"{ROOT}/"))


def user_frames(trace):
    """The frames of a traceback that lie in the user's files."""
    return [f for f in traceback.extract_tb(trace) if is_users(f.filename)]


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a UserError, an OSError or text that is not UTF-8 into a sentence and exit code 2.

    Other errors are bugs.
    """
    try:
        yield
    except BrokenPipeError:  # an OSError, but no mistake: _excepthook handles it
        raise
    except (UserError, OSError, UnicodeDecodeError) as error:  # the last: of a file's text
        note(f"{os.path.basename(sys.argv[0].removesuffix('/__main__.py'))}: {error}")
        sys.exit(2)


def _excepthook(family, error, trace):
    """Print an error. Ctrl-C, a closed pipe (`| head`) and too little memory are no bugs.

    Too little memory prints a traceback too if the user's own code asked for the memory.
    """
    no_memory = re.search("MemoryError|can.t allocate memory", repr(error))
    if KeyboardInterrupt in (family, type(error.__context__)):  # a library may raise its own error
        print("\ninterrupted", file=sys.stderr)
    elif issubclass(family, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    elif not no_memory or user_frames(trace):
        sys.__excepthook__(family, error, trace)
    if no_memory:
        note(f"out of memory ({first_line(error)}). Make the batch or the model smaller")


sys.excepthook = _excepthook


class Flag(typing.NamedTuple):
    default: object
    legal: list  # types, NoneType included, and the strings of a Literal
    comment: str
    group: str  # the question above it


@user_errors()
def configure(script: dict, *dataclasses: type) -> tuple[dict, dict]:
    """(config, given): every flag's value; where each flag was set: a file, or "command line".

    script: the calling script's globals(). dataclasses: classes whose fields are flags as well;
    where the script assigns the same name, the script's default wins. Exits with code 2 on a
    mistake and with 0 after --help.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook
            stream.reconfigure(errors="backslashreplace")  # for what the terminal's encoding lacks
    args = []
    for arg in sys.argv[1:]:
        if re.match("--import=.", arg):
            _import(arg.removeprefix("--import="))
        else:
            args.append(arg)
    flags = _flags(script, dataclasses)
    if "--help" in args or "-h" in args:
        _print_help(script, flags)
        sys.exit(0)
    config = {name: flag.default for name, flag in flags.items()}
    given = {}
    for arg in sorted(args, key=lambda arg: arg.startswith("-")):  # config files, then flags
        is_flag = arg.startswith("-")
        values = _read_flag(arg, flags) if is_flag else _read_config(arg, flags)
        config |= values
        given |= dict.fromkeys(values, "command line" if is_flag else arg)
    return config, given


def run_script(script: dict) -> None:
    """Set the flags of a script, given by its globals(), and call its main().

    With --quick the values of the script's QUICK are the defaults.
    """
    config, given = configure(script)
    if config.get("quick"):
        config |= script["QUICK"] | {name: config[name] for name in given}
    script.update(config)
    with user_errors():
        script["main"]()


def _import(module):
    """Import the module of a flag --import. An error inside the module keeps its traceback."""
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # the module is there, and needs another
            raise
        raise UserError(f"{error} (--import needs a module's name, such as my.ideas)") from None


def _flags(script, dataclasses):
    """Every flag, in the order of --help: the fields of the dataclasses, then the script's own."""
    module = types.ModuleType("script")
    vars(module).update(script)
    flags = {}
    for owner in (*dataclasses, module):
        hints = typing.get_type_hints(owner)
        indent = "    " if isinstance(owner, type) else ""
        lines = rf"(?m)^{indent}(?:# (.*\?)|([a-z]\w*)(?:: .+?)? = .+?(?:  # (.*))?)$"
        group = "Flags"
        own = {}
        for question, name, comment in re.findall(lines, inspect.getsource(owner)):
            group = question or group
            default = getattr(owner, name, ())
            if isinstance(default, PLAIN):
                legal = _legal(hints.get(name, type(default)))
                first = flags.get(name, Flag(default, legal, comment, group))
                own.setdefault(name, Flag(default, legal, comment or first.comment, first.group))
        flags |= own
    return flags


def _legal(hint):
    """What a flag may be: int | None -> [int, NoneType]; Literal["a", "b"] -> ["a", "b"]."""
    parts = typing.get_args(hint)
    return [t for part in parts for t in _legal(part)] if parts else [hint]


def _words(legal):
    words = {
        bool: "True or False",
        int: "an integer",
        float: "a number",
        str: "text",
        types.NoneType: "None",
    }
    return " or ".join(words.get(t, t) for t in legal)


def _print_help(script, flags):
    command = sys.argv[0]
    if script.get("__spec__"):  # python -m
        command = f"-m {script['__spec__'].name.removesuffix('.__main__')}"
    print(f"""{script.get("__doc__") or ""}
usage: python {command} [config/file.py] [--flag=value ...]

Each flag stands here with its default value. A flag on the command line wins over a config file.
--flag is short for --flag=True, and --no-flag for --flag=False. --import=my.ideas imports a module
first, which may add to the model's tables.""")
    margin = " " * 36
    text = textwrap.TextWrapper(100, "", margin, break_on_hyphens=False, break_long_words=False)
    for group in dict.fromkeys(flag.group for flag in flags.values()):
        print(f"\n{group}")
        for name, (default, legal, comment, flag_group) in flags.items():
            if flag_group == group:
                values = f" ({_words(legal)})" if isinstance(legal[0], str) else ""
                head = f"  --{name}={default!r}".ljust(len(margin) - 2)
                print(text.fill(f"{head}  {comment}{values}"))


def _read_config(path, flags):
    """The assignments of a config file, run in a namespace of its own."""
    files = [file for file in (path, f"{ROOT}/{path}") if os.path.isfile(file)]
    if not files or not path.endswith(".py"):  # another file may be a text meant for --source=
        hint = "(A flag is written --key=value.)"
        raise UserError(f"there is no config file {path} that ends in .py {hint}")
    try:
        namespace = runpy.run_path(files[0], run_name="config_file")
    except (Exception, SystemExit) as error:
        message = f"{path} could not be run: {type(error).__name__}: {error}"
        for frame in user_frames(error.__traceback__)[-1:]:  # none for a SyntaxError in the file
            message += f" ({frame.filename}, line {frame.lineno})"
        raise UserError(message) from None
    values = {}
    for name, value in namespace.items():
        if getattr(value, "shape", None) == ():  # a number of NumPy or PyTorch
            value = value.item()
        if name in flags:
            values[name] = _checked(value, flags[name].legal, f"{path}: {name} = {value!r}")
        elif isinstance(value, PLAIN) and not name.startswith("_"):
            hint = "(Begin your own variables' names with _.)"
            raise UserError(f"{path} sets `{name}`: {_unknown(name, flags)} {hint}")
    return values


def _read_flag(arg, flags):
    """{name: value} of --name=value, --name or --no-name."""
    if not arg.startswith("--"):
        raise UserError(f"{arg}: flags begin with two dashes: -{arg}")
    arg = re.sub("^--no[-_]([^=]*)$", r"--\1=False", arg)
    name, equals, text = arg[2:].partition("=")
    if name not in flags:
        raise UserError(f"--{name}: {_unknown(name, flags)} (--help lists all flags.)")
    legal = flags[name].legal
    if not equals and bool not in legal:
        raise UserError(f"--{name} needs a value, {_words(legal)}: --{name}=...")
    text = text if equals else "True"
    value = WORDS.get(text.lower(), text)
    if type(value) not in legal:
        value = text
        if int in legal or float in legal:
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(text)
    return {name: _checked(value, legal, f"--{name}={text}")}


def _unknown(name, flags):
    near = difflib.get_close_matches(name, flags, 1)
    return "unknown flag" + (f"; did you mean `{near[0]}`?" if near else "")


def _checked(value, legal, given):
    """A value as a legal type: float takes an int, int takes 1e3; nothing takes nan and inf.

    In paths ~ is the home folder.
    """
    if type(value) is int and float in legal:
        value = float(value)
    elif isinstance(value, float) and int in legal and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        value = HOME.sub(lambda _: os.path.expanduser("~"), value)
    if isinstance(value, int) and abs(value) >= 2**63:  # seeds and sizes are numbers of 64 bits
        raise UserError(f"{given}: the number is too large")
    finite = not isinstance(value, float) or math.isfinite(value)
    if finite and (type(value) in legal or value in legal):
        return value
    raise UserError(f"{given}: the flag needs {_words(legal)}")


def names(given: str, known: Iterable[str], separator: str = ",") -> list[str]:
    """The names that a flag lists, or all known names. Raises UserError for an unknown name."""
    listed = [name.strip() for name in given.split(separator) if name.strip()]
    for name in listed:
        if name not in known:
            raise UserError(f"{name!r} is not one of {f'{separator} '.join(known)}")
    return listed or list(known)


def positive(flag: str, given: str) -> list[int]:
    """The integers that a flag lists. Raises UserError if one is not positive or not below 10^9."""
    number = r" *[1-9]\d{,8} *"
    if not re.fullmatch(f"{number}(,{number})*", given):
        numbers = "positive integers below 10^9, separated by commas"
        raise UserError(f"--{flag} must be {numbers}; got {given}")
    return [int(word) for word in given.split(",")]


def at_least_one(**flags: int) -> None:
    """Raise UserError for a flag below 1: at_least_one(jobs=jobs)."""
    refuse((n < 1, f"--{name}={n} must be at least 1") for name, n in flags.items())


def can_compile(device: str) -> bool:
    """Whether torch.compile works here; if not, a line says why. A compiler may be missing."""
    import torch

    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
    except Exception as error:  # of several libraries
        note(f"going on uncompiled: torch.compile fails here ({first_line(error)})")
        return False
    torch._dynamo.config.suppress_errors = True  # what it cannot trace runs uncompiled
    return True


def pick_device(device: str, dtype: str) -> tuple:
    """(device, dtype, autocast context) of the flags. Raises UserError for a missing device.

    The GPU becomes PyTorch's current one. If it has no number, each of torchrun's processes on a
    machine takes its own.
    """
    import torch

    if device == "auto":
        families = ("cuda", "mps", "cpu")
        device = next(name for name in families if getattr(torch, name).device_count())
    if device == "cuda":
        device += f":{os.environ.get('LOCAL_RANK', 0)}"
    if not re.fullmatch(r"cpu|mps|cuda:\d+", device):
        raise UserError(f"--device={device} is not one of auto, cpu, cuda, cuda:N, mps")
    family, _, index = device.partition(":")
    count = getattr(torch, family).device_count()
    if int(index or 0) >= count:
        here = f"this PyTorch ({torch.__version__}) sees {count} {family} devices"
        raise UserError(f"--device={device}: {here}; --device=cpu works")
    if index:
        torch.cuda.set_device(device)
    if dtype == "auto":
        dtype = "float32"
        if family == "cuda":
            bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = "bfloat16" if bfloat16 else "float16"
    if dtype == "float32":
        return device, dtype, contextlib.nullcontext()
    return device, dtype, torch.autocast(family, dtype=getattr(torch, dtype))
