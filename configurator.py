"""Flags for every script: `python X.py config/file.py --key=value`.

A script's own top-level assignments are its flags, and so are the fields of dataclasses that the
script names. Config files (plain Python assignments) override them, and --key=value overrides both:

    # How large is a step?               <- a group of flags in --help: a question, with its mark
    batch_size = 12  # sequences per step          <- a flag, its default and its help on one line
    config, given = configure(globals(), GPTConfig)
    globals().update(config)

--import=my.ideas imports a module first. The module may add to tables such as model.ATTENTION.

A flag has the type of its annotation or, without one, of its default: bool, int, float or str, each
of them `| None`, or a Literal of strings. The annotation "Literal[*TABLE]", in quotes, is read when
the flags are, so --import can add to the table. A user's mistake is answered with a sentence on
stderr and exit code 2.

In a path ~/ is the home folder. A flag is a path, or a list of paths with commas, if its name is in
PATHS or its text begins with FILE:. All other texts stay as they are.
"""

import ast
import contextlib
import difflib
import inspect
import math
import os
import re
import runpy
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator

from errors import UserError, first_line, note, refuse

ROOT = os.path.dirname(__file__)
PLAIN = bool | int | float | str | None  # the types of a flag's value
# How "flag=text" begins if the text is a path, or a list of paths
PATHS = r"(\w+_dir|\w+_file|dataset|init_from|json|out|picture|runs|source|to|tokenizer)=|\w+=FILE:"
DTYPE = typing.Literal["auto", "float32", "bfloat16", "float16"]
# A line of a script: the question above some flags; a flag, and the comment that ends it
GROUP = r"# (.*\?)$"
FLAG = r"([a-z_0-9]+)\s*(?::[^=]+?)?\s*=(?!=).*?(?:\s#\s*(.*))?$"
# The ~ of a path
HOME = r"(?<![^,:])~(?=[/\\])"
# The files of a container's CPU time and of the period for which it has that (cgroup v2, v1)
CGROUP = "/sys/fs/cgroup"
QUOTAS = "cpu.max", "cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us"


def cores() -> int:
    """The CPUs that this process may use: by its affinity, and by the quota of a container.

    Where a quota is the smaller number, it sets OMP_NUM_THREADS too, unless the user has set it.
    """
    n = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        n = len(os.sched_getaffinity(0))
    for names in QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # no such file; "max": no limit
            texts = [open(f"{CGROUP}/{name}").read() for name in names.split()]
            quota, period = map(float, " ".join(texts).split())
            if 0 < quota < n * period:
                n = math.ceil(quota / period)
                os.environ.setdefault("OMP_NUM_THREADS", str(n))
    return n


# OpenMP reads its variables when torch is loaded, so each script imports this file before torch: a
# section of its own in pyproject.toml keeps that order. By default a thread that waits for another
# one spins 300,000 times: too long where other programs run. On an idle machine 50,000
# spins cost no time, and 20,000 cost 2 to 6%.
cores()
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "50000")


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what a user can mend into a sentence and exit code 2. Other errors are bugs.

    A user can mend a UserError, an OSError, a missing module, and text that is not UTF-8.
    """
    try:
        yield
    except BrokenPipeError:  # an OSError, but no mistake: _excepthook handles it
        raise
    except (UserError, OSError, ModuleNotFoundError, UnicodeDecodeError) as error:
        # every process prints it: perhaps this one alone has no GPU
        sys.stderr.write(f"{os.path.basename(sys.argv[0].removesuffix('/__main__.py'))}: {error}\n")
        sys.exit(2)


def _excepthook(family, error, trace):
    """Print an error. Ctrl-C and a closed pipe (`| head`) are no errors."""
    if family is KeyboardInterrupt:
        note("\ninterrupted")
    elif family is BrokenPipeError:
        os._exit(1)  # without flushing stdout, which would fail again
    else:
        sys.__excepthook__(family, error, trace)


sys.excepthook = _excepthook

# -----------------------------------------------------------------------------
# flags and their values


@user_errors()
def configure(script: dict, *dataclasses: type) -> tuple[dict, dict]:
    """(config, given): every flag's value; where each flag was set: a file, or "command line".

    script: the calling script's globals(). dataclasses: classes whose fields are flags as well;
    where the script assigns the same name, the script's default wins. Exits with code 2 on a
    mistake and with 0 after --help.
    """
    # what the terminal's encoding lacks is printed as an escape; a notebook's has all
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    # imported modules may add to the tables from which flags choose
    sources = {}
    options = {}
    for arg in sys.argv[1:]:
        arg = re.sub("^--no[-_]([^=]*)$", r"--\1=False", arg)
        name, equals, text = arg.partition("=")
        if name == "--import" and text:
            if text in ("attention", "lab", "text", "training"):
                raise UserError(f"--import={text} is a folder of this project: rename {text}.py")
            __import__(text)  # import_module takes ./my for a relative name, and wants a package
        elif arg.startswith("-"):
            options[name.lstrip("-")] = text if equals else True
        else:
            file = arg if os.path.isfile(arg) else f"{ROOT}/{arg}"
            if not os.path.isfile(file) or not arg.endswith(".py"):  # a text is meant for --source=
                raise UserError(f"there is no config file {arg} (a flag is written --key=value)")
            sources[arg] = runpy.run_path(file)

    flags = _flags(script, dataclasses)
    if options.keys() & {"h", "help"}:
        _print_help(script, flags)
        sys.exit()

    # the command line comes last: it wins over config files
    sources["command line"] = options
    config = {name: flag[0] for name, flag in flags.items()}
    given = {}
    for source, values in sources.items():
        for name, value in values.items():
            if name in flags:
                config[name] = _checked(source, name, value, flags[name][1])
                given[name] = source
            elif isinstance(value, PLAIN) and name[:1] != "_":
                [near] = difflib.get_close_matches(name, flags, 1, cutoff=0)
                raise UserError(f"{source}: unknown flag --{name}; did you mean --{near}?")
    return config, given


@user_errors()
def run_script(script: dict) -> None:
    """Set the flags of a script, given by its globals(), and call its main().

    With --quick the values of the script's QUICK are the defaults.
    """
    config, given = configure(script)
    if config.get("quick"):
        config |= script["QUICK"] | {name: config[name] for name in given}
    script.update(config)
    script["main"]()


def _flags(script, dataclasses):
    """{name: (default, type, help, group)} of every flag, in the order of --help.

    The fields of the dataclasses come first. A group is the question above a flag.
    """
    module = types.ModuleType("script")
    vars(module).update(script)
    flags = {}
    for owner in (*dataclasses, module):
        hints = typing.get_type_hints(owner)
        indent = 4 * isinstance(owner, type)
        group = "Flags"
        for line in inspect.getsourcelines(owner)[0]:
            if found := re.match(GROUP, line[indent:]):
                group = found[1]
            elif found := re.match(FLAG, line[indent:]):
                name, comment = found.groups("")
                default = getattr(owner, name, ())
                if isinstance(default, PLAIN):
                    hint = hints.get(name, type(default))
                    flags[name] = default, hint, comment, flags.get(name, [group])[-1]
    return flags


def _print_help(script, flags):
    print(f"""{script.get("__doc__") or ""}
