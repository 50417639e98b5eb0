"""Beta against softmax where a model overfits (the beta post: nanoGPT's Shakespeare config).

    OMP_NUM_THREADS=1 python -m lab.experiments.beta_post --jobs=2  # on two cores
    python -m lab.experiments.beta_post --scale=paper               # the post's run, on a GPU
    python -m lab.experiments.beta_post --what=show                 # picture and tables of --out
    OMP_NUM_THREADS=1 python -m lab.experiments.beta_post --what=backward,show

The post reports the losses after 10,000 iterations: 1.0040 (training) and 1.5550 (validation) for
beta, 0.7140 and 1.6204 for softmax. Its softmax model has overfitted by then. The pocket scale does
the same in small: a model of 0.34M parameters and 2% of the text, which it sees 77 times (the post:
10.7M, the whole text, 163 times).

The post's purpose is a cheaper backward pass. `backward` times the passes of softmax and beta: both
as their definitions, both with a backward pass written by hand, and both in their fast form. All
but the fast forms hold n x n numbers.
"""

import functools
import itertools
import os
from typing import Literal

from configurator import names, positive, run_script

import torch

from attention.forms import FORM
from attention.scores import distances, plain_form
from bench import interleaved, medians, passes, peak_memory, ratios
from lab.experiments.results import difference, drawing, mean, measured, show_table, stored
from lab.experiments.runs import by_seed, finals, of_rows
from model import ATTENTION
from text.dataset import Tokens, folder_of
from text.prepare import tokenised, write
from text.tokenizers import tokenizer

# What is measured?
what = "train,backward,show"  # the parts to run; show: the picture and the tables
scale: Literal["pocket", "paper"] = "pocket"  # pocket: for two CPU cores; paper: the post's
lengths = "512,2048"  # backward: numbers of tokens
repeats = 9  # backward: rounds, in each of which every row runs once
dataset = "shakespeare_char"  # the data set, or (pocket) the one whose first part is taken
seeds = 3  # runs of each row
jobs = 1  # runs at the same time; they share the cores of the CPU
out = "lab/experiments/beta_post.json"  # the results
picture = "lab/experiments/pictures/beta_post.png"  # the picture
out_dir = "out-beta-post"  # the folder for the runs, each in a folder of its own

CPU = "config/train_shakespeare_char_cpu.py"
POCKET = {"max_iters": 2000, "lr_decay_iters": 2000, "eval_interval": 250, "eval_iters": 73}
SCALES = {  # config file, flags, share of the training split
    "paper": ("config/train_shakespeare_char.py", {"max_iters": 10000}, 1.0),
    "pocket": (CPU, POCKET, 0.02),
}
ROWS = {"softmax": "black", "beta": "C0"}  # the attentions, with their colors
DROPOUT = (0.2, 0.0)  # the post's, and none


def part_of_the_text(share: float, make: bool) -> str:
    """The data set with a share of its training split, the first tokens, and all of validation.

    make: make it; False: only return its path.
    """
    if share == 1.0:
        return dataset
    folder = os.path.join(out_dir, f"{os.path.basename(dataset)}-{share:g}")
    if make:
        train = Tokens(folder_of(dataset), "train", 1)
        val = Tokens(folder_of(dataset), "val", 1)
        tok = tokenizer(train.meta["tokenizer"])
        ids = {"train": train.ids[: int(share * len(train))], "val": val.ids}
        rows = {split: [tokenised(tok.decode(x), tok)] for split, x in ids.items()}
        write(folder, tok, rows, {"from": f"{share:.1%} of {dataset}"})
    return folder


def train(make: bool) -> dict:
    """{(attention, dropout): the results of the seeds}. make: see runs.record."""
    file, flags, share = SCALES[scale]
    data = part_of_the_text(share, make)
    rows = {}
    for dropout, row in itertools.product(DROPOUT, ROWS):
        run = flags | {"attention": row, "dataset": data, "dropout": dropout}
        rows[row, dropout] = f"{scale}, {row}, dropout {dropout:g}, seed ", file, run
    keep = ("val_loss", "train_loss")
    return by_seed(rows, range(1, seeds + 1), out, out_dir, jobs, make, keep)


