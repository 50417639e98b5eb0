"""Flags and config files: what they accept, and how they answer a mistake. Missing packages."""

import json
import os
import re
import subprocess
import sys
import textwrap

import configurator

import pytest
import torch
from harness import ROOT, done, parametrize, refusal
from test_house import CORE, read

from errors import UserError, optional

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
    n_head: int = 12  # heads of the model
    bias: bool = True  # in every layer

# an ordinary comment
out_dir = "out"  # where files go
# How long does it train?
learning_rate = 6e-4  # the largest
max_iters = 600  # steps
compile = True  # the model
# What is sampled?
text = "a"  # do we sample?
top_k: int | None = 200  # of the tokens
kind: "Literal[*KINDS]" = "a"  # a table, which --import may make longer
bias = False  # in every layer; False is faster
maybe: bool | None = None  # None: decided later
NOT_A_FLAG = 3
KINDS = {{"a": 1, "b": 2}}
config, given = configure(globals(), Model)
print(json.dumps([config, given]))
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "config").mkdir()

    def run(*args, config=None):
        if config is not None:
            (tmp_path / "config" / "my.py").write_text(textwrap.dedent(config))
        command = [sys.executable, str(tmp_path / "script.py"), *args]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


def assert_sentence(result, says):
    assert (result.returncode, result.stdout) == (2, "")
    assert says in result.stderr and len(result.stderr.splitlines()) == 1


def values(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)[0]


HOME = os.path.expanduser("~")
PROMPT = {"text": f"FILE:{HOME}/b"}
DEFAULTS = {
    "out_dir": "out",
    "learning_rate": 6e-4,
    "max_iters": 600,
    "compile": True,
    "text": "a",
    "top_k": 200,
    "kind": "a",
    "bias": False,
    "maybe": None,
    "n_head": 12,
}


@parametrize(
    "flags, expected",
    [
        ("", {}),  # the defaults are the script's, then the dataclass's
        ("--out_dir=a=b --learning_rate=1", {"out_dir": "a=b", "learning_rate": 1.0}),
        ("--out_dir=5 --max_iters=1e3 --kind=b", {"out_dir": "5", "max_iters": 1000, "kind": "b"}),
        ("--out_dir= --top_k=5 --no-bias", {"out_dir": "", "top_k": 5, "bias": False}),
        ("--max_iters=9007199254740993", {"max_iters": 2**53 + 1}),
        ("--compile --maybe --top_k=None", {"compile": True, "maybe": True, "top_k": None}),
        ("--no-compile --no_maybe --bias=True", {"compile": False, "bias": True, "maybe": False}),
        ("--out_dir=~/a,~/b~ --text=FILE:~/b", {"out_dir": f"{HOME}/a,{HOME}/b~"} | PROMPT),
        ("--text=~/x:~/e", {"text": "~/x:~/e"}),  # no path
        ("--text='None'", {"text": "'None'"}),
    ],
)
def test_flags_are_taken(script, flags, expected):
    result = script(*flags.split())
    assert values(result) == DEFAULTS | expected
    assert json.loads(result.stdout)[1] == dict.fromkeys(expected, "command line")


@parametrize(
    "flag, says",
    [
        ("--nhead=3", "command line: unknown flag --nhead; did you mean --n_head?"),
        ("--max-iters=3", "did you mean --max_iters?"),
        ("--max_iters=1.5", "--max_iters must be int, not '1.5'"),
        ("--learning_rate=inf", "must be float"),
        ("--max_iters", "must be int, not True"),
        ("--out_dir", "must be str, not True"),
        ("--compile=2", "must be bool"),
        ("--kind=c", "must be Literal['a', 'b']"),
        ("--top_k=x", "must be int | None"),
        ("--no-max_iters", "must be int"),
        ("max_iters=3", "no config file max_iters=3 (a flag is written --key=value)"),
        ("--import=my/ideas", "No module named 'my/ideas'"),
    ],
)
def test_a_mistake_is_a_sentence_and_code_2(script, flag, says):
    assert_sentence(script(flag, config=""), says)


def test_a_config_file_overrides_defaults_and_flags_override_it(script, tmp_path):
    (tmp_path / "base.py").write_text("n_head = 4")
    text = """
        from base import *
        import time
        import os.path as _p
        from math import pi as _pi
        max_iters = 5 * 8
        learning_rate = 1
        compile = False
        out_dir = "out-" + str(2 * 3)
        top_k = None
        def helper(): pass
    """
    result = script("config/my.py", config=text)
    expected = {"max_iters": 40, "learning_rate": 1.0, "out_dir": "out-6", "n_head": 4}
    expected |= {"compile": False, "top_k": None}
    assert values(result) == DEFAULTS | expected
    assert json.loads(result.stdout)[1] == dict.fromkeys(expected, "config/my.py")
    for order in (["config/my.py", "--max_iters=7"], ["--max_iters=7", "config/my.py"]):
        assert values(script(*order))["max_iters"] == 7


