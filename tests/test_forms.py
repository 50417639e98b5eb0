"""Which code an attention runs: its fast form, unless somebody has edited its definition."""

import copy
import functools
import importlib
import inspect
import itertools
import math

import pytest
import torch
from harness import assert_equal, parametrize, refusal
from reference import cached, fast, naive_attention, shaken
from torch.autograd import grad
from torch.nn import functional as F
from torch.testing import assert_close

from attention import forms, scores
from attention.cache import heads_of, run_definitions
from attention.fast import general_form
from attention.forms import FORM, code_of
from attention.scores import distances, learned, plain_form
from model import ATTENTION, GPT, GPTConfig
from parts import POSITION, WHERE, Scheme
from training.run import LEAK, change_by_later_tokens

SIZES = {"block_size": 300, "vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 16}
SMALL = SIZES | {"block_size": 8}
forms_of = parametrize("core", FORM)


def gpt_of(**fields: object) -> GPT:
    return GPT(GPTConfig(**SIZES | fields))


def qkv_of(attn, x) -> list[torch.Tensor]:
    """q, k and v (B, H, T, D) of a layer, straight from its projection."""
    H, G, D = attn.sizes
    parts = attn.c_attn(x).split((H * D, G * D, G * D), dim=-1)
    return [part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts]


@torch.no_grad()
def assert_cached(gpt: GPT, idx: torch.Tensor, expected: torch.Tensor, tolerance=1e-9) -> None:
    """Decoding gives these logits: all but 20 tokens at once, then one token at a time."""
    pieces = [idx.shape[1] - 20, *[1] * 20]
    assert_equal(cached(gpt, idx, pieces), expected, tolerance)


# -----------------------------------------------------------------------------
# the forms of the built-in attentions


@forms_of
def test_the_fast_forms_are_used(core, capfd):
    """If this fails, a definition (or attention/scores.py) was edited, and your code runs.

    Only when its fast form computes the same again may FORM[core].written_for become
    code_of(ATTENTION[core]): else the old fast form would run in the place of the edit.
    """
    assert FORM[core].written_for == code_of(ATTENTION[core])
    gpt = gpt_of(attention=core, heads="SL", window=20, position="rope")
    short, long = heads_of(gpt)
    assert long.words == FORM[core].words
    code = FORM[core].words if FORM[core].short else "its definition"
    assert short.words == code
    assert (short.sums, long.sums) == (None, FORM[core].sums)
    assert capfd.readouterr().err == ""
    run_definitions(gpt)
    assert {heads.words for heads in (short, long)} == {"its definition, on all tokens at once"}


class Times(Scheme):
    """Multiplies an attention's outputs by a number, and lowers no score."""

    def __init__(self, c):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, q, k, heads, past):
        return q, k, {}

    def wrap(self, definition):
        @functools.wraps(definition)
        def times(*args, **settings):
            return self.factor * definition(*args, **settings)

        return times


@parametrize("core", ATTENTION)
def test_what_a_position_wraps_is_never_dropped(core, monkeypatch):
    """A function around the definition, beyond 256 tokens: it acts, and has a gradient."""
    monkeypatch.setitem(POSITION, "times", (None, Times))
    gpt = gpt_of(attention=core, heads="SL", window=20, position="times").double()
    attn = gpt.transformer.h[0].attn
    attn.c_proj = torch.nn.Identity()
    x = torch.randn(1, 300, 16, dtype=torch.float64)
    spans = zip(*(t.unbind(1) for t in qkv_of(attn, x)), (20, None), strict=True)
    y = [naive_attention(core, *(t[:, None] for t in qkv), window=w) for *qkv, w in spans]
    assert_equal(attn(x), 3 * torch.cat(y, dim=-1)[:, 0], 1e-9)
    assert grad(attn(x).sum(), attn.position.factor)[0] != 0
    idx = torch.arange(60)[None] % 11
    gpt = gpt_of(attention=core, position="times").double()
    assert_cached(gpt, idx, gpt(idx, idx)[0])