class ByHand(torch.autograd.Function):
    """Causal softmax or beta attention of q, k, v (B, H, T, D), with its gradients in closed form.

    With the weights a, y = a v, da = dy v^T, and D the sum of y dy over a row (which is also the
    sum of a da), the gradients with respect to the scores s are

        softmax:  ds = a (da - D)
        beta:     ds = da / (1 + ||s||) - a D / ||s||,
                  since da . s = D (1 + ||s||) and s = a (1 + ||s||)

    So both read da and a once, and need one number, or two, of each row.
    """

    @staticmethod
    def forward(ctx, beta, q, k, v):
        s = q @ k.mT * q.shape[-1] ** -0.5
        s.masked_fill_(distances(*s.shape[-2:], s.device) < 0, 0.0 if beta else -torch.inf)
        norm = s.norm(dim=-1, keepdim=True) if beta else None
        a = s.div_(1 + norm) if beta else s.softmax(-1)
        y = a @ v
        ctx.save_for_backward(q, k, v, a, y, norm)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, a, y, norm = ctx.saved_tensors
        total = (y * dy).sum(-1, keepdim=True)
        ds = dy @ v.mT
        if norm is None:
            ds.sub_(total).mul_(a)
        else:  # a score of a hidden key is 0, whatever q and k are
            ds.div_(1 + norm).masked_fill_(a == 0, 0.0).addcmul_(a, total / norm, value=-1)
        ds *= q.shape[-1] ** -0.5
        return None, ds @ k, ds.mT @ q, a.mT @ dy


FORMS = {}  # {name: attend(q, k, v)}
for name in ROWS:
    FORMS[f"{name}, definition"] = plain_form(ATTENTION[name])
    FORMS[f"{name}, by hand"] = functools.partial(ByHand.apply, name == "beta")
    FORMS[f"{name}, fast form"] = FORM[name].long(ATTENTION[name])


def times(n: int) -> dict:
    """{form: its numbers} for a sequence of n tokens, with 6 heads of 32.

    "ms": milliseconds of the passes; "ratio": to softmax's in the same form; "bytes": peak memory.
    """
    x = torch.randn(4, 1, 6, n, 32, requires_grad=True).unbind()
    tasks = {name: functools.partial(passes, attend, x, "cpu") for name, attend in FORMS.items()}
    rounds = interleaved(tasks, "cpu", repeats)
    of_forms = {}
    for name, task in tasks.items():
        softmax = f"softmax, {name.partition(', ')[2]}"
        of_forms[name] = {
            "ms": medians(rounds[name])[0],
            "ratio": ratios(rounds, name, softmax),
            "bytes": peak_memory(task, "cpu"),
        }
    return of_forms


def draw(runs: dict) -> None:
    """Losses of both splits over the steps, with dropout and without."""
    with drawing(picture, 1, 2, 12, 4.5) as axes:
        for ax, dropout in zip(axes, DROPOUT, strict=True):
            for row, color in ROWS.items():
                for i, result in enumerate(runs[row, dropout]):
                    for split, line in (("val", "-"), ("train", ":")):
                        curve = result["curves"][f"{split}_loss"]
                        label = None if i else f"{row}, {split}"
                        ax.plot(*curve.values(), line, color=color, linewidth=1, label=label)
            ax.set(title=f"dropout {dropout:g}", xlabel="step", ylabel="loss", ylim=(0.4, 4.0))


def losses(results: list[dict]) -> list[list[float]]:
    """The best validation losses of the seeds, the last ones, and the last training losses."""
    best, train = ([result[key] for result in results] for key in ("best", "train"))
    return [best, finals(results), train]


def show_losses(runs: dict) -> None:
    """Print the table of the losses."""
    rows = []
    for (row, dropout), results in runs.items():
        found = losses(results)
        against = ["", ""]
        if row != "softmax":
            against = map(difference, found[:2], losses(runs["softmax", dropout]))
        rows.append([row, f"{dropout:g}", *map(mean, found), *against])
    columns = " | dropout | best val loss | last val loss | last train loss"
    columns += " | best, against softmax | last, against softmax"
    show_table(columns, rows)


def show_times() -> None:
    """Print the table of the times of the passes."""
    rows = []
    for n, forms in stored(out, "backward", "passes").items():
        for name in FORMS:
            r = forms[name]
            cells = [n, name, f"{r['ms']['forward']:.1f}", f"{r['ms']['backward']:.1f}"]
            rows.append([*cells, f"{r['ratio']['backward']:.2f}x", f"{r['bytes'] / 2**20:.0f}"])
    columns = "n |  | forward, ms | backward, ms | backward, against softmax's"
    show_table(f"{columns} | peak memory, MiB", rows)


def main() -> None:
    parts = names(what, ["train", "backward", "show"])
    if "backward" in parts:
        for n in positive("lengths", lengths):
            measured(out, "backward", "passes", n, times, n, of=of_rows(__file__))
    if parts == ["backward"]:
        return
    runs = train("train" in parts)
    if "show" in parts:
        draw(runs)
        show_losses(runs)
        show_times()


if __name__ == "__main__":
    run_script(globals())
