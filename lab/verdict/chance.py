"""How often a verdict gives a word to an idea that changes nothing: measured with softmax alone.

    python -m lab.verdict --what=bank      # makes the runs, in two hours, and lab/verdict/bank.json
    python -m lab.verdict --what=chance    # simulates verdicts with the losses in this file

The bank has losses of softmax at both sizes: 40 seeds at three learning rates half an octave apart,
10 at four outer ones. A simulated verdict draws seeds from it and takes them through method.py: the
choice of rates, eight sittings, the words. The idea's seeds in equal time are drawn anew.
"""

import functools
import itertools
import math
import os
import platform
import random
import statistics
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from errors import UserError, optional
from lab.experiments.results import Interval, interval, save, saved, short, show_table, stored
from lab.verdict import method
from lab.verdict.judge import Judge, Setting

BANK = "lab/verdict/bank.json"
SEEDS = 40  # at the central rates
OUTER = 10  # seeds at the outer ones
KS = -3, -2, -1, 0, 1, 2, 3  # the rates; see method.py
CENTRAL = -1, 0, 1
LEAST = 0.003  # nats: the error of a chosen rate, at least; where one seed chooses, twice this
# What is simulated
VERDICTS = 4000  # of each case
COMPARED = 8  # seeds
QUICK = 4  # seeds of a first look
NOTHING = 0.0, 0.0  # nats that the idea is better, at each size
ONE_SIZE = ((0.06, 0.0), (0.0, 0.06))
BOTH = 0.01, 0.02, 0.04  # at both sizes
SITTING = 0.05  # the error of the logarithm of a step's time in one sitting
WORTH = 0.2  # nats for each unit of the logarithm of the number of steps
FAILURE = 0.5  # nats that a failing seed loses
ITSELF = 20  # verdicts of softmax against itself on the card


