"""lab/examples/attention.py: both sides and padding, against one query at a time; in the layers of a GPT."""

import pytest
import torch
from reference import one_query
from torch import Tensor

from attention.heads import HeadGroup
from errors import UserError
from lab.examples.attention import Bidirectional
from model import ATTENTION, GPT, GPTConfig

T = 23
cores = pytest.mark.parametrize("core", ATTENTION)


def qkv(B: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(B, 2, T, d, dtype=dtype, requires_grad=True) for d in (8, 8, 5)]


def padding() -> Tensor:
    """(6, T): none; padding on the right, on the left, in holes; one key alone; nothing but padding."""
    at = torch.arange(T)
    return torch.stack([at >= 0, at < T - T // 3, at >= T // 4, at % 3 != 1, at == T // 2, at < 0])


def attend(core: str, q, k, v, seen: Tensor | None, **settings) -> Tensor:
    group = HeadGroup([0, 1], settings["window"], core, ATTENTION[core])
    return Bidirectional(seen).attend(None, group, q, k, v, **settings)


def naive(core: str, q, k, v, seen: Tensor | None, *, window, scale, decay=None) -> Tensor:
    """A query at a time, over the keys that it sees; where that is padding alone, over the padding."""
    rows = []
    for b in range(len(q)):
        y = []
        for i in range(T):
            near = [j for j in range(T) if abs(i - j) <= (T if window is None else window)]
            keys = [j for j in near if seen is None or seen[b, j]] or near
            distance = torch.tensor([abs(i - j) for j in keys], dtype=torch.float64)
            x = q[[b], :, i], k[[b]][:, :, keys], v[[b]][:, :, keys]
            y.append(one_query(core, *x, scale, None, decay, distance))
        rows.append(torch.stack(y, dim=-2))
    return torch.cat(rows)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()))


def same(core: str, x: list[Tensor], tolerance: float, seen: Tensor | None, **settings) -> bool:
    """Whether outputs and gradients are the naive ones."""
    found = []
    for form, inputs in ((attend, x), (naive, [t.detach().double().requires_grad_() for t in x])):
        decay = {"decay": inputs[3]} if len(x) > 3 else {}
        y = form(core, *inputs[:3], seen, **settings, **decay)
        dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().view(y.shape).to(y.dtype)
        found.append((y, *torch.autograd.grad(y, inputs, dy)))
    assert found[0][0].dtype == x[0].dtype
    return all(close(a, b, tolerance) for a, b in zip(*found, strict=True))


@cores
@pytest.mark.parametrize("window", [None, 0, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_naive_forward_and_backward(core, window, padded):
    settings = {"seen": padding() if padded else None, "window": window, "scale": 0.4}
    assert same(core, qkv(6 if padded else 1), 1e-12, **settings)
    assert same(core, qkv(6 if padded else 1, torch.float32), 1e-5, **settings)


@pytest.mark.parametrize("core", ["beta", "beta_squared"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_decay_to_both_sides(core, window):
    decay = torch.tensor([0.1, 0.5], dtype=torch.float64)[:, None, None].requires_grad_()
    assert same(core, [*qkv(6), decay], 1e-12, padding(), window=window, scale=0.4)


def test_laser_of_a_wide_range_of_values():
    """exp would underflow: the definition runs."""
    q, k, v = qkv(1)
    assert same("laser", [q, k, (v * 200).detach().requires_grad_()], 1e-12, None, window=None, scale=0.4)


@cores
def test_half_precision(core):
    q, k, v = (t.detach() for t in qkv(6, torch.bfloat16))
    y = attend(core, q, k, v, padding(), window=None, scale=None)
    expected = naive(core, q.double(), k.double(), v.double(), padding(), window=None, scale=None)
    assert y.dtype == torch.bfloat16 and close(y, expected, 2e-2)


# -----------------------------------------------------------------------------
# in a model: GPT's own layers, with a Bidirectional as their context

SIZES = {"block_size": 40, "vocab_size": 11, "n_layer": 2, "n_head": 4, "n_embd": 32}
CHOICES = [
    {"heads": "SL", "window": 4},
    {"heads": "SSLL", "window": 4, "differential": True, "n_kv_head": 2},
    {"position": "rope", "qk_norm": "rmsnorm", "per_dim_temperature": True},
    {"position": "none", "conv": 4, "where": "post", "mlp": "swiglu"},
]


@cores
@pytest.mark.parametrize("choices", CHOICES, ids=str)
@torch.no_grad()
def test_a_padded_batch_is_as_each_text_alone(core, choices):
    gpt = GPT(GPTConfig(**SIZES, attention=core, **choices)).double().eval()
    idx, lengths = torch.randint(11, (3, 40)), (40, 23, 1)
    seen = torch.arange(40) < torch.tensor(lengths)[:, None]
    y = gpt.hidden(idx, Bidirectional(seen))
    for row, n in enumerate(lengths):
        torch.testing.assert_close(y[row, :n], gpt.hidden(idx[[row], :n], Bidirectional())[0], rtol=0, atol=1e-12)
    later = idx.clone()
    later[:, -1] = (later[:, -1] + 1) % 11
    assert (gpt.hidden(later, Bidirectional(seen)) - y)[0, 0].abs().max() > 1e-9  # the last token is seen by the first
    assert close(gpt.hidden(later, Bidirectional(seen))[1, :23], y[1, :23], 1e-12)  # but here it is padding


@pytest.mark.parametrize(
    ("choices", "name"),
    [({"position": "t5"}, "T5"), ({"position": "relative"}, "Relative"), ({"position": "alibi"}, "ALiBi"),
     ({"decay": "learned"}, "ALiBi"), ({"position": "relative", "decay": "alibi", "attention": "beta"}, "Relative")],
)  # fmt: skip
def test_numbers_by_distance_are_refused(choices, name):
    gpt = GPT(GPTConfig(**SIZES, **choices))
    with pytest.raises(UserError, match=f"{name} counts how far a key lies behind a query"):
        gpt.hidden(torch.zeros(1, 4, dtype=torch.long), Bidirectional())


@torch.no_grad()
def test_a_decay_of_beta_goes_to_both_sides():
    gpt = GPT(GPTConfig(**SIZES, attention="beta", decay="alibi", position="none")).eval()
    idx = torch.randint(11, (1, 9))
    backwards = gpt.hidden(idx.flip(1), Bidirectional()).flip(1)
    torch.testing.assert_close(gpt.hidden(idx, Bidirectional()), backwards, rtol=0, atol=1e-6)
