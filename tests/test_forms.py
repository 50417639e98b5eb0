"""Which code an attention runs: its fast form, unless somebody has edited its definition."""

import functools
import math
import os
import traceback

import pytest
import torch
from harness import ROOT, assert_equal, parametrize, refusal
from reference import cached, fast, naive_attention
from torch.autograd import grad
from torch.nn import functional as F

import model
from attention import fast as parts
from attention import forms, scores
from attention.cache import KeyValues, RunningSums, groups_of, new_part, run_definitions
from attention.forms import FORM, form_of
from attention.scores import has_argument, learned, plain_form
from attention.trial import is_row_local
from model import ATTENTION, GPT, GPTConfig
from positions import POSITION, Scheme

SIZES = {"block_size": 300, "vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 16}
SMALL = SIZES | {"block_size": 8}


def gpt_of(**fields: object) -> GPT:
    return GPT(GPTConfig(**SIZES | fields))


@torch.no_grad()
def assert_cached(gpt: GPT, idx: torch.Tensor, expected: torch.Tensor, tolerance=1e-9) -> None:
    """Decoding gives these logits: all but 20 tokens at once, then one token at a time."""
    pieces = [idx.shape[1] - 20, *[1] * 20]
    assert_equal(cached(gpt, idx, pieces), expected, tolerance)


# -----------------------------------------------------------------------------
# the forms of the built-in attentions


@parametrize("core", FORM)
def test_the_fast_forms_are_used(core, capfd):
    """If this fails, a definition (or scores() or visible()) was edited, and your code runs.

    Only when its fast form computes the same again may FORM[core].written_for become
    print_of(ATTENTION[core]): else the old fast form would run in the place of the edit.
    """
    assert FORM[core].written_for == forms.print_of(ATTENTION[core])
    gpt = gpt_of(attention=core, heads="SL", window=20, position="rope")
    short, long = groups_of(gpt)
    assert FORM[core].name == long.form_name
    code = FORM[core].name if FORM[core].short else "its definition"
    assert short.form_name == f"{code} with a window"
    kept = RunningSums if FORM[core].sums else KeyValues
    assert type(new_part(long, 300)) is kept and type(new_part(short, 300)) is KeyValues
    assert capfd.readouterr().err == ""


NEEDS = [  # fields of GPTConfig, and which code short and long heads then run
    ("softmax", {"dropout": 0.1}, "PyTorch's fused attention"),
    ("beta", {"decay": "learned"}, "running sums"),
    ("beta", {"dropout": 0.1}, "its definition in training, since attention weights are dropped"),
    ("beta", {"block_size": 64}, "its definition in training, which is faster below 256 tokens"),
    ("softcap", {}, "its definition"),
]


@parametrize("core, fields, code", NEEDS)
def test_a_form_is_chosen_for_what_it_must_take(core, fields, code):
    gpt = gpt_of(attention=core, **fields)
    assert [group.form_name for group in groups_of(gpt)] == [code]
    run_definitions(gpt)
    assert groups_of(gpt)[0].form_name == "its definition, on all tokens at once"


def test_from_forward_to_the_kernel_are_six_frames(monkeypatch):
    calls = []

    def sdpa(q, k, v, *args, **kwargs):
        stack = traceback.extract_stack()
        ours = [f for f in stack if f.filename.startswith(ROOT + os.sep)]
        calls.append([f.name for f in ours if "site-packages" not in f.filename])  # README's venv
        return v

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    gpt_of(**SMALL)(torch.zeros(1, 8, dtype=torch.long))
    (names,) = calls
    ours = names[names.index("test_from_forward_to_the_kernel_are_six_frames") + 1 : -1]
    assert len(ours) <= 6 and ours[0] == "forward" and ours[-1] == "sdpa", ours


class Times(Scheme):
    """Multiplies an attention's outputs by a number, and gives no bias."""

    def __init__(self, c):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, q, k, group, past):
        return q, k, {"around": self.around}

    def around(self, definition):
        return lambda *args, **settings: self.factor * definition(*args, **settings)


@parametrize("core", ["softmax", "beta", "beta_squared", "softcap"])
def test_what_a_position_gives_is_never_dropped(core, monkeypatch):
    """A function around the definition, beyond 256 tokens: it acts, and has a gradient."""
    monkeypatch.setitem(POSITION, "times", (None, Times))
    gpt = gpt_of(attention=core, position="times").double()
    attn = gpt.transformer.h[0].attn
    q, k, v = torch.randn(3, 1, 2, 300, 8, dtype=torch.float64)
    y = attn.mix(q, k, v)
    assert_equal(y, 3 * naive_attention(core, q, k, v), 1e-9)
    assert grad(y.sum(), attn.position.factor)[0] != 0
    assert type(new_part(attn.groups[0], 300)) is KeyValues


