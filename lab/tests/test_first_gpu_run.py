"""lab/first_gpu_run.py: its commands, in small and in full size."""

import os
import re
from unittest import mock

import pytest
from harness import ROOT, done, parametrize, refused, slow

from lab import first_gpu_run as first
from model import ATTENTION

LOSS = "step 5: train loss 1.5, val loss 2.5"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """commands(tiny) -> (name, script, flags) of each command, with their folders in tmp_path."""
    monkeypatch.setattr(first, "out", str(tmp_path))
    monkeypatch.setattr(first, "out_dir", str(tmp_path / "runs"))

    def commands(tiny):
        monkeypatch.setattr(first, "tiny", tiny)
        rows = []
        for part in first.PARTS.values():
            for group in part():
                for name, command in group.items():
                    script, *flags = [word for word in command.argv if word != "-m"]
                    rows.append((name, script, flags))
        return rows

    with mock.patch.dict(ATTENTION):  # --import adds to it
        yield commands


@slow
def test_a_rehearsal_of_the_first_half_hour(commands, run, data):
    """Its commands work in small; here in one process, one after another, on a prepared text."""
    steps = {"stopped": ["--max_iters=3"], "resumed": ["--max_iters=5"]}
    for name, script, flags in commands(tiny=True):
        if script == "pytest":
            continue
        if script == "train.py":
            flags += [f"--dataset={data}", *steps.get(name, [])]
        out = done(run(script, *flags))
    assert "step 5: train loss" in out  # of resumed


def test_the_commands_of_the_first_half_hour(commands, run):
    """In full size their flags are right; what then needs a GPU says so."""
    for name, script, flags in commands(tiny=False):
        if script == "pytest":
            check_tests(flags)
        elif script == "train.py":
            if name in ("LS", "beta", "stopped"):  # the others have these flags too
                more = ["--init_from=scratch", "--device=cpu", "--dry_run"]
                done(run(script, *flags, *more), "FLOPs: ")
        else:
            err = refused(run(script, *flags))
            assert re.search("needs a CUDA GPU|sees 0 cuda devices", err), err


def check_tests(flags):
    """Each word of -k is in the name of a test of these files."""
    files = [flag for flag in flags if flag.endswith(".py")]
    text = "".join(open(os.path.join(ROOT, file)).read() for file in files)
    for word in flags[-1].split(" or "):
        assert re.search(rf"def test_\w*{word}", text), word


@parametrize("part", first.PARTS.values())
def test_a_part_takes_nine_minutes_at_most(part):
    seconds = 0
    for group in part():
        seconds += max(command.seconds for command in group.values()) + first.PATIENCE
    assert seconds <= 540


@parametrize("text, ending", [("beta is WRONG: its output differs", "FAILED"), (LOSS, "done")])
def test_an_attention_that_is_wrong_fails(tmp_path, monkeypatch, text, ending):
    """bench.py itself goes on without it."""
    monkeypatch.setattr(first, "tiny", True)
    with open(tmp_path / "log", "w") as log:
        result = first.run("bench", first.Command(["-c", f"print({text!r})"], 60), log, [])
    assert first.in_words(result).startswith(ending)
    assert [row["val"] for row in result["losses"]] == [2.5] * (text == LOSS)
