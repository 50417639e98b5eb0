"""lab/experiments/forward_pass.py: its rows."""

import json

from lab.experiments import forward_pass


def test_forward_pass(tmp_path, monkeypatch):
    out_file = tmp_path / "f.json"
    settings = {
        "LS_MODEL": forward_pass.LS_MODEL | {"n_layer": 2, "n_embd": 48, "vocab_size": 99},
        "lengths": "16,160",
        "heads": "SL",
        "repeats": 2,
        "tokens": 330,
        "device": "cpu",
        "out": str(out_file),
    }
    for name, value in settings.items():
        monkeypatch.setattr(forward_pass, name, value)
    forward_pass.main()
    rows = json.loads(out_file.read_text())["model"]
    softmax = [(row["n"], row["batch"]) for row in rows if row["subject"] == "softmax SL"]
    assert softmax == [(16, 20), (160, 2)]