# -----------------------------------------------------------------------------
# edits

END = '"""\n'  # of a docstring
LINES = [  # at the beginning of a definition
    "s = 1.0001 * s",
    "seen = seen & (s >= s.topk(min(512, s.shape[-1]))[0][..., -1:])",
    "s = s * (2.0 if s.shape[-1] > 512 else 1.0)",
    "v = v.detach()",
    "s = s.clamp(-50.0, 50.0)",
    "s = F.dropout(s, 0.1)",
    "s = helper(s)",
]
ARGUMENTS = ["b=learned(0.0)", "f=of_token(0.0)"]
CODE = """import functools
import math
from torch.nn import functional as F
from torch.testing import assert_close
from attention.scores import learned, of_token

def helper(x):
    return {helper}

def decorator(function):
    def other(*args, **settings):
        return function(*args, **settings)

    return {around}

{decorator}
"""
SHIPPED = dict(ATTENTION)
modules = map("edited{}".format, itertools.count())


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """edited(core, old, new, ...): a definition with one replacement, in a file of its own."""
    monkeypatch.syspath_prepend(tmp_path)

    def edited(core, old=END, new=END, around="", helper="x"):
        definition = SHIPPED[core]
        text = inspect.getsource(definition)
        assert text.count(old) == 1
        name = next(modules)
        decorator = "@decorator" if around else ""
        code = CODE.format(helper=helper, around=around, decorator=decorator)
        (tmp_path / f"{name}.py").write_text(code + text.replace(old, new))
        return getattr(importlib.import_module(name), definition.__name__)

    return edited


def unchanged(name, definition):
    return FORM[name].written_for == code_of(definition)


@forms_of
def test_nobodys_edit_is_ignored(core, edited, monkeypatch):
    """No fast code for another definition; a copy of the definition keeps it."""
    assert unchanged(core, edited(core))
    assert not unchanged(core, edited(core, around="other"))
    edits = [edited(core, END, f"{END}    {line}\n") for line in LINES]
    edits += [edited(core, "):", f", {argument}):") for argument in ARGUMENTS]
    edits.append(edited(core, around="functools.wraps(function)(other)"))
    if core != "laser":
        edits += [edited(core, "drop(s", "(s"), edited(core, END, f"{END}    s = drop(s)\n")]
    for definition in edits:
        assert not unchanged(core, definition)
        monkeypatch.setitem(ATTENTION, core, definition)
        gpt = gpt_of(**SMALL, attention=core, heads="SL", window=2)
        words = [heads.words for heads in heads_of(gpt)]
        assert words == ["its definition", "its definition"]


@forms_of
def test_an_edited_definition_is_what_runs(core, edited, monkeypatch, capfd):
    """The edited definition makes logits, gradients and text; one line says so."""
    forms.note_once.cache_clear()
    definition = edited(core, END, f"{END}    s = 1.5 * s\n")
    monkeypatch.setitem(ATTENTION, core, definition)
    gpt = gpt_of(attention=core, heads="SL", window=20).double()
    assert capfd.readouterr().err.count("its definition was edited") == 1
    attn = gpt.transformer.h[0].attn
    x = torch.randn(1, 300, 16, dtype=torch.float64)
    q, k, v = qkv_of(attn, x)
    short = plain_form(definition)(q[:, :1], k[:, :1], v[:, :1], window=20)
    long = plain_form(definition)(q[:, 1:], k[:, 1:], v[:, 1:])
    y = torch.cat((short, long), dim=1)
    expected = attn.c_proj(y.transpose(1, 2).flatten(2))
    assert_equal(attn(x), expected, 1e-10)
    ours = grad(attn(x).sum(), attn.parameters())
    theirs = grad(expected.sum(), attn.parameters())
    assert_equal(ours, theirs, 1e-9)
    idx = torch.randint(11, (1, 40))
    assert_cached(gpt.eval(), idx, gpt(idx, idx)[0])


def edited_scores(q, k, scale=None):
    """Cosines in the place of products."""
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT


