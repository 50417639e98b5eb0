"""lab/examples/attention.py: both sides and padding, one query at a time; in a GPT's layers."""

import pytest
import torch
from harness import assert_equal, parametrize, refusal
from reference import one_query

from attention.heads import HeadGroup
from errors import UserError
from lab.examples import attention
from lab.examples.attention import Bidirectional, Encoder
from model import ATTENTION, GPT, GPTConfig

T = 23
cores = parametrize("core", ATTENTION)
windows = parametrize("window", [None, 5])


def qkv(B, dtype=torch.float64):
    return [torch.randn(B, 2, T, d, dtype=dtype, requires_grad=True) for d in (8, 8, 5)]


def padding():
    """(6, T): none; on the right, on the left, in holes; one key alone; nothing but padding."""
    t = torch.arange(T)
    return torch.stack([t >= 0, t < T - T // 3, t >= T // 4, t % 3 != 1, t == T // 2, t < 0])


def two_heads(core, window, schemes=()):
    is_short = window is not None
    heads = "S" if is_short else "L"
    c = GPTConfig(
        attention=core,
        heads=heads,
        window=window,
        n_head=2,
        n_embd=16,
    )
    return HeadGroup(c.resolved(), [0, 1], is_short, ATTENTION[core], schemes)


def attend(core, q, k, v, seen, **settings):
    group = two_heads(core, settings["window"])
    return Bidirectional(seen).attend(group, q, k, v, **settings)


def no_position(offset):
    return 0.0, 0.0, None


def naive(core, q, k, v, seen, *, window, scale, decay=None, position=no_position):
    """One query at a time, over the keys that it sees; where all is padding, over the padding.

    position(offset) -> what j - i = offset adds to the keys, to the values and to the scores.
    """
    y = []
    for b in range(len(q)):
        for i in range(T):
            near = [j for j in range(T) if window is None or abs(i - j) <= window]
            keys = [j for j in near if seen is None or seen[b, j]] or near
            offset = torch.tensor(keys) - i
            of_keys, of_values, bias = position(offset)
            one = one_query(
                core,
                q[[b], :, i],
                k[[b]][:, :, keys] + of_keys,
                v[[b]][:, :, keys] + of_values,
                scale,
                bias,
                decay,
                offset.abs().double(),
            )
            y.append(one[0])
    return torch.stack(y).unflatten(0, (len(q), T)).transpose(1, 2)


def with_gradients(y, inputs):
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin()
    return [y, *torch.autograd.grad(y, inputs, dy.view(y.shape).to(y.dtype))]


def check_close(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max())


def check(core, x, tolerance, seen, window):
    """Outputs and gradients are the naive ones. x: q, k, v, and a decay if there is one."""
    double = [t.detach().double().requires_grad_() for t in x]
    results = []
    for form, inputs in ((attend, x), (naive, double)):
        decay = {"decay": inputs[3]} if len(x) > 3 else {}
        y = form(core, *inputs[:3], seen, window=window, scale=0.4, **decay)
        results.append(with_gradients(y, inputs))
    assert results[0][0].dtype == x[0].dtype
    check_close(*results, tolerance)


@cores
@parametrize("window", [None, 0, 5])
@parametrize("padded", [False, True])
def test_equals_naive_forward_and_backward(core, window, padded):
    seen = padding() if padded else None
    B = 6 if padded else 1
    check(core, qkv(B), 1e-12, seen, window)
    check(core, qkv(B, torch.float32), 1e-5, seen, window)


@parametrize("core", ["beta", "beta_squared"])
@windows
def test_a_decay_to_both_sides(core, window):
    decay = torch.tensor([0.1, 0.5], dtype=torch.float64)[:, None, None].requires_grad_()
    check(core, [*qkv(6), decay], 1e-12, padding(), window)


def test_laser_of_a_wide_range_of_values():
    """exp would underflow: the definition runs."""
    q, k, v = qkv(1)
    v = (v * 200).detach().requires_grad_()
    check("laser", [q, k, v], 1e-12, None, None)


@cores
def test_half_precision(core):
    x = [t.detach() for t in qkv(6, torch.bfloat16)]
    y = attend(core, *x, padding(), window=None, scale=None)
    double = [t.double() for t in x]
    expected = naive(core, *double, padding(), window=None, scale=None)
    assert y.dtype == torch.bfloat16
    check_close([y], [expected], 2e-2)


# -----------------------------------------------------------------------------
# positions on both sides

MAX_DISTANCE = {"relative": 3, "t5": 17, "alibi": None}
POSITIONS = [
    ("relative", "softmax"),
    ("relative", "beta"),
    ("t5", "softmax"),
    ("t5", "laser"),
    ("t5", "softcap"),
    *[("alibi", core) for core in ATTENTION],
]


@parametrize("position, core", POSITIONS)
@windows
def test_positions_equal_naive_forward_and_backward(position, core, window):
    config = GPTConfig(
        block_size=40,
        vocab_size=2,
        n_layer=1,
        n_head=2,
        n_embd=16,
        attention=core,
        position=position,
        max_distance=MAX_DISTANCE[position],
    )
    scheme = Encoder(config).transformer.h[0].attn.position.double()
    for p in scheme.parameters():
        torch.nn.init.normal_(p)

    def relative(offset):  # w_clip(j - i, k), of keys and of values
        assert scheme.k.shape == scheme.v.shape == (2 * 3 + 1, 8)
        index = offset.clamp(-3, 3) + 3
        return scheme.k[index], scheme.v[index], None

    def t5(offset):
        buckets = attention.bucket_of_both(offset, 17)
        return 0.0, 0.0, scheme.table.weight[buckets].T

    naive_position = {"relative": relative, "t5": t5, "alibi": no_position}[position]
    decay = None
    if position == "alibi":
        decay = torch.tensor([[[2**-4]], [[2**-8]]], dtype=torch.float64)
    x = [torch.randn(6, 2, T, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    q, k, v = x
    group = two_heads(core, window, [scheme])
    of_q, of_k, settings = scheme(q, k, group, 0)
    settings |= {"window": window, "scale": 8**-0.5}
    y = Bidirectional(padding()).attend(group, of_q, of_k, v, **settings)
    expected = naive(
        core,
        *x,
        padding(),
        window=window,
        scale=8**-0.5,
        decay=decay,
        position=naive_position,
    )
    inputs = [*x, *scheme.parameters()]
    check_close(with_gradients(y, inputs), with_gradients(expected, inputs), 1e-12)


@parametrize("max_distance", [128, 20])
def test_the_buckets_of_both_sides_are_those_of_transformers(max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offset = torch.arange(-300, 301)
    theirs = t5.T5Attention._relative_position_bucket(offset, True, 32, max_distance)
    assert torch.equal(attention.bucket_of_both(offset, max_distance), theirs)
    assert len(theirs.unique()) == 31


# -----------------------------------------------------------------------------
# in a model: GPT's own layers, with a Bidirectional as their context

SIZES = {"block_size": 40, "vocab_size": 11, "n_layer": 2, "n_head": 4, "n_embd": 32}
CHOICES = [
    {"heads": "SL", "window": 4},
    {"heads": "SSLL", "window": 4, "differential": True, "n_kv_head": 2},
    {"position": "rope", "qk_norm": "rmsnorm", "per_dim_temperature": True},
    {"position": "none", "conv": 4, "where": "post", "mlp": "swiglu"},
    {"position": "alibi", "heads": "SLLL", "window": 4},
    {"position": "relative", "decay": "learned", "differential": True, "n_kv_head": 2},
    {"position": "t5", "heads": "SSLL", "window": 4, "nope_long": True},
]
REFUSED = [("relative", "laser"), ("t5", "beta"), ("t5", "beta_squared")]


@cores
@parametrize("choices", CHOICES, ids=str)
@torch.no_grad()
def test_a_padded_batch_is_as_each_text_alone(core, choices):
    if (choices.get("position"), core) in REFUSED:
        pytest.skip("a model cannot have both")
    gpt = Encoder(GPTConfig(**SIZES, attention=core, **choices)).double().eval()
    idx = torch.randint(11, (3, 40))
    lengths = (40, 23, 1)
    seen = torch.arange(40) < torch.tensor(lengths)[:, None]
    y = gpt.hidden(idx, Bidirectional(seen))
    for row, n in enumerate(lengths):
        alone = gpt.hidden(idx[[row], :n], Bidirectional())
        assert_equal(y[row, :n], alone[0], 1e-12)
    # The first token sees the last one, but not where it is padding.
    idx[:, -1] = (idx[:, -1] + 1) % 11
    change = (gpt.hidden(idx, Bidirectional(seen)) - y).abs()
    assert change[0, 0].max() > 1e-9
    assert change[1, :23].max() <= 1e-12


@parametrize("choices, name", [({"position": "t5"}, "T5"), ({"decay": "learned"}, "ALiBi")])
def test_positions_that_know_the_past_alone_are_refused(choices, name):
    gpt = GPT(GPTConfig(**SIZES, **choices))
    with refusal(f"{name} counts how far a key lies behind a query", UserError):
        gpt.hidden(torch.zeros(1, 4, dtype=torch.long), Bidirectional())
