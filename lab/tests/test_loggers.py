"""lab/loggers/logits.py: the largest scores of each layer, in the log of a run."""

from functools import partial

import pytest
import torch
from harness import done, log_of, parametrize
from reference import SIZES

from attention.cache import heads_of
from lab.look.probe import max_abs_scores
from model import GPT, GPTConfig

T = 24


@parametrize("core", ["softmax", "laser", "beta"])
def test_the_largest_score_of_each_layer(core):
    """The largest entry of the full matrix of scores that a token sees."""
    gpt = GPT(GPTConfig(**SIZES, attention=core, heads="SL", window=5, position="rope")).eval()
    largest = [0.0, 0.0]

    def spied(layer, code, q, k, v, **settings):
        s = q @ k.mT / 8**0.5  # a head is 8 wide
        place = torch.arange(s.shape[-1])
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance <= settings.get("window", T))
        largest[layer] = max(largest[layer], s[..., seen].abs().max().item())
        return code(q, k, v, **settings)

    for layer, block in enumerate(gpt.transformer.h):
        for heads in block.attn.heads:
            heads.run = partial(spied, layer, heads.run)
    codes = [heads.run for heads in heads_of(gpt)]

    idx = torch.randint(65, (2, T))
    gpt(idx)
    assert min(largest) > 0
    assert max_abs_scores(gpt, idx) == pytest.approx(largest, rel=1e-5)
    assert [heads.run for heads in heads_of(gpt)] == codes


def test_logits_in_the_log(train, tmp_path):
    """They change no loss, with dropout."""
    losses = []
    for flag in ("", "--import=lab.loggers.logits"):
        out = done(train(flag, "--log_interval=2 --max_iters=4 --dropout=0.2"))
        rows = [row for row in log_of(tmp_path) if "loss" in row]
        losses.append([row["loss"] for row in rows])
    logits = [row["max_logit"] for row in rows]
    assert [len(layers) for layers in logits] == [2, 2]
    assert f"largest logit {max(logits[0]):.2f}" in out
    assert losses[0] == losses[1]
