"""What does a verdict on small models say about larger ones? Measured with the card's attentions.

    python data/text/prepare.py --source=books --gutenberg --tokenizer=sentencepiece \
--vocab_size=1024 --out_dir=data/novels
    python -m lab.verdict.calibration --what=plan    # how long it takes on this machine
    python -m lab.verdict.calibration                # makes the missing runs, prints and draws

Softmax and sixteen attentions of the card train at two sizes on the same 4.8 million tokens of
novels, with two seeds each. IDEAS, rates and seeds stood in a commit before the first run of an
idea. The parts (--what):

plan    times a step of each model, and prints how long all runs take.
train   makes the runs that --out_dir lacks, and writes their losses into calibration.json.
show    prints how many pairs have the same order at both sizes, by how far apart they are.
draw    draws the differences at the large size over those at the small one.
"""

import itertools
import json
import math
import os
import shlex
import statistics
from collections.abc import Callable

import numpy as np
import torch

from configurator import names, run_script
from errors import optional
from lab.experiments.results import CONFIDENCE, Interval, add, drawing, saved, show_table
from lab.experiments.runs import flags_of, settings_of
from lab.experiments.times import model_of, step_of, vocab_size_of
from lab.verdict.chance import machine
from lab.verdict.judge import Arm, Judge, Setting, cores, shape_of
from training.estimate import duration, num_params

# What is done?
what = "train,show,draw"  # the parts, separated by commas: see above
config_file = "config/modern_shakespeare_char_cpu.py"  # the recipe of all runs, as in a verdict
dataset = "novels"  # their text
jobs = 0  # runs at the same time, one thread for each; 0: as many as this process has cores
out_dir = "out-calibration"  # the folder of the runs
picture = "lab/verdict/calibration.png"

CARD = "lab/verdict/results/{}.json"
PATH = "lab/verdict/calibration.json"
IDEAS = (
    *("stick_breaking", "stick_breaking_without_positions", "forgetting", "laser_LS", "LS"),
    *("softmax_beta_squared", "gated_delta", "softcap", "laser", "sink", "top_k", "entmax15"),
    *("ssmax", "differential", "beta_squared", "beta"),
)
SIZES = "3 x 96", "4 x 144"
STEPS = 2344  # of 2048 tokens
COMMON = "--batch_size=8", "--eval_iters=100"
SEEDS = 1, 2
MORE_SEEDS = 1, 2, 3, 4  # of softmax, which is in each difference
# Half octaves, added to all rates: of softmax, tried alone at the small size with seed 1 before the
# others were made, with losses of 3.386, 3.372, 3.383 and 3.387 at 0, -2, -3 and -4
SHIFT = -1.5
ASIDE = -1, 1  # half octaves: other rates of CHECKED
CHECKED = {"softmax": SEEDS, "forgetting": (1,), "stick_breaking_without_positions": (1,)}
OVERHEAD = 30.0  # seconds of a run besides its steps
EDGES = 0.0, 0.03, 0.08, math.inf  # nats between two attentions at the small size
BAD = 0.1  # nats behind softmax: pairs with such an idea are easy
DRAWS = 2000  # of attentions, for an interval


def rate_of(name: str, size: str) -> float:
    """The rate of an attention: of the line, over ln(width), through those of the card's sizes."""
    side = name != "softmax"
    with open(CARD.format(name if side else IDEAS[0]), encoding="utf-8") as f:
        small, large = (of["rates"][side] for of in json.load(f)["sizes"].values())
    beyond = math.log2(int(size.split()[-1]) / 96)  # the card's are 48 and 96 wide
    return round(large + beyond * (large - small) + SHIFT, 1)


def words_of(name: str) -> tuple[str, ...]:
    """The flags of train.py of an attention of the card."""
    return () if name == "softmax" else tuple(shlex.split(saved(CARD.format(name), {})["flags"]))


def runs_of(size: str) -> dict[tuple[str, int, int], tuple[Setting, float, int]]:
    """All runs at a size: {(attention, half octaves beside its rate, seed): for Judge.run}."""
    keys = [("softmax", 0, seed) for seed in MORE_SEEDS]
    keys += [(name, k, seed) for name, of in CHECKED.items() for k in ASIDE for seed in of]
    keys += [(name, 0, seed) for seed, name in itertools.product(SEEDS, IDEAS)]
    runs = {}
    for name, aside, seed in keys:
        setting = Setting(Arm(name, words_of(name)), size, STEPS)
        runs[name, aside, seed] = setting, rate_of(name, size) + aside, seed
    return runs


