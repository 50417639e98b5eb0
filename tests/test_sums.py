"""attention/sums.py: beta and beta_squared from running sums, in linear time."""

import pytest
import torch
from reference import naive_attention
from test_attention import DECAYS, close, long_qkv

from attention import sums
from attention.cache import KeyValues, RunningSums, new_part
from attention.heads import HeadGroup
from attention.sums import SUMS, Linear
from model import ATTENTION

kinds = pytest.mark.parametrize("core", SUMS)
at_once = pytest.mark.parametrize("rows", [128, 10**9])  # 64 tokens at a time, and all at once


@kinds
@pytest.mark.parametrize("decay", [None, [0.03, 0.4]], ids=["", "decay"])
@at_once
@pytest.mark.parametrize("on_a_cpu", [True, False])
def test_sums_go_on_from_a_state(core, decay, rows, on_a_cpu, monkeypatch):
    """Pieces of uneven sizes give what all tokens at once give: outputs, and the state in the end."""
    monkeypatch.setattr(sums, "by_loops", lambda x: on_a_cpu)
    monkeypatch.setattr(sums, "ROWS_AT_ONCE", rows)
    q, k, v = long_qkv()
    kind, decay = SUMS[core], decay and torch.tensor(decay, dtype=torch.float64, requires_grad=True)
    whole, end = Linear.apply(kind, q, k, v, decay, None)
    state, parts = None, []
    for part in zip(*(x.split([1, 1, 100, 64, 134], dim=-2) for x in (q, k, v)), strict=True):
        y, state = Linear.apply(kind, *part, decay, state)
        parts.append(y)
    assert close(torch.cat(parts, -2), whole, 1e-12) and close(state, end, 1e-12) and not state.requires_grad
    with torch.no_grad():  # as in decoding: one token after another
        each, state = None if decay is None else decay[:, None, None], None
        for i in range(q.shape[-2]):
            y, state = one_token_after(kind, q[..., [i], :], k[..., [i], :], v[..., [i], :], each, state)
            assert close(y, whole[..., [i], :], 1e-12)
    assert close(state, end, 1e-12) and state[0, 0].numel() == kind.state_size(8, 8)


def one_token_after(kind: type, q, k, v, decay, state) -> tuple:
    if state is None:
        return Linear.apply(kind, q, k, v, None if decay is None else decay.flatten(), None)
    return kind.one_token(q, k, v, decay, state)


@kinds
@at_once
@pytest.mark.parametrize("on_a_cpu", [True, False])
def test_outputs_and_gradients_are_those_of_one_query_at_a_time(core, rows, on_a_cpu, monkeypatch):
    """The sums themselves, since fast("beta") would be the definition if they were wrong; also as a GPU does it."""
    monkeypatch.setattr(sums, "by_loops", lambda x: on_a_cpu)
    monkeypatch.setattr(sums, "ROWS_AT_ONCE", rows)
    x = [torch.randn(1, len(DECAYS), 300, d, dtype=torch.float64, requires_grad=True) for d in (8, 8, 5)]
    x.append(torch.tensor(DECAYS, dtype=torch.float64)[:, None, None].requires_grad_())
    y = sums.linear_attention(SUMS[core], *x[:3], decay=x[3])[0]
    exact = naive_attention(core, *x[:3], decay=x[3])
    dy = torch.randn_like(y)
    assert close(y, exact, 1e-12)
    for ours, theirs in zip(torch.autograd.grad(y, x, dy), torch.autograd.grad(exact, x, dy), strict=True):
        assert close(ours, theirs, 1e-12)


# -----------------------------------------------------------------------------
# what it costs


@pytest.mark.parametrize(
    ("core", "D", "Dv", "least"),
    [
        ("beta", 16, 16, 16),
        ("beta", 64, 64, 64),
        ("beta_squared", 16, 16, 73),
        ("beta_squared", 16, 32, 94),
        ("beta_squared", 64, 64, 1057),
    ],
)
def test_a_cache_is_the_smaller_one(core, D, Dv, least):
    """D (D + Dv) numbers of beta, D (D + 1) / 2 (Dv + 1) of beta_squared, or D + Dv a token: sums from `least`."""
    group = HeadGroup([0], None, core, ATTENTION[core], n_map=Dv // D, width=D)
    assert type(new_part(group, least)) is RunningSums and type(new_part(group, least - 1)) is KeyValues
    assert type(new_part(HeadGroup([0], 9, core, ATTENTION[core], width=D), 10**6)) is KeyValues
