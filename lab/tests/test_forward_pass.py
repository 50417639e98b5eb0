"""lab/experiments/forward_pass.py: its rows."""

import json

from lab.experiments import forward_pass
from model import ATTENTION


def test_forward_pass(tmp_path, monkeypatch):
    out_file = tmp_path / "f.json"
    settings = {
        "LS_MODEL": forward_pass.LS_MODEL | {"n_layer": 2, "n_embd": 48, "vocab_size": 99},
        "lengths": "16,160",
        "heads": "SL",
        "repeats": 2,
        "device": "cpu",
        "out": str(out_file),
    }
    for name, value in settings.items():
        monkeypatch.setattr(forward_pass, name, value)
    forward_pass.main()
    rows = json.loads(out_file.read_text())["model"]
    names = [f"{name} {heads}" for name in ATTENTION for heads in ("L", "SL")]
    names += ["softmax/beta conv SL", "softmax/beta_squared conv SL"]
    names += ["softmax L, GQA 2", "softmax L, MQA"]
    expected = [(name, n) for n in (16, 160) for name in names]
    assert [(row["subject"], row["n"]) for row in rows] == expected
    assert all(row["median"]["ms"] > 0 for row in rows)
