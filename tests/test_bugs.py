"""If somebody edits the code and makes a bug, Python's traceback shows it, and ends in the bug's own error."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from harness import ROOT, SMALL

from training import checkpoint

# (file, what stands there, the bug, the last line of the traceback)
BUGS = {
    "a name that is not there": (
        "train.py",
        "        return learning_rate * (it + 1) / (warmup_iters + 1)\n",
        "        return learning_rate * (step + 1) / (warmup_iters + 1)\n",
        "NameError: name 'step' is not defined",
    ),
    "a ValueError of PyTorch's": (
        "model.py",
        "        return self.dropout(x) if self.training else x\n",
        "        return F.dropout(x, 3.0) if self.training else x\n",
        "ValueError: dropout probability has to be between 0 and 1, but got 3.0",
    ),
    "where data are read": (
        "text/dataset.py",
        "    def _windows(self, offsets",
        "    def _windows(self, offsets, *, calls=[]):\n        calls.append(1)\n        if len(calls) > 1:\n"
        "            {}['typo']\n        return self._read(offsets)\n\n    def _read(self, offsets",
        "KeyError: 'typo'",
    ),
}


def copied(folder: object) -> None:
    """Copies the project's code, without data, into a folder."""
    for name in ("attention", "training", "text"):
        shutil.copytree(os.path.join(ROOT, name), folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (name for name in os.listdir(ROOT) if name.endswith(".py")):
        shutil.copy(os.path.join(ROOT, name), folder / name)


@pytest.mark.slow
def test_a_bug_has_its_traceback(data, tmp_path):
    """One bug of each kind, typed into a copy of the project; all run at the same time."""
    quick = ["--max_iters=4", "--warmup_iters=2", "--lr_decay_iters=20", "--eval_interval=100", "--eval_iters=1"]
    runs, env = {}, os.environ | {"OMP_NUM_THREADS": "1"}
    for number, (name, (file, was, bug, _)) in enumerate(BUGS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        copied(folder)
        source = (folder / file).read_text()
        assert source.count(was) >= 1, f"{file} has no line {was!r} to put a bug into"
        (folder / file).write_text(source.replace(was, bug, 1))
        command = [sys.executable, "train.py", f"--dataset={data}", f"--out_dir={folder / 'out'}", *SMALL, *quick]
        runs[name] = subprocess.Popen(command, cwd=folder, env=env, stdout=-1, stderr=-1, text=True)
    for name, process in runs.items():
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1, (name, err)
        assert "Traceback (most recent call last)" in err and BUGS[name][0].split("/")[-1] in err, (name, err)
        assert err.strip().splitlines()[-1].startswith(BUGS[name][3]), (name, err)
        assert "learning_rate may help" not in err, (name, err)


def test_a_bug_while_a_checkpoint_is_written(train, monkeypatch):
    monkeypatch.setattr(checkpoint, "check_finite", lambda state: {}["typo"])
    with pytest.raises(KeyError, match="typo"):
        train()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("[enforce fail at inline_container.cc:668] . unexpected pos 1216 vs 1106", OSError),
        ("PytorchStreamWriter failed writing file data/0: file write failed", OSError),
        ("a size must match", RuntimeError),
    ],
)
def test_only_a_failing_disk_cannot_be_written_to(tmp_path, monkeypatch, message, error):
    """torch.save raises RuntimeErrors both for a full disk and for bugs."""

    def broken(*args: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(error, match="Is the disk full" if error is OSError else message):
        checkpoint.save(str(tmp_path / "ckpt.pt"), {})
    assert not os.listdir(tmp_path)
