"""Can attention in linear time look something up? Three synthetic tasks: accuracy against the size, drawn and printed.

    OMP_NUM_THREADS=1 python -m lab.experiments.recall  # 40 minutes on one core of a busy CPU
    python -m lab.experiments.recall --tasks=pairs --only="beta; beta, conv" --seeds=2

pairs: multi-query associative recall (MQAR, Zoology, arXiv 2312.04927). Pairs of a key and a value, then all keys again
in another order. At each of these keys the model has to give the key's value.

copying: a random string, a separator, and the string again, whose tokens the model has to give.

induction: random tokens, one of them after a special token. The special token also ends the text, and the model has to
give the token that came after it the first time.

A batch has one of the trained sizes, at random. A run ends early once its last batches are perfect. Each model tries
the learning RATES until it reaches ENOUGH; the rate with the best accuracy at the trained sizes counts. Results are
added to the JSON file --out. Runs that are there are skipped, so you can stop the script and start it again.
"""

import collections
import itertools
import math
import statistics
from typing import Literal

import torch
from torch.nn import functional as F

from configurator import names
from errors import UserError
from lab.experiments.results import check_writable, drawing, save, saved, show_table, start
from model import GPT, GPTConfig
from training.optimizers import OPTIMIZER, Settings

tasks = "pairs,copying,induction"  # the tasks, separated by commas
only = ""  # the models, separated by semicolons; empty: all
seeds = 1  # runs of each model at its best learning rate, with the seeds 1, 2, ...
scale: Literal["small", "long", "tiny"] = "small"  # long: four times as many steps; tiny: a test of the script
out = "lab/experiments/recall.json"  # the results
picture = "lab/pictures/recall.png"  # the picture

SHORT = {"heads": "SSSL", "window": 16}
MIXED = SHORT | {"short_attention": "softmax", "conv": 4}
MODELS = {  # flags; in the picture: colour, line (dashed: no convolution), marker
    "softmax": ({}, "#000000", "--", "o"),
    "softmax, conv": ({"conv": 4}, "#000000", "-", "o"),
    "LASER": ({"attention": "laser"}, "#999999", "--", "s"),
    "LS": (SHORT, "#CC79A7", "--", "D"),
    "beta": ({"attention": "beta"}, "#56B4E9", "--", "v"),
    "beta, decay": ({"attention": "beta", "decay": "alibi"}, "#009E73", "--", "^"),
    "beta, conv": ({"attention": "beta", "conv": 4}, "#56B4E9", "-", "v"),
    "beta_squared, conv": ({"attention": "beta_squared", "conv": 4}, "#D55E00", "-", "P"),
    "softmax short, beta long, conv": (MIXED | {"attention": "beta"}, "#0072B2", "-", "<"),
    "softmax short, beta_squared long, conv": (MIXED | {"attention": "beta_squared"}, "#E69F00", "-", "X"),
}
STICK, V2 = {"attention": "stick_breaking"}, {"after": "differential_v2", "n_head": 8, "head_dim": 16, "n_kv_head": 4}
IDEAS = {  # flags of models that are not in the picture; they need --import=lab.ideas, and run if --only has them
    "stick-breaking, conv": STICK | {"conv": 4},
    "stick-breaking, differential V2, conv": STICK | V2 | {"conv": 4},
    "differential V2, conv": V2 | {"conv": 4},
    "delta rule, conv": {"attention": "delta_rule", "conv": 4},
}
VOCAB = 256
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": VOCAB, "position": "rope"}
SCALES = {"small": {"steps": 1000, "tokens": 1024, "sequences": 256}}  # tokens of a batch, sequences of a test
SCALES |= {"long": SCALES["small"] | {"steps": 4000}, "tiny": {"steps": 3, "tokens": 128, "sequences": 4}}
RATES = (3e-3, 1e-2)
WARMUP, STREAK = 50, 50  # steps; batches: a run ends once their mean accuracy is 0.999
ENOUGH = 0.99  # mean accuracy at the trained sizes with which a model tries no other rate