def test_a_form_refuses_what_it_cannot_take():
    q, k, v = torch.randn(3, 1, 2, 300, 8)
    for core, form in FORM.items():
        for name in {"bias", "decay", "dropout", "around", "misspelt"} - set(form.arguments):
            with pytest.raises(TypeError, match=name):
                form.long(ATTENTION[core])(q, k, v, **{name: torch.zeros(2, 1, 1)})


# -----------------------------------------------------------------------------
# edits


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


EDITS = {"beta": edited_beta, "softmax": edited_softmax, "laser": edited_laser}


@parametrize("core, edited", EDITS.items())
def test_an_edited_definition_is_what_runs(core, edited, monkeypatch, capfd):
    """The edited definition makes logits, gradients and text; one line says so."""
    forms.note_once.cache_clear()
    monkeypatch.setitem(ATTENTION, core, edited)
    gpt = gpt_of(attention=core, heads="SL", window=20).double()
    assert capfd.readouterr().err.count("its definition was edited") == 1
    attn = gpt.transformer.h[0].attn
    x = torch.randn(1, 300, 16, dtype=torch.float64)
    q, k, v = (t.view(1, 300, 2, 8).transpose(1, 2) for t in attn.c_attn(x).split(16, dim=2))
    short = plain_form(edited)(q[:, :1], k[:, :1], v[:, :1], window=20)
    long = plain_form(edited)(q[:, 1:], k[:, 1:], v[:, 1:])
    y = torch.cat((short, long), dim=1)
    expected = attn.c_proj(y.transpose(1, 2).flatten(2))
    assert_equal(attn(x), expected, 1e-10)
    ours = grad(attn(x).sum(), attn.parameters())
    theirs = grad(expected.sum(), attn.parameters())
    assert_equal(ours, theirs, 1e-9)
    idx = torch.randint(11, (1, 40))
    assert_cached(gpt.eval(), idx, gpt(idx, idx)[0])


def edited_scores(q, k, scale=None, bias=None):
    """Cosines in the place of products."""
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT


def edited_visible(q, k, window):
    """Every second key."""
    distance = scores.distances(q.shape[-2], k.shape[-2], q.device)
    return (distance >= 0) & (distance % 2 == 0)


@parametrize("core", FORM)
@parametrize("edited", [edited_scores, edited_visible])
def test_edited_scores_and_an_edited_mask_are_what_runs(core, edited, monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 300, 8, dtype=torch.float64)
    shipped = fast(core)(q, k, v)
    monkeypatch.setattr(scores, edited.__name__.removeprefix("edited_"), edited)
    gpt = gpt_of(attention=core).double()
    y = gpt.transformer.h[0].attn.mix(q, k, v)
    assert_equal(y, plain_form(ATTENTION[core])(q, k, v), 1e-9)
    assert (y - shipped).abs().max() > 0.1


def test_what_is_no_shipped_definition():
    """A lambda, a wrapped and a partial function count as edits; comments and names do not."""
    definition = model.softmax_attention

    @functools.wraps(definition)
    def wrapped(*args, **kwargs):
        return definition(*args, **kwargs)

    partial = functools.partial(definition)
    for other in (lambda s, seen, v, drop: definition(s, seen, v, drop), wrapped, partial):
        assert not forms.unchanged("softmax", other)

    def renamed(s, seen, v, drop):
        """Another docstring."""  # and a comment
        return drop(s.where(seen, -math.inf).softmax(-1)) @ v

    assert forms.unchanged("softmax", definition) and forms.unchanged("softmax", renamed)


def helper(x):
    return x + 1


def uses_helper(s, seen, v):
    return helper(v)


def test_a_fingerprint_knows_the_functions_that_a_definition_calls(monkeypatch):
    before = forms.fingerprint(uses_helper)
    monkeypatch.setitem(uses_helper.__globals__, "helper", cached)
    forms.fingerprint.cache_clear()
    assert before != forms.fingerprint(uses_helper) != ""


# -----------------------------------------------------------------------------
# a new attention, of which nothing else is known


def sigmoid_attention(s, seen, v):
    """y = sigmoid(s - log n) v, n the number of keys seen: a researcher's own."""
    return (s - seen.sum(-1, keepdim=True).log()).sigmoid().where(seen, 0.0) @ v


