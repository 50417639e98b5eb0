"""How often a verdict gives a word to an idea that changes nothing: measured with softmax alone.

    python -m lab.verdict --what=bank      # makes the runs, in two hours, and lab/verdict/bank.json
    python -m lab.verdict --what=chance    # simulates verdicts with the losses in this file

The bank has losses of softmax at both sizes: 40 seeds at three learning rates half an octave apart,
10 at four outer ones. A simulated verdict draws seeds from it, other ones for each side, and takes
them through all of method.py, the choice of rates included.
"""

import functools
import itertools
import math
import os
import platform
import random
import statistics
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from errors import UserError, optional
from lab.experiments.results import save, saved, short, show_table
from lab.verdict import method
from lab.verdict.judge import Judge, Setting

BANK = "lab/verdict/bank.json"
SEEDS = 40  # at the central rates
OUTER = 10  # seeds at the outer ones
KS = -3, -2, -1, 0, 1, 2, 3  # the rates; see method.py
CENTRAL = -1, 0, 1
LEAST = 0.003  # nats: the error of a chosen rate, at least
# What is simulated
VERDICTS = 4000  # of each case where a word is wrong
RIGHT = 400  # and of each gain
COMPARED = 8  # seeds
QUICK = 4  # seeds of a first look
GAINS = 0.01, 0.02, 0.04  # nats
ONE_SIZE = 0.06  # nats: a gain at the first size alone
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
    gains: tuple = (0.0, 0.0)  # nats that the idea is better, at each size


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

    def loss(self, case: Case, k: float, seed: int, shift: float) -> float:
        """The loss of a run; beyond the outer rates it rises on."""
        at = round(k - shift, 1)
        inside = min(max(at, self.ends[0]), self.ends[1])
        x = (self.curve[inside] - self.lowest) * (1 + abs(at - inside)) * case.bend
        nearest = min(max(round(at), CENTRAL[0]), CENTRAL[-1]) - CENTRAL[0]
        failure = FAILURE * (random.random() < case.failing)
        return self.lowest + x + case.spread * self.added[seed][nearest] + failure


def chosen(at: Size, case: Case, seeds: list[int], shift: float) -> method.Tuned:
    """The rate that one side chooses, with these seeds of the bank."""
    choice = method.tune()
    ks = next(choice)
    while True:
        losses = {k: [at.loss(case, k, seed, shift) for seed in seeds] for k in ks}
        try:
            ks = choice.send(losses)
        except StopIteration as end:
            return end.value


def simulated(sizes: list[Size], taus: list[float], case: Case, n: int, tried: int) -> list:
    """The differences of a simulated verdict with n seeds, in steps and in time: [(x, t), ...].

    tried: seeds with which rates are tried. Empty if a chosen rate is at the edge, which gives no
    word.
    """
    drawn = random.sample(range(len(sizes[0].added)), 2 * (tried + n))
    sides = drawn[: tried + n], drawn[tried + n :]
    found = []
    for at, tau, gain in zip(sizes, taus, case.gains, strict=False):
        losses = []
        for seeds, shift in zip(sides, (0.0, case.shift), strict=True):
            k, at_edge = chosen(at, case, seeds[:tried], shift)
            if at_edge:
                return []
            losses.append([at.loss(case, k, seed, shift) for seed in seeds[tried:]])
        changes = [y - x - gain for x, y in zip(*losses, strict=True)]
        lost = tau**2, math.inf
        sittings = [random.gauss(0.0, SITTING) for _ in range(method.SITTINGS)]
        late = WORTH * statistics.fmean(sittings)
        timing = method.timing_error(WORTH, sittings)
        in_time = method.interval([x + late for x in changes], lost, timing)
        found.append((method.interval(changes, lost), in_time))
    return found


def words_of(case: Case, n: int, share: float) -> set[str]:
    """The words anywhere in the report of a simulated verdict with n seeds; see method.word."""
    sizes = sizes_of()
    found = simulated([*sizes.values()], [*map(tau, sizes)], case, n, len(method.TRIED))
    if not found:
        return {"no word"}
    steps, in_time = zip(*found, strict=True)
    return {method.word(steps, share), method.word(in_time, share, method.LEVEL)}


def quick_words_of(case: Case) -> set[str]:
    """The word of a simulated first look, at the first size."""
    name, size = next(iter(sizes_of().items()))
    found = simulated([size], [tau(name, True)], case, QUICK, 1)
    return {method.quick_word(found[0][0]) if found else "look again"}


