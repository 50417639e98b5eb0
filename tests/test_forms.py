"""Which form of an attention runs: the fast one if its definition is unchanged, so that no edit is ignored."""

import functools
import math

import pytest
import torch
from reference import naive_attention

import model
from attention import fast, forms
from attention.cache import KeyValues, RunningSums, new_part, run_definitions
from attention.forms import FAST, fast_form
from attention.heads import HeadGroup
from attention.scores import learned, plain_form, takes
from attention.sums import SUMS
from model import ATTENTION, GPT, GPTConfig

cores = pytest.mark.parametrize("core", ATTENTION)


def sigmoid_attention(s, seen, v):
    """y = sigmoid(s - log n) v, n the number of keys seen (arXiv 2409.04431): a researcher's own."""
    return (s - seen.sum(-1, keepdim=True).log()).sigmoid().where(seen, 0.0) @ v


def edited_beta(s, seen, v, drop, fade):
    """beta with a sign that somebody has changed."""
    s = fade(s).where(seen, 0.0)
    return drop(s / (1 - s.norm(dim=-1, keepdim=True))) @ v


def edited_softmax(s, seen, v, drop):
    """softmax with another gradient only: the gradient takes the weights for constants."""
    return drop(s.where(seen, -math.inf).softmax(-1).detach()) @ v


def edited_laser(s, seen, v):
    """LASER with a temperature of its values."""
    return 2 * model.laser_attention(s, seen, v / 2)


EDITS = [("beta", edited_beta), ("softmax", edited_softmax), ("laser", edited_laser)]


@pytest.mark.parametrize("core", FAST)
def test_the_fast_forms_are_used(core, capfd):
    """If this fails, a definition was edited, and its code runs. Only when its fast form computes the same again may
    WRITTEN_FOR[core] become fingerprint(ATTENTION[core]): else the old fast form would run in the edit's place."""
    assert forms.WRITTEN_FOR[core] == forms.fingerprint(ATTENTION[core])
    form, general = fast_form(core, ATTENTION[core]), fast.general_form(ATTENTION[core])
    assert form.__qualname__ == FAST[core](ATTENTION[core]).__qualname__ != general.__qualname__
    group = HeadGroup([0], None, core, ATTENTION[core], width=4)
    assert type(new_part(group, 100)) is (RunningSums if core in SUMS else KeyValues)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("core", "edited"), EDITS, ids=lambda x: getattr(x, "__name__", x))