def edited_visible(q, k, window):
    """Every second key."""
    distance = distances(q.shape[-2], k.shape[-2], q.device)
    return (distance >= 0) & (distance % 2 == 0)


def edited_faded(x, decay):
    return 2 * x


@forms_of
@parametrize("other", [edited_scores, edited_visible, edited_faded])
def test_edited_scores_masks_and_decays_are_what_runs(core, other, monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 300, 8, dtype=torch.float64)
    shipped = fast(core)(q, k, v)
    monkeypatch.setattr(scores, other.__name__.removeprefix("edited_"), other)
    assert not unchanged(core, ATTENTION[core])
    y = fast(core)(q, k, v)
    assert_equal(y, plain_form(ATTENTION[core])(q, k, v), 1e-9)
    if other is not edited_faded or "beta" in core:
        assert (y - shipped).abs().max() > 0.1


@forms_of
def test_code_is_known_by_what_it_computes(core, edited):
    """With helpers of its file; without names, comments and docstrings."""
    line = f"{END}    s = helper(s)\n"
    code = code_of(edited(core, END, line))
    assert code == code_of(edited(core, END, line)) != ""
    assert code != code_of(edited(core, END, line, helper="x + 1"))
    assert unchanged(core, edited(core, END, ' # and a comment"""\n    # another\n'))
    for other in (functools.partial(ATTENTION[core]), lambda s, seen, v: v):
        assert not unchanged(core, other)


# -----------------------------------------------------------------------------
# a new attention, of which nothing else is known


def sigmoid_attention(s, seen, v):
    """y = sigmoid(s - log n) v, n the number of keys seen: a researcher's own."""
    return (s - seen.sum(-1, keepdim=True).log()).sigmoid().where(seen, 0.0) @ v


def normalised_keys(s, seen, v, k):
    """A researcher's own: y = s / (1 + ||s||) v, with keys of length 1 (up to a factor)."""
    s = (s / k.norm(dim=-1)[..., None, :]).where(seen, 0.0)
    return s / (1 + s.norm(dim=-1, keepdim=True)) @ v


@parametrize("definition", [sigmoid_attention, normalised_keys])
@parametrize("fields", [{"position": "alibi"}, {"position": "rope", "n_kv_head": 2}])
def test_a_new_attention_has_everything(definition, fields, monkeypatch, capfd):
    """Short heads in blocks, grouped heads, every position and a cache, by its definition alone."""
    monkeypatch.setitem(ATTENTION, "own", definition)
    q, k, v = torch.randn(3, 1, 2, 300, 8, dtype=torch.float64)
    for window in (None, 0, 20, 100):
        exact = naive_attention("own", q, k, v, window=window)
        assert_equal(fast("own")(q, k, v, window=window), exact, 1e-12)
    assert capfd.readouterr().err == ""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "heads": "SSLL", "window": 20}
    idx = torch.randint(11, (2, 300))
    gpt = gpt_of(attention="own", **sizes, **fields).double().eval()
    full = gpt(idx, idx)[0]
    assert_cached(gpt, idx, full)
    assert all(g.isfinite().all() for g in grad(full.sum(), gpt.parameters()))
    run_definitions(gpt)
    assert_equal(gpt(idx, idx)[0], full, 1e-9)


def sink(s, seen, v, drop, b=learned(0.5)):
    """A researcher's own, with a scalar for each head: y = e^s / (e^b + sum e^s) v."""
    s = s.where(seen, -math.inf)
    return drop((s - s.logsumexp(-1, keepdim=True).logaddexp(b)).exp()) @ v


