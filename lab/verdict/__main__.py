"""Is an attention better than another one? One command says it.

    python -m lab.verdict --import=my --attention=entmax15
    python -m lab.verdict --flags="--attention=beta --conv=4" --against="--conv=4"
    python -m lab.verdict --import=my --attention=entmax15 --quick     # one size, fewer runs
    python -m lab.verdict --what=card                                  # all verdicts in one table

It checks the new model (does it see later tokens, does decoding with a cache give the same, are
gradients finite), tunes the learning rate of both sides, trains seeds of both in equal steps and in
equal time, and measures speed, recall and longer texts. A check that fails ends it. Then it prints
a report, and writes it with pictures, numbers and a copy of the code into a folder verdict-NAME.

Finished runs are kept in --out_dir: the command can be stopped and started again, and the next idea
needs no new runs of what it is compared with. docs/verdict.md says how it decides.
"""

import os
import re
import shlex
import sys
import time
from typing import Literal

import torch

from configurator import at_least_one, configure, user_errors
from errors import UserError
from lab.experiments.lecture import evaluated
from lab.experiments.results import measured
from lab.experiments.runs import code_of, constants, final, flags_of, identity, of_text
from lab.experiments.runs import folder_of as run_folder
from lab.experiments.times import model_of, step_times
from lab.verdict import checks, costs, report
from lab.verdict.judge import Arm, Judge, Setting, difference, in_words
from model import GPTConfig
from text.dataset import Tokens, folder_of, prepare_shakespeare, read_meta
from training.checkpoint import open_model
from training.estimate import duration
from training.origin import imported, origin
from training.run import DEFAULTS, model_args

# What is judged?
what: Literal["judge", "card"] = "judge"  # card: print all verdicts that were made, in one table
attention = ""  # the idea: a name in ATTENTION
flags = ""  # the idea: more flags of train.py, with spaces between them
against = ""  # what it is compared with: flags of train.py; empty: softmax
name = ""  # the name of the verdict; empty: made of the attention and the flags
# On what?
config_file = "config/train_shakespeare_char_cpu.py"  # the config file of every run
dataset: str | None = None  # the data of every run; None: the config file's
both = ""  # more flags of train.py for both sides, such as "--block_size=256 --device=cuda"
# How exactly?
quick = False  # one size, fewer steps and seeds: four minutes on two cores
sizes = "2 x 48, 3 x 96"  # layers x width of the models, with commas
steps = 1000  # steps of a run
seeds = 5  # runs of each side and size, with the seeds 1, 2, ...
jobs = 0  # runs at the same time, one thread for each; 0: as many as the CPU has cores
out_dir = "out-verdict"  # the folder of the runs

QUICK = {"sizes": "2 x 48", "steps": 500, "seeds": 3}
SAME_TIME = 0.03  # numbers of steps that differ by less count as equal
TUNED_AGAIN = 0.2  # numbers of steps that differ by more have learning rates of their own
LONG = 2048  # tokens of the timed layer
LONGER = 4  # times the context


def arms() -> tuple[Arm, Arm]:
    """(what it is compared with, the idea)."""
    words = shlex.split(flags)
    if attention:
        words.insert(0, f"--attention={attention}")
    if not words:
        raise UserError("what is judged? --attention= a name in ATTENTION, or --flags=")
    title = name or " ".join(words).replace("--attention=", "").replace("--", "")
    modules = [f"--import={module}" for module in imported()]
    base = Arm(against or "softmax", tuple(shlex.split(against)))
    return base, Arm(title, (*words, *modules))