def test_an_edited_definition_is_what_runs(core, edited, monkeypatch, capfd):
    """The edited definition, not the old fast form, makes logits, gradients and text; one line says so."""
    monkeypatch.setitem(ATTENTION, core, edited)
    sizes = {"block_size": 280, "vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 16, "attention": core}
    gpt = GPT(GPTConfig(**sizes, heads="SL", window=20)).double()
    assert capfd.readouterr().err.count("its definition was edited") == 1
    attn, x = gpt.transformer.h[0].attn, torch.randn(1, 280, 16, dtype=torch.float64)
    q, k, v = (t.view(1, 280, 2, 8).transpose(1, 2) for t in attn.c_attn(x).split(16, dim=2))
    form = plain_form(edited)
    y = torch.cat([form(q[:, [h]], k[:, [h]], v[:, [h]], window=w) for h, w in enumerate((20, None))], dim=1)
    expected = attn.c_proj(y.transpose(1, 2).reshape(1, 280, 16))
    torch.testing.assert_close(attn(x), expected, rtol=0, atol=1e-10)
    for ours, theirs in zip(
        torch.autograd.grad(attn(x).sum(), attn.parameters()),
        torch.autograd.grad(expected.sum(), attn.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    idx = torch.randint(11, (1, 40))
    cache, cached = gpt.eval().new_cache(), []
    with torch.no_grad():
        full = gpt(idx, idx)[0]
        for part in idx.split([20, *20 * [1]], dim=1):
            cached.append(gpt(part, part, cache=cache)[0])
    torch.testing.assert_close(torch.cat(cached, 1), full, rtol=0, atol=1e-9)


def test_what_is_no_shipped_definition():
    """A lambda, a wrapped definition and a partial one count as edits; comments and names do not."""
    definition = model.softmax_attention

    @functools.wraps(definition)
    def wrapped(*args, **kwargs):
        return definition(*args, **kwargs)

    for other in (lambda s, seen, v, drop: definition(s, seen, v, drop), wrapped, functools.partial(definition)):
        assert not forms.unchanged("softmax", other)

    def renamed(s, seen, v, drop):
        """Another docstring."""  # and a comment
        return drop(s.where(seen, -math.inf).softmax(-1)) @ v

    assert forms.unchanged("softmax", definition) and forms.unchanged("softmax", renamed)


@cores
def test_plain_and_fast_give_the_same_text(core, train, run, tmp_path):
    train(f"--attention={core}", "--heads=SL", "--window=5")
    flags = (f"--out_dir={tmp_path / 'out'}", "--device=cpu", "--num_samples=1", "--max_new_tokens=40", "--start=the")
    texts = [run("sample.py", *flags, *plain)[1] for plain in ([], ["--plain"])]
    assert texts[0] == texts[1] and len(texts[0]) > 60


# -----------------------------------------------------------------------------
# a new attention, of which nothing else is known


def test_a_new_attention_has_everything(monkeypatch, capfd):
    """Short heads in blocks, grouped heads, every position, packed documents and a cache, by its definition alone."""
    monkeypatch.setitem(ATTENTION, "sigmoid", sigmoid_attention)
    form = fast_form("sigmoid", sigmoid_attention)
    q, k, v = (torch.randn(1, 2, 300, 8, dtype=torch.float64) for _ in "qkv")
    for window in (None, 0, 20, 100):
        exact = naive_attention("sigmoid", q, k, v, window=window)
        torch.testing.assert_close(form(q, k, v, window=window), exact, rtol=0, atol=1e-12)
    assert not takes(sigmoid_attention, "drop") and capfd.readouterr().err == ""
    sizes = {"block_size": 300, "vocab_size": 11, "n_layer": 2, "n_head": 4, "n_embd": 32, "attention": "sigmoid"}
    idx = torch.randint(11, (2, 300))
    for more in (
        {"position": "relative"},
        {"position": "rope", "n_kv_head": 2},
        {"differential": True, "position": "t5"},
    ):
        gpt = GPT(GPTConfig(**sizes, **more, heads="SSLL", window=20)).eval()
        full, _ = gpt(idx, idx)
        cache = gpt.new_cache()
        parts = [gpt(part, part, cache=cache)[0] for part in idx.split([280, *20 * [1]], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-5)
        run_definitions(gpt)
        torch.testing.assert_close(gpt(idx, idx)[0], full, rtol=0, atol=1e-5)


def normalised_keys(s, seen, v, k):
    """A researcher's own, which needs the keys: y = s / (1 + ||s||) v, with keys of length 1 (up to a factor)."""
    s = (s / k.norm(dim=-1)[..., None, :]).where(seen, 0.0)
    return s / (1 + s.norm(dim=-1, keepdim=True)) @ v


def test_an_attention_that_needs_the_keys(monkeypatch, capfd):
    """In short heads, in blocks, it gets those of its block; with a cache, those so far."""
    monkeypatch.setitem(ATTENTION, "keys", normalised_keys)
    sizes = {"block_size": 300, "vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 16, "attention": "keys"}
    gpt, idx = GPT(GPTConfig(**sizes, heads="SL", window=20, position="rope")).double().eval(), torch.arange(300) % 11
    full, cache = gpt(idx[None], idx[None])[0], gpt.new_cache()
    assert all(g.isfinite().all() for g in torch.autograd.grad(full.sum(), gpt.parameters()))
    parts = [gpt(part, part, cache=cache)[0] for part in idx[None].split([280, *20 * [1]], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-9)
    run_definitions(gpt)
    torch.testing.assert_close(gpt(idx[None], idx[None])[0], full, rtol=0, atol=1e-9)
    assert capfd.readouterr().err == ""


def sink(s, seen, v, drop, b=learned(0.5)):
    """A researcher's own, with a number for each head: y = e^s / (e^b + sum e^s) v."""
    s = s.where(seen, -math.inf)
    return drop((s - s.logsumexp(-1, keepdim=True).logaddexp(b)).exp()) @ v


def test_an_attention_with_a_learned_number(monkeypatch):
    """It begins as the definition says, is saved under its name, is trained without weight decay, and is each head's
    own in short heads (blocks), long heads and decoding: for softmax with a key of score b and value 0."""
    monkeypatch.setitem(ATTENTION, "sink", sink)
    sizes = {"block_size": 300, "vocab_size": 11, "n_layer": 1, "n_head": 3, "n_embd": 24}
    gpt = GPT(GPTConfig(attention="sink", short_attention="softmax", heads="LSL", window=20, **sizes)).double().eval()
    number = gpt.state_dict(keep_vars=True)["transformer.h.0.attn.numbers.b"]
    assert number.tolist() == [0.5, 0.0, 0.5] and number.dim() == 1
    gpt = GPT(GPTConfig(attention="sink", heads="LSL", window=20, **sizes)).double().eval()
    attn, x = gpt.transformer.h[0].attn, torch.randn(1, 300, 24, dtype=torch.float64)
    attn.numbers.b.data = torch.tensor([-1.0, 2.0, 5.0], dtype=torch.float64)
    q, k, v = (t.view(1, 300, 3, 8).transpose(1, 2) for t in attn.c_attn(x).split(24, dim=2))
    distance = torch.arange(300)[:, None] - torch.arange(300)
    s = torch.cat((q @ k.mT / 8**0.5, attn.numbers.b[:, None, None].expand(1, 3, 300, 1)), dim=-1)
    for h, window in enumerate((300, 20, 300)):
        s[:, h, :, :300].masked_fill_((distance < 0) | (distance > window), -math.inf)
    expected = attn.c_proj((s.softmax(-1)[..., :300] @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x), expected, rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y.sin().sum(), attn.numbers.b)[0] for y in (attn(x), expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    idx, cache = torch.arange(300)[None] % 11, gpt.new_cache()
    parts = [gpt(part, part, cache=cache)[0] for part in idx.split([280, *20 * [1]], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), gpt(idx, idx)[0], rtol=0, atol=1e-9)


def by_length(s, seen, v):
    """Depends on the number of tokens."""
    return s.where(seen, -math.inf).softmax(-1) @ v / s.shape[-1]


def in_order(s, seen, v):
    """Depends on the place of a query among all: right on all tokens, wrong in blocks."""
    return s.where(seen, -math.inf).softmax(-1) @ v * (1 + (torch.arange(s.shape[-1]) > 100))[-s.shape[-2] :, None]


@pytest.mark.parametrize("broken", [by_length, in_order])
def test_an_attention_that_breaks_the_rule_is_called_as_a_whole(broken, capfd):
    """Blocks would compute something else, and a line says so, once."""
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in "qkv")
    form = fast_form("mine", broken)
    err = capfd.readouterr().err
    assert "ort heads cost T^2" in err and ("later tokens, or with their number" in err) == (broken is by_length)
    assert torch.equal(form(q, k, v, window=9), plain_form(broken)(q, k, v, window=9))
    assert fast_form("mine", broken) is form and capfd.readouterr().err == ""


def test_a_bug_in_an_attention_is_its_own(monkeypatch):
    def wrong(s, seen, v, drop):
        B, H, T = s.shape

    monkeypatch.setitem(ATTENTION, "wrong", wrong)
    gpt = GPT(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=2, n_embd=16, attention="wrong"))
    with pytest.raises(ValueError, match="too many values to unpack"):
        gpt(torch.zeros(1, 8, dtype=torch.long))
    monkeypatch.setitem(ATTENTION, "softmax", wrong)
    gpt = GPT(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=2, n_embd=16))
    with pytest.raises(ValueError, match="too many values to unpack"):
        gpt(torch.zeros(1, 8, dtype=torch.long))


def test_an_attention_that_cannot_be_tried_is_named(capfd):
    """It works in float32 alone, so that nobody knows whether it sees later tokens."""
    weights = torch.full((8, 8), 0.125)
    form = fast_form("mine", lambda s, seen, v: weights @ v)
    assert "whether it sees later tokens could not be tried" in capfd.readouterr().err
    assert form(*(torch.ones(1, 1, 8, 4) for _ in "qkv")).shape == (1, 1, 8, 4)


def test_values_by_distance_need_a_linear_attention(monkeypatch):
    """The check looks at what an attention computes, not at its name: Shaw's positions add vectors to the values."""
    sizes = {"block_size": 8, "vocab_size": 5, "n_layer": 1, "n_head": 2, "n_embd": 16, "position": "relative"}
    monkeypatch.setitem(ATTENTION, "mine", sigmoid_attention)
    GPTConfig(**sizes, attention="mine")

    def squared(s, seen, v, drop):
        return model.softmax_attention(s, seen, v * v, drop)

    for not_linear in (squared, lambda s, seen, v: model.laser_attention(s, seen, v)):
        monkeypatch.setitem(ATTENTION, "mine", not_linear)
        with pytest.raises(ValueError, match="must be linear in its values, and mine is not"):
            GPTConfig(**sizes, attention="mine")


def test_an_output_of_another_shape_is_seen(monkeypatch):
    monkeypatch.setitem(ATTENTION, "flat", lambda s, seen, v: v.sum(1, keepdim=True))
    gpt = GPT(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=2, n_embd=16, attention="flat"))
    with pytest.raises(ValueError, match=r"this attention gave \(1, 1, 8, 8\) .*, not \(1, 2, 8, 8\)"):
        gpt(torch.zeros(1, 8, dtype=torch.long))


def test_trying_an_attention_draws_no_random_number_and_needs_no_device():
    """It runs on the CPU wherever the model is made, and leaves the generator alone."""
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert forms.is_row_local("mine", lambda s, seen, v, drop: model.softmax_attention(s, seen, v, drop))
    assert torch.equal(state, torch.get_rng_state())


def test_an_attention_with_keys_gets_them_without_alibis_dimensions():
    widths = []

    def spy(s, seen, v, k):
        widths.append(k.shape[-1])
        return s.where(seen, -math.inf).softmax(-1) @ v

    groups = [HeadGroup([0, 1], None, name, f) for name, f in (("spy", spy), ("softmax", ATTENTION["softmax"]))]
    assert [group.fades for group in groups] == [True, False] and set(widths) == {4}  # what is_row_local tries
    sizes = {"block_size": 40, "vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 16, "decay": "learned"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ATTENTION, "spy", spy)
        torch.manual_seed(1)
        ours = GPT(GPTConfig(attention="spy", **sizes)).double()
    torch.manual_seed(1)
    theirs, idx = GPT(GPTConfig(**sizes)).double(), torch.arange(40)[None] % 11
    torch.testing.assert_close(ours(idx, idx)[0], theirs(idx, idx)[0], rtol=0, atol=1e-6)
    assert set(widths) == {4, 8}