def pairs(n: int, rows: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens (rows, 3 n), answers (rows, n)): n keys, each with its value after it, then the keys in another order."""
    keys = torch.rand(rows, VOCAB // 2, generator=g).argsort(-1)[:, :n]
    values = torch.randint(VOCAB // 2, VOCAB, (rows, n), generator=g)
    order = torch.rand(rows, n, generator=g).argsort(-1)
    return torch.cat((torch.stack((keys, values), -1).flatten(1), keys.gather(1, order)), 1), values.gather(1, order)


def copying(n: int, rows: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens (rows, 2 n), answers (rows, n)): n random tokens, the separator 0, and the first n - 1 of them again."""
    text = torch.randint(1, VOCAB, (rows, n), generator=g)
    return torch.cat((text, torch.zeros_like(text[:, :1]), text[:, :-1]), dim=1), text


def induction(n: int, rows: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens (rows, n + 1), answers (rows, 1)): n tokens, of them one is 0, the special token, and then 0 again."""
    at = torch.randint(n - 1, (rows, 1), generator=g)
    x = torch.randint(1, 17, (rows, n + 1), generator=g).scatter(1, at, 0)
    x[:, -1] = 0
    return x, x.gather(1, at + 1)


TASKS = {  # function, tokens of a sequence per unit of its size, what this size counts, trained sizes, larger ones
    "pairs": (pairs, 3, "key-value pairs", [4, 8, 16, 32], [64]),
    "copying": (copying, 2, "tokens to copy", [8, 16, 32], [64, 128]),
    "induction": (induction, 1, "tokens before the question", [8, 16, 32], [64, 128]),
}


def batch(task: str, n: int, rows: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets) of new sequences: the answers belong to the last tokens; those before have no target, -1."""
    x, answers = TASKS[task][0](n, rows, g)
    return x, F.pad(answers, (x.shape[1] - answers.shape[1], 0), value=-1)


