"""Flags and config files: what they accept, and how they answer a mistake. Missing packages."""

import json
import os
import re
import subprocess
import sys
import textwrap
import traceback

import pytest
import torch
from harness import ROOT, done, parametrize, refusal
from test_house import CORE, read

import configurator
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
# How large is it?
top_k: int | None = 200  # of the tokens
kind: "Literal[*KINDS]" = "a"  # a table, which --import may make longer
bias = False
maybe: bool | None = None  # None: decided later
NOT_A_FLAG = 3
KINDS = {{"a": 1, "b": 2}}
config, given = configure(globals(), Model)
learning_rate = "reassigned below, as scripts do"
print(json.dumps([config, given]))
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "config").mkdir()
    (tmp_path / "note.txt").write_text("A text that someone meant with --source=.")

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


@parametrize(
    "flags, expected",
    [
        ("", {}),  # the defaults are the script's, then the dataclass's
        ("--out_dir=a=b --learning_rate=1", {"out_dir": "a=b", "learning_rate": 1.0}),
        ("--out_dir=5 --max_iters=1e3 --kind=b", {"out_dir": "5", "max_iters": 1000, "kind": "b"}),
        (
            "--out_dir= --top_k=5 --learning_rate=1e-3",
            {"out_dir": "", "top_k": 5, "learning_rate": 1e-3},
        ),
        ("--max_iters=9007199254740993", {"max_iters": 2**53 + 1}),
        ("--compile --maybe --top_k=None", {"compile": True, "maybe": True, "top_k": None}),
        ("--no-compile --bias=yes --maybe=0", {"compile": False, "bias": True, "maybe": False}),
        ("--no_maybe --bias=true", {"maybe": False, "bias": True}),
        ("--out_dir=~/a,FILE:~/b~", {"out_dir": f"{HOME}/a,FILE:{HOME}/b~"}),
    ],
)
def test_flags_are_taken(script, flags, expected):
    result = script(*flags.split())
    assert values(result) == DEFAULTS | expected
    assert json.loads(result.stdout)[1] == dict.fromkeys(expected, "command line")


@parametrize(
    "flag, says",
    [
        ("--nhead=3", "did you mean `n_head`?"),
        ("--max-iters=3", "did you mean `max_iters`?"),
        ("--max_iters=1.5", "needs an integer"),
        ("--max_iters=99999999999999999999", "--max_iters=99999999999999999999: the number is too"),
        ("--learning_rate=1e999", "needs a number"),
        ("--max_iters", "needs a value, an integer: --max_iters=..."),
        ("--compile=2", "needs True or False"),
        ("--kind=c", "needs a or b"),
        ("--top_k=x", "needs an integer or None"),
        ("-max_iters=3", "two dashes: --max_iters=3"),
        ("--no-max_iters", "needs an integer"),
        ("--import=", "unknown flag"),
        ("note.txt", "note.txt that ends in .py"),
        ("config/your.py", "there is no config file config/your.py"),
        ("--import=my/ideas.py", "No module named 'my/ideas' (--import needs a module's name"),
        ("--import=json.decoder.x", "'json.decoder' is not a package (--import needs"),
    ],
)
def test_a_mistake_is_a_sentence_and_code_2(script, flag, says):
    assert_sentence(script(flag, config=""), says)


def test_a_config_file_overrides_defaults_and_flags_override_it(script, tmp_path):
    (tmp_path / "base.py").write_text("import numpy as np\nn_head = np.int64(4)")
    text = """
        from base import *
        import time
        import os.path as _p
        from math import pi as _pi
        max_iters = 5 * 8
        learning_rate = np.float32(0.5)
        compile = np.bool_(False)
        out_dir = "out-" + str(2 * 3)
        def helper(): pass
    """
    result = script("config/my.py", config=text)
    expected = {"max_iters": 40, "learning_rate": 0.5, "out_dir": "out-6", "n_head": 4}
    expected["compile"] = False
    assert values(result) == DEFAULTS | expected
    assert json.loads(result.stdout)[1] == dict.fromkeys(expected, "config/my.py")
    for order in (["config/my.py", "--max_iters=7"], ["--max_iters=7", "config/my.py"]):
        assert values(script(*order))["max_iters"] == 7


@parametrize(
    "config, says",
    [
        ("max_iter = 3", "did you mean `max_iters`?"),
        ("compile = 1", "needs True or False"),
        ("\nmax_iters = ", "(my.py, line 2)"),
        ("max_iters = max_iters * 2", "name 'max_iters' is not defined (config/my.py, line 1)"),
        ("n_head = 1\nimport nowhere", "No module named 'nowhere' (config/my.py, line 2)"),
        ("import json\njson.loads('')", "(char 0) (config/my.py, line 2)"),
        ("from base import *", "base.py, line 3)"),
    ],
)
def test_a_mistake_in_a_config_file(script, tmp_path, config, says):
    (tmp_path / "base.py").write_text("max_iters = 1\n\nmax_iters / 0\n")
    result = script("config/my.py", config=config)
    assert_sentence(result, says)
    assert result.stderr.startswith("script.py: config/my.py")


