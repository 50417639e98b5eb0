"""What does a verdict on small models say about larger ones? Measured with the card's attentions.

    python data/text/prepare.py --source=books --gutenberg --tokenizer=sentencepiece \
--vocab_size=1024 --out_dir=data/novels
    python -m lab.verdict.calibration --what=plan    # how long it takes on this machine
    python -m lab.verdict.calibration                # makes the missing runs, prints and draws

Softmax and sixteen attentions of the card train at two sizes on the same 4.8 million tokens of
novels, with two seeds each, at rates that are chosen at the small size. IDEAS, sizes and seeds
stood in a commit before the first run of an idea. The parts (--what):

plan    times a step of each model, and prints how long all runs take.
train   makes the runs that --out_dir lacks, and writes their losses into calibration.json.
show    prints how many pairs have the same order at both sizes, by how far apart they are.
draw    draws the differences at the large size over those at the small one.
"""

import itertools
import math
import os
import shlex
import statistics
from collections.abc import Callable

from configurator import names, run_script

import numpy as np
import torch

from errors import optional
from lab.experiments.results import CONFIDENCE, Interval, add, drawing, saved, show_table, stored
from lab.experiments.runs import flags_of, settings_of
from lab.experiments.times import model_of, step_of, vocab_size_of
from lab.verdict.chance import machine, tau
from lab.verdict.judge import Arm, Judge, Setting, shape_of
from lab.verdict.method import TRIED, slope
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
MODELS = "softmax", *IDEAS
SIZES = "3 x 96", "4 x 144"
STEPS = 2344  # of 2048 tokens
COMMON = "--batch_size=8", "--eval_iters=100"
SEEDS = 1, 2
# softmax's best rate at the small size: with the seeds 1 and 2 its mean losses were 3.3702, 3.3696
# and 3.3756 at -1.5, -0.5 and 0.5
SOFTMAX = -0.9
ASIDE = -1, 1  # half octaves: other rates of CHECKED
CHECKED = {"softmax": SEEDS, "forgetting": (1,), "stick_breaking_without_positions": (1,)}
OVERHEAD = 30.0  # seconds of a run besides its steps
NEAR = 0.03  # nats between two attentions at the small size
EDGES = 0.0, NEAR, 0.08, math.inf
BAD = 0.1  # nats behind softmax: pairs with such an idea are easy
DRAWS = 10000  # of attentions, for an interval


def words_of(name: str) -> tuple[str, ...]:
    """The flags of train.py of an attention of the card."""
    return () if name == "softmax" else tuple(shlex.split(saved(CARD.format(name), {})["flags"]))


def settings_at(size: str, steps: int) -> dict[str, Setting]:
    """What each model is trained with."""
    return {name: Setting(Arm(name, words_of(name)), size, steps) for name in MODELS}


