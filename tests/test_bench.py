"""bench.py: its rows, its checks against the definitions, its refusals."""

import json

import bench
from attention import forms
from attention.scores import plain_form, takes
from model import ATTENTION

TINY = ("--n_head=2", "--head_dim=8", "--heads=SL", "--batch_size=1", "--repeats=2", "--device=cpu", "--quick")


def test_attention(run, tmp_path):
    out_file = tmp_path / "b.json"
    code, out, _ = run("bench.py", *TINY, "--what=attention", "--lengths=16,400", f"--out={out_file}")
    assert code == 0 and "WRONG" not in out and "left out" not in out
    rows = json.loads(out_file.read_text())["attention"]
    names = ["sdpa"]
    for core, definition in ATTENTION.items():
        names += [core, f"{core} SL", f"{core} differential"]
        names += [f"{core} decay"] if takes(definition, "fade") else []
    assert [(row["subject"], row["n"]) for row in rows] == [(name, n) for n in (16, 400) for name in names]
    assert all(row["peak bytes"] > 4 * 2 * 8 * row["n"] and row["median"]["both"] > 0 for row in rows)
    assert rows[0]["ratio"] == {"forward": 1, "backward": 1, "both": 1} and all(row["error"] < 1e-5 for row in rows)


def test_positions_head_dims_and_tokens_at_once(run, tmp_path):
    flags = ["--only=softmax,rope,alibi,t5,relative", "--lengths=16,64", "--head_dim=16,8"]  # so of attention alone
    flags += ["--tokens=128", "--repeats=1", "--n_head=2", "--heads=SL", f"--out={tmp_path / 'b.json'}"]
    code, out, _ = run("bench.py", *flags)
    assert code == 0 and "WRONG" not in out
    _, rows = json.loads((tmp_path / "b.json").read_text()).values()
    names = ["softmax", "rope", "alibi", "relative", "t5"]
    expected = [(name, d, n, 128 // n) for d in (16, 8) for n in (16, 64) for name in names]
    assert [(row["subject"], row["d"], row["n"], row["batch"]) for row in rows] == expected
    assert rows[0]["ratio"]["both"] == 1  # of the first row that is timed


def test_a_new_attention_is_timed_a_wrong_one_is_not(run, tmp_path, monkeypatch):
    """It is compared with its own definition, and a bug in it prints its traceback. An edited definition is timed."""

    def broken(s, seen, v):
        raise ValueError("a bug of mine")

    def doubled(definition):
        return lambda q, k, v, **settings: 2 * plain_form(definition)(q, k, v, **settings)

    monkeypatch.setitem(ATTENTION, "mine", lambda s, seen, v: (s * seen) @ v)
    monkeypatch.setitem(ATTENTION, "wrong", lambda s, seen, v: (s * seen) @ v)
    monkeypatch.setitem(forms.FAST, "wrong", doubled)
    monkeypatch.setitem(forms.WRITTEN_FOR, "wrong", forms.fingerprint(ATTENTION["wrong"]))
    monkeypatch.setitem(ATTENTION, "broken", broken)
    monkeypatch.setitem(ATTENTION, "beta", lambda s, seen, v: 2 * (s * seen) @ v)
    rows = "sdpa,beta,beta SL,mine,mine SL,broken,wrong,wrong SL"
    flags = ("--what=attention", "--lengths=16", f"--only={rows}", "--window=5")
    code, out, err = run("bench.py", *TINY, *flags, f"--out={tmp_path / 'b.json'}")
    timed = [row["subject"] for row in json.loads((tmp_path / "b.json").read_text())["attention"]]
    assert code == 0 and timed == ["sdpa", "beta", "beta SL", "mine", "mine SL"]
    assert out.count("WRONG") == 2
    assert "wrong SL is WRONG: its output or a gradient differs from the definition's by 1; " in out
    assert "broken left out (ValueError: a bug of mine)" in out
    assert err.count("Traceback (most recent call last)") == 1 and "in broken\n" in err
    assert "attention='beta': its definition was edited" in err  # a model runs it, and so does bench.py


def test_medians_and_ratios():
    rounds = {"a": {"ms": [1.0, 2.0, 4.0, 8.0, 9.0]}, "b": {"ms": [3.0, 6.0, 12.0, 8.0, 9.0]}}
    assert bench.medians(rounds["b"]) == ({"ms": 8.0}, {"ms": (9.0 - 6.0) / 2 / 8.0})
    assert bench.ratios(rounds, "b", "a") == {"ms": 3.0}  # the median of 3, 3, 3, 1, 1


def test_models_steps_and_decoding(tmp_path, monkeypatch):
    """With models that are less wide and have fewer layers."""
    flags = {"what": "model,step,decode", "model_lengths": "16,160", "step_length": 16, "decode_length": 8}
    flags |= {"heads": "SL", "batch_size": 1, "repeats": 2, "device": "cpu", "out": str(tmp_path / "b.json")}
    sizes = {"LS_MODEL": {"n_layer": 2, "n_embd": 48, "vocab_size": 99}, "GPT_10M": {"n_layer": 2, "n_embd": 48}}
    sizes = {name: getattr(bench, name) | small for name, small in sizes.items()}
    for name, value in (flags | sizes).items():
        monkeypatch.setattr(bench, name, value)
    bench.main()
    results = json.loads((tmp_path / "b.json").read_text())
    names = [f"{core} {pattern}" for core in ATTENTION for pattern in ("L", "SL")]
    names += [f"softmax/{core} conv SL" for core in forms.SUMS]
    assert [(row["subject"], row["n"]) for row in results["model"]] == [(name, n) for n in (16, 160) for name in names]
    assert [row["subject"] for row in results["step"]] == names
    assert [row["subject"] for row in results["decode"]] == [*names, "softmax L, GQA 2", "softmax L, MQA"]
    size = {row["subject"]: row["cache, bytes"] for row in results["decode"]}
    assert size["softmax L"] == 2 * 2 * 48 * 8 * 4  # layers, k and v, width, tokens, bytes
    assert size["softmax L"] == 3 * size["softmax L, GQA 2"] == 6 * size["softmax L, MQA"]


def test_refusals(run):
    for wrong, says in (
        ("--lengths=a,b", "--lengths must be positive integers"),
        ("--repeats=0", "must be at least 1"),
        ("--what=attn", "not one of attention, model, step, decode"),
        ("--only=sdap", "not one of sdpa"),
        ("--heads=S/L", "the letters of one layer, with an S"),
        ("--window=-1", "0 (a token sees itself alone) or more"),
    ):
        code, _, err = run("bench.py", *TINY, wrong)
        assert code == 2 and says in err
