"""identity.py: what decides a run has another checksum, what does not has the same. And runs.py."""

import json
import os
import shutil
import threading
import time

import pytest
from filelock import FileLock
from harness import ROOT, parametrize, refusal

from errors import UserError
from lab.experiments import compare, identity, laser, results, runs
from lab.experiments.tables import TABLES

CODE = {
    "mine.py": "import helper\n\ndef f(x):\n    return helper.times * x\n",
    "helper.py": "from package.part import times\nimport pool\nlater = __import__('later')\n",
    "later.py": "x = 1\n",
    "pool/__init__.py": "import importlib\nfor name in ('one',):\n"
    "    importlib.import_module(f'{__name__}.{name}')\n",
    "pool/one.py": "x = 1\n",
    "package/__init__.py": "",
    "package/part.py": "from . import other\nfrom .other import number\ntimes = 2 * number\n",
    "package/other.py": "def late():\n    import importlib\n    importlib.import_module('lazy')\n"
    "number = 1\n",
    "lazy.py": "x = 1\n",
    "config.py": "import helper_of_config\ndataset = 'shakespeare_char'\nn_layer = 1\n",
    "helper_of_config.py": "x = 1\n",
}


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A folder with CODE; write(name, text) edits a file, as between two processes."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        later = time.time() + len(identity.SEEN)
        os.utime(path, (later, later))
        monkeypatch.setattr(identity, "SEEN", {})

    for name, text in CODE.items():
        write(name, text)
    return write


def identity_of(tmp_path, *flags):
    return runs.identity([str(tmp_path / "config.py"), "--import=mine", *flags])


@parametrize("name", CODE)
def test_code_that_a_run_executes_is_in_its_identity(name, code, tmp_path):
    """Whatever it imports; but no comment, no docstring and no layout."""
    first = identity_of(tmp_path)
    code(name, f'"""A docstring."""\n# a comment\n\n\n{CODE[name]}')
    assert identity_of(tmp_path) == first
    code(name, CODE[name] + "new = 1\n")
    assert identity_of(tmp_path) != first


def test_the_core_and_the_flags_are_in_an_identity():
    first = runs.identity([laser.CPU, "--seed=1"])
    files = {os.path.relpath(path, ROOT) for path in identity.SEEN}
    wanted = "model.py parts.py train.py attention/fast.py training/log.py text/dataset.py"
    assert {*wanted.split(), laser.CPU, "data/shakespeare_char"} <= files
    assert not [path for path in files if "-packages" in path or path.startswith("..")]
    assert first != runs.identity([laser.CPU, "--seed=2"])
    variants = "lab/experiments/variants.py"
    runs.identity([laser.CPU, "--variant=rezero"])
    assert variants not in files and f"{ROOT}/{variants}" in identity.SEEN


