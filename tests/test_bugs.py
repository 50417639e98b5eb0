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
    "a wrong unpack": (
        "model.py",
        "    s, seen = scores(q, k, scale, bias), visible(q, k, window, causal, seen)  # (B, H, Tq, T), (Tq, T)\n",
        "    B, H, T = q.shape\n",
        "ValueError: too many values to unpack (expected 3",
    ),
    "a wrong shape": (
        "choices.py",
        'gelu_tanh = partial(F.gelu, approximate="tanh")',
        'gelu_tanh = lambda x: F.gelu(x @ x, approximate="tanh")',
        "RuntimeError: Expected size for first two dimensions of batch2 tensor to be",
    ),
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
    "in the thread that loads": (
        "text/dataset.py",
        "    def _windows(self, offsets",
        "    def _windows(self, offsets, *, calls=[]):\n        calls.append(1)\n        if len(calls) > 1:\n"
        "            {}['typo']\n        return self._read(offsets)\n\n    def _read(self, offsets",
        "KeyError: 'typo'",
    ),
    "in prepare.py": (
        "data/shakespeare_char/prepare.py",
        "with user_errors():\n",
        "with user_errors():\n    config['typo']\n",
        "KeyError: 'typo'",
    ),
}


def copied(folder: object) -> None:
    """Copies the project's code, without data, into a folder."""
    for name in ("attention", "training", "text", "data", "config"):
        there = shutil.ignore_patterns("*.bin", "meta.json", "__pycache__", "*.tmp")
        shutil.copytree(os.path.join(ROOT, name), folder / name, ignore=there)
    for name in (name for name in os.listdir(ROOT) if name.endswith(".py")):
        shutil.copy(os.path.join(ROOT, name), folder / name)


def with_bug(folder: object, file: str, was: str, bug: str) -> None:
    source = (folder / file).read_text()
    assert source.count(was) >= 1, f"{file} has no line {was!r} to put a bug into"
    (folder / file).write_text(source.replace(was, bug, 1))


def flags(data: str, folder: object) -> list[str]:
    quick = ["--max_iters=4", "--warmup_iters=2", "--lr_decay_iters=20", "--eval_interval=100", "--eval_iters=1"]
    return [f"--dataset={data}", f"--out_dir={folder / 'out'}", *SMALL, *quick, "--gradient_accumulation_steps=2"]


@pytest.mark.slow
def test_a_bug_has_its_traceback(data, tmp_path):
    """One bug of each kind, typed into a copy of the project; all run at the same time."""
    runs = {}
    for number, (name, (file, was, bug, _)) in enumerate(BUGS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        copied(folder)
        with_bug(folder, file, was, bug)
        script = [file] if file.startswith("data") else ["train.py", *flags(data, folder)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        runs[name] = subprocess.Popen([sys.executable, *script], cwd=folder, env=env, stdout=-1, stderr=-1, text=True)
    for name, process in runs.items():
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1, (name, err)
        assert "Traceback (most recent call last)" in err and BUGS[name][0].split("/")[-1] in err, (name, err)
        assert err.strip().splitlines()[-1].startswith(BUGS[name][3]), (name, err)
        assert "learning_rate may help" not in err, (name, err)


@pytest.mark.slow
def test_a_bug_has_its_traceback_under_torchrun(data, tmp_path):
    copied(tmp_path)
    file, was, bug, says = BUGS["a wrong unpack"]
    with_bug(tmp_path, file, was, bug)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "train.py", *flags(data, tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback (most recent call last)" in done.stderr and says in done.stderr
    assert 'model.py", line' in done.stderr and "learning_rate may help" not in done.stderr


@pytest.mark.parametrize("background", [[], ["--save_in_background"]])
def test_a_bug_while_a_checkpoint_is_written(train, monkeypatch, background):
    def broken(*args: object) -> None:
        {}["typo"]

    monkeypatch.setattr(checkpoint, "check_finite", broken)
    with pytest.raises(KeyError, match="typo"):
        train(*background)


@pytest.mark.parametrize("background", [False, True])
def test_only_a_failing_disk_cannot_be_written_to(background, tmp_path, monkeypatch):
    """torch.save raises RuntimeErrors both for a full disk and for bugs."""
    keeper = checkpoint.Keeper(str(tmp_path), 2, background, False)
    state = {"model": {}, "iter_num": 3}
    full = "[enforce fail at inline_container.cc:668] . unexpected pos 1216 vs 1106"
    for message in (full, "PytorchStreamWriter failed writing file data/0: file write failed", "a size must match"):

        def broken(*args: object, message: str = message) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr(torch, "save", broken)
        if "size" in message:
            with pytest.raises(RuntimeError, match="a size must match"):
                keeper.save(state)
                keeper.wait()
        else:
            keeper.save(state)
            keeper.wait()
            assert isinstance(keeper.error, OSError) and "Is the disk full?" in str(keeper.error)


def test_a_mistake_has_no_traceback(train):
    code, _, err = train("--heads=SX")
    assert code == 2 and "made of S (short) and L (long)" in err and "Traceback" not in err
