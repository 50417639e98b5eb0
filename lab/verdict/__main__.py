"""Is an attention better than another one? One command says it.

    python -m lab.verdict --import=my --attention=entmax15
    python -m lab.verdict --flags="--attention=beta --conv=4" --against="--conv=4"
    python -m lab.verdict --import=my --attention=entmax15 --quick     # one size, fewer runs
    python -m lab.verdict --what=card --only=laser,sink                # verdicts in one table
    python -m lab.verdict --what=chance                                # how often it is wrong

It checks the new model (does it see later tokens, are gradients finite), tunes the learning rates
of both sides, trains seeds of both in equal steps and in equal time, on a second text and in a
second recipe, and measures speed, memory, skills and longer texts. Then it prints a report, and
writes it with a picture, numbers and a copy of the code into a folder verdict-NAME.

Finished runs are kept in --out_dir: the command can be stopped and started again, and the next idea
needs no new runs of what it is compared with. docs/verdict.md says how it decides.
"""

import itertools
import math
import os
import shlex
import sys
import time
from statistics import fmean
from typing import Literal

from configurator import at_least_one, run_script

import torch

from attention.cache import heads_of
from errors import UserError, optional
from lab.experiments.identity import of_code, of_text, unchanged
from lab.experiments.results import Interval, add, interval, is_current, short, stored
from lab.experiments.runs import (
    flags_of,
    folder_of,
    identity,
    import_all,
    imports_of,
    settings_of,
)
from lab.experiments.times import apart, model_of, vocab_size_of
from lab.verdict import chance, checks, costs, method, report
from lab.verdict.judge import SET, SHARED, Arm, Judge, Setting, shape_of
from model import GPT
from training.checkpoint import open_model
from training.distributed import count
from training.estimate import duration, num_params
from training.origin import imported, origin

# What is judged?
what: Literal["judge", "card", "bank", "chance"] = "judge"  # bank, chance: see chance.py
only = ""  # the rows of the card, with commas; then first looks as well
attention = ""  # the idea: a name in ATTENTION
flags = ""  # the idea: more flags of train.py, with spaces between them
against = ""  # what it is compared with: flags of train.py; empty: softmax
name = ""  # the name of the verdict; empty: made of the attention and the flags
# On what?
config_file = "config/modern_shakespeare_char_cpu.py"  # the recipe of both sides
second_recipe = "config/train_shakespeare_char_cpu.py"  # another one, for a column; empty: none
dataset: str | None = None  # the data of every run; None: the config file's
second_text = "python"  # another data set, for a column; empty: none
both = ""  # more flags of train.py for both sides, such as "--block_size=512 --batch_size=4"
# How exactly?
quick = False  # one size, fewer runs: a first look
sizes = "2 x 48, 3 x 96"  # layers x width of the models, with commas
steps = 600  # steps of a run
seeds = 8  # compared runs of each side and size; each size has seeds of its own
jobs = 0  # runs at the same time, one thread for each; 0: as many as this process has cores
out_dir = "out-verdict"  # the folder of the runs

MEASURED = {"flops": costs.of_flops, "layer": costs.of_layer, "decoding": costs.of_decoding}
QUICK = {"sizes": "2 x 48", "seeds": 4}
SAME_TIME = 0.03  # numbers of steps that differ by less count as equal
FAR = 0.35  # of ln(steps): from there on equal time says what longer training is worth
COLUMN = 3  # seeds of a second text, a second recipe, a skill and longer texts
OVERHEAD = 11.0  # seconds of a run besides its steps: its start, and evaluations


def words_of(text: str) -> list[str]:
    """The flags in a text. Raises UserError for other words."""
    try:
        words = shlex.split(text)
    except ValueError as error:  # a quotation without its end
        raise UserError(f"{text}: {error}") from None
    for word in words:
        if not word.startswith("--"):
            raise UserError(f"{word!r} is no flag: a config file of both sides is --config_file=")
    return words


def arms() -> tuple[Arm, Arm]:
    """(what it is compared with, the idea)."""
    words = words_of(flags)
    if attention:
        words.insert(0, f"--attention={attention}")
    if not words:
        raise UserError("what is judged? --attention= a name in ATTENTION, or --flags=")
    title = name or " ".join(words).replace("--attention=", "").replace("--", "")
    modules = [f"--import={module}" for module in imported()]
    # without modules where it is softmax alone, whose runs all verdicts share
    base = Arm(against, (*words_of(against), *(modules if against else ())))
    return base, Arm(title, (*words, *modules))


