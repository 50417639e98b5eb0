"""lab/first_gpu_run.py: its commands, in small and in full size."""

import os
import re

import pytest
from harness import ROOT

from lab import first_gpu_run as first


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """commands(tiny) -> (part, name, what python gets) of all its commands, with their folders in tmp_path."""
    monkeypatch.setattr(first, "out", str(tmp_path))
    monkeypatch.setattr(first, "out_dir", str(tmp_path / "runs"))

    def commands(tiny: bool) -> list[tuple[str, str, list[str]]]:
        monkeypatch.setattr(first, "tiny", tiny)
        groups = ((part, group) for part, make in first.PARTS.items() for group in make())
        return [(part, name, command.argv) for part, group in groups for name, command in group.items()]

    return commands


@pytest.mark.slow
def test_a_rehearsal_of_the_first_half_hour(commands, run, data):
    """Its commands work in small; here in one process, one after another, on a text that is there."""
    small = commands(tiny=True)
    assert [name for _, name, _ in small] == [
        "kernels", "float32", "bfloat16", "bench", "gpt2", "shakespeare", "shakespeare", "softmax", "beta", "LS",
        "long", "tests", "float16", "stopped", "resumed",
    ]  # fmt: skip
    for _, name, argv in small:
        script, *flags = argv[1:] if argv[0] == "-m" else argv
        if script == "train.py":
            flags += [f"--dataset={data}"] + {"stopped": ["--max_iters=3"], "resumed": ["--max_iters=5"]}.get(name, [])
        if script != "pytest":
            code, out, err = run(script, *flags)
            assert code == 0, (name, err)
            assert name != "resumed" or "step 5: train loss" in out


def test_the_commands_of_the_first_half_hour(commands, run):
    """In full size their flags are right; what then needs a GPU says so. A part takes nine minutes at most."""
    for _, name, argv in commands(tiny=False):
        script, *flags = argv[1:] if argv[0] == "-m" else argv
        if script == "pytest":
            files, names = [flag for flag in flags if flag.endswith(".py")], flags[-1].split(" or ")
            found = [re.findall(r"def (test_\w+)", open(os.path.join(ROOT, file)).read()) for file in files]
            assert all(any(name in test for tests in found for test in tests) for name in names)
        elif script == "train.py" and name in ("LS", "beta", "stopped"):  # those with flags of their own
            code, out, err = run(script, *flags, "--init_from=scratch", "--device=cpu", "--dry_run")
            assert code == 0 and "FLOPs: " in out, (name, err)
        elif script != "train.py":
            code, _, err = run(script, *flags)
            assert code == 2 and re.search("needs a CUDA GPU|sees 0 cuda devices", err), err
    for make in first.PARTS.values():
        assert sum(max(c.seconds for c in group.values()) + first.PATIENCE for group in make()) <= 540


def test_an_attention_that_is_wrong_fails(tmp_path, monkeypatch):
    """bench.py itself goes on without it."""
    monkeypatch.setattr(first, "tiny", True)
    for text, ending in (("beta is WRONG: its output differs", "FAILED"), ("beta", "done")):
        with open(tmp_path / "log", "w") as log:
            result = first.run("bench", first.Command(["-c", f"print({text!r})"], 60), log, [])
        assert first.in_words(result).startswith(ending)
