"""How a verdict decides: which learning rates are tried, how sure a difference is, and the words.

Nothing here makes a run. judge.py asks it with losses of runs, chance.py with simulated ones.

Rates are numbers k: half octaves above the config file's rates, which are multiplied by 2^(k/2).
"""

import math
import statistics
from typing import NamedTuple

import numpy as np

from lab.experiments.results import Interval

FIRST = (-2, 0, 2)  # the rates that are tried first
WIDER = 2  # how often another rate is tried where the best one is at the edge
TRIED = 101, 102  # the seeds with which rates are tried, and which are never compared
LEVEL = 0.02  # nats: intervals within this of 0 are level, and in equal time a word needs more
SITTINGS = 8  # of timed steps, between the runs
LEAST_SPREAD = 0.03  # of the logarithm of the times' ratio between sittings, at least
FAILED = 0.2  # nats above the others of its side: a seed that failed
# The intervals that decide. An idea that gains at one size only is called better where chance alone
# decides at the other one: in 1% at equal steps, and in 1% in equal time.
DECIDES = 0.98
HINT = 0.99
NEAR = 0.90
AGAIN = 0.2  # share of these misses in a second look, with another number of seeds


class Tuned(NamedTuple):
    """A chosen rate, and whether it is at the edge of what was tried."""

    k: float
    at_edge: bool


def choose(found: dict[float, list[float]]) -> tuple[tuple, Tuned | None]:
    """(the rates to try next, or none; then the chosen one). found: {rate: [losses of seeds]}.

    The first rates are an octave apart. Where the best is at the edge, the next one is tried. The
    rate is the vertex of the parabola through the best one and its neighbours. A seed that failed,
    while another one of its rate did not, says little about this rate and does not count here.
    """
    if not found:
        return FIRST, None
    means = {}
    for k, losses in found.items():
        means[k] = statistics.fmean(x for x in losses if x < min(losses) + FAILED)
    best = min(means, key=means.get)
    beyond = {min(means): best - 2, max(means): best + 2}
    if best not in beyond:
        return (), Tuned(vertex(best, means[best - 2], means[best], means[best + 2]), False)
    if len(found) < len(FIRST) + WIDER:
        return (beyond[best],), None
    return (), Tuned(best, True)


def vertex(k: float, below: float, lowest: float, above: float) -> float:
    """Where the parabola through the losses at k - 2, k and k + 2 is lowest, in tenths."""
    bend = below - 2 * lowest + above
    return round(k + (below - above) / bend, 1) if bend else k


def timing_error(worth: float, sittings: list[float]) -> tuple[float, float]:
    """(variance, degrees of freedom) of a loss, since the time of a step is not known exactly.

    worth: nats for each unit of the logarithm of the number of steps. sittings: the logarithm of
    the ratio of the times in each.
    """
    spread = max(LEAST_SPREAD, statistics.stdev(sittings))
    return (worth * spread) ** 2 / len(sittings), len(sittings) - 1


def pooled(intervals: list[Interval]) -> Interval:
    """The mean over sizes, whose errors are independent: each size has seeds of its own."""
    n = len(intervals)
    variances = [(x.error / n) ** 2 for x in intervals]
    df = sum(variances) ** 2 / sum(v**2 / x.df for v, x in zip(variances, intervals, strict=True))
    return Interval(statistics.fmean(x.mean for x in intervals), math.sqrt(sum(variances)), df)


def slope(parameters: list[int], found: list[Interval]) -> Interval:
    """How a difference changes with each doubling of the parameters: a line, weighted by errors."""
    x = np.log2(parameters)
    weights = np.array([1 / of.error**2 for of in found])
    apart = x - np.average(x, weights=weights)
    spread = (weights * apart**2).sum()
    steepness = (weights * apart * [of.mean for of in found]).sum() / spread
    return Interval(steepness, spread**-0.5, min(of.df for of in found))


def stricter(level: float, share: float) -> float:
    """The level with this share of the misses: 0.99 with a half of them is 0.995."""
    return 1 - share * (1 - level)


def word(intervals: list[Interval], share: float = 1.0, least: float = 0.0) -> str:
    """What the differences at all sizes are called.

    better, worse: each interval is on the same side of 0 and each mean further from 0 than `least`.
    a hint: the signs agree, and the interval of the mean over the sizes excludes 0. level: each
    interval is near 0. Else not seen. One size alone gives no word but level. share: of the usual
    misses of all intervals.
    """
    level = stricter(DECIDES, share)
    sides = {x.side(level) if abs(x.mean) > least else 0 for x in intervals}
    for side, name in ((-1, "better"), (1, "worse")):
        if sides == {side} and len(intervals) > 1:
            return name
    signs = {math.copysign(1, x.mean) for x in intervals}
    if len(intervals) > 1 and len(signs) == 1 and not least:
        side = pooled(intervals).side(stricter(HINT, share))
        if side:
            return f"a hint of {'worse' if side > 0 else 'better'}"
    near = stricter(NEAR, share)
    if all(abs(x.mean) + x.half(near) < LEVEL for x in intervals):
        return "level"
    return "not seen"


def quick_word(difference: Interval, share: float = 1.0) -> str:
    """What one difference is called in a first look: its interval excludes 0, or not."""
    return ("look again", "looks worse", "looks better")[difference.side(stricter(DECIDES, share))]


def failed(losses: list[float]) -> int:
    """How many seeds failed: their loss is far above the median."""
    return sum(loss > statistics.median(losses) + FAILED for loss in losses)
