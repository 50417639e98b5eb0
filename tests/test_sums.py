"""attention/sums.py: beta and beta_squared from running sums, in linear time."""

import functools
import resource

import pytest
import torch
from reference import naive_attention
from test_attention import DECAYS, close, long_qkv, saved_bytes

from attention import sums
from attention.cache import KeyValues, RunningSums, new_part
from attention.heads import HeadGroup
from attention.sums import SUMS, Linear, running_sums
from model import ATTENTION, GPT, GPTConfig

kinds = pytest.mark.parametrize("core", SUMS)
at_once = pytest.mark.parametrize("rows", [128, 10**9])  # 64 tokens at a time, and all at once
decays = pytest.mark.parametrize("decay", [None, [0.03, 0.4]], ids=["", "decay"])


def tensor(decay: list | None) -> torch.Tensor | None:
    return None if decay is None else torch.tensor(decay, dtype=torch.float64, requires_grad=True)


@kinds
@decays
@pytest.mark.parametrize("widths", [(2, 5), (5, 2)])
@pytest.mark.parametrize("T", [1, 130])
@at_once
def test_gradients_by_differences(core, decay, widths, T, rows, monkeypatch):
    monkeypatch.setattr(sums, "ROWS_AT_ONCE", rows)
    D, Dv = widths
    x = [torch.randn(1, 2, T, d, dtype=torch.float64, requires_grad=True) for d in (D, D, Dv)]
    some = torch.randn(1, 2, T, Dv, dtype=torch.float64)
    x += [] if decay is None else [tensor(decay)]

    def loss(q, k, v, decay=None):
        return (Linear.apply(SUMS[core], q, k, v, decay, None)[0] * some).sum()

    assert torch.autograd.gradcheck(loss, x, fast_mode=True)


@kinds
@decays
@at_once
def test_sums_go_on_from_a_state(core, decay, rows, monkeypatch):
    """Pieces of uneven sizes give what all tokens at once give: outputs, and the state in the end."""
    monkeypatch.setattr(sums, "ROWS_AT_ONCE", rows)
    q, k, v = long_qkv()
    kind, decay = SUMS[core], tensor(decay)
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


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("fade", [None, (4, 1, 1), (4, 1, 5)])
@pytest.mark.parametrize("from_a_state", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_gpus_running_sums_are_a_cpus(chunks, fade, from_a_state, reverse, monkeypatch):
    """A CPU adds one chunk after another; a GPU doubles the distance at each launch. Both are the plain sum."""
    x = torch.randn(2, 4, chunks, 3, 5, dtype=torch.float64)
    state = torch.randn(2, 4, 3, 5, dtype=torch.float64) if from_a_state else None
    factor = None if fade is None else torch.rand(fade, dtype=torch.float64)
    if factor is not None:
        factor[0] = 0.0  # gamma^64, where it underflows
    before, end = [], torch.zeros_like(x[:, :, 0]) if state is None else state
    for i in range(chunks)[:: -1 if reverse else 1]:
        before.append(end)
        end = (end if factor is None else factor * end) + x[:, :, i]
    before = torch.stack(before[::-1] if reverse else before, dim=2).flatten(0, 2)
    for on_a_cpu in (True, False):
        monkeypatch.setattr(sums, "by_loops", lambda x, on_a_cpu=on_a_cpu: on_a_cpu)
        ours = running_sums(x, state, factor, reverse=reverse)
        assert close(ours[0], before, 1e-14) and close(ours[1], end, 1e-14)


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


LINEAR_MODELS = [
    {"attention": "beta", "decay": "learned", "position": "rope"},
    {"attention": "beta_squared"},
    {
        "attention": "beta_squared",
        "short_attention": "softmax",
        "heads": "SL",
        "window": 50,
        "decay": "alibi",
        "conv": 4,
    },
]


def layer_and_input(choices: dict, n: int) -> tuple:
    """A layer's attention with heads of 16, and its input."""
    gpt = GPT(GPTConfig(block_size=n, vocab_size=5, n_layer=1, n_head=4, n_embd=64, **choices))
    return gpt.transformer.h[0].attn, torch.randn(1, n, 64, requires_grad=True)


@pytest.mark.parametrize("choices", LINEAR_MODELS, ids=str)
def test_memory_is_linear(choices):
    """Of what the forward pass keeps. Few tokens first: the square of 16,384 would fill this machine's memory."""
    for n in (1024, 8192):
        kept = [saved_bytes(functools.partial(*layer_and_input(choices, m))) for m in (n, 2 * n)]
        assert kept[1] <= 2.2 * kept[0]


@pytest.mark.slow
@pytest.mark.parametrize("choices", LINEAR_MODELS, ids=str)
def test_time_is_linear(choices):
    """Of a forward and a backward pass: at most 2.3 times as much for twice as many tokens, twice over.

    It is the CPU's time in this process, taken in turns, and the fastest of some, since other work shares the machine.
    """
    layers, took = [layer_and_input(choices, n) for n in (4096, 16384)], ([], [])
    for _ in range(3):
        for (attn, x), times in zip(layers, took, strict=True):
            start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            attn(x).sum().backward()
            times.append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - start)
    assert min(took[1]) <= 2.3**2 * min(took[0])