def accuracy(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """The share of the targets other than -1 whose token has the largest logit."""
    return (logits.argmax(-1) == targets)[targets != -1].float().mean().item()


def fit(task: str, flags: dict, rate: float, seed: int) -> dict:
    """Trains a model: {"steps": made, "trained": mean accuracy at trained sizes, "accuracy": {size: accuracy}}."""
    s, (_, per_unit, _, sizes, larger) = SCALES[scale], TASKS[task]
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    gpt = GPT(GPTConfig(**SIZES | flags, block_size=per_unit * larger[-1] + 1)).train()
    (adamw,) = OPTIMIZER["adamw"](gpt, Settings(rate, (0.9, 0.99), 0.1))
    last, found = collections.deque(maxlen=STREAK), {str(n): 0.0 for n in sizes + larger}
    for step in range(s["steps"]):
        n = sizes[torch.randint(len(sizes), (), generator=g)]
        x, y = batch(task, n, s["tokens"] // (per_unit * n), g)
        logits, loss = gpt(x, y)
        if not loss.isfinite():  # a model that diverges has accuracy 0
            return {"steps": step + 1, "trained": 0.0, "accuracy": found}
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        for group in adamw.param_groups:  # warm-up, then a cosine down to a tenth
            group["lr"] = rate * min((step + 1) / WARMUP, 0.55 + 0.45 * math.cos(math.pi * step / s["steps"]))
        adamw.step()
        adamw.zero_grad()
        last.append(accuracy(logits, y))
        if sum(last) >= 0.999 * STREAK:
            break
    gpt.eval()
    for n in sizes + larger:  # the same sequences for every model
        x, y = batch(task, n, s["sequences"], torch.Generator().manual_seed(12345))
        with torch.no_grad():
            logits = torch.cat([gpt(part, part)[0] for part in x.split(32)])
        found[str(n)] = round(accuracy(logits, y), 4)
    mean = statistics.mean(found[str(n)] for n in sizes)
    return {"steps": step + 1, "trained": round(mean, 4), "accuracy": found}


def results(task: str = "", model: str = "") -> list[dict]:
    """The runs in --out, {"task": , "model": , "rate": , "seed": , and what `fit` returns}; of a task and a model."""
    found = saved(out, {"settings": SIZES | SCALES[scale], "runs": []})
    if found["settings"] != SIZES | SCALES[scale]:
        raise UserError(f"--out={out} has results of other settings: name another file")
    return [run for run in found["runs"] if task in ("", run["task"]) and model in ("", run["model"])]


def measure(task: str, model: str, rate: float, seed: int) -> None:
    """Makes a run and adds it to --out, unless it is there."""
    if all((run["rate"], run["seed"]) != (rate, seed) for run in results(task, model)):
        flags = MODELS[model][0] if model in MODELS else IDEAS[model]
        run = {"task": task, "model": model, "rate": rate, "seed": seed, **fit(task, flags, rate, seed)}
        save(out, {"settings": SIZES | SCALES[scale], "runs": [*results(), run]})
        print(f"{task}; {model}; {rate}; seed {seed}; {run['steps']} steps:", *run["accuracy"].values(), flush=True)


def best(task: str, model: str) -> list[dict]:
    """A model's runs at its best learning rate: the one whose first run, seed 1, is best at the trained sizes."""
    runs = results(task, model)
    rate = max(runs, key=lambda run: (run["seed"] == 1, run["trained"]), default={}).get("rate")
    return [run for run in runs if run["rate"] == rate]


def means(runs: list[dict]) -> list[float]:
    """The mean accuracy at each tested size."""
    return [statistics.mean(of_size) for of_size in zip(*(run["accuracy"].values() for run in runs), strict=True)]


def draw() -> None:
    """Writes the picture: a panel for each task, a line for each model."""
    with drawing(picture, 1, len(TASKS), 15, 5.2) as axes:
        for ax, (task, (_, _, label, sizes, larger)) in zip(axes, TASKS.items(), strict=True):
            for model, (_, colour, line, marker) in MODELS.items():
                style = {"color": colour, "marker": marker, "label": model if ax is axes[-1] else None}
                y = means(best(task, model))
                ax.plot((sizes + larger)[: len(y)], y, line, markersize=5, **style)
            ax.axvspan(sizes[0], sizes[-1], color="0.93", zorder=0)
            ax.set_xscale("log", base=2)
            ax.set(xlabel=label, title=f"{task} (grey: trained sizes)", ylim=(-0.03, 1.03))
            ax.set_xticks(sizes + larger, sizes + larger)
        axes[0].set_ylabel("accuracy")
        axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def show(task: str) -> None:
    """Prints a table of the mean accuracies, the best model first."""
    _, _, label, sizes, larger = TASKS[task]
    rows = []
    for runs in sorted(
        filter(None, (best(task, model) for model in [*MODELS, *IDEAS])), key=lambda runs: -sum(means(runs))
    ):
        steps = ", ".join(str(run["steps"]) for run in runs)
        rows.append([runs[0]["model"], *(f"{mean:.2f}" for mean in means(runs)), runs[0]["rate"], steps])
    show_table([label, *sizes, *larger, "learning rate", "steps"], rows)


def main() -> None:
    models, chosen = names(only, MODELS | IDEAS, ";") if only else [*MODELS], names(tasks, TASKS)
    check_writable(out, picture)
    torch.set_flush_denormal(True)
    for task in chosen:
        for rate, model in itertools.product(RATES, models):
            if not any(run["trained"] >= ENOUGH for run in results(task, model)):
                measure(task, model, rate, 1)
        for seed, model in itertools.product(range(2, seeds + 1), models):
            measure(task, model, best(task, model)[0]["rate"], seed)
    draw()
    for task in chosen:
        show(task)


if __name__ == "__main__":
    start(globals())