def test_a_folder_and_an_encoding_of_ones_own(tmp_path, monkeypatch):
    folder = tmp_path / "my-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    (folder / "ours.py").write_bytes(b"\xef\xbb\xbfimport theirs\n")
    (folder / "theirs.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    identity.of_code(["ours"])
    assert {str(folder / name) for name in ("ours.py", "theirs.py")} <= {*identity.SEEN}


def test_what_a_config_file_computes_is_in_an_identity(code, tmp_path, monkeypatch):
    code(
        "config.py",
        CODE["config.py"] + "import os, time\nwandb_run_name = f'{time.time()}'\n"
        "n_layer = int(os.environ['LAYERS'])\n",
    )
    found = []
    for n in "12":
        monkeypatch.setenv("LAYERS", n)
        found.append(identity_of(tmp_path))
    assert found[0] != found[1] == identity_of(tmp_path)


def test_what_a_script_measures_is_of_its_code_and_its_rows(code, tmp_path):
    script = str(tmp_path / "config.py")
    rows = {"import": "mine"}, {"conv": 4}
    first = runs.of_rows(script, *rows)
    assert first != runs.of_rows(script, rows[0], {"conv": 2})
    code("helper_of_config.py", "x = 2\n")
    second = runs.of_rows(script, *rows)
    code("package/other.py", "number = 3\n")
    assert len({first, second, runs.of_rows(script, *rows)}) == 3


def test_times_of_steps_are_of_the_core_and_of_the_config_file():
    first = compare.of_times(TABLES["64"])
    files = {os.path.relpath(path, ROOT) for path in identity.SEEN}
    assert {"model.py", "training/optimizers.py", "lab/experiments/times.py"} <= files
    assert first != compare.of_times(TABLES["256"])


def test_data_prepared_anew_has_another_identity(code, data, tmp_path, monkeypatch):
    flag = f"--dataset={shutil.copytree(data, tmp_path / 'text')}"
    first = identity_of(tmp_path, flag)
    path = tmp_path / "text" / "meta.json"
    meta = json.loads(path.read_text())
    meta["files"]["train.bin"]["sha256"] = "0"
    path.write_text(json.dumps(meta))
    with refusal("was edited while this ran", UserError):
        identity_of(tmp_path, flag)
    monkeypatch.setattr(identity, "SEEN", {})
    assert identity_of(tmp_path, flag) != first


def test_results_of_edited_code_are_not_kept(code, tmp_path):
    """Neither of a measurement during which code was edited, nor of a run."""
    seen = dict(identity.SEEN)
    of = identity_of(tmp_path)
    path = str(tmp_path / "x.json")

    def measure():
        seen.update(identity.SEEN)
        code("lazy.py", "x = 2\n")
        identity.SEEN.update(seen)
        return {"a": 1}

    with refusal("lazy.py was edited while this ran", UserError):
        results.measured(path, "part", "row", 1, measure, of=of)
    assert not os.path.exists(path)


def log_of(folder, *rows):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


END = {"iter": 5, "val_loss": 1.0, "train_loss": 1.0}


def test_a_log_counts_with_its_last_step_alone(tmp_path):
    for rows in ([], [{"iter": 0}], [{"iter": 0}, END | {"iter": 4}], [END, {"iter": 5}]):
        log_of(tmp_path, *rows)
        assert runs.rows_of_log(tmp_path, 5) is None
    (tmp_path / "log.jsonl").write_text('{"iter": 5, "val_lo')
    assert runs.rows_of_log(tmp_path, 5) is None
    for last in (END, {"iter": 3, "diverged": True}):
        log_of(tmp_path, {"iter": 0}, last)
        assert runs.rows_of_log(tmp_path, 5)[-1] == last


def test_a_run_that_another_process_makes_is_waited_for(code, tmp_path, monkeypatch):
    command = [str(tmp_path / "config.py"), "--max_iters=5"]
    folder = tmp_path / "run"
    monkeypatch.setattr(runs, "make", lambda *args: pytest.fail("made twice"))
    log = []
    with FileLock(f"{folder}.lock"):
        second = threading.Thread(target=lambda: log.extend(runs.finished("a", command, folder)))
        second.start()
        time.sleep(0.1)
        log_of(folder, END)
        (folder / runs.DONE).write_text(runs.identity(command))
        assert not log
    second.join()
    assert log == [END]


def test_a_run_whose_process_read_other_code_is_not_kept(code, tmp_path, monkeypatch):
    """The code was edited, and edited back, before this process could see it."""
    command = [str(tmp_path / "config.py"), "--max_iters=5"]
    folder = tmp_path / "run"

    def make(*args):
        log_of(folder, END)
        (folder / runs.MADE).write_text("other code")

    monkeypatch.setattr(runs, "make", make)
    with refusal("were edited while", UserError):
        runs.finished("a", command, folder)
    assert not (folder / runs.DONE).exists()


def test_a_run_of_another_process_with_the_same_name_is_not_taken(code, tmp_path, monkeypatch):
    path = str(tmp_path / "x.json")
    monkeypatch.setattr(runs, "make_run", lambda *_: ({"of": "mine", "val": 1.0}, 0.0))

    def add_theirs(name, seconds):
        results.add(path, {"of": "theirs", "val": 2.0}, "runs", name)

    args = {"a": [str(tmp_path / "config.py")]}, str(tmp_path), 1, True, (), add_theirs
    assert runs.record(path, *args)["a"]["val"] == 1.0


def test_two_processes_add_to_a_file_of_results(tmp_path):
    path = str(tmp_path / "x.json")
    adding = [
        threading.Thread(target=results.add, args=(path, i, "runs", str(i))) for i in range(20)
    ]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert len(results.saved(path, {})["runs"]) == 20
