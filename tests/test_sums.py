"""attention/sums.py: beta and beta_squared from running sums, in linear time."""

import pytest
import torch
from harness import parametrize
from reference import assert_exact, close
from test_attention import LONG, qkv, with_decays

from attention import sums
from attention.cache import KeyValues, RunningSums, new_part
from attention.heads import HeadGroup
from attention.sums import Beta, BetaSquared, Linear
from model import ATTENTION, GPTConfig

SUMS = {"beta": Beta, "beta_squared": BetaSquared}
DECAY = torch.tensor([0.03, 0.4, 0.0], dtype=torch.float64)[:, None, None]
cores = parametrize("core", SUMS)


@pytest.fixture(params=[128, 10**9])  # 64 tokens at a time, and all at once
def _rows(request, monkeypatch):
    monkeypatch.setattr(sums, "ROWS_AT_ONCE", request.param)


@pytest.fixture(params=["cpu", "gpu"])
def _code(request, monkeypatch):
    """Runs the code for this device, on a CPU."""
    monkeypatch.setattr(sums, "by_loops", lambda x: request.param == "cpu")


@cores
@parametrize("decay", [None, DECAY])
@pytest.mark.usefixtures("_rows", "_code")
@torch.no_grad()
def test_sums_go_on_from_a_state(core, decay):
    """Pieces of uneven sizes, and single tokens, give what all tokens at once give."""
    of_core = SUMS[core]
    x = [t.detach() for t in qkv(LONG).values()]
    whole, end = Linear.apply(of_core, *x, decay, None)

    state = None
    outputs = []
    for part in zip(*(t.split([1, 1, 100, 64, 134], dim=-2) for t in x), strict=True):
        y, state = Linear.apply(of_core, *part, decay, state)
        outputs.append(y)
    assert close(torch.cat(outputs, dim=-2), whole, 1e-12)
    assert close(state, end, 1e-12)

    _, state = Linear.apply(of_core, *(t[..., :1, :] for t in x), decay, None)
    for i in range(1, LONG):  # as in decoding
        token = [t[..., [i], :] for t in x]
        y, state = of_core.one_token(*token, decay, state)
        assert close(y, whole[..., [i], :], 1e-12)
    assert close(state, end, 1e-12)
    assert state[0, 0].numel() == of_core.state_size(8, 8)


@cores
@pytest.mark.usefixtures("_rows", "_code")
def test_outputs_and_gradients_are_those_of_one_query_at_a_time(core):
    """The sums themselves: fast("beta") would be the definition if somebody had edited it."""

    def attend(q, k, v, **settings):
        y, state = sums.linear_attention(SUMS[core], q, k, v, **settings)
        assert not state.requires_grad
        return y

    assert_exact(attend, core, with_decays(), 1e-12)


# -----------------------------------------------------------------------------
# what a cache keeps

# D, Dv, and the number of tokens from which sums are the smaller: beta's D (D + Dv) numbers, or
# beta_squared's D (D + 1) / 2 (Dv + 1), against D + Dv for each token
SMALLER_FROM = [
    ("beta", 16, 16, 16),
    ("beta", 64, 64, 64),
    ("beta_squared", 16, 16, 73),
    ("beta_squared", 16, 32, 94),
    ("beta_squared", 64, 64, 1057),
]


@parametrize("core, D, Dv, least", SMALLER_FROM)
def test_a_cache_is_the_smaller_one(core, D, Dv, least):
    def part(tokens, heads):
        c = GPTConfig(attention=core, n_head=2, head_dim=D, differential=Dv > D, heads=heads)
        group = HeadGroup(c.resolved(), [0], heads == "S", ATTENTION[core])
        return type(new_part(group, tokens))

    assert part(least, "L") is RunningSums
    assert part(least - 1, "L") is KeyValues
    assert part(10**6, "S") is KeyValues
