"""Can attention in linear time look something up? The accuracy in synthetic tasks.

    OMP_NUM_THREADS=1 python -m lab.experiments.recall  # 40 minutes on one core of a busy CPU
    python -m lab.experiments.recall --tasks=pairs --only="beta; beta, conv" --seeds=2

pairs: multi-query associative recall (MQAR, Zoology, arXiv 2312.04927). Pairs of a key and a value,
then all keys again in another order. At each of these keys the model has to give the key's value.

copying: a random string, a separator, and the string again. The model has to give its tokens.

products: permutations of three things; at each the model has to give the product of all so far.
State tracking, which two layers of softmax cannot do for long texts (arXiv 2404.08819).

induction: random tokens, one of them after a special token. The special token also ends the text,
and the model has to give the token that came after it the first time.

A batch has one of the trained sizes, at random. A run ends early once its last batches are perfect.
Each model tries the learning RATES until it reaches ENOUGH; the rate with the best accuracy at the
trained sizes counts. The accuracy against the size is drawn and printed. Results are added to the
JSON file --out, {"task, scale": {model: {run: numbers}}}. Runs of the same code that are there are
skipped, so you can stop the script and start it again.
"""

import collections
import itertools
import math
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Literal, NamedTuple

from configurator import names, run_script

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.experiments.results import drawing, is_current, measured, show_table, stored
from lab.experiments.runs import import_all, imports_of, of_rows
from lab.experiments.tables import rows_of
from model import GPT, GPTConfig
from training.optimizers import OPTIMIZER

tasks = "pairs,copying,induction"  # the tasks, separated by commas; products is one more
only = ""  # the models, separated by semicolons; empty: all
seeds = 1  # runs of each model at its best learning rate, with the seeds 1, 2, ...
scale: Literal["small", "long", "tiny"] = "small"  # long: more steps; tiny: a test of the script
out = "lab/experiments/recall.json"  # the results
picture = "lab/experiments/pictures/recall.png"  # the picture

# flags of the models in the picture
MODELS = rows_of("""
softmax:
softmax, conv: --conv=4
LASER: --attention=laser
LS: --heads=SSSL --window=16
beta: --attention=beta
beta, decay: --attention=beta --decay=alibi
beta, conv: --attention=beta --conv=4
beta_squared, conv: --attention=beta_squared --conv=4
softmax short, beta long, conv: --heads=SSSL --window=16 --short_attention=softmax --conv=4 \
--attention=beta
softmax short, beta_squared long, conv: --heads=SSSL --window=16 --short_attention=softmax \
--conv=4 --attention=beta_squared
""")
MARKERS = "oosDv^vP<X"
# flags of more models, which run if --only has them
MORE = rows_of("""
stick-breaking, conv: --import=lab.ideas --attention=stick_breaking --conv=4
stick-breaking, differential V2, conv: --import=lab.ideas.after \
--attention=stick_breaking_differential_v2 --n_head=8 --head_dim=16 --n_kv_head=4 --conv=4
differential V2, conv: --import=lab.ideas.after \
--attention=differential_v2 --n_head=8 --head_dim=16 --n_kv_head=4 --conv=4
delta rule, conv: --import=lab.ideas --attention=delta_rule --conv=4
LUCID, conv: --import=lab.ideas.recent --attention=lucid --conv=4
beta, hybrid, conv: --attention=beta --n_layer=4 --heads=L/L/L/S --short_attention=softmax \
--window=255 --conv=4
beta_squared, hybrid, conv: --attention=beta_squared --n_layer=4 --heads=L/L/L/S \
--short_attention=softmax --window=255 --conv=4
""")
ALL = MODELS | MORE
VOCAB = 256
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": VOCAB, "position": "rope"}
SCALES = {  # steps, tokens of a batch, sequences of a test
    "small": {"steps": 1000, "tokens": 1024, "sequences": 256},
    "long": {"steps": 4000, "tokens": 1024, "sequences": 256},
    "tiny": {"steps": 3, "tokens": 128, "sequences": 4},
}
RATES = (3e-3, 1e-2)
ADAMW = {
    "optimizer": "adamw",
    "learning_rate": 1.0,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "adam_eps": None,
}
WARMUP = 50  # steps
STREAK = 50  # batches: a run ends once their mean accuracy is 0.999
ENOUGH = 0.99  # mean accuracy at the trained sizes with which a model tries no other rate