def test_a_new_attention_has_everything(monkeypatch, capfd):
    """Short heads in blocks, grouped heads, every position and a cache, by its definition alone."""
    monkeypatch.setitem(ATTENTION, "sigmoid", sigmoid_attention)
    q, k, v = torch.randn(3, 1, 2, 300, 8, dtype=torch.float64)
    for window in (None, 0, 20, 100):
        exact = naive_attention("sigmoid", q, k, v, window=window)
        assert_equal(fast("sigmoid")(q, k, v, window=window), exact, 1e-12)
    assert not has_argument(sigmoid_attention, "drop") and capfd.readouterr().err == ""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "attention": "sigmoid"}
    idx = torch.randint(11, (2, 300))
    for fields in (
        {"position": "alibi"},
        {"position": "rope", "n_kv_head": 2},
        {"differential": True, "decay": "learned"},
    ):
        gpt = gpt_of(**sizes, **fields, heads="SSLL", window=20).eval()
        full = gpt(idx, idx)[0]
        assert_cached(gpt, idx, full, 1e-5)
        run_definitions(gpt)
        assert_equal(gpt(idx, idx)[0], full, 1e-5)


def normalised_keys(s, seen, v, k):
    """A researcher's own: y = s / (1 + ||s||) v, with keys of length 1 (up to a factor)."""
    s = (s / k.norm(dim=-1)[..., None, :]).where(seen, 0.0)
    return s / (1 + s.norm(dim=-1, keepdim=True)) @ v


def test_an_attention_that_needs_the_keys(monkeypatch, capfd):
    """In short heads, in blocks, it gets those of its block; with a cache, those so far."""
    monkeypatch.setitem(ATTENTION, "keys", normalised_keys)
    gpt = gpt_of(attention="keys", heads="SL", window=20, position="rope").double().eval()
    idx = torch.arange(300)[None] % 11
    full = gpt(idx, idx)[0]
    assert all(g.isfinite().all() for g in grad(full.sum(), gpt.parameters()))
    assert_cached(gpt, idx, full)
    run_definitions(gpt)
    assert_equal(gpt(idx, idx)[0], full, 1e-9)
    assert capfd.readouterr().err == ""


def test_an_attention_with_keys_gets_them_without_alibis_dimensions(monkeypatch):
    widths = set()

    def spy(s, seen, v, k):
        widths.add(k.shape[-1])
        return s.where(seen, -math.inf).softmax(-1) @ v

    monkeypatch.setitem(ATTENTION, "spy", spy)
    models = []
    for core in ("spy", "softmax"):
        torch.manual_seed(1)
        models.append(gpt_of(**SMALL, attention=core, decay="learned").double())
    idx = torch.arange(8)[None]
    assert_equal(models[0](idx, idx)[0], models[1](idx, idx)[0], 1e-6)
    assert widths == {4, 8}  # what is tried on fixed inputs, and the model's


def sink(s, seen, v, drop, b=learned(0.5)):
    """A researcher's own, with a scalar for each head: y = e^s / (e^b + sum e^s) v."""
    s = s.where(seen, -math.inf)
    return drop((s - s.logsumexp(-1, keepdim=True).logaddexp(b)).exp()) @ v


def test_an_attention_with_a_learned_scalar(monkeypatch):
    """It begins as the definition says, and is each head's own: in blocks, long heads, decoding.

    sink is softmax with one more key, of score b and value 0.
    """
    monkeypatch.setitem(ATTENTION, "sink", sink)
    sizes = {"n_head": 3, "n_embd": 24, "attention": "sink", "heads": "LSL", "window": 20}
    gpt = gpt_of(**sizes, short_attention="softmax")
    number = gpt.state_dict(keep_vars=True)["transformer.h.0.attn.numbers.b"]
    assert number.tolist() == [0.5, 0.0, 0.5] and number.dim() == 1  # so it is not decayed
    gpt = gpt_of(**sizes).double().eval()
    attn = gpt.transformer.h[0].attn
    attn.numbers.b.data = torch.tensor([-1.0, 2.0, 5.0], dtype=torch.float64)
    x = torch.randn(1, 300, 24, dtype=torch.float64)
    q, k, v = (t.view(1, 300, 3, 8).transpose(1, 2) for t in attn.c_attn(x).split(24, dim=2))
    distance = torch.arange(300)[:, None] - torch.arange(300)
    b = attn.numbers.b[:, None, None].expand(1, 3, 300, 1)
    s = torch.cat((q @ k.mT / 8**0.5, b), dim=-1)
    for h, window in enumerate((300, 20, 300)):
        s[:, h, :, :300].masked_fill_((distance < 0) | (distance > window), -math.inf)
    y = s.softmax(-1)[..., :300] @ v
    expected = attn.c_proj(y.transpose(1, 2).flatten(2))
    assert_equal(attn(x), expected, 1e-12)
    ours, theirs = (grad(out.sin().sum(), attn.numbers.b) for out in (attn(x), expected))
    assert_equal(ours, theirs, 1e-12)
    idx = torch.arange(300)[None] % 11
    assert_cached(gpt, idx, gpt(idx, idx)[0])