def machine() -> dict[str, str]:
    """What decides how fast a step is: {"processor": , "torch": }."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            names = [line.split(":")[1].strip() for line in f if line.startswith("model name")]
        name = names[0] if names else name
    return {"processor": name, "torch": str(torch.__version__)}


def make_bank(judge: Judge, settings: list[Setting]) -> None:
    """Make the runs of the bank, and write them to BANK: {size: {rate: {seed: loss}}}."""
    keys = []
    for seed, setting in itertools.product(range(1, SEEDS + 1), settings):
        keys += [(setting, k, seed) for k in (KS if seed <= OUTER else CENTRAL)]
    losses = judge.make([judge.run(*key) for key in keys])
    bank = {}
    for (setting, k, seed), loss in zip(keys, losses, strict=True):
        bank.setdefault(setting.size, {}).setdefault(str(k), {})[str(seed)] = loss
    about = {"recipe": judge.config_file, "steps": settings[0].steps} | machine()
    save(BANK, {"about": about} | short(bank))


class Case(NamedTuple):
    """What is simulated: an idea that is softmax, but for these differences."""

    shift: float = 0.0  # half octaves between the best rates of both sides
    bend: float = 1.0  # the loss rises so many times as fast away from the best rate
    spread: float = 1.0  # times the seeds' own deviation
    failing: float = 0.0  # the share of runs that fail
    paired: bool = False  # a seed's losses on both sides correlate by 0.7


HARDER = Case(spread=1.5)  # of which tau is measured: other recipes have other deviations


class Size:
    """The bank's losses at one size: a curve over the rates, and what each seed adds to it.

    The curve is the cubic polynomial through the rates' means, with weights: one that passes
    through each of them would have their noise, and three times the curvature three times as much.
    """

    def __init__(self, losses: dict[str, dict[str, float]]):
        by_rate = {int(k): of_seeds for k, of_seeds in losses.items()}
        middle = statistics.fmean(by_rate[0].values())
        means = []
        for of_seeds in by_rate.values():  # outer rates have few seeds: paired with the middle
            changes = [x - by_rate[0][seed] for seed, x in of_seeds.items()]
            means.append(middle + statistics.fmean(changes))
        weights = [math.sqrt(len(of_seeds)) for of_seeds in by_rate.values()]
        fit = np.polynomial.Polynomial.fit([*by_rate], means, 3, w=weights)
        self.ends = min(by_rate), max(by_rate)
        low, high = self.ends
        self.curve = {k / 10: float(fit(k / 10)) for k in range(10 * low, 10 * high + 1)}
        self.lowest = min(self.curve.values())
        self.added = [
            [by_rate[k][seed] - statistics.fmean(by_rate[k].values()) for k in CENTRAL]
            for seed in by_rate[CENTRAL[0]]
        ]

    def loss(self, case: Case, k: float, seed: int, side: int) -> float:
        """The loss of a run of softmax (side 0) or of the idea (1). It rises beyond outer rates.

        In a paired case half of the variance of what a seed adds is the same on both sides.
        """
        at = round(k - case.shift * side, 1)
        inside = min(max(at, self.ends[0]), self.ends[1])
        x = (self.curve[inside] - self.lowest) * (1 + abs(at - inside)) * case.bend
        nearest = min(max(round(at), CENTRAL[0]), CENTRAL[-1]) - CENTRAL[0]
        added = self.added[seed][nearest]
        if side and case.paired:
            added = (added + self.added[seed - 1][nearest]) / math.sqrt(2)
        failure = FAILURE * (random.random() < case.failing)
        return self.lowest + x + case.spread * added + failure


def chosen(at: Size, case: Case, seeds: list[int], side: int) -> method.Tuned:
    """The rate that one side chooses, with these seeds of the bank."""
    found = {}
    while ks := method.choose(found)[0]:
        found |= {k: [at.loss(case, k, seed, side) for seed in seeds] for k in ks}
    return method.choose(found)[1]


def simulated(at: Size, tau: float, case: Case, n: int, tried: int) -> list[Interval]:
    """[the difference at equal steps, in equal time] at one size, of a simulated verdict.

    n: compared seeds; tried: seeds with which rates are tried. Empty if a chosen rate is at the
    edge, which gives no word.
    """
    everyone = range(len(at.added))
    drawn = random.sample(everyone, (tried + n) * (1 if case.paired else 2))
    sides = drawn[: tried + n], drawn[-tried - n :]
    rates = []
    losses = []
    for side, seeds in enumerate(sides):
        k, at_edge = chosen(at, case, seeds[:tried], side)
        if at_edge:
            return []
        rates.append(k)
        losses.append([at.loss(case, k, seed, side) for seed in seeds[tried:]])

    # as many steps, but other runs
    others = random.sample([seed for seed in everyone if seed not in sides[0]], n)
    sittings = [random.gauss(0.0, SITTING) for _ in range(method.SITTINGS)]
    late = WORTH * statistics.fmean(sittings)
    in_time = [at.loss(case, rates[1], seed, 1) + late for seed in others]

    lost = tau**2, math.inf
    timing = method.timing_error(WORTH, sittings)
    base, idea = losses
    return [
        interval([y - x for x, y in zip(base, idea, strict=True)], lost),
        interval([y - x for x, y in zip(base, in_time, strict=True)], lost, timing),
    ]


def verdicts(count: int, case: Case, n: int) -> list[list[list[Interval]]]:
    """Simulated verdicts with n compared seeds: what `simulated` gives at each size."""
    args = case, n, len(method.TRIED)
    sizes = [(size, tau(name)) for name, size in sizes_of().items()]  # tau draws as well
    random.seed(0)
    return [[simulated(*size, *args) for size in sizes] for _ in range(count)]


def words_of(found: list[list[Interval]], gains: tuple, share: float, places: int = 2) -> set[str]:
    """The words of a report where the idea is better by `gains`. share: see method.word.

    places: 2; 1: at equal steps alone.
    """
    if not all(found):
        return {"no word"}
    words = set()
    of_places = [*zip(*found, strict=True)][:places]
    for intervals, least in zip(of_places, (0.0, method.LEVEL), strict=False):
        better = [x._replace(mean=x.mean - gain) for x, gain in zip(intervals, gains, strict=True)]
        words.add(method.word(better, share, least))
    return words


def quick_words_of(case: Case) -> Counter:
    """How often a first look says each word, at the first size."""
    name, size = next(iter(sizes_of().items()))
    lost = tau(name, True)
    random.seed(0)
    found = [simulated(size, lost, case, QUICK, 1) for _ in range(VERDICTS)]
    return Counter(method.quick_word(x[0]) if x else "look again" for x in found)


@functools.cache
def sizes_of() -> dict[str, Size]:
    """{size: its losses in the bank}."""
    return {size: Size(x) for size, x in saved(BANK, {}).items() if size != "about"}


@functools.cache
def tau(size: str, quick: bool = False) -> float:
    """The deviation of what two sides lose by choosing their rates with few seeds, in nats.

    Of the bank, by simulated choices; of a size that is not in it, the largest. quick: chosen with
    one seed.
    """
    least = LEAST * (2 if quick else 1)
    if size not in sizes_of():
        return max([least, *(tau(other, quick) for other in sizes_of())])
    at = sizes_of()[size]
    draw = random.Random(0)
    lost = []
    for _ in range(2000):
        seeds = draw.sample(range(len(at.added)), 1 if quick else len(method.TRIED))
        k, _ = chosen(at, HARDER, seeds, 0)
        lost.append(at.curve[min(max(k, at.ends[0]), at.ends[1])] - at.lowest)
    return max(least, math.sqrt(2) * statistics.pstdev(lost))


def itself() -> list[str]:
    """The first cells of a row of the card: verdicts of softmax against itself, from the bank."""
    found = [x for x in verdicts(ITSELF, Case(), COMPARED) if all(x)]
    words = Counter(method.word([steps for steps, _ in x]) for x in found)
    words["no word"] += ITSELF - len(found)
    said = ", ".join(f"{word} {n}" for word, n in words.most_common() if n)
    ends = []
    for of_size in zip(*found, strict=True):
        means = [steps.mean for steps, _ in of_size]
        ends.append(f"{min(means):+.3f} to {max(means):+.3f}")
    return [f"{ITSELF} verdicts with seeds of the bank", "softmax", said, "; ".join(ends)]


def shared_error() -> str:
    """The error of softmax's mean loss at each size, which all rows of the card share."""
    errors = []
    for name, size in sizes_of().items():
        deviation = statistics.stdev(x[1] for x in size.added)
        errors.append(f"{deviation / math.sqrt(COMPARED):.4f} at {name}")
    return ", ".join(errors)