def pairs(n: int, rows: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens (rows, 3 n), answers (rows, n)) of n keys.

    Each key has its value after it; then the keys come in another order.
    """
    keys = torch.rand(rows, VOCAB // 2, generator=g).argsort(-1)[:, :n]
    values = torch.randint(VOCAB // 2, VOCAB, (rows, n), generator=g)
    order = torch.rand(rows, n, generator=g).argsort(-1)
    text = torch.stack((keys, values), dim=-1).flatten(1)
    return torch.cat((text, keys.gather(1, order)), dim=1), values.gather(1, order)


def copying(n: int, rows: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens (rows, 2 n), answers (rows, n)): n random tokens, the separator 0, n - 1 again."""
    text = torch.randint(1, VOCAB, (rows, n), generator=g)
    return torch.cat((text, torch.zeros_like(text[:, :1]), text[:, :-1]), dim=1), text


def induction(n: int, rows: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens (rows, n + 1), answers (rows, 1)): n tokens, one of them the special 0; 0 again."""
    special = torch.randint(n - 1, (rows, 1), generator=g)
    x = torch.randint(1, 17, (rows, n + 1), generator=g).scatter(1, special, 0)
    x[:, -1] = 0
    return x, x.gather(1, special + 1)


def products(n: int, rows: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens (rows, n), answers (rows, n)): permutations of three things; the product so far."""
    group = torch.tensor([*itertools.permutations(range(3))])
    x = torch.randint(len(group), (rows, n), generator=g)
    state = torch.arange(3).expand(rows, 3)
    answers = []
    for step in x.T:
        state = state.gather(1, group[step])
        answers.append((state[:, None] == group).all(-1).int().argmax(-1))
    return x, torch.stack(answers, dim=1)


class Task(NamedTuple):
    draw: Callable  # (size, rows, generator) -> (tokens, answers)
    per_unit: int  # tokens of a sequence per unit of its size
    label: str  # what the size counts
    trained: list  # sizes in training
    larger: list  # sizes that are only tested

    @property
    def sizes(self) -> list:
        return self.trained + self.larger


TASKS = {
    "pairs": Task(pairs, 3, "key-value pairs", [4, 8, 16, 32], [64]),
    "copying": Task(copying, 2, "tokens to copy", [8, 16, 32], [64, 128]),
    "induction": Task(induction, 1, "tokens before the question", [8, 16, 32], [64, 128]),
    "products": Task(products, 1, "permutations to multiply", [4, 8, 16], [32]),
}