class Verdict:
    """One verdict, in the order in which it is made; numbers: what the report prints."""

    def __init__(self, base: Arm, idea: Arm):
        self.base = base
        self.idea = idea
        self.began = time.monotonic()
        common = shlex.split(both)
        if dataset:
            common.append(f"--dataset={dataset}")
        self.settings = constants("train.py") | constants(config_file) | flags_of(common)
        data = self.settings["dataset"]
        prepare_shakespeare(data)
        self.vocab_size = read_meta(folder_of(data))["vocab_size"]
        self.sizes = [size.strip() for size in sizes.split(",")]
        for size in self.sizes:
            if not re.fullmatch(r"[1-9]\d* x [1-9]\d*", size):
                raise UserError(f'--sizes={size!r}: a size is layers x width, such as "3 x 96"')
        middle = self.settings["learning_rate"]
        cores = 1 if "cuda" in self.settings["device"] else os.cpu_count() or 1
        self.judge = Judge(
            config_file=config_file,
            common=tuple(common),
            rates=[middle / 2, middle, 2 * middle],
            seeds=list(range(1, seeds + 1)),
            tuning=(101,) if quick else (101, 102),
            out_dir=out_dir,
            jobs=jobs or cores,
        )
        self.of = of_text(f"{code_of(self.flags(base))} {code_of(self.flags(idea))}")
        self.numbers = {"checks": [], "sizes": {size: {} for size in self.sizes}}

    def flags(self, arm: Arm, size: str = "", **more: object) -> dict:
        """The flags of train.py with which an arm's model is made."""
        shape = {}
        if size:
            n_layer, n_embd = map(int, size.split(" x "))
            shape = {"n_layer": n_layer, "n_embd": n_embd}
        return shape | flags_of([*self.judge.common, *arm.words]) | more

    def models(self, size: str, **more: object) -> dict:
        """{arm's name: a new model}, what it is compared with first."""
        return {
            arm.name: model_of(config_file, self.flags(arm, size, **more), self.vocab_size)[0]
            for arm in (self.base, self.idea)
        }

    def kept(self, part: str, size: str, measure, *args: object) -> dict:
        """What measure(*args) gives, from the file of results if it is there."""
        row = " ".join([*self.idea.words, "against", self.base.name, *self.judge.common])
        return measured(self.judge.store, part, row, size, measure, *args, of=self.of)

    def check(self, *found: checks.Check) -> None:
        """Add checks to the report. One that fails ends the verdict."""
        for check in found:
            self.numbers["checks"].append(str(check))
            if not check.ok:
                self.numbers["verdict"] = f"not judged: {check}"
                self.finish()
                sys.exit(1)

    def check_new(self) -> None:
        """Checks of the new models."""
        for size in self.sizes:
            gpts = self.models(size)
            n = [sum(p.numel() for p in gpt.parameters()) for gpt in gpts.values()]
            self.numbers["sizes"][size]["parameters"] = n
            last = gpts[self.idea.name]
            self.check(checks.later_tokens(last))
            self.numbers["checks"].pop()  # said once, of the trained model
        self.check(checks.gradients(last), checks.cached(last))
        self.numbers["checks"].pop()

    def time_steps(self) -> None:
        """Times of steps decide how many steps fit into equal time."""
        against = dict.fromkeys((self.base.name, self.idea.name), self.base.name)
        for size in self.sizes:
            rows = {arm.name: self.flags(arm, size) for arm in (self.base, self.idea)}
            args = (config_file, rows, self.vocab_size, 20, against)
            times = self.kept("times", size, step_times, *args)
            for arm in (self.base, self.idea):
                self.judge.ms[arm.name, size] = times[arm.name][0]
            ratio = times[self.idea.name][1]
            fit = round(steps / ratio)
            if abs(fit / steps - 1) < SAME_TIME:
                fit = steps
            self.numbers["sizes"][size] |= {"ratio": ratio, "fit": fit}

    def train(self) -> None:
        """The runs in equal steps and in equal time, and their differences."""
        in_steps = {}
        in_time = {}
        for size in self.sizes:
            in_steps[size] = [Setting(arm, size, steps) for arm in (self.base, self.idea)]
            in_time[size] = Setting(self.idea, size, self.numbers["sizes"][size]["fit"])
        again = [s for s in in_time.values() if abs(s.steps / steps - 1) > TUNED_AGAIN]
        settings = sum(in_steps.values(), [])
        seconds = self.judge.plan(settings, True) + self.judge.plan(again, True)
        seconds += self.judge.plan(
            [s for s in in_time.values() if s not in settings + again], False
        )
        print(
            f"{self.idea.name} against {self.base.name}: about {self.judge.planned} runs, "
            f"{self.judge.jobs} at a time, {duration(seconds)}",
            flush=True,
        )
        rates = self.judge.tuned(settings)
        for size, setting in in_time.items():
            rates[setting] = rates[in_steps[size][1]]
        rates |= self.judge.tuned(again)
        results = self.judge.losses(rates)
        for size in self.sizes:
            base, idea = in_steps[size]
            row = self.numbers["sizes"][size]
            row["rates"] = [rates[base].rate, rates[idea].rate]
            row["time_rate"] = rates[in_time[size]].rate
            losses = {s: [final(x) for x in results[s]] for s in (base, idea, in_time[size])}
            for part, setting in (("steps", idea), ("time", in_time[size])):
                row[part] = difference(losses[setting], losses[base])
                row[f"{part}_edge"] = rates[base].at_edge or rates[setting].at_edge
            row["ms"] = [self.judge.ms[arm.name, size] for arm in (self.base, self.idea)]
            row["losses"] = [losses[base], losses[idea], losses[in_time[size]]]
            row["curves"] = [[x["curves"]["val_loss"] for x in results[s]] for s in (base, idea)]
        self.folders = [self.judge.trained(s, rates[s].rate) for s in in_steps[self.sizes[-1]]]
        self.rates = [rates[s].rate for s in in_steps[self.sizes[-1]]]

    def check_trained(self) -> None:
        """Checks of the trained models, and their rounding errors in bfloat16."""
        base, idea = (open_model("resume", folder, "latest")[0] for folder in self.folders)
        self.check(checks.later_tokens(idea), checks.cached(idea))
        T = idea.config.block_size
        text = Tokens(folder_of(self.settings["dataset"]), "val", T)
        idx = next(text.eval_batches(1, 16))[0]
        ratio = checks.bfloat16_error(idea, idx) / checks.bfloat16_error(base, idx)
        self.numbers["bfloat16"] = ratio

    def measure(self) -> None:
        """Speed, recall and longer texts."""
        size = self.sizes[-1]
        self.numbers["layer"] = self.kept(
            "layer", size, lambda: costs.of_layer(self.models(size, block_size=LONG), 3)
        )
        self.numbers["decoding"] = self.kept(
            "decoding", size, lambda: costs.of_decoding(self.models(size), 5)
        )
        print("recall", flush=True)
        self.numbers["recall"] = self.kept("recall", "pairs", self.recall)
        self.numbers["longer"] = self.longer(size)

    def recall(self) -> dict:
        """{"base": , "idea": accuracy in associative recall}, with a convolution and RoPE."""
        extra = {"position": "rope", "conv": 4}
        fields = [costs.added(self.flags(arm), extra) for arm in (self.base, self.idea)]
        base, idea = costs.recall_of(fields, imported(), self.judge.jobs)
        return {"base": base, "idea": idea}

    def longer(self, size: str) -> dict:
        """{"base": , "idea": }: how much higher the loss is on texts LONGER times the context."""
        runs = {}
        for arm, rate in zip((self.base, self.idea), self.rates, strict=True):
            more = []
            if "position" not in self.flags(arm):
                fields = costs.added(self.flags(arm), {"position": "rope"})
                more = [f"--position={fields.get('position', 'none')}"]
            setting = Setting(arm, size, steps)
            runs[arm] = self.judge.run(setting, rate, 1, *more)
        self.judge.make(list(runs.values()))
        T = self.settings.get("block_size", 1024)
        changes = {}
        for key, (arm, run) in zip(("base", "idea"), runs.items(), strict=True):
            folder = run_folder(*run, out_dir)
            modules = [word for word in arm.words if word.startswith("--import")]
            loss = {}
            for n in (T, LONGER * T):
                args = evaluated, folder, f"--block_size={n}", *modules
                kept = measured(self.judge.store, "lengths", run[0], n, *args, of=identity(run[1]))
                loss[n] = kept["loss"]
            changes[key] = loss[LONGER * T] - loss[T]
        return changes

    def decide(self) -> None:
        """The verdict, of the differences at each size."""
        parts = []
        for part, where in (("steps", "at equal steps"), ("time", "in equal time")):
            words = {}
            for size, row in self.numbers["sizes"].items():
                words[size] = "" if row[f"{part}_edge"] else row[part].word
            parts.append(in_words(words, where))
        sizes = self.numbers["sizes"].values()
        if any(row["steps_edge"] or row["time_edge"] for row in sizes):
            parts.append("a best learning rate is at the edge of its grid, which decides nothing")
        if any(abs(row["parameters"][1] / row["parameters"][0] - 1) > 0.01 for row in sizes):
            parts.append("with another number of parameters")
        self.numbers["verdict"] = "; ".join(parts)

    def finish(self) -> None:
        """Print the report and write the folder of the verdict."""
        self.numbers |= {
            "idea": self.idea.name,
            "base": self.base.name,
            "flags": " ".join(self.idea.words),
            "command": shlex.join(["python", "-m", "lab.verdict", *sys.argv[1:]]),
            "made": [len(self.judge.made), time.monotonic() - self.began],
            "seeds": seeds,
            "steps": steps,
            "origin": origin(GPTConfig(**model_args(DEFAULTS | self.flags(self.idea)))),
        }
        report.write(self.numbers, getattr(self, "folders", ()))


def main() -> None:
    if what == "card":
        report.card()
        return
    at_least_one(steps=steps, seeds=seeds - 1)
    torch.set_flush_denormal(True)  # as train.py
    os.makedirs(out_dir, exist_ok=True)
    verdict = Verdict(*arms())
    verdict.check_new()
    verdict.time_steps()
    verdict.train()
    verdict.check_trained()
    verdict.measure()
    verdict.decide()
    verdict.finish()


if __name__ == "__main__":
    config, given = configure(globals())
    if config["quick"]:
        config |= QUICK | {name: config[name] for name in given}
    globals().update(config)
    with user_errors():
        main()
