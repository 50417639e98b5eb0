"""The runs of a verdict, with the rates and seeds that method.py asks for."""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from configurator import cores

from errors import UserError
from lab.experiments.runs import record
from lab.verdict import method
from lab.verdict.method import Tuned

RATES = "learning_rate", "muon_lr"  # flags of train.py, all multiplied by the same number
SET = {"seed", "max_iters", "lr_decay_iters", "warmup_iters", "min_lr", *RATES}  # by `Judge.run`
# the same on both sides, or their losses would be of other tokens, and their times of other steps
SHARED = {*"dataset batch_size block_size eval_iters gradient_accumulation_steps device".split()}
EVALUATED = 56_000  # tokens of an evaluation: half of Tiny Shakespeare's validation split


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
    settings: dict  # of all runs: those of train.py, of the config file and of the flags
    vocab_size: int
    out_dir: str
    jobs: int  # runs at the same time; 0: as many as this process has cores, on a GPU one
    tried: dict[Setting, list] = field(default_factory=dict)  # [(rate, loss), ...]
    made: list[float] = field(default_factory=list)  # the seconds of the runs that are made

    def __post_init__(self):
        self.jobs = self.jobs or (cores() if self.on_cpu else 1)

    @property
    def store(self) -> str:
        return f"{self.out_dir}/results.json"

    @property
    def on_cpu(self) -> bool:
        return self.settings["device"] in ("auto", "cpu")

    def run(self, setting: Setting, k: float, seed: int) -> tuple[str, list[str]]:
        """(the name, the arguments of train.py) of a run. k: its rate; see method.py."""
        n = setting.steps
        c = self.settings
        words = [
            *shape_of(setting.size, c["n_head"]),
            f"--max_iters={n}",
            f"--lr_decay_iters={n}",
            f"--warmup_iters={n // 5}",  # with a shorter rise some seeds fail at high rates
            f"--eval_interval={n}",
            f"--eval_iters={min(200, 1 + EVALUATED // (c['batch_size'] * c['block_size']))}",
            "--min_lr=0.0",
            "--device=cpu",  # as the times; the flags of both sides may say another one
            *self.common,
            *setting.arm.words,
            *(f"--{name}={c[name] * 2 ** (k / 2):.4g}" for name in RATES),
            f"--seed={seed}",
        ]
        about = " ".join([*setting.arm.words, *self.common]) or "the config file"
        name = f"{about}; {self.config_file}, {setting.size}, {n} steps, rate {k:g}, seed {seed}"
        return name, [self.config_file, *words]

    def make(self, runs: list[tuple[str, list[str]]]) -> list[float]:
        """Make the runs that are missing; return the last validation loss of all.

        A run that diverged has the loss of a model that knows nothing.
        """
        done = record(self.store, dict(runs), self.out_dir, self.jobs, True, (), self.progress)
        nothing = math.log(self.vocab_size)
        return [nothing if "diverged" in x else x["val"] for x in (done[name] for name, _ in runs)]

    def progress(self, name: str, seconds: float) -> None:
        """Say how long a run took."""
        self.made.append(seconds)
        print(f"  {seconds:.0f} s: {name}", flush=True)

    def tuned(self, settings: list[Setting], seeds: tuple = method.TRIED) -> dict[Setting, Tuned]:
        """The rate of each setting, by method.choose. The runs of all are made together."""
        found = {setting: {} for setting in settings}
        while keys := [
            (setting, k, seed)
            for setting, of_rates in found.items()
            for k in method.choose(of_rates)[0]
            for seed in seeds
        ]:
            losses = self.make([self.run(*key) for key in keys])
            for (setting, k, _), loss in zip(keys, losses, strict=True):
                found[setting].setdefault(k, []).append(loss)
                self.tried.setdefault(setting, []).append([k, loss])
        return {setting: method.choose(of_rates)[1] for setting, of_rates in found.items()}

    def losses(self, rates: dict[Setting, float], seeds: Iterable[int]) -> dict[Setting, list]:
        """The losses of each setting's seeds, at its rate."""
        keys = list(itertools.product(rates.items(), seeds))
        losses = self.make([self.run(*of, seed) for of, seed in keys])
        n = len(keys) // max(1, len(rates))
        return {setting: losses[i * n : (i + 1) * n] for i, setting in enumerate(rates)}


def shape_of(size: str, n_head: int = 1) -> list[str]:
    """The flags of a size such as "3 x 96": layers and width. Raises UserError for another text.

    n_head: of both sides. Where the width is no multiple of it, heads are a little narrower.
    """
    match = re.fullmatch(r"([1-9]\d*) x ([1-9]\d*)", size)
    if not match:
        raise UserError(f'--sizes={size}: a size is layers x width, such as "3 x 96"')
    width = int(match[2])
    narrower = [f"--head_dim={width // n_head // 2 * 2}"] if width % n_head else []
    return [f"--n_layer={match[1]}", f"--n_embd={width}", *narrower]