def rates_of(judge: Judge) -> dict[str, float]:
    """The rate of each model: chosen at the small size, in half the steps, with another seed.

    With more steps the best rates are lower. All rates are moved by as much as softmax's own.
    """
    settings = settings_at(SIZES[0], STEPS // 2)
    tuned = judge.tuned([*settings.values()], TRIED[:1])
    by = SOFTMAX - tuned[settings["softmax"]].k
    return {name: round(tuned[setting].k + by, 1) for name, setting in settings.items()}


def keys() -> list[tuple[str, int, int]]:
    """Of the runs at each size: (attention, half octaves beside its rate, seed)."""
    aside = [(name, k, seed) for name, of in CHECKED.items() for k in ASIDE for seed in of]
    return [(name, 0, seed) for seed, name in itertools.product(SEEDS, MODELS)] + aside


def plan(judge: Judge) -> None:
    """Time a step of each model, in turns, and print what all runs take, finished ones as well."""
    torch.set_num_threads(1)
    seconds = 0.0
    for size in SIZES:
        steps = {}
        for name in MODELS:
            flags = flags_of([*shape_of(size), *judge.common, *words_of(name)])
            gpt, settings = model_of(config_file, flags, judge.vocab_size)
            steps[name] = step_of(gpt, settings, judge.vocab_size)
        rounds = [{name: step()["ms"] for name, step in steps.items()} for _ in range(4)]
        made = [name for name, _, _ in keys()]
        if size == SIZES[0]:
            made += MODELS * 2  # rates are chosen by three or four runs of half the steps
        for name in made:
            ms = statistics.median(x[name] for x in rounds[1:])
            seconds += STEPS * ms / 1e3 + OVERHEAD
    print(f"all runs: {duration(seconds)} of one core")


def train(judge: Judge) -> None:
    """Make the missing runs, and write the losses of each size into PATH."""
    add(PATH, {"recipe": config_file, "steps": STEPS} | machine(), "about")
    rates = rates_of(judge)
    add(PATH, rates, "rates")
    for size in SIZES:
        gpt, _ = model_of(config_file, flags_of(shape_of(size)), judge.vocab_size)
        add(PATH, num_params(gpt, non_embedding=False), "parameters", size)
        settings = settings_at(size, STEPS)
        runs = [judge.run(settings[name], rates[name] + k, seed) for name, k, seed in keys()]
        for (name, k, seed), loss in zip(keys(), judge.make(runs), strict=True):
            add(PATH, loss, size, name, f"{k:+d}", str(seed))


def read() -> tuple[list[int], list[np.ndarray]]:
    """(parameters, losses (attentions, seeds)) of each size. Softmax comes first."""
    found = saved(PATH, {})
    losses = []
    for size in SIZES:
        rows = [found[size][name]["+0"] for name in MODELS]
        losses.append(np.array([[row[str(seed)] for seed in SEEDS] for row in rows]))
    return [found["parameters"][size] for size in SIZES], losses


def behind(losses: np.ndarray) -> np.ndarray:
    """The mean losses of attentions minus softmax's."""
    return losses.mean(1) - losses[0].mean()


def error_of(losses: np.ndarray) -> tuple[float, int]:
    """(the standard error of a difference of two means, its degrees of freedom).

    A seed has the same batches for all: what it adds to each loss is taken out, and what is left of
    all attentions is pooled. To this tau adds what rates lose that were chosen with one seed.
    """
    rest = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    n, seeds = losses.shape
    df = (n - 1) * (seeds - 1)
    return math.hypot(math.sqrt((rest**2).sum() / df * 2 / seeds), tau(SIZES[0], True)), df


def on_card() -> np.ndarray:
    """The differences at equal steps that the card has: the means over its sizes."""
    rows = [saved(CARD.format(name), {})["sizes"].values() for name in IDEAS]
    return np.array([0.0, *(statistics.fmean(of["steps"][0] for of in row) for row in rows)])


def sides(small: np.ndarray, large: np.ndarray, low: float, high: float) -> np.ndarray:
    """Of the differences from softmax that are so large: whether they keep their sign."""
    return (small * large > 0)[(small != 0) & (abs(small) >= low) & (abs(small) < high)]


def pairs(small: np.ndarray, large: np.ndarray, low: float, high: float) -> np.ndarray:
    """Of the pairs that lie so far apart at the small size: whether they keep their order."""
    i, j = np.triu_indices(len(small), 1)  # one that is drawn twice makes no pair with itself
    return sides(small[i] - small[j], large[i] - large[j], low, high)


def correlation(small: np.ndarray, large: np.ndarray) -> float:
    """Spearman's correlation of ranks."""
    return optional("scipy.stats", "a rank").spearmanr(small, large).statistic


def resampled(f: Callable, small: np.ndarray, large: np.ndarray, *args: float) -> str:
    """The interval of f(small, large, *args) where attentions are drawn with replacement."""
    n = len(small)
    drawn = np.random.default_rng(0).integers(n, size=(DRAWS, n))
    found = [f(small[i], large[i], *args) for i in drawn]
    low, high = np.nanquantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return f" ({low:.2f} to {high:.2f})" if low < high else ""


def counted(f: Callable, *args: object) -> str:
    """How many of f's pairs or ideas agree, with the interval of their share."""
    same = f(*args)
    if not len(same):
        return ""
    share = resampled(lambda *x: np.mean(y) if len(y := f(*x)) else math.nan, *args)
    return f"{same.sum()} of {len(same)}{share}"


def in_millions(parameters: list[int]) -> list[str]:
    return [f"{n / 1e6:.2f}M" for n in parameters]


def show() -> None:
    """Print the differences, how many pairs and signs are kept, and the correlation of ranks.

    And how many of them are kept between two seeds of the small size: what chance does alone.
    Last what another rate adds to the losses.
    """
    parameters, losses = read()
    n = in_millions(parameters)
    small, large = map(behind, losses)
    card = on_card()
    rows = []
    for name, of_card, *means in zip(MODELS, card, small, large, strict=True):
        found = [Interval(mean, *error_of(x)) for mean, x in zip(means, losses, strict=True)]
        rate = f"{2 ** (stored(PATH, 'rates')[name] / 2):.2f}x"
        found.append(slope(parameters, found))
        rows.append([name, rate, f"{of_card:+.3f}", *map(str, found)])
    columns = f"attention | rate | card | {' | '.join(n)} | for each doubling of the parameters"
    show_table(columns, rows[1:])

    rows = []
    sources = {
        f"{n[0]}, the same text": (small, large),
        "the card": (card, large),
        f"one seed of {n[0]}; then its other seed": (losses[0] - losses[0][0]).T,
    }
    for source, (before, after) in sources.items():
        for limit in (math.inf, BAD):
            x, y = before[before < limit], after[before < limit]
            cells = [counted(pairs, x, y, *bin) for bin in itertools.pairwise(EDGES)]
            cells += [counted(sides, x, y, *bin) for bin in ((0.0, NEAR), (NEAR, math.inf))]
            ranks = f"{correlation(x, y):.2f}{resampled(correlation, x, y)}"
            rows.append([source, limit, *cells, ranks])
    bins = (
        f"pairs 0 to {NEAR} apart | {NEAR} to {EDGES[2]} | further | ideas 0 to {NEAR} from softmax"
    )
    show_table(f"small | worse by less than | {bins} | further ones | correlation of ranks", rows)

    rows = []
    for name, k, seed in keys()[len(SEEDS) * len(MODELS) :]:
        of = [stored(PATH, size, name) for size in SIZES]
        changes = [x[f"{k:+d}"][str(seed)] - x["+0"][str(seed)] for x in of]
        rows.append([name, f"{k:+d}", seed, *(f"{x:+.3f}" for x in changes)])
    show_table(f"attention | half octaves beside its rate | seed | {' | '.join(n)}", rows)


def draw() -> None:
    """Draw the differences at the large size over those at the small one; both by attention."""
    parameters, losses = read()
    n = in_millions(parameters)
    means = [behind(x)[1:] for x in losses]
    half = [Interval(0.0, *error_of(x)).half(CONFIDENCE) for x in losses]
    near = [i for i in np.argsort(-means[0]) if means[0][i] < BAD]  # the lowest loss comes last
    with drawing(picture, 1, 2, 13, 6) as (left, right):
        left.errorbar(*means, half[1], half[0], "o", ms=4, lw=0.6)
        left.axline((0, 0), slope=1, color="black", lw=0.8, label="the same at both sizes")
        for i in np.flatnonzero(means[0] >= BAD):
            left.annotate(IDEAS[i], [x[i] for x in means], (6, -12), textcoords="offset points")
        left.set(xlabel=f"loss minus softmax's at {n[0]}", ylabel=f"loss minus softmax's at {n[1]}")

        rows = np.arange(len(near))
        for x, error, size, up in zip(means, half, n, (0.12, -0.12), strict=True):
            right.errorbar(x[near], rows + up, xerr=error, fmt="o", ms=4, lw=1, label=size)
        right.axvline(0, color="black", lw=0.8)
        right.set_yticks(rows, [IDEAS[i] for i in near])
        right.set(xlabel=f"loss minus softmax's; without ideas worse by {BAD}")


def lines(change: float) -> list[str]:
    """What a report says of larger models, where its difference is `change`."""
    parameters, losses = read()
    small, large = on_card(), behind(losses[1])
    near = small < BAD
    low, high = next(x for x in itertools.pairwise(EDGES) if x[0] <= abs(change) < x[1])
    n = in_millions(parameters)[1]
    kept = counted(pairs, small[near], large[near], low, high)
    of = f"of attentions that are {low} to {high} apart on the card"
    return [f"larger     {of}, {kept} pairs had the same order at {n}, at equal steps, on novels"]


def main() -> None:
    parts = names(what, ["plan", "train", "show", "draw"])
    if {"plan", "train"} & {*parts}:
        common = [f"--dataset={dataset}", *COMMON]
        settings = settings_of(config_file, flags_of(common))
        judge = Judge(config_file, tuple(common), settings, vocab_size_of(dataset), out_dir, jobs)
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
