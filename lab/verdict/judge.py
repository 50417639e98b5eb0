"""The runs of a verdict: learning rates are tuned, then seeds are paired; and its statistics."""

import re
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

from errors import UserError
from lab.experiments.results import saved
from lab.experiments.runs import final, identity, record
from training.distributed import count
from training.estimate import duration

WIDER = 2  # how often a grid of rates is made wider where its best rate is at its edge


class Arm(NamedTuple):
    """One side of the comparison: its name and its flags of train.py."""

    name: str
    words: tuple[str, ...]


class Setting(NamedTuple):
    """What an arm is trained with: a size such as "3 x 96", and a number of steps."""

    arm: Arm
    size: str
    steps: int


@dataclass
class Judge:
    """Makes runs of train.py and keeps their results in out_dir/results.json."""

    config_file: str
    common: tuple[str, ...]  # flags of both arms
    rates: list[float]
    seeds: list[int]
    tuning: tuple[int, ...]
    out_dir: str
    jobs: int
    planned: int = 0  # runs to make
    made: list[float] = field(default_factory=list)  # the seconds of the runs that are made

    @property
    def store(self) -> str:
        return f"{self.out_dir}/results.json"

    def run(self, setting: Setting, rate: float, seed: int, *more: str) -> tuple[str, list[str]]:
        """(the name, the arguments of train.py) of a run."""
        n = setting.steps
        words = [
            *shape_of(setting.size),
            f"--max_iters={n}",
            f"--lr_decay_iters={n}",
            f"--warmup_iters={n // 5}",  # with a shorter rise some seeds fail at high rates
            f"--eval_interval={max(1, n // 5)}",
            "--eval_iters=73",
            "--min_lr=0.0",
            *self.common,
            *setting.arm.words,
            *more,
            f"--learning_rate={rate:g}",
            f"--seed={seed}",
        ]
        about = " ".join([*setting.arm.words, *more, *self.common]) or "the config file"
        name = f"{about}; {setting.size}, {n} steps, rate {rate:g}, seed {seed}"
        return name, [self.config_file, *words]

    def make(self, runs: list[tuple[str, list[str]]]) -> dict:
        """Make the runs that are missing; return {name: result} of all."""
        keep = ("val_loss",)
        return record(self.store, dict(runs), self.out_dir, self.jobs, True, keep, self.progress)

    def progress(self, name: str, seconds: float) -> None:
        """Say how far the plan is, after a run that took so long."""
        self.made.append(seconds)
        left = max(0, self.planned - len(self.made)) * statistics.mean(self.made) / self.jobs
        print(f"  {seconds:.0f} s: {name}; about {duration(left)} left", flush=True)

    def plan(self, settings: list[Setting], tunes: bool) -> None:
        """Add the runs that these settings need to the plan.

        Where a grid is made wider, more are added. Where rates are tuned, the seeds are there too.
        """
        known = saved(self.store, {"runs": {}})["runs"]
        for setting in settings:
            first = self.tuning if tunes else self.seeds
            runs = [self.run(setting, rate, seed) for rate in self.rates for seed in first]
            left = sum(known.get(name, {}).get("of") != identity(args) for name, args in runs)
            n = left + len(self.seeds) * (left > 0)
            if not tunes:  # at one of the rates
                n = len(self.seeds) if left == len(runs) else 0
            self.planned += n

    def tuned(self, settings: list[Setting]) -> dict[Setting, "Tuned"]:
        """The best rate of each setting, by its mean loss over the seeds of `tuning`.

        Where the best rate is at the edge of the grid, the next rate is tried, WIDER times at most.
        """
        grids = {setting: sorted(self.rates) for setting in settings}
        for widened in range(WIDER + 1):
            runs = []
            for setting, rates in grids.items():
                runs += [self.run(setting, rate, seed) for rate in rates for seed in self.tuning]
            results = self.make(runs)
            best = {}
            for setting, rates in grids.items():
                means = {}
                for rate in rates:
                    names = [self.run(setting, rate, seed)[0] for seed in self.tuning]
                    means[rate] = statistics.mean(final(results[name]) for name in names)
                rate = min(means, key=means.get)
                best[setting] = Tuned(rate, rate in (min(rates), max(rates)), means)
            if widened == WIDER or not any(x.at_edge for x in best.values()):
                return best
            for setting, (rate, at_edge, _) in best.items():
                if at_edge:
                    grids[setting].append(2 * rate if rate == max(grids[setting]) else rate / 2)
                    self.planned += len(self.tuning)
        return best

    def losses(self, rates: dict[Setting, "Tuned"]) -> dict[Setting, list[dict]]:
        """The results of each setting's seeds, at its best rate."""
        runs = {s: [self.run(s, x.rate, seed) for seed in self.seeds] for s, x in rates.items()}
        results = self.make(sum(runs.values(), []))
        return {s: [results[name] for name, _ in of_s] for s, of_s in runs.items()}


def shape_of(size: str) -> list[str]:
    """The flags of a size such as "3 x 96": layers and width. Raises UserError for another text."""
    match = re.fullmatch(r"([1-9]\d*) x ([1-9]\d*)", size)
    if not match:
        raise UserError(f'--sizes={size}: a size is layers x width, such as "3 x 96"')
    return [f"--n_layer={match[1]}", f"--n_embd={match[2]}"]


class Tuned(NamedTuple):
    rate: float
    at_edge: bool
    means: dict[float, float]  # {rate: mean loss}


def in_words(words: dict[str, str], where: str) -> str:
    """A verdict on sizes, {size: "better", "worse" or ""}: "better at equal steps at both"."""
    parts = []
    for word in ("better", "worse"):
        n = list(words.values()).count(word)
        if n:
            which = f"at {'all' if n > 2 else 'both'} sizes" if n > 1 else "at the only size"
            if n < len(words):
                which = f"at {n} of {count(len(words), 'size')}"
            parts.append(f"{word} {where} {which}")
    return ", ".join(parts) or f"no difference seen {where}"