def upper(n: int, of: int) -> str:
    """A share in percent, and its upper 95% limit (Clopper and Pearson)."""
    beta = optional("scipy.stats", "a limit").beta
    limit = 1.0 if n == of else beta.ppf(0.95, n + 1, of - n)
    return f"{n / of:.2%} (< {limit:.2%})"


def show() -> None:
    """Print how often each word is said: to nothing, to a gain at one size, to gains at both."""
    if not sizes_of():
        raise UserError(f"there is no {BANK}: python -m lab.verdict --what=bank makes it")
    about = stored(BANK, "about")
    print(", ".join(f"{key}: {x}" for key, x in about.items()))
    for name, size in sizes_of().items():
        deviation = statistics.stdev(x[1] for x in size.added)
        print(f"{name}: seeds' deviation {deviation:.4f}, tau {tau(name):.4f}")

    cases = [*itertools.starmap(Case, itertools.product((0, 1), (1, 3), (1, 1.5), (0, 0.05)))]
    cases += [case._replace(paired=True) for case in cases]
    columns = "half octaves apart | curvature | deviation | failing runs | paired"
    wrong = "better or worse | better | a hint | better where one size gains 0.06 | a hint there"
    wrong += " | level at equal steps"
    right = " | ".join(f"better (or a hint) at equal steps if both gain {gain}" for gain in BOTH)
    for n, share in ((COMPARED, 1.0), (2 * COMPARED, method.AGAIN)):
        rows = [[*case, *shares_of(case, n, share)] for case in cases]
        level = method.stricter(method.DECIDES, share)
        print(f"\n{n} seeds, intervals of {100 * level:g}% decide")
        show_table(f"{columns} | {wrong} | {right}", rows)
    rows = []
    for case in cases:
        counts = quick_words_of(case)
        rows.append([*case, upper(counts["looks better"] + counts["looks worse"], VERDICTS)])
    show_table(f"{columns} | --quick: looks better or worse", rows)


def shares_of(case: Case, n: int, share: float) -> list[str]:
    """The cells of a row: how often the words are said, to nothing and to gains."""
    found = verdicts(VERDICTS, case, n)

    def times(gains: tuple, *words: str, places: int = 2) -> int:
        said = [words_of(x, gains, share, places) for x in found]
        return sum(not one.isdisjoint(words) for one in said)

    hints = "a hint of better", "a hint of worse"
    cells = [times(NOTHING, "better", "worse"), times(NOTHING, "better"), times(NOTHING, *hints)]
    cells += [max(times(gains, word) for gains in ONE_SIZE) for word in ("better", hints[0])]
    texts = [upper(cell, VERDICTS) for cell in cells]
    texts.append(f"{times(NOTHING, 'level', places=1) / VERDICTS:.0%}")
    for gain in BOTH:
        better = times((gain, gain), "better", places=1) / VERDICTS
        either = times((gain, gain), "better", hints[0], places=1) / VERDICTS
        texts.append(f"{better:.0%} ({either:.0%})")
    return texts