@parametrize(
    "config, says",
    [
        ("max_iter = 3", "config/my.py: unknown flag --max_iter; did you mean --max_iters?"),
        ("compile = 1", "config/my.py: --compile must be bool, not 1"),
        ("learning_rate = float('nan')", "must be float, not nan"),
    ],
)
def test_a_mistake_in_a_config_file(script, config, says):
    assert_sentence(script("config/my.py", config=config), says)


def test_an_imported_module_may_add_choices(script, tmp_path):
    (tmp_path / "kinds.py").write_text("import __main__\n__main__.KINDS['c'] = 3\n")
    assert values(script("--import=kinds", "--kind=c"))["kind"] == "c"
    assert "(a or b or c)" in script("--import=kinds", "--help").stdout


def test_an_error_in_users_code_keeps_its_traceback(script, tmp_path):
    (tmp_path / "ideas.py").write_text("\nfrom json import nothing\n")
    for result, says in (
        (script("--import=ideas"), 'ideas.py", line 2'),
        (script("config/my.py", config="max_iters = max_iters * 2"), 'my.py", line 1'),
    ):
        assert result.returncode == 1 and says in result.stderr


HELP = """
How large is it?
  --n_head=12                       heads of the model
  --bias=False                      in every layer; False is faster

Flags
  --out_dir='out'                   where files go

How long does it train?
  --learning_rate=0.0006            the largest
  --max_iters=600                   steps
  --compile=True                    the model

What is sampled?
  --text='a'                        do we sample?
  --top_k=200                       of the tokens
  --kind='a'                        a table, which --import may make longer (a or b)
  --maybe=None                      None: decided later
"""


def test_help_lists_every_flag_in_groups(script):
    out = script("--help").stdout
    assert out.startswith("A script with flags.\n") and out.endswith(HELP)


@parametrize(
    "ending, says",
    [
        ("raise KeyboardInterrupt", "\ninterrupted\n"),
        ("raise BrokenPipeError", ""),
        ("raise MemoryError('1 EB')", "\nMemoryError: 1 EB\n"),
    ],
)
def test_how_a_script_ends(ending, says):
    command = [sys.executable, "-c", f"import configurator\n{ending}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode != 0 and result.stderr.endswith(says)
    assert ("Traceback" in result.stderr) == ("Error" in says)


@pytest.mark.filterwarnings("ignore")  # without a GPU its autocast warns
def test_each_process_takes_its_own_gpu(monkeypatch):
    """And bfloat16, if the GPU has it."""
    taken = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", lambda n, device: None)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for dtype in ("bfloat16", "float16"):
        has = dtype == "bfloat16"
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has, **_: has)
        chosen = configurator.pick_device("auto", "auto")
        assert chosen[:2] == (taken.pop(), dtype) == ("cuda:1", dtype)


def test_a_missing_package_is_named():
    with refusal("a test needs nowhere: pip install nowhere", UserError):
        optional("nowhere.part", "a test")


# -----------------------------------------------------------------------------
# --help of every script


SETS_FLAGS = re.compile(r"(?m)^(config, .*= configure\(|    .*run_\w+\(globals)")
SCRIPTS = [path for path in CORE if SETS_FLAGS.search(read(path))]


def check_help(run, script):
    """--help prints lines of at most 100 columns, and explains every flag."""
    out = done(run(script, "--help"))
    out = out[out.index("\nusage: ") :].rstrip()
    assert all(len(line) <= 100 for line in out.splitlines())
    flags = re.split(r"\n+(?:\S.*\n)?  --", out)[1:]
    assert flags
    for flag in flags:
        assert re.fullmatch(r"\w+=.+?\s{2,}\S.*", flag, re.DOTALL), flag


@parametrize("script", SCRIPTS)
def test_help_explains_every_flag(run, script):
    check_help(run, script)


def test_a_module_with_the_name_of_a_folder_of_the_project(script):
    """It would be the folder, without a word."""
    assert_sentence(script("--import=text"), "--import=text is a folder of this project")


# -----------------------------------------------------------------------------
# what OpenMP reads


@parametrize(
    "files, n",
    [
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_cores_of_a_container(files, n, tmp_path, monkeypatch):
    """Its files, and the cores that it may use; the machine has 8."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(configurator, "CGROUP", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert configurator.cores() == n
    assert os.environ.get("OMP_NUM_THREADS") == (str(n) if n < 8 else None)


@parametrize("env", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE"}])
def test_waiting_threads_give_a_busy_core_up(env):
    """Unless the user has said how they wait."""
    names = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
    rest = {name: x for name, x in os.environ.items() if name not in names}
    code = "import configurator, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=rest | env, text=True)
    assert out.strip() == (str(env.get("GOMP_SPINCOUNT")) if env else "50000")