def counted(n: int, words: Callable, *args: object) -> Counter:
    """In how many of n simulated verdicts each word stands. words(*args): those of one."""
    random.seed(0)
    counts = Counter()
    for _ in range(n):
        said = words(*args)
        counts.update(said)
        counts["better or worse"] += bool(said & {"better", "worse"})
        counts["a hint"] += any(word.startswith("a hint") for word in said)
        counts["for it"] += bool(said & {"better", "a hint of better"})
    return counts


@functools.cache
def sizes_of() -> dict[str, Size]:
    """{size: its losses in the bank}."""
    return {size: Size(x) for size, x in saved(BANK, {}).items() if size != "about"}


@functools.cache
def tau(size: str, quick: bool = False) -> float:
    """The deviation of what two sides lose by choosing their rates with few seeds, in nats.

    Of the bank, by simulated choices; of a size that is not in it, the largest. quick: as in a
    first look.
    """
    if size not in sizes_of():
        return max([LEAST, *(tau(other, quick) for other in sizes_of())])
    at = sizes_of()[size]
    draw = random.Random(0)
    lost = []
    for _ in range(2000):
        seeds = draw.sample(range(len(at.added)), 1 if quick else len(method.TRIED))
        k, _ = chosen(at, Case(), seeds, 0.0)
        lost.append(at.curve[min(max(k, at.ends[0]), at.ends[1])] - at.lowest)
    return max(LEAST, math.sqrt(2) * statistics.pstdev(lost))


def itself() -> list[str]:
    """The first cells of a row of the card: verdicts of softmax against itself, from the bank."""
    sizes = sizes_of()
    random.seed(0)
    words = Counter()
    means = {size: [] for size in sizes}
    for _ in range(ITSELF):
        taus = [*map(tau, sizes)]
        found = simulated([*sizes.values()], taus, Case(), COMPARED, len(method.TRIED))
        steps = [of_steps for of_steps, _ in found]
        words[method.word(steps) if found else "no word"] += 1
        for size, x in zip(sizes, steps, strict=False):
            means[size].append(x.mean)
    ends = [f"{min(x):+.3f} to {max(x):+.3f}" for x in means.values()]
    said = ", ".join(f"{word} {n}" for word, n in words.most_common())
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
    about = saved(BANK, {"about": {}})["about"]
    print(", ".join(f"{key}: {x}" for key, x in about.items()))
    for name, size in sizes_of().items():
        deviation = statistics.stdev(x[1] for x in size.added)
        print(f"{name}: seeds' deviation {deviation:.4f}, tau {tau(name):.4f}")

    cases = list(itertools.starmap(Case, itertools.product((0, 1), (1, 3), (1, 1.5), (0, 0.05))))
    columns = "half octaves apart | curvature | deviation | failing runs | "
    wrong = "better or worse", "better", "a hint"
    for n, share in ((COMPARED, 1.0), (2 * COMPARED, method.AGAIN)):
        rows = []
        for case in cases:
            nothing = counted(VERDICTS, words_of, case, n, share)
            one = case._replace(gains=(ONE_SIZE, 0.0))
            at_one = counted(VERDICTS, words_of, one, n, share)
            cells = [upper(nothing[word], VERDICTS) for word in wrong]
            cells += [upper(at_one["better"], VERDICTS), f"{nothing['level'] / VERDICTS:.0%}"]
            for gain in GAINS:
                found = counted(RIGHT, words_of, case._replace(gains=(gain, gain)), n, share)
                cells.append(f"{found['better'] / RIGHT:.0%} ({found['for it'] / RIGHT:.0%})")
            rows.append([*case[:4], *cells])
        level = method.stricter(method.DECIDES, share)
        print(f"\n{n} seeds, intervals of {level:.1%} decide")
        gains = " | ".join(f"better (or a hint) where it is by {gain}" for gain in GAINS)
        head = f"better where one size gains {ONE_SIZE} | level | {gains}"
        show_table(f"{columns}{' | '.join(wrong)} | {head}", rows)
    rows = []
    for case in cases:
        counts = counted(VERDICTS, quick_words_of, case)
        words = "looks better", "looks worse"
        rows.append([*case[:4], *(upper(counts[word], VERDICTS) for word in words)])
    show_table(f"{columns}--quick: looks better | looks worse", rows)