usage: ... [config/file.py] [--flag=value ...]

Each flag stands here with its default value. A flag on the command line wins over a config file.
--flag is short for --flag=True, and --no-flag for --flag=False. --import=my.ideas imports a module
first, which may add to the model's tables; give it once for each module.""")

    text = textwrap.TextWrapper(100, "", " " * 36, break_on_hyphens=False)
    question = ""
    for name, (default, hint, comment, group) in flags.items():
        if group != question:
            question = group
            print(f"\n{question}")
        if "Literal" in str(hint):
            comment += f" ({' or '.join(typing.get_args(hint))})"
        flag = f"  --{name}={default!r}"
        print(text.fill(f"{flag:34}  {comment}"))


def _checked(source, name, value, hint):
    """A flag's value, in its type. A float takes an int, and an int takes 1e3.

    A text may stand for a number, True, False or None. nan and inf are refused.
    """
    kinds = typing.get_args(hint) or (hint,)
    if isinstance(value, str) and (value in kinds or str in kinds and value != "None"):
        if re.match(PATHS, f"{name}={value}"):
            value = os.path.expanduser("~").join(re.split(HOME, value))
        return value

    # no text: a number, True, False or None; literal_eval reads no nan and no inf
    with contextlib.suppress(ValueError, SyntaxError):
        number = ast.literal_eval(str(value))
        if type(number) is int and float in kinds:
            number = float(number)
        if type(number) is float and int in kinds and number.is_integer():
            number = int(number)
        if type(number) in kinds:
            return number
    raise UserError(f"{source}: --{name} must be {inspect.formatannotation(hint)}, not {value!r}")


# -----------------------------------------------------------------------------
# what several scripts need


def names(given: str, known: Iterable[str], separator: str = ",") -> list[str]:
    """The names that a flag lists, or all known names. Raises UserError for an unknown name."""
    listed = [name.strip() for name in given.split(separator) if name.strip()]
    for name in listed:
        if name not in known:
            raise UserError(f"{name!r} is not one of {f'{separator} '.join(known)}")
    return listed or list(known)


def positive(flag: str, given: str) -> list[int]:
    """The integers that a flag lists. Raises UserError if one is not positive."""
    if not re.fullmatch(r" *[1-9]\d*( *, *[1-9]\d*)* *", given):
        raise UserError(f"--{flag} must be positive integers, separated by commas; got {given}")
    return [int(word) for word in given.split(",")]


def at_least_one(**flags: int) -> None:
    """Raise UserError for a flag below 1: at_least_one(jobs=jobs)."""
    refuse((n < 1, f"--{name}={n} must be at least 1") for name, n in flags.items())


def pick_device(device: str, dtype: str) -> tuple:
    """(device, dtype, autocast context) of the flags. Raises UserError for a missing device.

    The GPU becomes PyTorch's current one. If it has no number, each of torchrun's processes on a
    machine takes its own. On a CPU the tiniest numbers become zeros: they would cost several times
    as much. Products of float32 are exact, also where an earlier script has asked for TF32.
    """
    import torch

    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("highest")
    if device == "auto":
        device = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if device == "cuda":
        device += f":{os.environ.get('LOCAL_RANK', 0)}"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device={device}: {first_line(error)}; --device=cpu works") from None

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        if dtype == "auto":
            bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = "bfloat16" if bfloat16 else "float16"
    if dtype in ("auto", "float32"):
        return device, "float32", contextlib.nullcontext()
    return device, dtype, torch.autocast(device.split(":")[0], getattr(torch, dtype))
