"""laser.py, long_short.py, beta_post.py and jacobians.py at a tiny scale; runs.py; results.py."""

import json
import math
import re

import pytest
import torch
from harness import assert_equal, done, parametrize, refusal, slow
from scipy import stats
from test_experiments import tables
from torch.testing import assert_close

from errors import UserError
from lab.experiments import beta_post, identity, jacobians, laser, long_short, results, runs
from lab.experiments.tables import rows_of
from text.dataset import read_meta

pytestmark = pytest.mark.usefixtures("quick")


CPU = laser.CPU
FLAGS = {
    "max_iters": 4,
    "lr_decay_iters": 4,
    "eval_interval": 2,
    "eval_iters": 1,
    "log_interval": 1,
    "warmup_iters": 1,
    "n_layer": 1,
    "n_embd": 24,
    "block_size": 16,
}
TINY = {  # {experiment: its smallest scale}
    laser: {
        "file": CPU,
        "flags": FLAGS | {"n_head": 2},
        "models": rows_of("""
1 x 8, adamw: --n_embd=8
1 x 16, adamw: --n_embd=16
1 x 8, lamb: --n_embd=8 --import=lab.ideas.lamb --optimizer=lamb
"""),
        "rates": {
            "1 x 8, adamw": [1e-3, 1e-2],
            "1 x 16, adamw": [1e-3, 1e-2],
            "1 x 8, lamb": [1e-2],
        },
    },
    long_short: {
        "file": CPU,
        "flags": FLAGS,
        "two": {"n_head": 2, "head_dim": 4, "n_hidden": 128},
        "models": ("long", "LS", "QK-norm"),
        "lengths": {16: 2, 32: 1},
        "border": (32, [1e-2, 1e18]),
        "bfloat16": [6e-3, 1e-2],
    },
    beta_post: (CPU, FLAGS, 0.1),
}


@pytest.fixture
def tiny(data, tmp_path, capsys, monkeypatch):
    """tiny(experiment, flag=...) runs it at its TINY scale: (its output, its JSON file)."""

    def tiny(script, **flags):
        out = tmp_path / "x.json"
        picture = tmp_path / "x.png"
        scale = TINY[script]
        if script is not beta_post:  # whose data set is a flag
            scale = scale | {"flags": scale["flags"] | {"dataset": data, "device": "cpu"}}
        monkeypatch.setitem(script.SCALES, "tiny", scale)
        places = {"out_dir": str(tmp_path / "r"), "out": str(out), "picture": str(picture)}
        flags |= places | {"scale": "tiny", "seeds": 2, "jobs": 2}
        for name, value in flags.items():
            monkeypatch.setattr(script, name, value)
        script.main()
        printed = capsys.readouterr().out
        stored = out.read_text()
        assert picture.read_bytes()[1:4] == b"PNG"
        script.main()  # makes no run again
        assert tables(capsys.readouterr().out) == tables(printed)
        assert out.read_text() == stored
        return printed, json.loads(stored)

    return tiny


@slow
def test_laser(tiny):
    """Equal rates for both, more seeds at the best one, one power law for each seed."""
    out, found = tiny(laser)
    (rows,) = tables(out)
    assert len(rows) == 3
    vals = {name: run["val"] for name, run in found["runs"].items()}
    for size, _, recipe, _, softmax_rate, _, laser_rate, against, *_ in rows:
        rates = ["0.01"] if recipe == "lamb" else ["0.001", "0.01"]
        losses = []
        for attention, best in (("laser", laser_rate), ("softmax", softmax_rate)):
            name = f"tiny, {size}, {attention}, {recipe}, {{}}, seed {{}}"
            first = {rate: vals[name.format(rate, 1)] for rate in rates}
            assert best == min(first, key=first.get)
            losses.append([vals[name.format(best, seed)] for seed in (2, 3)])
        assert against.strip("*") == str(results.difference(*losses))
    assert len({*vals.values()}) == len(vals)  # no two runs are the same


def test_the_statistics_of_laser():
    n = [1000, 5000, 70000]
    law = laser.power_law(n, [3 * x**-0.08 for x in n])
    assert law == pytest.approx((3, -0.08))
    # a law of LASER that reaches every loss with 3/4 of the parameters
    share = laser.saved_share(1.5, (3.0, -0.1), (3.0 * 0.75**0.1, -0.1))
    assert share == pytest.approx(0.25)


