"""lab.verdict: each decision with faked losses and times; one verdict with runs, to the card."""

import itertools
import json
import math
import os
import random
import re
import statistics
from types import SimpleNamespace

import pytest
from harness import done, parametrize, refusal, refused, slow
from scipy import stats

import lab.verdict.__main__ as main
from lab.experiments.results import Interval, interval, save, saved
from lab.experiments.runs import identity
from lab.experiments.times import apart
from lab.ideas.gated_delta import GatedDelta
from lab.verdict import chance, checks, costs, judge, method, report
from model import ATTENTION, GPT, GPTConfig

SIZES = {"block_size": 32, "vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 8}

# -----------------------------------------------------------------------------
# method.py


def tuned(loss):
    """(the chosen rate, [the rates that were asked]) where loss(k) are the losses of the seeds."""
    found = {}
    asked = []
    while ks := method.choose(found)[0]:
        asked.append(ks)
        found |= {k: loss(k) for k in ks}
    return method.choose(found)[1], asked


@parametrize(
    "best, chosen, at_edge, tried",
    [
        (0.3, 0.3, False, [(-2, 0, 2)]),
        (1.2, 1.2, False, [(-2, 0, 2), (4,)]),
        (-1.8, -1.8, False, [(-2, 0, 2), (-4,)]),
        (4.4, 4.4, False, [(-2, 0, 2), (4,), (6,)]),
        (9.0, 6, True, [(-2, 0, 2), (4,), (6,)]),
        (-9.0, -6, True, [(-2, 0, 2), (-4,), (-6,)]),
    ],
)
def test_a_rate_is_the_vertex_of_a_parabola(best, chosen, at_edge, tried):
    """At the edge the next rate is tried, twice; then the rate is the best one, and at the edge."""
    found, asked = tuned(lambda k: [(k - best) ** 2 + x for x in (0.1, -0.1)])
    assert found == (pytest.approx(chosen), at_edge) and asked == tried


@parametrize("failed, chosen", [((), 0.5), ((1,), 0.5), ((0, 1), 2.9)])
def test_a_seed_that_fails_does_not_choose(failed, chosen):
    """Unless the other seed of its rate, here 0, fails as well."""
    found, _ = tuned(
        lambda k: [0.01 * (k - 0.5) ** 2 + 3 * (k == 0 and seed in failed) for seed in (0, 1)]
    )
    assert found == (chosen, False)


@parametrize(
    "losses, found",
    [((2, 1, 2), 0), ((2, 1, 1.5), 1 / 3), ((1.1, 1, 9), -0.98), ((1, 1, 1), 0), ((1, 1, 2), -1)],
)
def test_a_vertex_lies_within_half_an_octave_of_the_best_rate(losses, found):
    assert method.vertex(6, *losses) == pytest.approx(6 + found, abs=0.05)


def test_an_interval_has_all_errors_and_satterthwaites_degrees_of_freedom():
    changes = [0.1, -0.2, 0.3, 0.0]
    plain = interval(changes)
    low, high = stats.ttest_1samp(changes, 0).confidence_interval()
    assert [plain.mean - plain.half(0.95), plain.mean + plain.half(0.95)] == pytest.approx(
        [low, high], rel=1e-4
    )
    assert plain.p == pytest.approx(stats.ttest_1samp(changes, 0).pvalue)
    own = statistics.variance(changes) / 4
    more = interval(changes, (0.01, math.inf), (0.02, 7))
    assert more.error**2 == pytest.approx(own + 0.03)
    assert more.df == pytest.approx((own + 0.03) ** 2 / (own**2 / 3 + 0.02**2 / 7))
    both = method.pooled([plain, more])
    assert both.error**2 == pytest.approx((plain.error**2 + more.error**2) / 4)
    assert both.mean == pytest.approx(0.05)
    assert Interval(0.0, 1.0, 1e9).shown(0.95) == pytest.approx(1.96 + 0.84, abs=0.01)
    assert interval([0.1, 0.1, 0.1]).side(0.99) == 1  # without spread


def of(*means, error=0.01):
    return [Interval(mean, error, 1e6) for mean in means]


# differences at the sizes | share of the misses | least | word
WORDS = """
-0.03 -0.0234     | 1   | 0    | better
0.03 0.0234       | 1   | 0    | worse
-0.03 0.0234      | 1   | 0    | not seen
-0.03 -0.0231     | 1   | 0    | a hint of better  # 2.33 errors are 98%
0.019 0.019       | 1   | 0    | a hint of worse
-0.06 0.001       | 1   | 0    | not seen          # the signs differ
-0.06 -0.001      | 1   | 0    | a hint of better
0.018 0.018       | 1   | 0    | not seen          # 2.55 errors of the mean: below 99%
-0.03 -0.0286     | 0.2 | 0    | a hint of better
-0.03 -0.0289     | 0.2 | 0    | better            # 2.88 errors are 99.6%
0.0205 0.0205     | 0.2 | 0    | not seen          # 2.9 errors of the mean: below 99.8%
-0.03 -0.025      | 1   | 0.02 | better
-0.05 -0.0199     | 1   | 0.02 | not seen
0.002 -0.003      | 1   | 0    | level
0.002 -0.003      | 0.2 | 0    | not seen
0.004 -0.003      | 1   | 0    | not seen
0.002             | 1   | 0    | level
-0.05             | 1   | 0    | not seen
-0.03 -0.03 -0.03 | 1   | 0    | better
-0.03 -0.03 0.0   | 1   | 0    | not seen
"""


@parametrize("row", WORDS.strip().splitlines())
def test_words(row):
    means, *rest, word = row.partition("#")[0].split("|")
    assert method.word(of(*map(float, means.split())), *map(float, rest)) == word.strip()


def test_words_of_a_first_look():
    words = [method.quick_word(x) for x in of(-0.0234, 0.0231, 0.0234)]
    assert words == ["looks better", "look again", "looks worse"]


def test_a_seed_fails_if_it_is_far_above_the_median():
    assert method.failed([1.0, 1.1, 1.05, 1.29, 1.31]) == 1
    assert method.failed([1.0, 4.0, 4.1]) == 0


def test_the_sittings_error():
    assert method.timing_error(0.2, [0.1, 0.1]) == (pytest.approx((0.2 * 0.03) ** 2 / 2), 1)
    sittings = [0.0, 0.1, 0.2]
    assert method.timing_error(0.2, sittings)[0] == pytest.approx((0.2 * 0.1) ** 2 / 3)


# -----------------------------------------------------------------------------
# the order of a verdict, with faked runs and times


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """verdict(loss, times, **flags): the numbers of one, with a list of the runs that it made.

    loss(name of the arm, size, steps, k, seed); times: {arm: ms of a step}, "plain" too.
    """
    made = []

    def verdict(loss, times, fast=True, **flags):
        def make(self, runs):
            losses = []
            for name, args in runs:
                arm = "idea" if "--attention=laser" in args else "softmax"
                size, steps, k, seed = re.search(
                    r", (\d+ x \d+), (\d+) steps, rate (\S+), seed (\d+)$", name
                ).groups()
                key = arm, size, int(steps), float(k), int(seed)
                made.append((self.config_file.split("/")[-1], *self.common, *key))
                losses.append(loss(*key))
            return losses

        def sitting():
            fast, plain, idea = (next(times[x]) for x in ("softmax", "plain", "idea"))
            return [math.log(idea / fast), math.log(idea / plain), fast, plain, idea]

        quiet = {"attention": "laser", "second_text": "", "second_recipe": ""}
        for name, value in {**quiet, "out_dir": str(tmp_path), **flags}.items():
            monkeypatch.setattr(main, name, value)
        monkeypatch.setattr(judge.Judge, "make", make)
        monkeypatch.setattr(costs, "Clock", lambda *_: SimpleNamespace(sitting=sitting))
        monkeypatch.setattr(main, "imported", list)
        monkeypatch.setattr(chance, "tau", lambda size, quick: 0.003)
        one = main.Verdict(*main.arms())
        one.numbers["fast"] = fast
        for size in one.sizes:
            one.numbers["sizes"][size]["parameters"] = [10, 10]
        one.look()
        one.start()
        one.train()
        one.equal_time()
        one.decide()
        return one, made

    return verdict


def always(**times):
    """Steps that always take the same time."""
    return {name: iter(lambda ms=ms: ms, None) for name, ms in times.items()}


SEEDS = {"2 x 48": range(1, 9), "3 x 96": range(1001, 1009)}
SAME = {"softmax": 10.0, "plain": 20.0, "idea": 10.0}


def noise(size, seed, by=0.002):
    return random.Random(f"{size} {seed}").gauss(0, by)


def test_seeds_and_rates_of_a_verdict(faked):
    """Rates are chosen with seeds that are never compared, for each side and size by itself."""
    best = {("softmax", "2 x 48"): 0.5, ("softmax", "3 x 96"): -0.6}
    best |= {("idea", "2 x 48"): 2.0, ("idea", "3 x 96"): 0.0}

    def loss(arm, size, steps, k, seed):
        return 2 + 0.01 * (k - best[arm, size]) ** 2 + noise(size, seed) * (arm == "idea")

    one, made = faked(loss, always(**SAME))
    for (arm, size), k in best.items():
        runs = {x[4:] for x in made if x[1:4] == (arm, size, 600)}
        compared = {(k, seed) for seed in SEEDS[size]}
        rates = (-2.0, 0.0, 2.0, 4.0) if k == 2 else (-2.0, 0.0, 2.0)
        assert runs == compared | {(x, seed) for x in rates for seed in (101, 102)}
    row = one.numbers["sizes"]["2 x 48"]
    assert row["rates"] == [0.5, 2.0] and not row["edge"]
    assert row["steps"].mean == pytest.approx(
        statistics.fmean(noise("2 x 48", s) for s in range(1, 9))
    )
    assert one.numbers["verdict"].startswith("level at equal steps")


@parametrize("side", ["softmax", "idea"])
def test_a_rate_at_the_edge_gives_no_word(side, faked):
    def loss(arm, size, steps, k, seed):
        best = 9 if (arm, size) == (side, "3 x 96") else 0
        return 2 + 0.01 * (k - best) ** 2 - 0.5 * (arm == "idea") + noise(size, seed)

    one, _ = faked(loss, always(**SAME))
    assert "no word: a best learning rate is at the edge" in one.numbers["verdict"]
    assert "better" not in one.numbers["verdict"]


@parametrize(
    "gain, said",
    [
        (-0.05, "better at equal steps; better in equal time"),
        (0.05, "worse at equal steps; worse in equal time"),
        (-0.015, "better at equal steps; not seen in equal time"),
        (0.0, "level at equal steps; level in equal time"),
    ],
)
def test_an_idea_that_takes_as_long(gain, said, faked):
    def loss(arm, size, steps, k, seed):
        worth = 0.1 * math.log(600 / steps)
        return 2 + 0.01 * k * k + worth + (gain + noise(size, seed)) * (arm == "idea")

    one, made = faked(loss, always(**SAME))
    assert one.numbers["verdict"].startswith(said)
    assert {x[3] for x in made} == {600, 300}  # half the steps, for what a longer training is worth
    assert all(x[1] == "idea" and x[5] in SEEDS[x[2]][:2] for x in made if x[3] == 300)
    row = one.numbers["sizes"]["2 x 48"]
    assert row["worth"] == pytest.approx(0.1) and row["fit"] == 600
    assert row["time"].error > row["steps"].error
    assert "other_time" not in row  # it has fast code, so softmax as written is no opponent


@parametrize("fast, fit", [(True, 200), (False, 400)])
def test_a_slow_idea_has_the_steps_that_fit_and_no_second_tuning(fast, fit, faked):
    """One without fast code is compared with softmax as it is written, of twice the time."""

    def loss(arm, size, steps, k, seed):
        best = 0.5 if arm == "idea" else -0.5
        worth = 0.1 * math.log(600 / steps)
        return 2 + 0.01 * (k - best) ** 2 + worth + (noise(size, seed) - 0.01) * (arm == "idea")

    times = always(softmax=10.0, plain=20.0, idea=30.0)
    one, made = faked(loss, times, fast=fast)
    assert {(x[3], x[1]) for x in made} == {(600, "softmax"), (600, "idea"), (fit, "idea")}
    assert {x[4:] for x in made if x[3] == fit and x[2] == "3 x 96"} == {
        (0.5, seed) for seed in SEEDS["3 x 96"]
    }
    row = one.numbers["sizes"]["3 x 96"]
    assert row["ratio"] == pytest.approx([3, 1.5]) and row["worth"] == pytest.approx(0.1)
    expected = 0.1 * math.log(600 / fit) - 0.01
    assert row["time"].mean == pytest.approx(expected, abs=0.003)
    if not fast:
        change = row["other_time"].mean - row["time"].mean
        assert change == pytest.approx(0.1 * math.log(3.0 * fit / 600))
    opponent = "" if fast else " with softmax as written"
    assert f"worse in equal time{opponent}, on this machine" in one.numbers["verdict"]


def test_a_sitting_is_the_unit_of_time(faked):
    """Eight sittings between the runs: their logarithms' mean decides, and their spread counts."""
    ms = [10.0, 20.0] * 8
    times = always(softmax=10.0, plain=20.0) | {"idea": iter(ms + ms)}

    def loss(arm, size, steps, k, seed):
        return 2 + 0.01 * k * k + 0.1 * math.log(600 / steps) + noise(size, seed)

    one, made = faked(loss, times, sizes="2 x 48")
    assert len(one.sittings["2 x 48"]) == 8
    row = one.numbers["sizes"]["2 x 48"]
    assert row["ratio"][0] == pytest.approx(math.sqrt(2)) and row["fit"] == round(600 / 2**0.5)
    assert {x[3] for x in made} == {600, 424, 300}  # too near to say what longer training is worth
    spread = statistics.stdev([0.0, math.log(2)] * 4)
    assert row["time"].error ** 2 - row["steps"].error ** 2 == pytest.approx(
        (row["worth"] * spread) ** 2 / 8, rel=1e-6
    )


def test_seeds_that_fail_count_and_are_told(faked):
    def loss(arm, size, steps, k, seed):
        return 2 + 0.01 * k * k + noise(size, seed) + (arm == "idea" and seed % 1000 == 3)

    one, _ = faked(loss, always(**SAME))
    assert "2 seeds of laser failed, and count" in one.numbers["verdict"]
    assert one.numbers["sizes"]["2 x 48"]["steps"].mean == pytest.approx(1 / 8, abs=0.01)
    assert one.folders == [[], []]  # a run that diverged has no model
    one.check_trained()
    assert "no trained model" in costs.tried(costs.of_trained, one.folders, [])["why"]


def test_a_second_look_is_stricter(faked):
    """With another number of seeds 2.6 errors are a hint, which were a word."""

    def loss(arm, size, steps, k, seed):
        return 2 + 0.01 * k * k + noise(size, seed, 0.0002) - 0.0078 * (arm == "idea")

    first, _ = faked(loss, always(**SAME), seeds=3)
    again, _ = faked(loss, always(**SAME), seeds=3)
    for one in (first, again):
        assert one.numbers["verdict"].startswith("better at") and not one.numbers["looks"]
    second, _ = faked(loss, always(**SAME), seeds=5, sizes="2 x 48,3 x 96")
    assert second.numbers["verdict"].startswith("a hint of better at")
    assert second.numbers["looks"] == {"3": first.numbers["verdict"]}


def test_a_first_look(faked):
    """Three rates, no more seeds to choose; four compared."""

    def loss(arm, size, steps, k, seed):
        return 2 + 0.01 * k * k + noise(size, seed) - 0.1 * (arm == "idea")

    quick = {**main.QUICK, "quick": True}
    one, made = faked(loss, always(**SAME), **quick)
    assert one.numbers["verdict"] == "looks better at equal steps"
    assert {x[4:] for x in made if x[1] == "idea"} == {
        *((k, 101) for k in (-2.0, 0.0, 2.0)),
        *((0.0, seed) for seed in (1, 2, 3, 4)),
    }


@parametrize(
    "flags, says",
    [
        ({"flags": "--batch_size=6"}, "--batch_size is for both sides: give it in --both="),
        ({"against": "--dataset=python"}, "--dataset is for both sides"),
        ({"both": "--seed=2"}, "--seed: a verdict sets it itself"),
        ({"flags": "--conv=4 config/train_gpt2.py"}, "'config/train_gpt2.py' is no flag"),
        ({"flags": "--attention='beta"}, "No closing quotation"),
    ],
)
def test_flags_that_make_no_comparison(flags, says, faked):
    with refusal(says):
        faked(None, None, **flags)


def test_a_verdict_of_a_gpu_has_no_times(faked):
    """They are measured on the CPU."""
    loss = lambda *key: 2 + 0.01 * key[3] ** 2  # noqa: E731
    one, _ = faked(loss, always(**SAME), both="--device=cuda")
    assert one.numbers["verdict"] == "level at equal steps"


def test_both_sides_may_be_the_same(monkeypatch):
    monkeypatch.setattr(judge, "record", lambda _, runs, *__: dict.fromkeys(runs, {"val": 1.0}))
    one = judge.Judge("", (), {}, 10, "", 1)
    assert one.make([("a", []), ("a", [])]) == [1.0, 1.0]


def test_a_second_recipe_has_its_own_rates_and_three_seeds(faked):
    recipe = "config/train_shakespeare_char_cpu.py"

    def loss(arm, size, steps, k, seed):
        best = 0.5 if arm == "idea" else -0.5
        return 2 + 0.01 * (k - best) ** 2 + seed * (arm == "idea" and seed < 100)

    one, made = faked(loss, always(**SAME), second_recipe=recipe)
    made.clear()
    one.columns()
    assert {x[0] for x in made} == {os.path.basename(recipe)}
    for arm, k in {"idea": 0.5, "softmax": -0.5}.items():
        assert {x[4:] for x in made if x[1] == arm} == {
            *((rate, 101) for rate in (-2.0, 0.0, 2.0)),
            *((k, seed) for seed in (1, 2, 3)),
        }
    assert one.numbers["columns"]["second recipe"]["difference"].mean == pytest.approx(2.0)


def test_a_second_recipe_at_the_edge_says_so(faked):
    recipe = "config/train_shakespeare_char_cpu.py"
    one, _ = faked(lambda *key: 2 - 0.1 * key[3], always(**SAME), second_recipe=recipe)
    one.columns()
    assert "at the edge" in one.numbers["columns"]["second recipe"]["why"]


@parametrize("ratio", [0.9, 1.02])
def test_equal_flops_where_the_products_of_matrices_differ(ratio, faked, monkeypatch):
    """An estimate. What it costs on another machine is measured there."""

    def loss(arm, size, steps, k, seed):
        return 2 + 0.01 * k * k + 0.1 * math.log(600 / steps) + noise(size, seed)

    one, _ = faked(loss, always(**SAME))
    monkeypatch.setattr(main, "apart", lambda alone, f, *args: f(*args))
    monkeypatch.setattr(main, "MEASURED", {"flops": lambda *_: {"ratio": ratio}})
    monkeypatch.setattr(costs, "of_trained", lambda *_: {})
    monkeypatch.setattr(costs, "skills", lambda *_: dict.fromkeys(costs.SKILLS, {}))
    one.measure()
    row = one.numbers["sizes"]["3 x 96"]
    assert ("equal_flops" in row) == (ratio == 0.9)
    if ratio == 0.9:
        assert row["equal_flops"].mean == pytest.approx(row["steps"].mean + 0.1 * math.log(0.9))
    assert one.stored("flops", one.arms)["ratio"] == ratio
    for module, name in ((chance, "machine"), (main, "identity")):  # another data set, say
        with monkeypatch.context() as changed:
            changed.setattr(module, name, lambda *_: "another")
            assert one.stored("flops", one.arms) is None


def test_the_first_line_counts_the_runs_that_are_kept(faked, tmp_path):
    """At one size: 6 and 4 runs of each side, 9 of columns, 4 of the idea in equal time."""
    one, _ = faked(lambda *key: 2 + key[3] ** 2, always(**SAME), seeds=4, sizes="2 x 48")
    of_run = 6 + main.OVERHEAD
    assert one.seconds() == pytest.approx(of_run * (2 * (6 + 4 + 9) + 4) + 300)
    runs = {}
    for arm in one.arms:
        for k, seed in [*itertools.product((-2, 0, 2), (101, 102)), (0.5, 1), (0.5, 2), (0.5, 3)]:
            name, words = one.judge.run(judge.Setting(arm, "2 x 48", 600), k, seed)
            runs[name] = {"of": identity(words)}
    save(one.judge.store, {"runs": runs})
    assert one.seconds() == pytest.approx(of_run * (2 * (1 + 9) + 4) + 300)
    for run in runs.values():
        run["of"] = "edited"
    save(one.judge.store, {"runs": runs})
    assert one.seconds() == pytest.approx(of_run * (2 * (6 + 4 + 9) + 4) + 300)


def test_flops_are_of_what_an_attention_needs():
    """The same products as softmax, in whatever code; fewer with short heads."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32}
    for row in ({"attention": "laser"}, {"attention": "softcap"}, {"heads": "S", "window": 8}):
        file = "config/modern_shakespeare_char_cpu.py"
        ratio = costs.of_flops(file, [sizes, sizes | row], 65)["ratio"]
        assert (0.3 < ratio < 0.8) if "heads" in row else (ratio == 1), row


def test_a_sitting_leaves_out_the_first_steps(monkeypatch):
    """They are slow. The ratio is the median of the rounds' ratios."""
    steps = [iter([100.0, *[ms] * costs.ROUNDS]) for ms in (10.0, 20.0, 30.0)]
    clock = costs.Clock.__new__(costs.Clock)
    clock.steps = [lambda step=step: {"ms": next(step)} for step in steps]
    ratios = [math.log(3), math.log(1.5)]
    assert clock.sitting() == pytest.approx([*ratios, 10.0, 20.0, 30.0])


def test_a_skill_has_three_seeds_at_the_better_of_two_rates(monkeypatch):
    asked = []

    def fit(task, fields, rate, seed, recipe):
        asked.append((task, fields, rate, seed, recipe))
        return {"trained": 1 - rate / 2, "accuracy": {"4": rate + seed}}

    monkeypatch.setattr("lab.experiments.recall.fit", fit)
    assert costs.skill("pairs", {"n_head": 2}, {"optimizer": "muon"}, []) == {"4": [1.5, 2.5, 3.5]}
    rates_and_seeds = [(1.0, 1), (0.5, 1), (0.5, 2), (0.5, 3)]
    assert asked == [("pairs", {"n_head": 2}, *x, {"optimizer": "muon"}) for x in rates_and_seeds]


def test_a_row_of_the_card_has_holms_correction():
    """The smallest p of three times 3, the next one times 2 or what the smallest has."""
    x = {"parameters": [1, 1], "steps": [-0.02, 0.01, 1e6], "ratio": [1.0, 1.0]}
    numbers = {
        "idea": "x", "base": "softmax", "flags": "", "command": "", "verdict": "", "level": 0.98,
        "sizes": {"1 x 2": x, "3 x 4": x}, "layer": {"why": ""}, "decoding": {"why": ""},
    }  # fmt: skip
    p = report.overall(numbers).p
    for others, times in {(0.5, 0.9): 3, (p / 1.2, 0.9): 2.5, (p / 4, 0.9): 2}.items():
        cell = report.cells_of(numbers, sorted([p, *others]))[5]
        assert cell.endswith(f"p {times * p:.2g}")


def test_three_sizes_have_a_slope():
    numbers = saved("lab/verdict/results/forgetting.json", {})
    assert not any("doubling" in line for line in report.lines_of(numbers))
    third = {"parameters": [700_000, 700_000], "steps": [-0.03, 0.006, 14.0]}
    numbers["sizes"]["4 x 144"] = numbers["sizes"]["3 x 96"] | third
    (line,) = [line for line in report.lines_of(numbers) if "doubling" in line]
    assert line.split(None, 5)[5].startswith("+0.012 (")


def test_other_runs_have_other_names(faked):
    """In one folder: of another config file, another number of steps, another rate."""
    one, _ = faked(lambda *_: 2.0, always(**SAME))
    setting = judge.Setting(one.idea, "2 x 48", 600)
    runs = [one.judge.run(setting, 0, 1), one.judge.run(setting, 0.1, 1)]
    runs += [one.judge.run(setting._replace(steps=300), 0, 1), one.judge.run(setting, 0, 2)]
    runs.append(one.judge_of("config/train_shakespeare_char_cpu.py", []).run(setting, 0, 1))
    assert len({name for name, _ in runs}) == 5
    assert [args[-3:-1] for _, args in runs[:2]] == [
        ["--learning_rate=0.028", "--muon_lr=0.014"],
        ["--learning_rate=0.02899", "--muon_lr=0.01449"],
    ]


# -----------------------------------------------------------------------------
# chance.py


@pytest.fixture
def bank(monkeypatch, tmp_path):
    """A bank of made-up losses: the best rate is 0, and the seeds' deviation 0.01."""
    draw = random.Random(1)
    losses = {}
    for size in ("a", "b"):
        added = [draw.gauss(0, 0.01) for _ in range(chance.SEEDS)]
        losses[size] = {
            k: {
                seed: 2 + 0.004 * k * k + x
                for seed, x in enumerate(added)
                if seed < chance.OUTER or k in chance.CENTRAL
            }
            for k in chance.KS
        }
    path = tmp_path / "bank.json"
    path.write_text(json.dumps({"about": {}} | losses))
    monkeypatch.setattr(chance, "BANK", str(path))
    chance.sizes_of.cache_clear()
    chance.tau.cache_clear()
    yield
    chance.sizes_of.cache_clear()
    chance.tau.cache_clear()


def test_the_bank_simulates_the_method(bank):
    at = chance.sizes_of()["a"]
    case = chance.Case()
    assert at.curve[3.0] - at.curve[0.0] == pytest.approx(0.036, abs=1e-6)
    assert at.loss(case, 0, 0, 0) != at.loss(case, 0, 1, 0)
    seeds = [0, 1]
    moved = chance.Case(shift=1.0, bend=3.0, spread=2.0)
    assert chance.chosen(at, case, seeds, 1) == (0.0, False)
    assert chance.chosen(at, moved, seeds, 0) == (0.0, False)
    assert chance.chosen(at, moved, seeds, 1) == (1.0, False)
    rise = at.loss(moved, 3, 0, 1) - at.loss(moved, 1, 0, 1)
    assert rise == pytest.approx(3 * 0.016, abs=1e-6)
    spread = at.loss(moved, 1, 0, 1) - at.lowest
    assert spread == pytest.approx(2 * (at.loss(case, 0, 0, 0) - at.lowest))
    assert at.loss(case, 5, 0, 0) > at.loss(case, 3, 0, 0)
    assert chance.tau("a") == chance.tau("of no bank") == chance.tau("a", True) / 2 == 0.003
    seeds = range(chance.SEEDS)
    base, idea = ([at.loss(chance.Case(paired=True), 0, x, side) for x in seeds] for side in (0, 1))
    assert statistics.correlation(base, idea) == pytest.approx(0.7, abs=0.15)
    assert statistics.stdev(idea) == pytest.approx(statistics.stdev(base), rel=0.2)
    assert len(chance.simulated(at, 0.003, case, 8, 2)) == 2
    assert chance.simulated(at, 0.003, chance.Case(shift=9.0), 8, 2) == []  # at the edge


def times(*words, gains=chance.NOTHING, share=1.0, **case):
    """In how many of 400 simulated verdicts one of the words is said."""
    found = chance.verdicts(400, chance.Case(**case), 8)
    return sum(not chance.words_of(x, gains, share).isdisjoint(words) for x in found)


def test_how_often_a_word_is_said(bank, monkeypatch):
    both = 0.05, 0.05
    assert times("better", "worse") <= 4 and times("level") > 200
    assert times("better", gains=both) == times("worse", gains=(-0.05, -0.05)) == 400
    assert times("better", gains=(0.05, 0.0)) < 40
    assert times("better", gains=both, failing=1.0) == 400
    assert times("better", gains=both, failing=0.3) < 200
    small = 0.02, 0.02
    assert times("better", gains=small, share=0.05) < times("better", gains=small)
    monkeypatch.setattr(chance, "VERDICTS", 400)
    assert chance.quick_words_of(chance.Case())["look again"] > 340
    assert chance.upper(0, 100) == "0.00% (< 2.95%)"


def test_all_cases_are_printed(bank, monkeypatch, capsys):
    monkeypatch.setattr(chance, "VERDICTS", 2)
    chance.show()
    out = capsys.readouterr().out
    for case in ("0 | 1 | 1 | 0 | False", "1 | 3 | 1.5 | 0.05 | True"):
        assert out.count(f"\n| {case} |") == 3
    assert "16 seeds, intervals of 99.6% decide" in out


# -----------------------------------------------------------------------------
# gates, and a whole verdict


def low_rank(s, seen, v, drop):
    """The values have rank 1, so LASER subtracts large numbers that are nearly equal."""
    return ATTENTION["laser"](1e3 * s, seen, 1e2 * v[..., :1] + 1e-2 * v)


@parametrize(
    "definition, says",
    [
        (
            lambda s, seen, v: s.softmax(-1) @ v,
            "no later token seen: FAILS, logits change with later tokens by",
        ),
        (lambda s, seen, v: (s * seen).sqrt() @ v, "gradients finite: FAILS, not on"),
        (
            lambda s, seen, v: ATTENTION["laser"](s, seen, v) + 1e-7 * v.mean(-2, keepdim=True),
            "no later token seen: FAILS, logits change with later tokens by",
        ),
        (low_rank, ""),
    ],
)
def test_a_model_that_fails_a_gate(definition, says, monkeypatch):
    monkeypatch.setitem(ATTENTION, "own", definition)
    gpt = GPT(GPTConfig(**SIZES, attention="own", attn_dropout=0.0))
    found = [check(gpt) for check in (checks.later_tokens, checks.gradients)]
    assert says in " ".join(str(check) for check in found if not check.ok)
    assert bool(says) != all(check.ok for check in found)
    assert next(gpt.parameters()).dtype.itemsize == 4  # the model itself stays as it is
    new = GPT(GPTConfig(**SIZES, zero_init=True, position="rope"))  # attention adds nothing yet
    assert not checks.cached(new)
    monkeypatch.setattr(GPT, "new_cache", lambda self: None)  # each piece alone
    assert "with a cache its logits differ" in checks.cached(new)


def test_a_measurement_that_fails_says_why():
    assert costs.tried(lambda: 1 / 0) == {"why": "ZeroDivisionError: division by zero"}
    assert costs.tried(apart, os.abort) == {"why": "its process was killed, perhaps for its memory"}
    text = report.told({"why": "no"}, "{ratio:.1f}", "ratio")
    assert text == "not measured: no"
    assert report.told({"ratio": 1.0, "why": "but"}, "{ratio:.1f}", "ratio") == "1.0; but"


def test_an_idea_without_positions_gets_none(monkeypatch):
    monkeypatch.setitem(ATTENTION, "gated_delta", GatedDelta)
    settings = {"position": "rope", "qk_norm": "rmsnorm", "n_head": 2, "n_embd": 8}
    assert costs.fitting({"attention": "gated_delta"}, settings)["position"] == "none"
    assert costs.fitting({"attention": "laser"}, settings) == {}


TINY = (
    "dataset = {data!r}\ndevice = 'cpu'\nposition = 'rope'\noptimizer = 'muon'\n"
    "learning_rate = 0.1\nmuon_lr = 0.1\nbatch_size = 2\nblock_size = 32\nn_head = 2\n"
    "gradient_accumulation_steps = 1\n"
)


@slow
@parametrize(
    "name, flags", [("laser", ""), ("gated_delta", "--import=lab.ideas.gated_delta --quick")]
)
def test_from_an_idea_to_the_card(
    name, flags, run, quick, no_new_processes, data, tmp_path, monkeypatch
):
    """A second call makes no run again, and the card has a row."""
    monkeypatch.setitem(ATTENTION, "gated_delta", GatedDelta)  # the import happened already
    monkeypatch.setattr(
        "lab.experiments.recall.SCALES", {"small": {"steps": 2, "tokens": 128, "sequences": 4}}
    )
    monkeypatch.setattr("lab.verdict.judge.EVALUATED", 1000)
    monkeypatch.setattr("lab.verdict.report.VERDICTS", (str(tmp_path / "verdict-*" / "runs.json"),))
    monkeypatch.setattr("lab.verdict.report.FOLDER", str(tmp_path / "verdict-"))
    config = tmp_path / "tiny.py"
    config.write_text(TINY.format(data=data))
    args = [f"--attention={name}", *flags.split(), f"--config_file={config}", "--steps=10"]
    args += ["--seeds=2", "--sizes=1 x 8", "--second_text=", "--second_recipe="]
    args.append(f"--out_dir={tmp_path / 'runs'}")
    out = done(run("lab.verdict", *args), f"{name} against softmax: about", "VERDICT    ")
    (folder,) = tmp_path.glob(f"verdict-{name}*")
    files = set(os.listdir(folder))
    assert {"report.md", "losses.png", "runs.json"} <= files
    numbers = json.loads((folder / "runs.json").read_text())
    assert numbers["made"][0] > 8 and ("-value pairs" in out) != ("--quick" in flags)
    again = done(run("lab.verdict", *args))
    assert re.search(r"^  \d+ s: ", out, re.MULTILINE)  # runs
    assert not re.search(r"^  \d+ s: ", again, re.MULTILINE)
    assert again.split("VERDICT")[1].splitlines()[0] == out.split("VERDICT")[1].splitlines()[0]
    assert len([*tmp_path.glob("verdict-*")]) == 1
    card = done(run("lab.verdict", "--what=card"), "20 verdicts with seeds of the bank | softmax |")
    row = f"| {name} `--attention={name} --config_file={config} --steps=10 --seeds=2"
    assert (row in card) != ("--quick" in flags)
    refused(run("lab.verdict", *args, "--sizes=1x8"), "a size is layers x width")
    refused(run("lab.verdict", *args, "--both=--max_iters=9"), "--max_iters: a verdict sets it")


def test_a_leak_that_begins_late_ends_a_verdict(monkeypatch, tmp_path, capsys):
    """At 200 tokens. The report says so, and no run is made."""

    def leak(s, seen, v, drop):
        own = seen | (seen.sum(-1, keepdim=True) > 200)
        return ATTENTION["softmax"](s, own, v, drop)

    monkeypatch.setitem(ATTENTION, "leak", leak)
    monkeypatch.setattr(report, "FOLDER", str(tmp_path / "verdict-"))
    flags = {"attention": "leak", "out_dir": str(tmp_path), "second_text": "", "second_recipe": ""}
    for name, value in flags.items():
        monkeypatch.setattr(main, name, value)
    monkeypatch.setattr(main, "imported", list)
    with pytest.raises(SystemExit):
        main.Verdict(*main.arms()).check_new()
    out = capsys.readouterr().out
    assert "VERDICT    not judged: no later token seen: FAILS" in out
    (folder,) = tmp_path.glob("verdict-leak-*")
    assert "not judged" in (folder / "report.md").read_text()


def test_each_verdict_has_a_folder_of_its_own(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report, "FOLDER", str(tmp_path / "verdict-"))
    monkeypatch.setattr(report, "lines_of", lambda n: [])
    numbers = {
        "idea": "x", "base": "softmax", "flags": "--attention=x", "recipe": "c", "both": "",
        "data": "d", "steps": 1, "seeds": 8, "quick": False, "sizes": {}, "command": "",
        "origin": {"sources": {"a/b": "", "a" * 300: "", "внимание" * 40: ""}},
    }  # fmt: skip
    others = [{}, {"base": "b"}, {"both": "--position=rope"}, {"recipe": "e"}, {"data": "f"}]
    others += [{"flags": "--attention=y"}, {"steps": 2}, {"sizes": {"1 x 2": {}}}]
    others += [{"seeds": 16}, {"quick": True}]
    others += [{"idea": name} for name in ("внимание", "注意力", "a/b", "a" * 300)]
    for other in others:
        report.write(json.loads(json.dumps(numbers | other)))
    assert len(os.listdir(tmp_path)) == len(others)