def test_characters_that_the_terminal_lacks_are_escaped(script, tmp_path, monkeypatch):
    """In the encodings of a redirected output on Windows, and half a character in UTF-8."""
    (tmp_path / "script.py").write_text(SCRIPT + r'print("\u6f22\udcff")')
    for encoding, line in (("cp1252", r"\u6f22\udcff"), ("utf-8", r"漢\udcff")):
        monkeypatch.setenv("PYTHONIOENCODING", encoding)
        command = [sys.executable, tmp_path / "script.py"]
        printed = subprocess.run(command, capture_output=True, check=True).stdout
        assert printed.decode(encoding).splitlines()[-1] == line


def test_an_imported_module_may_add_choices(script, tmp_path):
    (tmp_path / "kinds.py").write_text("import __main__\n__main__.KINDS['c'] = 3\n")
    assert values(script("--import=kinds", "--kind=c"))["kind"] == "c"
    assert "(a or b or c)" in script("--import=kinds", "--help").stdout


def test_an_error_in_an_imported_module_keeps_its_traceback(script, tmp_path):
    for code, says in (
        ("import nowhere", "No module named 'nowhere'"),
        ("from json import nothing", "cannot import name 'nothing'"),
    ):
        (tmp_path / "ideas.py").write_text(f"\n{code}\n")
        result = script("--import=ideas")
        assert result.returncode == 1 and says in result.stderr
        assert 'ideas.py", line 2' in result.stderr and "--import needs" not in result.stderr


HELP = """
How large is it?
  --n_head=12                       heads of the model
  --bias=False                      in every layer
  --top_k=200                       of the tokens
  --kind='a'                        a table, which --import may make longer (a or b)
  --maybe=None                      None: decided later

Flags
  --out_dir='out'                   where files go

How long does it train?
  --learning_rate=0.0006            the largest
  --max_iters=600                   steps
  --compile=True                    the model
"""


def test_help_lists_every_flag_in_groups(script):
    out = script("--help").stdout
    assert out.startswith("A script with flags.\n") and out.endswith(HELP)


AFTER_CTRL_C = """
try:
    raise KeyboardInterrupt
except BaseException:
    raise RuntimeError("a process died") from None
"""
NO_MEMORY = "out of memory (1 EB). Make the batch or the model smaller\n"


@parametrize(
    "ending, says",
    [
        ("raise KeyboardInterrupt", "\ninterrupted\n"),
        (AFTER_CTRL_C, "\ninterrupted\n"),
        ("raise BrokenPipeError", ""),
        ("configurator.names('a', Names())", NO_MEMORY),
    ],
)
def test_what_is_nobodys_bug_is_a_sentence(ending, says):
    names = "class Names:\n    def __contains__(self, name):\n        raise MemoryError('1 EB')\n"
    code = f"{names}import configurator\n{ending}"  # in no file, as if it were the core's
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode != 0 and result.stderr == says


@parametrize(
    "ending, last",
    [
        ("1 / 0", "ZeroDivisionError: division by zero\n"),
        ("raise MemoryError('1 EB')", NO_MEMORY),
        ("import torch; torch.empty(2**58)", "Make the batch or the model smaller\n"),
    ],
)
def test_an_error_in_the_users_own_code_keeps_its_traceback(script, tmp_path, ending, last):
    (tmp_path / "script.py").write_text(f"{SCRIPT}{ending}\n")
    err = script().stderr
    assert f'script.py", line {SCRIPT.count(chr(10)) + 1}' in err and err.endswith(last), err


@pytest.mark.filterwarnings("ignore")  # without a GPU its autocast warns
def test_each_process_takes_its_own_gpu(monkeypatch):
    """And bfloat16, if the GPU has it."""
    taken = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for dtype in ("bfloat16", "float16"):
        has = dtype == "bfloat16"
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has, **_: has)
        chosen = configurator.pick_device("auto", "auto")
        assert chosen[:2] == (taken.pop(), dtype) == ("cuda:1", dtype)


def test_which_files_are_the_users(monkeypatch):
    users = [
        f"{ROOT}/my.py",
        f"{ROOT}/lab/ideas/scores.py",
        f"{ROOT}/model_2.py",
        "/home/me/model.py",
    ]
    paths = [f"{ROOT}/{name}" for name in CORE] + [json.__file__, pytest.__file__, "<string>"]
    frames = [traceback.FrameSummary(path, 1, "f") for path in paths + users]
    monkeypatch.setattr(traceback, "extract_tb", lambda trace: frames)
    assert [frame.filename for frame in configurator.user_frames(None)] == users


def test_a_missing_package_is_named_a_broken_one_keeps_its_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with refusal("a test needs nowhere: pip install nowhere", UserError):
        optional("nowhere.part", "a test")
    with refusal("a test needs scikit-learn: pip install scikit-learn", UserError):
        optional("sklearn.datasets", "a test", "scikit-learn")
    (tmp_path / "broken.py").write_text("import nowhere")
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'"):
        optional("broken", "a test")


# -----------------------------------------------------------------------------
# --help of every script


SETS_FLAGS = re.compile(r"(?m)^ *(config, .*= configure\(|run_script\(globals)")
SCRIPTS = [path for path in CORE if path != "configurator.py" and SETS_FLAGS.search(read(path))]


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