@slow
def test_long_short(tiny):
    """All models and lengths; scores and times are measured; at a senseless rate all runs break."""
    out, found = tiny(long_short)
    _, border, _ = tables(out)
    models = {"6": TINY[long_short]["models"], "2": long_short.COMPARED}
    keys = [[n, heads, model] for heads in models for n in ("16", "32") for model in models[heads]]
    for n, heads, model in keys:
        seeds = [found["runs"][f"tiny, {n}, {heads}, {model}, {seed}"] for seed in (1, 2)]
        assert ["max_logit" in run["curves"] for run in seeds] == [True, False]
        assert all(run["max_logit"] > 0 for run in seeds)
    broken = {row[0]: row[4] for row in border}
    assert broken == {"0.006": "0 of 2", "0.01": "0 of 2", "1e+18": "2 of 2"}


@slow
def test_beta_post(tiny, data, tmp_path):
    """The models see the first tenth of the training split, and all of the validation split."""
    out, found = tiny(beta_post, dataset=data, lengths="32", repeats=1)
    _, passes = tables(out)
    vals = [run["val"] for run in found["runs"].values()]
    assert len({*vals}) == len(vals) == 2 * 2 * 2  # no two runs are the same
    assert [row[4] for row in passes[:3]] == ["1.00x"] * 3
    (meta,) = (tmp_path / "r").glob("*/meta.json")
    part = read_meta(str(meta.parent))["files"]
    whole = read_meta(data)["files"]
    assert part["train.bin"]["tokens"] == whole["train.bin"]["tokens"] // 10
    assert part["val.bin"] == whole["val.bin"]


@parametrize("attention", ["softmax", "beta"])
def test_passes_by_hand(attention):
    """The closed forms of the gradients, and the fast forms, are the definition's."""
    *x, dy = (torch.randn(2, 3, 40, 8).double().requires_grad_() for _ in range(4))
    want = beta_post.FORMS[f"{attention}, definition"](*x)
    gradients = torch.autograd.grad(want, x, dy)
    for form in ("by hand", "fast form"):
        y = beta_post.FORMS[f"{attention}, {form}"](*x)
        assert_equal(y, want, 1e-13)
        assert_equal(torch.autograd.grad(y, x, dy), gradients, 1e-12)


def test_jacobians(run, tmp_path):
    """The paper's two values, 5 apart: (e^5 - 1) / (1 + p (e^5 - 1)) against 5, times p (1 - p)."""
    out = done(run("lab.experiments.jacobians", f"--picture={tmp_path / 'x.png'}"))
    (exact,) = tables(out)
    assert [row[0] for row in exact] == ["softmax", "LASER", "beta"]
    assert max(float(row[1]) for row in exact) < 1e-13
    p = torch.tensor([1e-5, 0.1, 0.9, 0.999], dtype=torch.float64)
    softmax, laser = (jacobians.two_values(name, p.logit())[1] for name in ("softmax", "LASER"))
    grown = math.expm1(5)
    assert_close(softmax, 5 * p * (1 - p))
    assert_close(laser / softmax, grown / (1 + p * grown) / 5)
    low, high = re.search(r"is between (\S+) and ([\d.]+)", out).groups()
    assert 0 <= float(low) < float(high) <= math.log(50)


# -----------------------------------------------------------------------------
# runs.py and results.py


def test_a_diverged_run_is_a_result_only_where_that_is_asked(data, tmp_path, capfd):
    flags = "--device=cpu --max_iters=5 --eval_iters=1 --log_interval=1 --n_layer=1 --block_size=16"
    command = [CPU, f"--dataset={data}", *flags.split(), "--learning_rate=1e18"]
    with refusal("this run failed", UserError):
        runs.finished("a", command, str(tmp_path / "a"))
    assert "a smaller --learning_rate" in capfd.readouterr().err
    log = runs.finished("a", command, str(tmp_path / "a"), may_diverge=True)
    step = log[-2]["iter"] + 1
    assert log[-1] == {"iter": step, "diverged": True}
    stored = str(tmp_path / "x.json")
    result = runs.record(stored, {"a": command}, str(tmp_path), jobs=1, make=True)["a"]
    assert result["diverged"] == step
    assert result["val"] == result["best"] == results.short(log[1]["val_loss"])


