"""Flags and config files: what they accept, and how they answer a mistake."""

import json
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest
from harness import ROOT

SCRIPT = f'''
"""A script with flags."""
import json, sys
sys.path.insert(0, {ROOT!r})
from dataclasses import dataclass
from typing import Literal
from configurator import configure

@dataclass
class Model:
    # How large is it?
    n_head: int = 12  # heads of the model, such as a name in HEADS
    bias: bool = True  # in every layer

# an ordinary comment
out_dir = "out"  # where files go
# How long does it train?
learning_rate = 6e-4  # the largest
max_iters = 600  # steps, not a name in MOST or a name in HEADSTRONG
compile = True  # the model
# How large is it?
top_k: int | None = 200  # of the tokens
kind: Literal["a", "b"] = "a"  # one of two, which is a name in sys.nothing or in json.NOWHERE
bias = False
maybe: bool | None = None  # None: decided later
NOT_A_FLAG = 3
MOST = 600
HEADS = {{"one": 1, "two": 2}}
config, given = configure(globals(), Model)
learning_rate = "reassigned below, as scripts do"
print(json.dumps([config, given]))
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "config").mkdir()

    def run(*args: str, config: str | None = None) -> subprocess.CompletedProcess:
        if config is not None:
            (tmp_path / "config" / "my.py").write_text(textwrap.dedent(config))
        command = [sys.executable, str(tmp_path / "script.py"), *args]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


def values(result: subprocess.CompletedProcess) -> dict:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)[0]


DEFAULTS = {
    "out_dir": "out",
    "learning_rate": 6e-4,
    "max_iters": 600,
    "compile": True,
    "top_k": 200,
    "kind": "a",
    "bias": False,
    "maybe": None,
    "n_head": 12,
}


def test_defaults_are_the_scripts_then_the_dataclasses(script):
    assert values(script()) == DEFAULTS


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--out_dir=a=b --learning_rate=1 --max_iters=1e3",
            {"out_dir": "a=b", "learning_rate": 1.0, "max_iters": 1000},
        ),
        ("--out_dir= --learning_rate=1e-3 --max_iters=-1", {"out_dir": "", "learning_rate": 1e-3, "max_iters": -1}),
        ("--out_dir=5 --top_k=5 --n_head=3 --kind=b", {"out_dir": "5", "top_k": 5, "n_head": 3, "kind": "b"}),
        ("--compile --maybe --bias=true --top_k=None", {"compile": True, "maybe": True, "bias": True, "top_k": None}),
        ("--compile=False --no-maybe", {"compile": False, "maybe": False}),
        ("--no-compile --maybe=None", {"compile": False, "maybe": None}),
        ("--no_compile", {"compile": False}),
    ],
)
def test_flags_are_taken(script, flags, expected):
    result = script(*flags.split(" "))
    assert values(result) == DEFAULTS | expected
    assert json.loads(result.stdout)[1] == dict.fromkeys(expected, "command line")


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--nhead=3", "did you mean `n_head`?"),
        ("--max-iters=3", "did you mean `max_iters`?"),
        ("--zzz=3", "unknown flag"),
        ("--NOT_A_FLAG=4", "unknown flag"),
        ("--learning_rate=fast", "needs a number"),
        ("--max_iters=1.5", "needs an integer"),
        ("--max_iters", "needs a value, an integer: --max_iters=..."),
        ("--compile=2", "needs True or False"),
        ("--kind=c", "needs one of a, b"),
        ("--top_k=x", "needs an integer or None"),
        ("-max_iters=3", "two dashes: --max_iters=3"),
        ("--no-max_iters", "unknown flag"),
        ("config/your.py", "there is no config file config/your.py"),
        ("max_iters=3", "there is no config file max_iters=3"),
        ("--import=my/ideas.py", "No module named 'my/ideas' (--import needs a module's name"),
    ],
)
def test_a_mistake_is_a_sentence_and_code_2(script, flag, says):
    result = script(flag, config="")
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    assert result.stdout == ""


def test_a_config_file_overrides_defaults_and_flags_override_it(script):
    text = """
        import time
        import os.path as _p
        from math import pi as _pi
        max_iters = 5 * 8
        learning_rate = 1  # an int for a float
        out_dir = "out-" + str(2 * 3)
        def helper(): pass
        n_head = 4
    """
    result = script("config/my.py", config=text)
    expected = {"max_iters": 40, "learning_rate": 1.0, "out_dir": "out-6", "n_head": 4}
    assert values(result) == DEFAULTS | expected
    assert json.loads(result.stdout)[1] == dict.fromkeys(expected, "config/my.py")
    for order in (["config/my.py", "--max_iters=7"], ["--max_iters=7", "config/my.py"]):
        assert values(script(*order))["max_iters"] == 7


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("max_iter = 3", "did you mean `max_iters`?"),
        ("max_iters = 'many'", "needs an integer"),
        ("compile = 1", "needs True or False"),
        ("max_iters = [1]", "needs an integer"),
        ("max_iters = ", "SyntaxError"),
        ("max_iters = unknown", "name 'unknown' is not defined"),
        ("max_iters = max_iters * 2", "name 'max_iters' is not defined"),
    ],
)
def test_a_mistake_in_a_config_file(script, config, says):
    result = script("config/my.py", config=config)
    assert (result.returncode, result.stdout) == (2, "")
    assert says in result.stderr and "config/my.py" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_lists_every_flag_in_groups_and_names_what_is_in_a_table(script, tmp_path):
    result = script("--help")
    assert result.returncode == 0 and result.stdout.startswith("A script with flags.\n")
    groups = result.stdout.split("\n\n")[-3:]
    assert [group.splitlines()[0] for group in groups] == ["How large is it?", "Flags", "How long does it train?"]
    flags = [[line.strip().split("  ")[0] for line in group.splitlines() if "  --" in line] for group in groups]
    order = [["n_head", "bias", "top_k", "kind", "maybe"], ["out_dir"], ["learning_rate", "max_iters", "compile"]]
    assert flags == [[f"--{name}={DEFAULTS[name]!r}" for name in names] for names in order]
    for comment in ("heads of the model, such as one, two\n", "where files go", "in every layer", "one of a, b"):
        assert comment in result.stdout
    assert "not a name in MOST or a name in HEADSTRONG" in " ".join(result.stdout.split())
    assert all(len(line) <= 100 for group in groups for line in group.splitlines())
    (tmp_path / "script.py").write_text(SCRIPT.replace('"out"', repr("out" + "/long" * 30)))  # its text begins below it
    assert "/long'\n" + " " * 36 + "where files go\n" in script("--help").stdout


AFTER_CTRL_C = "try: raise KeyboardInterrupt\nexcept BaseException: raise RuntimeError('a process died') from None"


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("raise KeyboardInterrupt", "\ninterrupted\n"),
        (AFTER_CTRL_C, "\ninterrupted\n"),
        ("raise BrokenPipeError", ""),
        ("raise MemoryError('1 EB')", "out of memory (1 EB). Make the batch or the model smaller\n"),
        ("raise RuntimeError('[enforce fail] can\\'t allocate memory: 1 EB')", "out of memory"),
    ],
)
def test_what_is_nobodys_bug_is_a_sentence(script, tmp_path, ending, says):
    (tmp_path / "script.py").write_text(SCRIPT + ending + "\n")
    result = script()
    assert says in result.stderr and "Traceback" not in result.stderr and result.returncode != 0


def test_a_bug_keeps_its_traceback(script, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + "1 / 0\n")
    assert "ZeroDivisionError" in script().stderr and "Traceback" in script().stderr


def test_a_config_file_may_build_on_another(run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from config.train_shakespeare_char_cpu import *\nmax_iters = 7\n")
    code, out, err = run("train.py", path, "--dry_run", "--vocab_size=65")
    assert code == 0 and "in 7 steps" in out, err


def test_only_python_is_run_as_a_config_file(run, tmp_path):
    """And not the text that someone meant with --source=."""
    (tmp_path / "note.txt").write_text("print('it ran')")
    code, out, err = run("data/text/prepare.py", tmp_path / "note.txt")
    assert code == 2 and "note.txt that ends in .py" in err and "it ran" not in out


# -----------------------------------------------------------------------------
# --help of every script


SCRIPTS = []
for pattern in ("*.py", "data/*/*.py", "scripts/*.py"):
    paths = sorted(path for path in pathlib.Path(ROOT).glob(pattern) if path.name != "configurator.py")
    SCRIPTS += [
        str(p.relative_to(ROOT)) for p in paths if re.search(r"^ *config, .*= configure\(", p.read_text(), re.M)
    ]


def help_of(run, script: str) -> dict[str, list[str]]:
    """What --help says: for each heading, the text of each flag below it."""
    code, out, _ = run(script, "--help")
    assert code == 0 and "usage: python" in out and all(len(line) <= 120 for line in out.splitlines())
    flags = out[out.index("usage: python") :].rstrip().split("\n\n")[2:]
    return {group.split("\n")[0]: group.split("\n  --")[1:] for group in flags}


def names(group: list[str]) -> list[str]:
    return [flag.split("=")[0] for flag in group]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_flag(run, script):
    groups = help_of(run, script)
    flags = [flag for group in groups.values() for flag in group]
    assert flags and len(set(names(flags))) == len(flags)
    for flag in flags:
        default, text = re.split(r"\s{2,}", flag, maxsplit=1)
        assert "=" in default and text.strip() and "a name in" not in text, flag