def plan(judge: Judge) -> None:
    """Time a step of each model, in turns, and print what all runs take, finished ones as well."""
    torch.set_num_threads(1)
    seconds = 0.0
    rows = []
    for size in SIZES:
        steps = {}
        for name in ("softmax", *IDEAS):
            flags = flags_of([*shape_of(size), *judge.common, *words_of(name)])
            gpt, settings = model_of(config_file, flags, judge.vocab_size)
            steps[name] = step_of(gpt, settings, judge.vocab_size)
        rounds = [{name: step()["ms"] for name, step in steps.items()} for _ in range(4)]
        ms = {name: statistics.median(x[name] for x in rounds[1:]) for name in steps}
        seconds += sum(STEPS * ms[name] / 1e3 + OVERHEAD for name, _, _ in runs_of(size))
        rows += [[size, name, f"{x:.0f}", f"{rate_of(name, size):g}"] for name, x in ms.items()]
    show_table("size | attention | ms a step | rate", rows)
    n = sum(len(runs_of(size)) for size in SIZES)
    print(f"\n{n} runs: {duration(seconds)} of one core")


def train(judge: Judge) -> None:
    """Make the missing runs, and write the losses of each size into PATH."""
    about = {"recipe": config_file, "steps": STEPS, "dataset": dataset} | machine()
    add(PATH, about, "about")
    for size in SIZES:
        gpt, _ = model_of(config_file, flags_of(shape_of(size)), judge.vocab_size)
        add(PATH, num_params(gpt, non_embedding=False), "parameters", size)
        runs = runs_of(size)
        losses = judge.make([judge.run(*args) for args in runs.values()])
        for (name, aside, seed), loss in zip(runs, losses, strict=True):
            add(PATH, loss, size, name, f"{aside:+d}", str(seed))


def differences(rows: dict) -> tuple[np.ndarray, float, int]:
    """(losses minus softmax's, whose own 0 is first; their standard error; its degrees of freedom).

    rows: {an attention: {rate: {seed: loss}}}. The error is of all attentions' seeds, pooled.
    """
    losses = [[*rows[name]["+0"].values()] for name in ("softmax", *IDEAS)]
    df = sum(len(x) - 1 for x in losses)
    variance = sum(statistics.variance(x) * (len(x) - 1) for x in losses) / df
    means = np.array([statistics.fmean(x) for x in losses])
    return means - means[0], math.sqrt(variance * (1 / len(SEEDS) + 1 / len(MORE_SEEDS))), df


def on_card() -> np.ndarray:
    """The differences at equal steps that the card has: the means over its sizes."""
    rows = [saved(CARD.format(name), {})["sizes"].values() for name in IDEAS]
    return np.array([0.0, *(statistics.fmean(of["steps"][0] for of in row) for row in rows)])