# -----------------------------------------------------------------------------
# an attention that breaks the rules


def by_length(s, seen, v):
    """Depends on the number of tokens."""
    return s.where(seen, -math.inf).softmax(-1) @ v / s.shape[-1]


def in_order(s, seen, v):
    """Depends on the place of a query among all: right on all tokens, wrong in blocks."""
    late = torch.arange(s.shape[-1]) > 100
    return s.where(seen, -math.inf).softmax(-1) @ v * (1 + late)[-s.shape[-2] :, None]


@parametrize("broken", [by_length, in_order])
def test_an_attention_that_breaks_the_rule_is_called_as_a_whole(broken, capfd):
    """Blocks would compute something else, and a line says so, once."""
    q, k, v = torch.randn(3, 1, 2, 300, 8)
    form, words, _ = form_of(broken.__name__, broken, window=9)
    err = capfd.readouterr().err
    assert "Short heads cost T^2" in err
    assert ("later tokens, or with their number" in err) == (broken is by_length)
    assert words == "its definition, on all tokens at once"
    assert torch.equal(form(q, k, v, window=9), plain_form(broken)(q, k, v, window=9))
    form_of(broken.__name__, broken, window=9)
    assert capfd.readouterr().err == ""


def leak(first: int, seen_later: int = 1):
    """softmax in which queries from `first` on see a later key too."""

    def leaking(s, seen, v, drop):
        T = s.shape[-1]
        i = torch.arange(T - s.shape[-2], T)[:, None]
        j = torch.arange(T)
        later = (i >= first) & (j == i + seen_later)
        return drop(s.where(seen | later, -math.inf).softmax(-1)) @ v

    return leaking


@parametrize(
    "first, tokens, is_found",
    [(10, 64, True), (200, 256, True), (900, 1024, True), (900, 8192, True), (200, 64, False)],
)
def test_a_leak_is_found_at_the_models_own_block_size(first, tokens, is_found, monkeypatch, capfd):
    """A model of 64 tokens cannot have a leak that begins at token 200."""
    monkeypatch.setitem(ATTENTION, "leaking", leak(first))
    gpt = gpt_of(block_size=tokens, attention="leaking")
    assert ("all tokens at once" in groups_of(gpt)[0].form_name) == is_found


def test_a_bug_in_an_attention_is_its_own(monkeypatch):
    def wrong(s, seen, v, drop):
        B, H, T = s.shape

    for name in ("wrong", "softmax"):
        monkeypatch.setitem(ATTENTION, name, wrong)
        gpt = gpt_of(**SMALL, attention=name)
        with pytest.raises(ValueError, match="too many values to unpack"):
            gpt(torch.zeros(1, 8, dtype=torch.long))


def test_an_error_while_an_attention_is_tried_is_shown_whole(capfd):
    """It works in float32 alone, so that nobody knows whether it sees later tokens."""
    weights = torch.full((8, 8), 0.125)
    form, *_ = form_of("mine", lambda s, seen, v: weights @ v)
    err = capfd.readouterr().err
    assert "whether it sees later tokens could not be tried" in err
    assert "weights @ v" in err and "RuntimeError" in err and __file__ in err
    assert form(*(torch.ones(1, 1, 8, 4) for _ in "qkv")).shape == (1, 1, 8, 4)


def test_an_output_of_another_shape_is_seen(monkeypatch):
    monkeypatch.setitem(ATTENTION, "flat", lambda s, seen, v: v.sum(1, keepdim=True))
    gpt = gpt_of(**SMALL, attention="flat")
    with refusal(r"this attention gave \(1, 1, 8, 8\) .*, not \(1, 2, 8, 8\)"):
        gpt(torch.zeros(1, 8, dtype=torch.long))


def test_trying_an_attention_draws_no_random_number_and_needs_no_device():
    """It runs on the CPU wherever the model is made, and leaves the generator alone."""
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert is_row_local(lambda s, seen, v, drop: model.softmax_attention(s, seen, v, drop), 64)
    assert torch.equal(state, torch.get_rng_state())


def test_block_lengths():
    assert [parts.block_length(w) for w in (0, 16, 64, 128, 129, 500)] == [64, 64, 64, 64, 128, 256]