class Verdict:
    """One verdict, in the order in which it is made; numbers: what the report prints."""

    def __init__(self, base: Arm, idea: Arm):
        self.began = time.monotonic()
        common = words_of(both)
        for name in SET & flags_of([*common, *base.words, *idea.words]).keys():
            raise UserError(f"--{name}: a verdict sets it itself, for both sides")
        for name in SHARED & flags_of([*base.words, *idea.words]).keys():
            raise UserError(f"--{name} is for both sides: give it in --both=")
        if dataset:
            common.append(f"--dataset={dataset}")
        self.sizes = [size.strip() for size in sizes.split(",")]
        self.judge = self.judge_of(config_file, common)
        self.heads = self.judge.settings["n_head"]
        self.timed = self.judge.on_cpu and not quick  # times are measured on the CPU
        self.others = {}  # of the columns
        if second_text and second_text != self.judge.settings["dataset"] and not quick:
            words = [*common, f"--dataset={second_text}"]
            self.others["second text"] = second_text, self.judge_of(config_file, words)
        if second_recipe and second_recipe != config_file and not quick:
            self.others["second recipe"] = second_recipe, self.judge_of(second_recipe, common)
        settings = self.judge.settings
        own = flags_of([*common, *idea.words])
        self.modules = imports_of(own)
        import_all(self.modules)
        self.given = idea
        more = costs.fitting(own, settings | flags_of(shape_of(self.sizes[0], self.heads)))
        self.base = base._replace(name=base.name or settings.get("attention", "softmax"))
        self.idea = idea._replace(words=(*idea.words, *(f"--{k}={x}" for k, x in more.items())))
        self.arms = self.base, self.idea
        self.share = 1.0  # of misses; see method.word
        self.sittings = {size: [] for size in self.sizes}
        self.clocks = {}
        self.numbers = {"checks": [], "looks": {}, "sizes": {size: {} for size in self.sizes}}

    def judge_of(self, file: str, common: list[str]) -> Judge:
        """The maker of runs with a config file and common flags."""
        settings = costs.DEFAULTS | settings_of(file, flags_of(common))
        vocab_size = vocab_size_of(settings["dataset"])
        return Judge(file, tuple(common), settings, vocab_size, out_dir, jobs)

    def rows(self, size: str) -> list[dict]:
        """The flags of train.py with which the models of both arms are made."""
        words = [*shape_of(size, self.heads), *self.judge.common]
        return [flags_of([*words, *arm.words]) for arm in self.arms]

    def models(self, size: str) -> list[GPT]:
        """New models: of what the idea is compared with, and of the idea."""
        return [model_of(config_file, x, self.judge.vocab_size)[0] for x in self.rows(size)]

    def of(self, arms: tuple[Arm, ...]) -> str:
        """A checksum of what decides the runs of arms."""
        settings = [Setting(arm, size, steps) for arm in arms for size in self.sizes]
        return of_text(str([identity(self.judge.run(setting, 0, 0)[1]) for setting in settings]))

    def key(self, arms: tuple[Arm, ...]) -> tuple[str, str]:
        """(the row, the checksum) under which a measurement of arms is kept."""
        row = " against ".join(" ".join([arm.name, *arm.words]) for arm in arms[::-1])
        of = f"{self.of(arms)} {of_code([], [costs.__file__])} {chance.machine()}"
        where = ", ".join([*self.sizes, f"{steps} steps"])
        return f"{row}; {where}, {' '.join(self.judge.common)}", of_text(of)

    def stored(self, part: str, arms: tuple[Arm, ...]) -> dict | None:
        """A measurement that is kept, of the code as it is now."""
        row, of = self.key(arms)
        found = stored(self.judge.store, part, row).get(config_file)
        return found if is_current(found, of) else None

    def kept(self, part: str, arms: tuple[Arm, ...], measure, *args: object) -> dict:
        """What measure(*args) gives of arms, or {"why": what went wrong}."""
        found = self.stored(part, arms)
        if found is None:
            print(part, flush=True)
            found = short(costs.tried(measure, *args))
            unchanged()
            if "why" not in found:
                row, of = self.key(arms)
                add(self.judge.store, found | {"of": of}, part, row, config_file)
        return found

    def check(self, *found: checks.Check) -> None:
        """Add gates to the report. One that fails ends the verdict."""
        for check in found:
            self.numbers["checks"].append(str(check))
            if not check.ok:
                self.numbers["verdict"] = f"not judged: {check}"
                self.finish()
                sys.exit(1)

    def check_new(self) -> None:
        """Gates of the new models."""
        self.numbers["origin"] = origin(self.models(self.sizes[-1])[1].config)
        for size in self.sizes:
            gpts = self.models(size)
            n = [num_params(gpt, non_embedding=False) for gpt in gpts]
            self.numbers["sizes"][size]["parameters"] = n
            self.check(*map(checks.later_tokens, gpts[1:]))
        self.check(checks.gradients(gpts[1]))
        # fast: no head runs its plain definition; a layer of one's own is what it is
        self.numbers["fast"] = all(x.words != "its definition" for x in heads_of(gpts[1]))
        self.numbers["checks"].clear()  # said of the trained model

    def look(self) -> None:
        """Note the number of seeds before the first run. A second look with another is stricter."""
        key = of_text(f"{self.of(self.arms)} {', '.join(self.sizes)} {steps} {quick}")
        looks = stored(self.judge.store, "looks", key)
        earlier = itertools.takewhile(lambda look: look[0] != str(seeds), looks.items())
        self.numbers["looks"] = dict(earlier)
        if self.numbers["looks"]:
            self.share = method.AGAIN
        add(self.judge.store, looks.get(str(seeds), "not ended"), "looks", key, str(seeds))
        self.look_key = key

    def compared(self, size: str) -> range:
        """The seeds of the compared runs. Each size has its own: their errors are independent."""
        first = 1 + 1000 * self.sizes.index(size)
        return range(first, first + seeds)

    def sit(self) -> None:
        """Time a few steps of both sides at each size, unless all sittings were held."""
        for size, clock in self.clocks.items():
            if len(self.sittings[size]) < method.SITTINGS:
                self.sittings[size].append(clock.sitting())

    def start(self) -> None:
        """The first sitting, and what all will take on this machine."""
        kept = self.stored("sittings", self.arms)
        if kept:
            self.sittings = {size: kept[size] for size in self.sizes}
        else:
            for size in self.sizes:
                rows = self.rows(size)
                self.clocks[size] = costs.Clock(config_file, rows, self.judge.vocab_size)
            self.sit()
        print(
            f"{self.idea.name} against {self.base.name}: about "
            f"{duration(self.seconds() / self.judge.jobs)} on this machine, "
            f"{self.judge.jobs} runs at a time",
            flush=True,
        )

    def seconds(self) -> float:
        """About how long everything takes on one core."""
        total = 0.0
        known = stored(self.judge.store, "runs")
        for size, (first, *_) in self.sittings.items():
            _, _, base_ms, _, idea_ms = first
            for arm, ms in ((self.base, base_ms), (self.idea, idea_ms)):
                of_run = steps * ms / 1e3 + OVERHEAD
                left = len(method.FIRST) * (1 if quick else 2) + seeds
                name, words = self.judge.run(Setting(arm, size, steps), 0, 101)
                if is_current(known.get(name), identity(words)):
                    about = name.partition(", rate ")[0]
                    left -= sum(name.startswith(about) for name in known)
                total += of_run * max(0, left)
                if size == self.sizes[0] and left > 0 and not quick:
                    total += of_run * (3 * COLUMN)
                if arm is self.idea and not quick:
                    total += (steps * base_ms / 1e3 + OVERHEAD) * seeds
        return total + (20 if quick else 300)

    def train(self) -> None:
        """The runs in equal steps, with sittings between them, and their differences."""
        at_size = {x: [Setting(arm, x, steps) for arm in self.arms] for x in self.sizes}
        tried = method.TRIED[: 1 if quick else None]
        self.tuned = self.judge.tuned(sum(at_size.values(), []), tried)
        rates = {setting: tuned.k for setting, tuned in self.tuned.items()}
        self.losses = {setting: [] for setting in rates}
        for i in range(0, seeds, self.judge.jobs):
            for size, settings in at_size.items():  # runs of one size take as long
                of_size = {setting: rates[setting] for setting in settings}
                few = self.compared(size)[i : i + self.judge.jobs]
                for setting, losses in self.judge.losses(of_size, few).items():
                    self.losses[setting] += losses
                self.sit()
        for _ in range(method.SITTINGS):
            self.sit()
        self.kept("sittings", self.arms, lambda: self.sittings)
        for size, (base, idea) in at_size.items():
            row = self.numbers["sizes"][size]
            losses = [self.losses[base], self.losses[idea]]
            row["rates"] = [rates[base], rates[idea]]
            row["edge"] = self.tuned[base].at_edge or self.tuned[idea].at_edge
            row["losses"] = losses
            row["tried"] = [self.judge.tried[base], self.judge.tried[idea]]
            row["failed"] = list(map(method.failed, losses))
            row["steps"] = difference(*losses, size, quick)
        size = self.sizes[-1]
        self.folders = [[], []]  # of runs that ended with a model
        for folders, setting in zip(self.folders, at_size[size], strict=True):
            for seed in self.compared(size)[:COLUMN]:
                folder = folder_of(*self.judge.run(setting, rates[setting], seed), out_dir)
                if os.path.exists(f"{folder}/ckpt.pt"):
                    folders.append(folder)

    def equal_time(self) -> None:
        """The idea's runs in as many steps as fit into the other side's time."""
        for size in self.sizes:
            row = self.numbers["sizes"][size]
            base, idea = (Setting(arm, size, steps) for arm in self.arms)
            *logs, _, _, _ = zip(*self.sittings[size], strict=True)
            opponent = 0 if self.numbers["fast"] else 1
            means = list(map(fmean, logs))
            fit = max(1, round(steps / math.exp(means[opponent])))
            if abs(fit / steps - 1) < SAME_TIME:
                fit = steps
            row["ratio"] = list(map(math.exp, means))
            row["fit"] = fit
            row["sittings"] = self.sittings[size]
            if not self.timed:
                continue

            # how much a longer training is worth, in nats for each unit of ln(steps)
            k = self.tuned[idea].k
            everyone = self.compared(size)
            in_time = self.losses[idea]
            if fit != steps:
                (in_time,) = self.judge.losses({idea._replace(steps=fit): k}, everyone).values()
            other, shorter = fit, in_time
            if abs(math.log(fit / steps)) < FAR:
                other = steps // 2
                two = everyone[:2]
                (shorter,) = self.judge.losses({idea._replace(steps=other): k}, two).values()
            gains = [y - x for x, y in zip(self.losses[idea], shorter, strict=False)]
            worth = fmean(gains) / math.log(steps / other)

            timing = method.timing_error(worth, logs[opponent])
            row["time"] = difference(self.losses[base], in_time, size, quick, timing)
            row["worth"] = worth
            row["in_time"] = in_time
            row["shorter"] = [other, shorter]
            if not self.numbers["fast"]:
                row["other_time"] = moved(row["time"], worth, means[0] - means[1])

    def columns(self) -> None:
        """The differences on a second text and in a second recipe, at the first size."""
        found = self.numbers["columns"] = {}
        for title, (name, judge) in self.others.items():
            is_recipe = title == "second recipe"
            arms = (self.base, self.given) if is_recipe else self.arms
            settings = [Setting(arm, self.sizes[0], steps) for arm in arms]
            rates = {x: None if is_recipe else self.tuned[x].k for x in settings}
            found[title] = {"of": name} | costs.tried(self.column, judge, rates)
            self.judge.made += judge.made

    def column(self, judge: Judge, rates: dict[Setting, float | None]) -> dict:
        """The difference of two settings, with few seeds. rates: None where one is to be chosen."""
        left = [setting for setting, k in rates.items() if k is None]
        for setting, tuned in judge.tuned(left, method.TRIED[:1]).items():
            if tuned.at_edge:
                return {"why": "a best learning rate is at the edge of what was tried"}
            rates[setting] = tuned.k
        losses = list(judge.losses(rates, range(1, COLUMN + 1)).values())
        return {"difference": difference(*losses, self.sizes[0], True), "losses": losses}

    def check_trained(self) -> None:
        """Gates of the trained model."""
        for folder in self.folders[1][:1]:
            model = open_model("resume", folder, "latest")[0]
            self.check(checks.later_tokens(model), checks.gradients(model))

    def measure(self) -> None:
        """Speed, memory, skills and longer texts, each in a process of its own."""
        rows = self.rows(self.sizes[-1])
        args = config_file, rows, self.judge.vocab_size
        n = self.numbers
        for part, measure in MEASURED.items():
            n[part] = self.kept(part, self.arms, apart, costs.alone, measure, *args)
        if quick:
            return
        ratio = n["flops"].get("ratio", 1.0)
        if self.timed and abs(ratio - 1) > SAME_TIME:
            row = n["sizes"][self.sizes[-1]]
            row["equal_flops"] = moved(row["steps"], row["worth"], math.log(ratio))
        n["trained"] = costs.tried(apart, costs.alone, costs.of_trained, self.folders, self.modules)
        sides = []
        for arm, flags in zip(self.arms, rows, strict=True):
            settings = self.judge.settings | flags
            args = settings, flags_of(list(arm.words)), self.modules, self.judge.jobs
            sides.append(self.kept("skills", (arm,), costs.skills, *args))
        why = [side for side in sides if "why" in side]
        n["skills"] = why[0] if why else {x: [side[x] for side in sides] for x in costs.SKILLS}

    def decide(self) -> None:
        """The words, of the differences at all sizes."""
        rows = self.numbers["sizes"].values()
        said = []
        parts = {"steps": ("at equal steps", 0.0)}
        if self.timed:
            written = "" if self.numbers["fast"] else f" with {self.base.name} as written"
            parts["time"] = (f"in equal time{written}, on this machine", method.LEVEL)
        for part, (where, least) in parts.items():
            found = [row[part] for row in rows]
            if quick:
                word = ", ".join(method.quick_word(x, self.share) for x in found)
            else:
                word = method.word(found, self.share, least)
            if any(row["edge"] for row in rows):
                word = "no word: a best learning rate is at the edge of what was tried"
            said.append(f"{word} {where}")
        failed = [sum(x) for x in zip(*(row["failed"] for row in rows), strict=True)]
        for arm, n in zip(self.arms, failed, strict=True):
            if n:
                said.append(f"{count(n, 'seed')} of {arm.name} failed, and count")
        if any(abs(row["parameters"][1] / row["parameters"][0] - 1) > 0.01 for row in rows):
            said.append("with another number of parameters")
        self.numbers["verdict"] = "; ".join(said)
        add(self.judge.store, self.numbers["verdict"], "looks", self.look_key, str(seeds))

    def finish(self) -> None:
        """Print the report and write the folder of the verdict."""
        self.numbers |= {
            "idea": self.idea.name,
            "base": self.base.name,
            "flags": " ".join(self.idea.words),
            "command": shlex.join(["python", "-m", "lab.verdict", *sys.argv[1:]]),
            "made": [len(self.judge.made), time.monotonic() - self.began],
            "seeds": seeds,
            "quick": quick,
            "steps": steps,
            "level": method.stricter(method.DECIDES, self.share),
            "hint": method.stricter(method.HINT, self.share),
            "near": method.stricter(method.NEAR, self.share),
            "recipe": config_file,
            "both": both,
            "context": self.judge.settings["block_size"],
            "data": self.judge.settings["dataset"],
            "machine": chance.machine(),
        }
        report.write(self.numbers)


