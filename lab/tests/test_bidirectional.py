"""lab/examples/attention.py: both sides and padding, against one query at a time; in the layers of a GPT."""

import pytest
import torch
from reference import one_query
from torch import Tensor

from attention.heads import HeadGroup
from errors import UserError
from lab.examples import attention
from lab.examples.attention import Bidirectional, Encoder
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
    return Bidirectional(seen).attend(group, q, k, v, **settings)


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
# positions on both sides

POSITIONS = [("relative", "softmax"), ("relative", "beta"), ("t5", "softmax"), ("t5", "laser"), ("t5", "softcap")]
POSITIONS += [("alibi", core) for core in ATTENTION]


@pytest.mark.parametrize(("position", "core"), POSITIONS)
@pytest.mark.parametrize("window", [None, 5])
def test_positions_equal_naive_forward_and_backward(position, core, window):
    """A query at a time: i sees j - i = offset away, earlier and later, and no padding."""
    far = None if position == "alibi" else 3 if position == "relative" else 17
    sizes = {"block_size": 40, "n_head": 2, "n_embd": 16, "attention": core, "position": position}
    scheme = Encoder(GPTConfig(**sizes, n_layer=1, vocab_size=2, max_distance=far)).transformer.h[0].attn.position
    for p in scheme.double().parameters():
        torch.nn.init.normal_(p)
    group = HeadGroup([0, 1], window, core, ATTENTION[core], [scheme], width=8)
    q, k, v = (torch.randn(6, 2, T, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    of_q, of_k, more = scheme(q, k, group, 0)
    found = Bidirectional(padding()).attend(group, of_q, of_k, v, window=window, scale=8**-0.5, **more)
    rows = []
    for seen in padding():
        y = []
        for i in range(T):
            near = [j for j in range(T) if abs(i - j) <= (T if window is None else window)]
            keys = [j for j in near if seen[j]] or near
            offset, b = torch.tensor(keys) - i, [len(rows)]
            x, bias, decay = [q[b, :, i], k[b][:, :, keys], v[b][:, :, keys]], None, None
            if position == "relative":  # w_clip(j - i, k), of keys and of values
                at = torch.tensor([max(-3, min(3, o)) + 3 for o in offset.tolist()])
                assert scheme.k.shape == scheme.v.shape == (2 * 3 + 1, 8)
                x[1], x[2] = x[1] + scheme.k[at], x[2] + scheme.v[at]
            elif position == "t5":
                bias = scheme.table.weight[attention.bucket_of_both(offset, 17)].T
            else:
                decay = torch.tensor([[[2**-4]], [[2**-8]]], dtype=torch.float64)
            y.append(one_query(core, *x, 8**-0.5, bias, decay, offset.abs().double()))
        rows.append(torch.stack(y, dim=-2))
    wanted, weights = torch.cat(rows), [q, k, v, *scheme.parameters()]
    dy = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).sin().view(found.shape)
    for a, b in zip((found, *torch.autograd.grad(found, weights, dy)),
                    (wanted, *torch.autograd.grad(wanted, weights, dy)), strict=True):  # fmt: skip
        assert close(a, b, 1e-12)


@pytest.mark.parametrize("max_distance", [128, 20])
def test_the_buckets_of_both_sides_are_those_of_transformers(max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offset = torch.arange(-300, 301)
    theirs = t5.T5Attention._relative_position_bucket(offset, True, 32, max_distance)
    assert torch.equal(attention.bucket_of_both(offset, max_distance), theirs) and len(theirs.unique()) == 31


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
REFUSED = {"relative": ["laser"], "t5": ["beta", "beta_squared"]}


@pytest.mark.parametrize(
    ("core", "choices"),
    [(core, x) for core in ATTENTION for x in CHOICES if core not in REFUSED.get(x.get("position"), [])], ids=str,
)  # fmt: skip
@torch.no_grad()
def test_a_padded_batch_is_as_each_text_alone(core, choices):
    gpt = Encoder(GPTConfig(**SIZES, attention=core, **choices)).double().eval()
    idx, lengths = torch.randint(11, (3, 40)), (40, 23, 1)
    seen = torch.arange(40) < torch.tensor(lengths)[:, None]
    y = gpt.hidden(idx, Bidirectional(seen))
    for row, n in enumerate(lengths):
        torch.testing.assert_close(y[row, :n], gpt.hidden(idx[[row], :n], Bidirectional())[0], rtol=0, atol=1e-12)
    later = idx.clone()
    later[:, -1] = (later[:, -1] + 1) % 11
    assert (gpt.hidden(later, Bidirectional(seen)) - y)[0, 0].abs().max() > 1e-9  # the last token is seen by the first
    assert close(gpt.hidden(later, Bidirectional(seen))[1, :23], y[1, :23], 1e-12)  # but here it is padding


@pytest.mark.parametrize(("choices", "name"), [({"position": "t5"}, "T5"), ({"decay": "learned"}, "ALiBi")])
def test_positions_that_know_the_past_alone_are_refused(choices, name):
    gpt = GPT(GPTConfig(**SIZES, **choices))
    with pytest.raises(UserError, match=f"{name} counts how far a key lies behind a query"):
        gpt.hidden(torch.zeros(1, 4, dtype=torch.long), Bidirectional())