def batch(task: str, n: int, rows: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of new sequences: the last tokens have the answers, the others -1."""
    x, answers = TASKS[task].draw(n, rows, g)
    return x, F.pad(answers, (x.shape[1] - answers.shape[1], 0), value=-1)


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """The share of the targets other than -1 whose token has the largest logit."""
    return (logits.argmax(-1) == targets)[targets != -1].float().mean().item()


def fit(task: str, flags: dict, rate: float, seed: int, recipe: dict | None = None) -> dict:
    """Train and test a model.

    recipe: settings of train.py for its optimizers, whose rates are multiplied by `rate`; None:
    AdamW. Returns {"rate": , "seed": , "steps": made, "trained": mean accuracy at trained sizes,
    "accuracy": {size: ...}}; a model that diverges has the accuracy 0.
    """
    t = TASKS[task]
    torch.manual_seed(seed)
    gpt = GPT(GPTConfig(**SIZES | flags, block_size=t.per_unit * t.larger[-1] + 1))
    settings = SimpleNamespace(**ADAMW | (recipe or {}))
    optimizers = OPTIMIZER[settings.optimizer](gpt, settings)
    steps, diverged = train(gpt, task, rate, torch.Generator().manual_seed(seed), optimizers)
    accuracy = {str(n): 0.0 if diverged else test(gpt, task, n) for n in t.sizes}
    mean = statistics.mean(accuracy[str(n)] for n in t.trained)
    made = {"rate": rate, "seed": seed, "steps": steps}
    return made | {"trained": round(mean, 4), "accuracy": accuracy}


def train(
    gpt: GPT, task: str, rate: float, g: torch.Generator, optimizers: list
) -> tuple[int, bool]:
    """Train until the last batches are perfect; return (the steps made, whether it diverged)."""
    t = TASKS[task]
    s = SCALES[scale]
    groups = [group for o in optimizers for group in o.param_groups]
    rates = [rate * group["lr"] for group in groups]
    gpt.train()
    last = collections.deque(maxlen=STREAK)
    for step in range(s["steps"]):
        n = t.trained[torch.randint(len(t.trained), (), generator=g)]
        x, y = batch(task, n, s["tokens"] // (t.per_unit * n), g)
        logits, loss = gpt(x, y)
        if not loss.isfinite():
            return step + 1, True
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / s["steps"])  # down to a tenth
        for group, highest in zip(groups, rates, strict=True):
            group["lr"] = highest * min((step + 1) / WARMUP, cosine)
        for optimizer in optimizers:
            optimizer.step()
        gpt.zero_grad()
        last.append(accuracy(logits, y))
        if sum(last) >= 0.999 * STREAK:
            break
    return step + 1, False


@torch.no_grad()
def test(gpt: GPT, task: str, n: int) -> float:
    """The accuracy at a size, on the same sequences for every model."""
    g = torch.Generator().manual_seed(12345)
    x, y = batch(task, n, SCALES[scale]["sequences"], g)
    gpt.eval()
    logits = torch.cat([gpt(part, part)[0] for part in x.split(32)])
    return round(accuracy(logits, y), 4)


def made_by(model: str) -> str:
    """A checksum of what makes a model's runs."""
    return of_rows(__file__, ALL[model])


def results(task: str, model: str) -> list[dict]:
    """The runs in --out of a task and a model, as its code is now: `fit`'s numbers of each."""
    of = made_by(model)
    runs = stored(out, f"{task}, {scale}", model).values()
    return [run for run in runs if is_current(run, of)]


def measure(task: str, model: str, rate: float, seed: int) -> None:
    """Make a run and add it to --out, unless it is there. It replaces a run of other code."""
    import_all(imports_of(ALL[model]))
    fields = {name: value for name, value in ALL[model].items() if name != "import"}
    run = f"rate {rate}, seed {seed}"
    args = task, fields, rate, seed
    measured(out, f"{task}, {scale}", model, run, fit, *args, of=made_by(model))


def best(task: str, model: str) -> list[dict]:
    """A model's runs at the learning rate whose first run (seed 1) is best at the trained sizes."""
    runs = results(task, model)
    first = [run for run in runs if run["seed"] == 1]
    rate = max(first, key=lambda run: run["trained"])["rate"] if first else None
    return [run for run in runs if run["rate"] == rate]


def means(runs: list[dict]) -> list[float]:
    """The mean accuracy of runs at each tested size."""
    by_size = zip(*(run["accuracy"].values() for run in runs), strict=True)
    return list(map(statistics.mean, by_size))


def draw(tasks: list[str]) -> None:
    """Write the picture: a panel for each task, a line for each model."""
    with drawing(picture, 1, len(tasks), 15, 5.2) as axes:
        for ax, task in zip(axes, tasks, strict=True):
            t = TASKS[task]
            sizes = list(map(str, t.sizes))
            for i, (model, flags) in enumerate(MODELS.items()):
                line = MARKERS[i] + ("-" if "conv" in flags else "--")
                label = model if ax is axes[-1] else None
                y = means(best(task, model))
                ax.plot(sizes[: len(y)], y, line, color=f"C{i}", markersize=5, label=label)
            ax.axvspan(0, len(t.trained) - 1, color="0.93", zorder=0)
            ax.set(xlabel=t.label, title=f"{task} (grey: trained sizes)", ylim=(-0.03, 1.03))
        axes[0].set_ylabel("accuracy")
        axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def show(task: str) -> None:
    """Print a table of the mean accuracies, the best model first."""
    t = TASKS[task]
    chosen = {model: runs for model in ALL if (runs := best(task, model))}
    rows = []
    for model, runs in sorted(chosen.items(), key=lambda of: -sum(means(of[1]))):
        steps = ", ".join(str(run["steps"]) for run in runs)
        accuracies = [f"{mean:.2f}" for mean in means(runs)]
        rows.append([model, *accuracies, runs[0]["rate"], steps])
    sizes = " | ".join(map(str, t.sizes))
    show_table(f"{t.label} | {sizes} | learning rate | steps", rows)


def main() -> None:
    models = names(only, ALL, ";") if only else MODELS
    chosen = names(tasks, TASKS)
    torch.set_flush_denormal(True)
    for task in chosen:
        for rate in RATES:
            for model in models:
                if all(run["trained"] < ENOUGH for run in results(task, model)):
                    measure(task, model, rate, 1)
        for seed in range(2, seeds + 1):
            for model in models:
                measure(task, model, best(task, model)[0]["rate"], seed)
    draw(chosen)
    for task in chosen:
        show(task)


if __name__ == "__main__":
    run_script(globals())
