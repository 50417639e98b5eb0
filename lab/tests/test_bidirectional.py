"""lab/examples/attention.py: both sides and padding, one query at a time; in a GPT's layers."""

from types import SimpleNamespace

import torch
from harness import assert_equal, parametrize, refusal
from reference import SIZES, close, one_query

import lab.ideas.positions  # noqa: F401
from attention.forms import Heads
from errors import UserError
from lab.examples.attention import Bidirectional, Encoder
from model import ATTENTION, GPTConfig

T = 23
cores = parametrize("core", ATTENTION)


def qkv(B, dtype=torch.float64):
    return [torch.randn(B, 2, T, d, dtype=dtype, requires_grad=True) for d in (8, 8, 5)]


def padding():
    """(6, T): none; on the right, on the left, in holes; one key alone; nothing but padding."""
    t = torch.arange(T)
    return torch.stack([t >= 0, t < T - T // 3, t >= T // 4, t % 3 != 1, t == T // 2, t < 0])


def attend(core, q, k, v, seen, weights=None, **settings):
    c = SimpleNamespace(n_head=2, n_kv_head=2)
    heads = Heads(c, core, ATTENTION[core], settings["window"], range(2), 0)
    return Bidirectional(seen, weights=weights).attend(heads, q, k, v, **settings)


def naive(core, q, k, v, seen, *, window, scale, decay=None):
    """One query at a time, over the keys that it sees; where all is padding, over the padding."""
    y = []
    for b in range(len(q)):
        for i in range(T):
            near = [j for j in range(T) if window is None or abs(i - j) <= window]
            keys = [j for j in near if seen is None or seen[b, j]] or near
            distance = (torch.tensor(keys) - i).abs().double()
            q_i = q[[b], :, i]
            k_i, v_i = (x[[b]][:, :, keys] for x in (k, v))
            one = one_query(core, q_i, k_i, v_i, scale, None, decay, distance)
            y.append(one[0])
    return torch.stack(y).unflatten(0, (len(q), T)).transpose(1, 2)


def check(core, x, tolerance, seen, window):
    """Outputs and gradients are the naive ones. x: q, k, v, and a decay if there is one."""
    double = [t.detach().double().requires_grad_() for t in x]
    results = []
    for form, inputs in ((attend, x), (naive, double)):
        decay = {"decay": inputs[3]} if len(x) > 3 else {}
        y = form(core, *inputs[:3], seen, window=window, scale=0.4, **decay)
        dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin()
        results.append([y, *torch.autograd.grad(y, inputs, dy.view(y.shape).to(y.dtype))])
    assert results[0][0].dtype == x[0].dtype
    assert all(close(a, b, tolerance) for a, b in zip(*results, strict=True))


@cores
@parametrize("window", [None, 0, 5])
@parametrize("padded", [False, True])
def test_equals_naive_forward_and_backward(core, window, padded):
    seen = padding() if padded else None
    B = 6 if padded else 1
    check(core, qkv(B), 1e-12, seen, window)
    check(core, qkv(B, torch.float32), 1e-5, seen, window)


@cores
@parametrize("window", [None, 5])
def test_a_decay_to_both_sides(core, window):
    decay = torch.tensor([0.1, 0.5], dtype=torch.float64)[:, None, None].requires_grad_()
    check(core, [*qkv(6), decay], 1e-12, padding(), window)


@parametrize("factor", [20, 200])
def test_laser_of_a_wide_range_of_values(factor):
    """exp would overflow in float32; from a range of 80 on the definition runs."""
    q, k, v = qkv(1)
    v = (v * factor).detach().requires_grad_()
    check("laser", [q, k, v], 1e-12, None, None)


@cores
def test_half_precision(core):
    check(core, qkv(6, torch.bfloat16), 2e-2, padding(), None)


@parametrize("core", ["softmax", "laser", "beta"])
def test_the_weights_of_values(core):
    """y = W v; of LASER exp(y) = W exp(v)."""
    q, k, v = qkv(6)
    weights = []
    y = attend(core, q, k, v, padding(), weights, window=5, scale=0.4)
    if core == "laser":
        y, v = y.exp(), v.exp()
    assert_equal(weights[0] @ v, y, 1e-12)


# -----------------------------------------------------------------------------
# in a model: GPT's own layers, with a Bidirectional as their context

CHOICES = [
    {"heads": "SSLL", "window": 4, "n_kv_head": 2},
    {"position": "rope", "qk_norm": "rmsnorm"},
    {"position": "none", "conv": 4, "where": "post", "mlp": "swiglu"},
    {"position": "alibi", "heads": "SLLL", "window": 4},
]


@cores
@parametrize("choices", CHOICES, ids=str)
@torch.no_grad()
def test_a_padded_batch_is_as_each_text_alone(core, choices):
    gpt = Encoder(GPTConfig(**SIZES, attention=core, **choices)).double().eval()
    idx = torch.randint(65, (3, 24))
    lengths = (24, 13, 1)
    seen = torch.arange(24) < torch.tensor(lengths)[:, None]
    y = gpt.hidden(idx, Bidirectional(seen))
    for row, n in enumerate(lengths):
        alone = gpt.hidden(idx[[row], :n], Bidirectional())
        assert_equal(y[row, :n], alone[0], 1e-12)
    # the first token sees the last one, but not where it is padding
    idx[:, -1] = (idx[:, -1] + 1) % 65
    change = (gpt.hidden(idx, Bidirectional(seen)) - y).abs()
    assert change[0, 0].max() > 1e-9
    assert change[1, :13].max() <= 1e-12


@parametrize("choices", [{"position": "alibi"}, {"position": "rope", "decay": "alibi"}])
def test_alibi_of_an_encoder_is_a_decay(choices):
    attn = Encoder(GPTConfig(**SIZES, **choices)).transformer.h[0].attn
    scheme = attn.decay or attn.position
    q, k, settings = scheme(*torch.zeros(2, 1, 4, 3, 8), attn.heads[0], 0)
    assert q.shape == k.shape == (1, 4, 3, 8)
    assert settings["decay"].flatten().tolist() == [2**-2, 2**-4, 2**-6, 2**-8]


@parametrize("choices, name", [({"position": "t5"}, "T5"), ({"decay": "learned"}, "LearnedALiBi")])
def test_positions_that_know_the_past_alone_are_refused(choices, name):
    with refusal(f"{name} counts how far a key lies behind a query", UserError):
        Encoder(GPTConfig(**SIZES, **choices))