def pairs(small: np.ndarray, large: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(how far apart each pair is at the small size, whether it keeps its order at the large)."""
    i, j = np.triu_indices(len(small), 1)
    apart, after = small[i] - small[j], large[i] - large[j]
    other = apart != 0  # one that is drawn twice makes no pair with itself
    return abs(apart[other]), (apart * after > 0)[other]


def kept(small: np.ndarray, large: np.ndarray, low: float, high: float) -> float:
    """The share of the pairs so far apart that keep their order; nan where there is none."""
    apart, same = pairs(small, large)
    chosen = same[(apart >= low) & (apart < high)]
    return chosen.mean() if len(chosen) else math.nan


def signs(small: np.ndarray, large: np.ndarray) -> float:
    """The share of the ideas that are on the same side of softmax."""
    return (small * large > 0)[small != 0].mean()


def correlation(small: np.ndarray, large: np.ndarray) -> float:
    """Spearman's correlation of ranks."""
    return optional("scipy.stats", "a rank").spearmanr(small, large).statistic


def resampled(f: Callable, small: np.ndarray, large: np.ndarray, *args: float) -> list[float]:
    """f(small, large, *args), and its interval where attentions are drawn with replacement."""
    draw = np.random.default_rng(0)
    drawn = draw.integers(len(small), size=(DRAWS, len(small)))
    ends = np.nanquantile(
        [f(small[i], large[i], *args) for i in drawn], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    )
    return [f(small, large, *args), *ends]


def told(*args: object) -> str:
    """What `resampled` gives, as text."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*resampled(*args))


def show() -> None:
    """Print the differences, the shares of pairs, of signs, and the correlation of ranks."""
    found = saved(PATH, {})
    (small, error, df), (large, other_error, other_df) = (differences(found[x]) for x in SIZES)
    n = [found["parameters"][size] for size in SIZES]
    doublings = math.log2(n[1] / n[0])
    rows = []
    for name, x, y, of_card in zip(IDEAS, small[1:], large[1:], on_card()[1:], strict=True):
        slope = (y - x) / doublings, math.hypot(error, other_error) / doublings, min(df, other_df)
        changes = Interval(x, error, df), Interval(y, other_error, other_df), Interval(*slope)
        rows.append([name, f"{of_card:+.3f}", *map(str, changes)])
    sizes = " | ".join(f"{x / 1e6:.2f}M" for x in n)
    show_table(f"attention | card | {sizes} | for each doubling of the compute", rows)

    rows = []
    for source, of in ((f"{n[0] / 1e6:.2f}M, the same text", small), ("the card", on_card())):
        near = of < BAD
        for title, chosen in (("all", near | True), (f"without ideas worse by {BAD}", near)):
            x, y = of[chosen], large[chosen]
            cells = []
            for low, high in (*itertools.pairwise(EDGES), (0.0, math.inf)):
                apart, _ = pairs(x, y)
                many = ((apart >= low) & (apart < high)).sum()
                cells.append(f"{told(kept, x, y, low, high)} of {many}" if many else "")
            rest = [told(f, x, y) for f in (signs, correlation)]
            rows.append([source, title, *cells, *rest])
    bins = "0 to 0.03 apart | 0.03 to 0.08 | further | all pairs"
    show_table(f"small | attentions | {bins} | same side of softmax | correlation of ranks", rows)


def draw() -> None:
    """Draw the differences at the large size over those at the small one, all and the near ones."""
    found = saved(PATH, {})
    (small, error, df), (large, other_error, _) = (differences(found[size]) for size in SIZES)
    half = Interval(0, 1, df).half(CONFIDENCE)
    n = [f"{found['parameters'][size] / 1e6:.2f}M" for size in SIZES]
    with drawing(picture, 1, 2, 13, 6) as axes:
        for ax, near in zip(axes, (large < math.inf, small < BAD), strict=True):
            x, y = small[near], large[near]
            ax.errorbar(x, y, other_error * half, error * half, "o", ms=4, lw=0.6, color="C0")
            ends = x.min(), x.max()
            ax.plot(ends, ends, color="black", lw=0.8, label="the same difference at both sizes")
            for name, *at in zip(np.array(["softmax", *IDEAS])[near], x, y, strict=True):
                ax.annotate(name, at, (4, 3), textcoords="offset points", fontsize=7)
            ax.set(
                xlabel=f"loss minus softmax's at {n[0]}",
                ylabel=f"loss minus softmax's at {n[1]}",
                title="all" if near.all() else f"without those that are worse by {BAD}",
            )


def line(change: float) -> str:
    """What a report says of larger models, where its difference is `change`."""
    found = saved(PATH, {})
    small, large = (differences(found[size])[0] for size in SIZES)
    low, high = next(x for x in itertools.pairwise(EDGES) if x[0] <= abs(change) < x[1])
    apart, same = pairs(small, large)
    chosen = same[(apart >= low) & (apart < high)]
    _, *ends = resampled(kept, small, large, low, high)
    n = [f"{found['parameters'][size] / 1e6:.2f}M" for size in SIZES]
    return (
        f"{chosen.sum()} of {len(chosen)} pairs ({ends[0]:.0%} to {ends[1]:.0%}) as near as yours "
        f"at {n[0]} parameters kept their order at {n[1]} (docs/verdict.md)"
    )


def main() -> None:
    parts = names(what, ["plan", "train", "show", "draw"])
    if {"plan", "train"} & {*parts}:
        common = [f"--dataset={dataset}", *COMMON]
        settings = settings_of(config_file, flags_of(common))
        n = jobs or cores()
        judge = Judge(config_file, tuple(common), settings, vocab_size_of(dataset), out_dir, n)
        os.makedirs(out_dir, exist_ok=True)
    if "plan" in parts:
        plan(judge)
    if "train" in parts:
        train(judge)
    if "show" in parts:
        show()
    if "draw" in parts:
        draw()


if __name__ == "__main__":
    run_script(globals())
