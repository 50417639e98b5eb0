"""attention/sums.py: beta and beta_squared from running sums, in linear time."""

import pytest
import torch
from harness import parametrize
from reference import assert_exact
from test_attention import LONG, qkv, with_decays
from torch.autograd import grad

from attention import sums
from attention.forms import FORM
from attention.sums import linear_attention

SUMS = {name: form.sums for name, form in FORM.items() if form.sums is not None}
DECAY = torch.tensor([0.03, 0.4, 0.0], dtype=torch.float64)[:, None, None]
PIECES = [1, 1, 100, 1, 63, 134]
cores = parametrize("core", SUMS)


@pytest.fixture(params=["cpu", "gpu", "parts"])
def _code(request, monkeypatch):
    """Runs the code for this device, on a CPU; or for long texts, computed again in parts."""
    monkeypatch.setattr(sums, "unrolls", lambda x: request.param == "gpu")
    if request.param == "parts":
        monkeypatch.setattr(sums, "TOKENS_KEPT", 100)


@cores
@parametrize("decay", [None, DECAY])
@pytest.mark.usefixtures("_code")
def test_sums_go_on_from_a_state(core, decay):
    """Pieces of uneven sizes give what all tokens at once give, and gradients reach the first."""
    x = qkv(LONG)
    settings = {"decay": None if decay is None else decay.clone().requires_grad_()}
    inputs = [*x.values(), *(t for t in settings.values() if t is not None)]
    y, end = linear_attention(SUMS[core], **x, **settings)
    assert end[0, 0].numel() == 2 * 8 * SUMS[core].tokens(8)

    state = None
    pieces = []
    for part in zip(*(t.split(PIECES, dim=2) for t in x.values()), strict=True):
        piece, state = linear_attention(SUMS[core], *part, **settings, state=state)
        pieces.append(piece)
    results = []
    for out in ([y, end], [torch.cat(pieces, dim=2), state]):
        dy = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) for t in out]
        results.append([*out, *grad(out, inputs, dy)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)


@cores
@pytest.mark.usefixtures("_code")
def test_outputs_and_gradients_are_those_of_one_query_at_a_time(core):
    """The sums themselves: fast("beta") would be the definition if somebody had edited it."""

    def attend(q, k, v, **settings):
        return linear_attention(SUMS[core], q, k, v, **settings)[0]

    assert_exact(attend, core, with_decays(), 1e-12)