def test_a_changed_command_or_config_is_run_again_and_shown_as_it_is(data, tmp_path, monkeypatch):
    config = tmp_path / "c.py"
    ones = (
        "max_iters = eval_iters = n_layer = n_head = batch_size = gradient_accumulation_steps = 1"
    )
    config.write_text(f"dataset={data!r}; device='cpu'; block_size = n_embd = 8\n{ones}")

    def val(make, *flags):
        commands = {"a": [str(config), *flags]}
        stored = str(tmp_path / "x.json")
        return runs.record(stored, commands, str(tmp_path / "r"), 1, make)["a"]["val"]

    with refusal("no results of 'a'", UserError):
        val(False)
    first = val(True)
    assert first == val(True) == val(False)
    second = val(True, "--learning_rate=1.0", "--warmup_iters=0")
    assert second != first
    monkeypatch.setattr(identity, "SEEN", {})
    config.write_text(config.read_text().replace("n_embd = 8", "n_embd = 4"))
    assert val(False) == second
    assert val(True) not in (first, second)


def test_what_is_stored_of_a_log():
    """Curves of 20 points: means of numbers, the largest of layers.

    A spike is a loss that is more than 0.2 above each of the ten before it.
    """
    losses = [9.0, *[2.0] * 36, 2.5, 2.6, 1.0]
    log = [{"iter": i, "loss": loss, "max_logit": [loss, 1.0]} for i, loss in enumerate(losses)]
    log += [{"iter": 9, "val_loss": loss, "train_loss": loss - 1.5} for loss in (3.0, 2.0, 2.5)]
    found = runs.result_of(log, ("loss", "max_logit"), first_seed=True)
    steps = [*range(1, 40, 2)]
    means = {"iter": steps, "loss": [5.5, *[2.0] * 17, 2.25, 1.8]}
    largest = {"iter": steps, "max_logit": [9.0, *[2.0] * 17, 2.5, 2.6]}
    assert found.pop("curves") == {"loss": means, "max_logit": largest}
    assert found == {"val": 2.5, "best": 2.0, "train": 1.0, "spikes": 1, "max_logit": 9.0}


def test_a_difference_is_that_of_a_paired_t_test():
    x, y = [2.0, 2.1, 2.3], [2.1, 2.21, 2.45]
    test = stats.ttest_rel(x, y)
    found = results.difference(x, y)
    low, high = test.confidence_interval()
    assert str(found) == f"-0.120 ({low:+.3f} to {high:+.3f})"
    assert found.p == pytest.approx(test.pvalue)
    shown = (4.303 + 1.061) * test._standard_error
    assert found.shown(0.95) == pytest.approx(shown, rel=1e-3)
    assert results.difference([2.0], [1.5]) == "+0.500, one seed"
    assert str(results.difference([math.inf, 1.0], [2.0, 2.0])) == "diverged"


@parametrize("ps, bold", [([0.04, 0.01, 0.02], 3), ([0.02, 0.02, 0.02], 0), ([0.03, 0.01, 0.9], 1)])
def test_what_is_bold_in_a_table(ps, bold, capsys):
    """By Holm (1979): the lowest p is compared with 0.05 / 3, the next with 0.05 / 2."""
    results.show_table("x", [[results.Interval(stats.norm.isf(p / 2), 1, 1e9)] for p in ps])
    assert capsys.readouterr().out.count("**") == 2 * bold


def test_sooner():
    """On a straight line between two evaluations; the median of the seeds; who never gets there."""

    def run(*losses):
        curve = {"iter": [0, 50, 100], "val_loss": [*losses]}
        return {"val": losses[-1], "curves": {"val_loss": curve}}

    base = [run(4.0, 3.0, 2.5)] * 3
    fast = run(4.0, 2.0, 1.0)
    slow = run(4.0, 3.0, 2.0)
    never = run(4.0, 3.5, 2.6)
    assert runs.sooner(base, base) == ""
    assert runs.sooner([fast] * 3, base) == "0.38"
    assert runs.sooner([fast, never, slow], base) == "0.75, 1 of 3 never"
    assert runs.sooner([never] * 3, base) == "3 of 3 never"
