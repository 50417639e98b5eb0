"""positions.py: what a Scheme of your own relies on, and how precise positions are."""

import torch
from harness import assert_equal, parametrize, refusal

from errors import UserError
from model import GPTConfig
from positions import DECAY, ALiBi, Scheme, add_to_scores, turns

SLOPES = torch.tensor([0.3, 0.07])
T = 1000


class Recency(Scheme):
    """Adds -slope (i - j) to the scores of two heads, by more dimensions of q and k."""

    scale = 8**-0.5

    def forward(self, q, k, group, past):
        place = torch.arange(past, past + q.shape[-2], dtype=torch.float32)
        slopes = (SLOPES / self.scale)[:, None].expand(-1, len(place))
        q, k = add_to_scores(q, k, slopes, place)
        q, k = add_to_scores(q, k, -slopes * place, torch.ones_like(place))
        return q, k, {}


@parametrize("kv_heads", [1, 2])
def test_what_a_scheme_adds_to_scores_is_precise_in_bfloat16(kv_heads):
    """To 16 bits; with the 8 bits of a bfloat16 the largest bias would be wrong by 1."""
    q = torch.randn(1, 2, T, 8).bfloat16()
    k = torch.randn(1, kv_heads, T, 8).bfloat16()
    place = torch.arange(T)
    bias = -SLOPES[:, None, None] * (place[:, None] - place)
    expected = q.float() @ k.float().mT * Recency.scale + bias
    of_q, of_k, _ = Recency()(q, k, None, 0)
    assert of_q.dtype == torch.bfloat16
    assert of_k.dtype == torch.bfloat16
    difference = of_q.float() @ of_k.float().mT * Recency.scale - expected
    error = difference.abs().amax((0, 2, 3))  # of each head
    assert (error <= 1e-4 * SLOPES * T).all()
    eight_bits = bias.bfloat16() - bias
    assert (eight_bits.abs().amax((1, 2)) > 10 * error).all()


def test_a_decay_is_asked_what_it_refuses(monkeypatch):
    class Biased(ALiBi):
        biased = True

    monkeypatch.setitem(DECAY, "mine", Biased)
    GPTConfig(attention="softmax", decay="mine")
    with refusal("decay='mine' adds a number to scores.* In beta a low", UserError):
        GPTConfig(attention="beta", decay="mine")


@parametrize("start", [0, 10**6])
def test_turns_are_right_far_away(start):
    """At a million, an angle in float32 would be wrong by 0.003."""
    turn = turns(start, start + 3, 8, 10000.0, torch.device("cpu"))
    assert turn.dtype == torch.float32
    assert turn.shape == (3, 4, 2)
    theta = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    places = torch.arange(start, start + 3)
    angle = places[:, None] * theta
    expected = torch.stack((angle.cos(), angle.sin()), dim=-1)
    assert_equal(turn.double(), expected, 1e-7)
