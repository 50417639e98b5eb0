"""lab/experiments/model_times.py: its rows, its refusals."""

import itertools
import json

import pytest
import torch
from harness import parametrize, refused

import bench
from lab.experiments import model_times
from model import ATTENTION

SMALL = {"n_layer": 2, "n_embd": 48}


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """timed(**flags) -> the results of small models. Half a second passes at each look."""
    clock = itertools.count(0, 0.5)
    for module in (bench, model_times):
        monkeypatch.setattr(module, "clock", lambda dev: next(clock))
    monkeypatch.setattr(model_times, "LS_MODEL", model_times.LS_MODEL | SMALL | {"vocab_size": 99})
    monkeypatch.setattr(model_times, "GPT_10M", model_times.GPT_10M | SMALL)

    def timed(**flags):
        flags |= {"heads": "SL", "repeats": 2, "device": "cpu", "out": str(tmp_path / "m.json")}
        for name, value in flags.items():
            monkeypatch.setattr(model_times, name, value)
        model_times.main()
        return json.loads((tmp_path / "m.json").read_text())

    return timed


def test_every_model_is_timed(timed):
    results = timed(lengths="16", seed=5)
    names = [f"{name} {heads}" for name in ATTENTION for heads in ("L", "SL")]
    names += ["softmax/beta conv SL", "softmax/beta_squared conv SL"]
    names += ["softmax L, GQA 2", "softmax L, MQA"]
    measured = {"forward": {"ms": 500}, "step": {"ms": 500}, "decode": {"tokens/s": 32}}
    assert list(results) == ["about", *measured]
    for part, median in measured.items():
        assert [row["subject"] for row in results[part]] == names
        assert all((row["n"], row["median"]) == (16, median) for row in results[part])
    assert torch.initial_seed() == 5
    size = {row["subject"]: row["cache, bytes"] for row in results["decode"]}
    assert size["softmax L"] == 2 * 2 * 48 * 16 * 4  # layers, k and v, width, tokens, bytes
    assert size["softmax L"] == 3 * size["softmax L, GQA 2"] == 6 * size["softmax L, MQA"]


@parametrize(
    "flags, says",
    [
        ("--lengths=a,b", "--lengths must be positive integers"),
        ("--heads=LL", "heads='LL' has no S"),
    ],
)
def test_refusals(run, flags, says, tmp_path):
    out = f"--out={tmp_path / 'm.json'}"
    refused(run("lab.experiments.model_times", "--device=cpu", out, *flags.split()), says)
