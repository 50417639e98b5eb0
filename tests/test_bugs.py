"""If somebody edits the code and makes a bug, Python's traceback shows it, and ends in the bug's own error."""

import os

import pytest
import torch
from harness import ROOT
from torch.nn import functional as F

from model import MLP
from text import dataset
from training import checkpoint


@pytest.mark.parametrize(
    ("owner", "name", "bug", "error", "says"),
    [
        (MLP, "forward", lambda self, x: F.dropout(x, 3.0), ValueError, "dropout probability has to be between"),
        (dataset.Tokens, "_windows", lambda self, offsets: {}["typo"], KeyError, "typo"),
        (checkpoint, "check_finite", lambda state: {}["typo"], KeyError, "typo"),
    ],
)
def test_a_bug_keeps_its_traceback(train, monkeypatch, owner, name, bug, error, says):
    """In the model, where data are read, and where a checkpoint is written: nobody takes it for a user's mistake."""
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(error, match=says):
        train("--max_iters=5")


def test_a_bug_in_train_py_keeps_its_traceback(run, data, tmp_path):
    with open(os.path.join(ROOT, "train.py"), encoding="utf-8") as f:
        source = f.read()
    was = "return learning_rate * (it + 1)"
    assert source.count(was) == 1
    (tmp_path / "train.py").write_text(source.replace(was, "return learning_rate * (step + 1)"), encoding="utf-8")
    small = ("--block_size=8", "--batch_size=1", "--n_layer=1", "--n_head=1", "--n_embd=8", "--device=cpu")
    few = ("--max_iters=3", "--warmup_iters=2", "--eval_iters=1", "--gradient_accumulation_steps=1")
    with pytest.raises(NameError, match="name 'step' is not defined"):
        run(str(tmp_path / "train.py"), f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", *small, *few)


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