def test_an_attention_with_a_learned_scalar(monkeypatch):
    """It begins as the definition says, and is each head's own: in blocks, long heads, decoding."""
    monkeypatch.setitem(ATTENTION, "sink", sink)
    sizes = {"n_head": 3, "n_embd": 24, "attention": "sink", "heads": "LSL", "window": 20}
    gpt = gpt_of(**sizes, short_attention="softmax")
    number = gpt.state_dict(keep_vars=True)["transformer.h.0.attn.numbers.b"]
    assert number.tolist() == [0.0, 0.5, 0.5] and number.dim() == 1  # so it is not decayed
    gpt = gpt_of(**sizes).double().eval()
    attn = gpt.transformer.h[0].attn
    number = attn.get_parameter("numbers.b")
    number.data = torch.tensor([2.0, -1.0, 5.0], dtype=torch.float64)
    x = torch.randn(1, 300, 24, dtype=torch.float64)
    y = []
    for h, window in enumerate((20, None, None)):
        of_head = (t[:, [h]] for t in qkv_of(attn, x))
        y.append(plain_form(sink)(*of_head, window=window, b=number[h]))
    expected = attn.c_proj(torch.cat(y, dim=-1)[:, 0])
    assert_equal(attn(x), expected, 1e-12)
    ours, theirs = (grad(out.sin().sum(), number) for out in (attn(x), expected))
    assert_equal(ours, theirs, 1e-12)
    idx = torch.arange(300)[None] % 11
    assert_cached(gpt, idx, gpt(idx, idx)[0])
    monkeypatch.setitem(ATTENTION, "sink", lambda s, seen, v, scale=learned(1.0): s * scale @ v)
    with refusal("no learned number may have the name {'scale'}"):
        gpt_of(**sizes)


# -----------------------------------------------------------------------------
# an attention that breaks the rules


def by_length(s, seen, v):
    """Depends on the number of tokens."""
    return s.where(seen, -math.inf).softmax(-1) @ v / s.shape[-1]


def leak(first: int):
    """softmax in which queries from `first` on see a later key too."""

    def leaking(s, seen, v, drop):
        T = s.shape[-1]
        i = torch.arange(T - s.shape[-2], T)[:, None]
        later = (i >= first) & (torch.arange(T) == i + 1)
        return drop(s.where(seen | later, -math.inf).softmax(-1)) @ v

    return leaking


@parametrize(
    "definition, tokens, is_found",
    [
        (by_length, 64, True),
        (leak(10), 64, True),
        (leak(900), 1024, True),
        (leak(200), 64, False),
        (sigmoid_attention, 64, False),
    ],
)
def test_a_leak_is_found_at_the_models_own_block_size(definition, tokens, is_found, monkeypatch):
    """A model of 64 tokens cannot have a leak that begins at token 200."""
    monkeypatch.setitem(ATTENTION, "mine", definition)
    gpt = shaken(GPTConfig(**SIZES | {"block_size": tokens}, attention="mine"))
    assert (change_by_later_tokens(gpt) > LEAK) == is_found


@parametrize("where", WHERE)
def test_a_leak_is_found_behind_the_zeros_of_zero_init(where, monkeypatch):
    """The model itself keeps them."""
    fields = SIZES | {"block_size": 64, "where": where, "zero_init": True}
    for definition, is_found in ((leak(10), True), (sigmoid_attention, False)):
        monkeypatch.setitem(ATTENTION, "mine", definition)
        gpt = GPT(GPTConfig(**fields, attention="mine"))
        weights = copy.deepcopy(gpt.state_dict())
        assert (change_by_later_tokens(gpt) > LEAK) == is_found
        assert_close(gpt.state_dict(), weights, rtol=0, atol=0)


def test_an_output_of_another_shape_is_seen(monkeypatch):
    monkeypatch.setitem(ATTENTION, "flat", lambda s, seen, v: v.sum(1, keepdim=True))
    gpt = gpt_of(**SMALL, attention="flat")
    with refusal(r"this attention gave \(1, 1, 8, 8\) .*, not \(1, 2, 8, 8\)"):
        gpt(torch.zeros(1, 8, dtype=torch.long))


def test_building_a_model_of_ones_own_draws_no_random_number_and_needs_no_device():
    """What a definition holds is counted on the CPU wherever the model is made."""
    state = torch.get_rng_state()
    with torch.device("meta"):
        general_form(lambda s, seen, v, drop: drop(s) @ v)
    assert torch.equal(state, torch.get_rng_state())
