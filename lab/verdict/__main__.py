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
import shlex
import sys
import time
from typing import Literal

import torch

from configurator import run_script
from errors import UserError
from lab.experiments.compare import TUNING
from lab.experiments.lecture import evaluated
from lab.experiments.results import difference, measured
from lab.experiments.runs import code_of, constants, final, flags_of, identity, of_text
from lab.experiments.runs import folder_of as run_folder
from lab.experiments.times import model_of, step_times
from lab.verdict import checks, costs, report
from lab.verdict.judge import Arm, Judge, Setting, in_words, shape_of
from model import GPT, GPTConfig
from text.dataset import Tokens, folder_of, prepare_shakespeare, read_meta
from training.checkpoint import open_model
from training.estimate import num_params
from training.origin import imported, origin

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
quick = False  # one size, fewer steps and seeds: a first look
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
        self.settings = {"block_size": GPTConfig.block_size} | constants("train.py")
        self.settings |= constants(config_file) | flags_of(common)
        data = self.settings["dataset"]
        prepare_shakespeare(data)
        self.vocab_size = read_meta(folder_of(data))["vocab_size"]
        self.sizes = [size.strip() for size in sizes.split(",")]
        for size in self.sizes:
            shape_of(size)
        middle = self.settings["learning_rate"]
        cores = 1 if "cuda" in self.settings["device"] else os.cpu_count() or 1
        self.judge = Judge(
            config_file=config_file,
            common=tuple(common),
            rates=[middle / 2, middle, 2 * middle],
            seeds=list(range(1, seeds + 1)),
            tuning=TUNING[:1] if quick else TUNING,
            out_dir=out_dir,
            jobs=jobs or cores,
        )
        self.of = of_text(str([code_of(flags) for flags in self.flags()]))
        self.numbers = {"checks": [], "sizes": {size: {} for size in self.sizes}}

    def flags(self, size: str = "") -> list[dict]:
        """The flags of train.py with which the models of both arms are made."""
        words = [*(shape_of(size) if size else ()), *self.judge.common]
        return [flags_of([*words, *arm.words]) for arm in (self.base, self.idea)]

    def models(self, size: str, **more: object) -> list[GPT]:
        """New models: of what the idea is compared with, and of the idea."""
        both = self.flags(size)
        return [model_of(config_file, flags | more, self.vocab_size)[0] for flags in both]

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
            n = [num_params(gpt, non_embedding=False) for gpt in gpts]
            self.numbers["sizes"][size]["parameters"] = n
            self.check(*map(checks.later_tokens, gpts[1:]))
        self.check(checks.gradients(gpts[1]), checks.cached(gpts[1]))
        self.numbers["checks"].clear()  # said of the trained model

    def time_steps(self) -> None:
        """Times of steps decide how many steps fit into equal time."""
        against = dict.fromkeys((self.base.name, self.idea.name), self.base.name)
        for size in self.sizes:
            rows = dict(zip(against, self.flags(size), strict=True))
            args = (config_file, rows, self.vocab_size, 20, against)
            times = self.kept("times", size, step_times, *args)
            ms = [times[arm][0] for arm in against]
            ratio = times[self.idea.name][1]
            fit = round(steps / ratio)
            if abs(fit / steps - 1) < SAME_TIME:
                fit = steps
            self.numbers["sizes"][size] |= {"ms": ms, "ratio": ratio, "fit": fit}

    def train(self) -> None:
        """The runs in equal steps and in equal time, and their differences."""
        in_steps = {}
        in_time = {}
        for size in self.sizes:
            in_steps[size] = [Setting(arm, size, steps) for arm in (self.base, self.idea)]
            in_time[size] = Setting(self.idea, size, self.numbers["sizes"][size]["fit"])
        again = [s for s in in_time.values() if abs(s.steps / steps - 1) > TUNED_AGAIN]
        settings = sum(in_steps.values(), [])
        self.judge.plan(settings + again, True)
        self.judge.plan([s for s in in_time.values() if s not in settings + again], False)
        print(
            f"{self.idea.name} against {self.base.name}: about {self.judge.planned} runs, "
            f"{self.judge.jobs} at a time",
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
            losses = {s: [final(x) for x in results[s]] for s in (base, idea, in_time[size])}
            for part, setting in (("steps", idea), ("time", in_time[size])):
                row[part] = difference(losses[setting], losses[base])
                row[f"{part}_edge"] = rates[base].at_edge or rates[setting].at_edge
            row["losses"] = list(losses.values())
            row["curves"] = [[x["curves"]["val_loss"] for x in results[s]] for s in (base, idea)]
        self.best = {s: rates[s].rate for s in in_steps[self.sizes[-1]]}
        self.folders = [run_folder(*self.judge.run(*x, 1), out_dir) for x in self.best.items()]

    def check_trained(self) -> None:
        """Checks of the trained models, and their rounding errors in bfloat16."""
        base, idea = (open_model("resume", folder, "latest")[0] for folder in self.folders)
        self.check(checks.later_tokens(idea), checks.cached(idea), checks.gradients(idea))
        T = idea.config.block_size
        text = Tokens(folder_of(self.settings["dataset"]), "val", T)
        idx = next(text.eval_batches(1, 16))[0]
        ratio = checks.bfloat16_error(idea, idx) / checks.bfloat16_error(base, idx)
        self.numbers["bfloat16"] = ratio

    def measure(self) -> None:
        """Speed, recall and longer texts."""
        size = self.sizes[-1]
        long = self.models(size, block_size=LONG)
        self.numbers["layer"] = self.kept("layer", size, costs.of_layer, *long)
        gpts = self.models(size)
        self.numbers["decoding"] = self.kept("decoding", size, costs.of_decoding, *gpts)
        print("recall", flush=True)
        self.numbers["recall"] = self.kept("recall", "pairs", self.recall)
        self.numbers["longer"] = self.longer()

    def recall(self) -> dict:
        """{"base": , "idea": accuracy in associative recall}, with RoPE if possible."""
        extra = {"position": "rope", "conv": 4}
        fields = [{"position": "none"} | costs.added(flags, extra) for flags in self.flags()]
        modules = [flags["import"] for flags in self.flags() if "import" in flags]
        base, idea = costs.recall_of(fields, ",".join(modules).split(","), self.judge.jobs)
        return {"base": base, "idea": idea}

    def longer(self) -> dict:
        """{"base": , "idea": }: how much higher the loss is on texts LONGER times the context."""
        runs = []
        for (setting, rate), flags in zip(self.best.items(), self.flags(), strict=True):
            more = []
            if "position" not in flags:
                position = costs.added(flags, {"position": "rope"}).get("position", "none")
                more = [f"--position={position}"]
            runs.append(self.judge.run(setting, rate, 1, *more))
        self.judge.make(runs)
        T = self.settings["block_size"]
        changes = []
        for name, args in runs:
            words = [word for word in args if word.startswith("--import")]
            losses = []
            for n in (T, LONGER * T):
                call = evaluated, run_folder(name, args, out_dir), f"--block_size={n}", *words
                kept = measured(self.judge.store, "lengths", name, n, *call, of=identity(args))
                losses.append(kept["loss"])
            changes.append(losses[1] - losses[0])
        return dict(zip(("base", "idea"), changes, strict=True))

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
            "context": self.settings["block_size"],
            "data": self.settings["dataset"],
            "origin": origin(self.models(self.sizes[-1])[1].config),
        }
        report.write(self.numbers, getattr(self, "folders", ()))


def main() -> None:
    if what == "card":
        report.card()
        return
    if seeds < 2:
        raise UserError(f"--seeds={seeds}: an interval needs two seeds or more")
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
    run_script(globals())
