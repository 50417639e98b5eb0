"""bench.py: its rows, its checks against the definitions, its refusals."""

import json
import math
import sys
from functools import partial

from configurator import run_script

import pytest
import torch
from harness import done, parametrize, refused

import bench
from attention import forms
from attention.scores import has_argument, plain_form
from model import ATTENTION

TINY = ("--device=cpu", "--n_head=2", "--head_dim=8", "--heads=SL", "--repeats=2", "--quick")


@pytest.fixture
def timed(run, tmp_path):
    """timed(flags) -> (the rows of attention, stdout, stderr) of a run of bench.py."""

    def timed(*flags):
        out_file = tmp_path / "b.json"
        result = run("bench.py", *TINY, *flags, f"--out={out_file}")
        out = done(result)
        results = json.loads(out_file.read_text())
        assert list(results) == ["about", "attention"]
        return results["attention"], out, result[2]

    return timed


def test_attention(timed):
    rows, out, _ = timed("--lengths=16,400", "--batch_size=1")
    assert "WRONG" not in out and "left out" not in out
    names = ["sdpa"]
    for name, definition in ATTENTION.items():
        names += [name, f"{name} SL"]
        if has_argument(definition, "fade"):
            names.append(f"{name} decay")
    expected = [(name, n) for n in (16, 400) for name in names]
    assert [(row["subject"], row["n"]) for row in rows] == expected
    for row in rows:
        assert row["peak bytes"] > 4 * 2 * 8 * row["n"] and row["batch"] == 1
        assert row["error"] < 1e-5
    (softcap,) = (row for row in rows if (row["subject"], row["n"]) == ("softcap", 400))
    assert 1 < softcap["peak bytes"] / (4 * 2 * 400 * 400) < 4  # a few times half its scores


def test_quick_gives_way_to_a_config_file(tmp_path, monkeypatch):
    (tmp_path / "my.py").write_text("repeats = 5")
    monkeypatch.setattr(sys, "argv", ["bench.py", str(tmp_path / "my.py"), "--quick"])
    script = vars(bench) | {"main": list}
    run_script(script)
    assert (script["repeats"], script["lengths"]) == (5, bench.QUICK["lengths"])


def test_positions_head_dims_and_tokens_at_once(timed):
    names = ["softmax", "rope", "alibi"]
    flags = "--no-quick --lengths=16,64 --head_dim=16,8 --tokens=128 --dtype=bfloat16"
    rows, out, _ = timed(*flags.split(), f"--only={','.join(names)}")
    assert "WRONG" not in out and all(1e-3 < row["error"] < 2e-2 for row in rows)
    expected = [(name, d, n, 128 // n) for d in (16, 8) for n in (16, 64) for name in names]
    assert [(row["subject"], row["d"], row["n"], row["batch"]) for row in rows] == expected


def test_a_new_attention_is_timed_a_wrong_one_is_not(timed, monkeypatch):
    """A bug in an attention prints its traceback. An edited definition is timed."""

    def broken(s, seen, v):
        raise ValueError("a bug of mine")

    def times(factor, definition):
        return lambda q, k, v, **settings: factor * plain_form(definition)(q, k, v, **settings)

    for name in ("added", "wrong"):
        monkeypatch.setitem(ATTENTION, name, lambda s, seen, v: (s * seen) @ v)
    wrong = forms.Form(
        forms.code_of(ATTENTION["wrong"]),
        "wrong",
        long=partial(times, 2),
        short=partial(times, math.nan),
    )
    monkeypatch.setitem(forms.FORM, "wrong", wrong)
    monkeypatch.setitem(ATTENTION, "broken", broken)
    monkeypatch.setitem(ATTENTION, "beta", lambda s, seen, v: 2 * (s * seen) @ v)

    names = "sdpa,beta,beta SL,added,added SL,broken,wrong,wrong SL"
    flags = ("--lengths=16", f"--only={names}", "--window=5")
    rows, out, err = timed(*flags)

    assert [row["subject"] for row in rows] == names.split(",")[:5]
    for error in ("1", "nan"):
        assert out.count(f" is WRONG: output or gradients are off by {error})\n") == 1
    assert "broken left out (ValueError: a bug of mine)" in out
    assert err.endswith("ValueError: a bug of mine\n") and "in _checked\n" in err
    assert "attention='beta': its definition was edited" in err  # as in a model that runs it


def test_medians_and_ratios():
    rounds = {
        "a": [{"ms": ms} for ms in (1.0, 2.0, 8.0)],
        "b": [{"ms": ms} for ms in (3.0, 6.0, 8.0)],
    }
    _, b = bench.table("a and b", {"n": 5}, rounds, {name: {"bytes": 7} for name in rounds})
    assert b == {
        "subject": "b",
        "median": {"ms": 6.0},
        "spread": {"ms": (7.0 - 4.5) / 2 / 6.0},
        "ratio": {"ms": 3.0},  # the median of 3, 3 and 1
        "n": 5,
        "bytes": 7,
    }


def test_the_passes_in_milliseconds(monkeypatch):
    """The forward passes take 1 and 2 s, the backward pass 3 s."""
    times = iter((0, 1, 10, 12, 20, 23))
    monkeypatch.setattr(bench, "clock", lambda dev: next(times))
    x = torch.ones(4, 1, 1, 2, 2, requires_grad=True).unbind()
    passes = bench.passes(lambda q, k, v: q * k * v, x, "cpu")
    assert passes == {"forward": 1000, "backward": 3000, "both": 5000}


def test_rounds_are_interleaved_after_a_warm_up():
    calls = []

    def task(name):
        calls.append(name)
        assert name != "c" or len(calls) < 6
        return {"call": len(calls)}

    tasks = {name: lambda name=name: task(name) for name in "abc"}
    rounds = bench.interleaved(tasks, "cpu", 2)
    assert "".join(calls) == "abcabcab"  # c fails, and is left out
    assert rounds == {"a": [{"call": 4}, {"call": 7}], "b": [{"call": 5}, {"call": 8}]}


def test_the_rows_have_short_heads(monkeypatch):
    monkeypatch.setattr(bench, "heads", "SL")
    monkeypatch.setattr(bench, "window", 5)
    row = bench.chosen_rows()["beta SL"]
    assert row == {"attention": "beta", "heads": "SL", "window": 5}


@parametrize(
    "flags, says",
    [
        ("--lengths=a,b", "--lengths must be positive integers"),
        ("--repeats=0", "must be at least 1"),
        ("--n_head=0", "no row is left"),
        ("--only=sdpb", "'sdpb' is not one of sdpa, softmax"),
        ("--what=step", "unknown flag --what"),
    ],
)
def test_refusals(run, flags, says):
    refused(run("bench.py", *TINY, *flags.split()), says)