def difference(
    base: list[float], idea: list[float], size: str, one_seed: bool, *more: tuple[float, float]
) -> Interval:
    """The idea's losses minus the base's, of the same seeds. one_seed: it chose the rates.

    more: other errors; see `interval`.
    """
    changes = [y - x for x, y in zip(base, idea, strict=True)]
    return interval(changes, (chance.tau(size, one_seed) ** 2, math.inf), *more)


def moved(x: Interval, worth: float, by: float) -> Interval:
    """An interval for a training that is longer by a factor exp(-by), estimated."""
    return Interval(x.mean + worth * by, math.hypot(x.error, worth * by / 5), x.df)


def main() -> None:
    if what == "card":
        report.card(only)
        return
    if only:
        raise UserError(f"--only={only} is for --what=card")
    if what == "chance":
        chance.show()
        return
    torch.set_flush_denormal(True)  # as train.py
    torch.set_num_threads(1)
    os.makedirs(out_dir, exist_ok=True)
    if what == "bank":
        base = Arm("softmax", ())
        verdict = Verdict(base, base)
        chance.make_bank(verdict.judge, [Setting(base, size, steps) for size in verdict.sizes])
        return
    if not 2 <= seeds <= 100:
        raise UserError(f"--seeds={seeds}: an interval needs two seeds or more, 100 at most")
    at_least_one(steps=steps, jobs=jobs or 1)
    for package in ("scipy", "matplotlib"):
        optional(package, "a verdict")
    verdict = Verdict(*arms())
    verdict.check_new()
    verdict.look()
    verdict.start()
    verdict.train()
    verdict.equal_time()
    if not quick:
        verdict.columns()
    verdict.check_trained()
    verdict.measure()
    verdict.decide()
    verdict.finish()


if __name__ == "__main__":
    run_script(globals())
