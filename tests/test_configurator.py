"""Flags and config files: what they accept, and how they answer a mistake. Missing packages."""

import json
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest
from harness import ROOT
from test_house import CORE

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
        ("--out_dir=a=b --learning_rate=1", {"out_dir": "a=b", "learning_rate": 1.0}),
        ("--out_dir= --learning_rate=1e-3", {"out_dir": "", "learning_rate": 1e-3}),
        ("--out_dir=5 --max_iters=1e3 --kind=b", {"out_dir": "5", "max_iters": 1000, "kind": "b"}),
        ("--top_k=5 --max_iters=-1", {"top_k": 5, "max_iters": -1}),
        ("--max_iters=9007199254740993", {"max_iters": 2**53 + 1}),
        ("--compile --maybe --top_k=None", {"compile": True, "maybe": True, "top_k": None}),
        (
            "--compile=False --bias=true --no-maybe",
            {"compile": False, "bias": True, "maybe": False},
        ),
        ("--no-compile --bias=yes --maybe=None", {"compile": False, "bias": True, "maybe": None}),
        ("--no_compile --bias=1 --maybe=0", {"compile": False, "bias": True, "maybe": False}),
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
        ("--learning_rate=nan", "needs a number"),
        ("--max_iters=[1]", "needs an integer"),
        ("--no-max_iters", "needs an integer"),
        ("--no-zzz", "unknown flag"),
        ("--import=", "unknown flag"),
        ("config/your.py", "there is no config file config/your.py"),
        ("max_iters=3", "there is no config file max_iters=3"),
        ("--import=my/ideas.py", "No module named 'my/ideas' (--import needs a module's name"),
        ("--import=.ideas", "No module named '.ideas' (--import needs"),
        ("--import=my.ideas", "No module named 'my' (--import needs"),
        ("--import=config.ideas", "No module named 'config.ideas' (--import needs"),
        ("--import=json.decoder.x", "'json.decoder' is not a package (--import needs"),
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


def test_an_error_in_a_config_file_has_its_line(script, tmp_path):
    (tmp_path / "base.py").write_text("max_iters = 1\n\nmax_iters / 0\n")
    for config, says in (
        ("n_head = 1\nimport nowhere", "No module named 'nowhere' (config/my.py, line 2)"),
        ("import json\njson.loads('')", "(char 0) (config/my.py, line 2)"),
        ("from base import *", "base.py, line 3)"),
        ("\nn_head = ", "(my.py, line 2)"),
    ):
        err = script("config/my.py", config=config).stderr
        assert err.startswith("script.py: config/my.py could not be run: ") and says in err, err


def test_an_imported_module_may_add_choices(script, tmp_path):
    (tmp_path / "kinds.py").write_text("import __main__\n__main__.KINDS['c'] = 3\n")
    assert values(script("--import=kinds", "--kind=c"))["kind"] == "c"
    assert "(one of a, b, c)" in script("--import=kinds", "--help").stdout


def test_an_error_in_an_imported_module_keeps_its_traceback(script, tmp_path):
    for code, says in (
        ("import nowhere", "No module named 'nowhere'"),
        ("import ideas.part", "No module named 'ideas.part'"),
        ("from json import nothing", "cannot import name 'nothing'"),
    ):
        (tmp_path / "ideas.py").write_text(f"\n{code}\n")
        result = script("--import=ideas")
        assert result.returncode == 1 and says in result.stderr
        assert 'ideas.py", line 2' in result.stderr and "--import needs" not in result.stderr


def test_help_lists_every_flag_in_groups(script, tmp_path):
    result = script("--help")
    assert result.returncode == 0 and result.stdout.startswith("A script with flags.\n")
    names = {
        "How large is it?": ["n_head", "bias", "top_k", "kind", "maybe"],
        "Flags": ["out_dir"],
        "How long does it train?": ["learning_rate", "max_iters", "compile"],
    }
    groups = [group.splitlines() for group in result.stdout.split("\n\n")[-3:]]
    flags = [[line.split("  ")[1] for line in lines[1:]] for lines in groups]
    assert [lines[0] for lines in groups] == list(names)
    assert flags == [[f"--{name}={DEFAULTS[name]!r}" for name in group] for group in names.values()]
    for comment in ("heads of the model\n", "where files go", "in every layer", "(one of a, b)"):
        assert comment in result.stdout
    long = SCRIPT.replace('"out"', repr("out" + "/long" * 30))
    (tmp_path / "script.py").write_text(long)  # the text of the flag begins below it
    assert "/long'\n" + " " * 36 + "where files go\n" in script("--help").stdout


AFTER_CTRL_C = """
try:
    raise KeyboardInterrupt
except BaseException:
    raise RuntimeError("a process died") from None
"""
NO_MEMORY = "out of memory (1 EB). Make the batch or the model smaller\n"


@pytest.mark.parametrize(
    ("ending", "says"),
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


@pytest.mark.parametrize(
    ("ending", "last"),
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


def test_which_files_are_the_users():
    ours = [f"{ROOT}/{name}" for name in CORE] + [json.__file__, pytest.__file__, "<string>"]
    users = [f"{ROOT}/my.py", f"{ROOT}/lab/ideas.py", f"{ROOT}/model_2.py", "/home/me/model.py"]
    for paths, is_ours in ((ours, True), (users, False)):
        for path in paths:
            code = compile("def f(g): g()", path, "exec")
            scope = {}
            exec(code, scope)
            with pytest.raises(ZeroDivisionError) as error:
                scope["f"](lambda: 1 / 0)
            files = [frame.filename for frame in configurator.user_frames(error.tb)]
            assert (path not in files) == is_ours, path


def test_a_missing_package_is_named_a_broken_one_keeps_its_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for module, package in (("nowhere.part", "nowhere"), ("sklearn.datasets", "scikit-learn")):
        with pytest.raises(UserError, match=f"a test needs {package}: pip install {package}"):
            optional(module, "a test")
    for i, (code, error, says) in enumerate((
        ("import nowhere", ModuleNotFoundError, "No module named 'nowhere'"),
        ("raise ImportError('no libfoo.so')", ImportError, "no libfoo.so"),
        ("1 / 0", ZeroDivisionError, "division by zero"),
    )):  # fmt: skip
        (tmp_path / f"broken{i}.py").write_text(code)
        with pytest.raises(error, match=says):
            optional(f"broken{i}", "a test")


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


def scripts() -> list[str]:
    """The paths of the core's files that call configure()."""
    texts = {name: pathlib.Path(ROOT, name).read_text() for name in CORE}
    call = re.compile(r"^ *config, .*= configure\(globals", re.M)
    return [n for n, text in texts.items() if call.search(text) and n != "configurator.py"]


@pytest.mark.parametrize("script", scripts())
def test_help_explains_every_flag(run, script):
    code, out, _ = run(script, "--help")
    out = out[out.index("\nusage: ") :].rstrip()
    assert code == 0 and all(len(line) <= 100 for line in out.splitlines())
    groups = out.split("\n\n")[2:]
    flags = [flag for group in groups for flag in group.split("\n  --")[1:]]
    names = [flag.split("=")[0] for flag in flags]
    assert flags and len(set(names)) == len(names)
    for flag in flags:
        assert re.fullmatch(r"\w+=.+?\s{2,}\S.*", flag, re.DOTALL), flag
