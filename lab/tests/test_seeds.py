"""laser.py, long_short.py, beta_post.py and jacobians.py at a tiny scale; and runs.py."""

import json
import math
import os

import pytest
import torch
from scipy import stats

from errors import UserError
from lab.experiments import beta_post, laser, long_short, results, runs

pytestmark = pytest.mark.usefixtures("quick")


def tables(out: str) -> list[list[list[str]]]:
    """The tables in what a script printed: rows of cells, without the heads."""
    blocks = [block.splitlines() for block in out.split("\n\n") if "|---" in block]
    return [[row.strip("| ").split(" | ") for row in block if row.startswith("| ")][1:] for block in blocks]


CPU, ONE = laser.CPU, {"max_iters": 4, "lr_decay_iters": 4, "eval_iters": 1, "n_layer": 1}
LOGGED = ONE | {"log_interval": 1, "warmup_iters": 1}
TINY = {  # {experiment: its smallest scale}
    laser: {
        "file": CPU,
        "flags": LOGGED | {"block_size": 16, "batch_size": 2, "eval_interval": 4, "n_head": 2},
        "sizes": {"1 x 8": ({"n_embd": 8}, [1e-3, 1e-2]), "1 x 16": ({"n_embd": 16}, [1e-3, 1e-2])},
        "more": {"lamb": ("1 x 8", {"optimizer": "lamb"}, [1e-2])},
    },
    long_short: {
        "file": CPU,
        "flags": LOGGED | {"eval_interval": 2, "log_logits": True, "n_embd": 24},
        "two": {"n_head": 2, "head_dim": 4, "n_hidden": 128},
        "kinds": ("long", "LS", "short", "QK-norm"),
        "lengths": {16: 2, 32: 1},
        "border": (32, [1e-2, 1e18]),
        "bfloat16": ([32], [1e-2]),
    },
    beta_post: (CPU, ONE | {"warmup_iters": 1, "n_embd": 24, "eval_interval": 2, "block_size": 16}, 0.1),
}


@pytest.fixture
def tiny(data, tmp_path, capsys, monkeypatch):
    """f(experiment, flag=...) runs it at its TINY scale: (its output, its JSON file); the picture was written."""
    here = {"out": str(tmp_path / "x.json"), "out_dir": str(tmp_path / "r"), "picture": str(tmp_path / "x.png")}

    def f(script, **flags: object) -> tuple[str, dict]:
        monkeypatch.setitem(script.SCALES, "tiny", TINY[script])
        for name, value in (here | {"scale": "tiny", "seeds": 2, "jobs": 2} | flags).items():
            monkeypatch.setattr(script, name, value)
        script.main()
        picture = tmp_path / "x.png"
        assert picture.read_bytes()[1:4] == b"PNG"
        picture.unlink()
        return capsys.readouterr().out, json.loads((tmp_path / "x.json").read_text())

    return f


@pytest.mark.slow
def test_laser(tiny, data, tmp_path):
    """Equal rates for both, more seeds at the best one, one power law for each seed; nothing is trained twice."""
    small = f"--dataset={data} --device=cpu"
    out, found = tiny(laser, extra=small)
    for size in ("1 x 8", "1 x 16"):
        for attention in ("softmax", "laser"):
            mine = [name for name in found["runs"] if name.startswith(f"tiny, {size}, {attention}, adamw, ")]
            assert {name.split(", ")[4] for name in mine if name.endswith("seed 1")} == {"0.001", "0.01"}
            assert sorted(name[-1] for name in mine if not name.endswith("seed 1")) == ["2", "3"]
    rows = tables(out)[0]
    for row in rows:
        for attention, at in (("softmax", 4), ("laser", 6)):
            first = {
                name.split(", ")[4]: r["val"]
                for name, r in found["runs"].items()
                if name.startswith(f"tiny, {row[0]}, {attention}, {row[2]}, ") and name.endswith("seed 1")
            }
            assert row[at] == min(first, key=first.get)  # the best rate
    assert [row[:3:2] for row in rows] == [["1 x 8", "adamw"], ["1 x 16", "adamw"], ["1 x 8", "lamb"]]
    for row in rows:
        of_softmax, of_laser = (
            [r["val"] for name, r in found["runs"].items()
             if name.startswith(f"tiny, {row[0]}, {a}, {row[2]}, {float(rate):g},") and not name.endswith("seed 1")]
            for a, rate in (("softmax", row[4]), ("laser", row[6]))
        )  # fmt: skip
        assert len(of_softmax) == 2 and row[7] == results.difference(of_laser, of_softmax)
    assert out.count("b = ") == 2 and "fewer parameters with LASER" in out
    again, same = tiny(laser, extra=small)
    assert same == found and "seed 1" not in again and tables(again) == tables(out)
    with pytest.raises(UserError, match="has no results of 'tiny, 1 x 8, softmax, adamw, 0.001, seed 1'"):
        tiny(laser, what="show", out=str(tmp_path / "no.json"))


def test_the_statistics_of_laser():
    a, b = laser.power_law([1000, 5000, 70000], [3 * n**-0.08 for n in (1000, 5000, 70000)])
    assert (a, b) == (pytest.approx(3), pytest.approx(-0.08))
    # a law of LASER that reaches every loss with 3/4 of the parameters
    assert laser.saved_share(1.5, (3.0, -0.1), (3.0 * 0.75**0.1, -0.1)) == pytest.approx(0.25)
    pair = ({"curves": {"norm": {"norm": norms}}} for norms in ([1.0, 2.0], [3.0, 3.0, 9.0]))
    assert laser.norm_ratio(*pair) == [3.0, 1.5]


@pytest.mark.slow
def test_long_short(tiny, data):
    """All kinds and lengths; scores and times are measured; at a senseless rate all runs break."""
    small = f"--dataset={data} --device=cpu"
    out, found = tiny(long_short, extra=small)
    lengths, border, bfloat16 = tables(out)
    kinds = ["long", "LS", "short", "QK-norm"]
    assert [row[:3] for row in lengths] == [[n, h, kind] for h in "62" for n in ("16", "32") for kind in kinds]
    for n, heads, kind, val, against, _, perplexity, score, ms, ratio in lengths:
        of = [r for name, r in found["runs"].items() if name.startswith(f"tiny, {n}, {heads}, {kind}, ")]
        assert len(of) == 2 and val.startswith(f"{sum(r['val'] for r in of) / len(of):.3f}")
        assert (against == "") == (kind == "long")
        assert float(perplexity) == pytest.approx(sum(math.exp(r["val"]) for r in of) / len(of), abs=0.01)
        assert float(score) >= 0 and float(ms) >= 0 and (float(ratio[:-1]) == 1 or kind != "long")
        assert float(score) == pytest.approx(sum(r["max_logit"] for r in of) / len(of), abs=0.06)
        assert [len(r["curves"].get("max_logit", {}).get("iter", [])) for r in of] == [4, 0]  # of the first seed
        assert ("window" in long_short.flags(int(n), int(heads), kind)) == (kind in ("LS", "short"))
    assert [[row[0], row[1], row[4]] for row in border] == [
        [rate, kind, broken]
        for rate, broken in (("0.006", "0 of 2"), ("0.01", "0 of 2"), ("1e+18", "2 of 2"))
        for kind in ("long", "LS")
    ]
    more = [", bfloat16", ", bfloat16 weights"]
    want = [["32", rate, kind + x] for rate in ("0.006", "0.01") for x in ["", *more] for kind in ("long", "LS")]
    assert [row[:3] for row in bfloat16] == want
    losses = {found["runs"][f"tiny, 32, 0.006, long{x}, 1"]["val"] for x in more} | {
        found["runs"]["tiny, 32, 6, long, 1"]["val"]
    }
    assert len(losses) == 3  # neither bfloat16 computes what the other or float32 does
    again, same = tiny(long_short, extra=small)
    assert same == found and tables(again) == [lengths, border, bfloat16] and "seed" not in again


@pytest.mark.slow
def test_beta_post(tiny, data, tmp_path):
    """The models see the first tenth of the training split, and all of the validation split."""
    out, found = tiny(beta_post, dataset=data, lengths="32", repeats=1)
    rows, passes = tables(out)
    assert [row[:2] for row in rows] == [[a, d] for d in ("0.2", "0") for a in ("softmax", "beta")]
    assert rows[0][7] == "1.6204, 0.7140" and len(found["runs"]) == 8
    assert [row[1] for row in passes] == [*beta_post.FORMS] and {row[4] for row in passes[:3]} == {"1.00x"}
    for row in rows:
        of = [r for name, r in found["runs"].items() if name.startswith(f"tiny, {row[0]}, dropout {row[1]}, ")]
        for cell, key in zip(row[2:5], ("best", "val", "train"), strict=True):
            assert cell == results.spread([r[key] for r in of])
    (text,) = (folder for folder in (tmp_path / "r").iterdir() if (folder / "meta.json").exists())
    whole, part = (json.load(open(os.path.join(d, "meta.json")))["files"] for d in (data, text))
    assert part["train.bin"]["tokens"] == whole["train.bin"]["tokens"] // 10
    assert part["val.bin"] == whole["val.bin"]


@pytest.mark.parametrize("attention", ["softmax", "beta"])
def test_passes_by_hand(attention):
    """The closed forms of the gradients, and the fast forms, are the definition's; it holds more numbers."""
    torch.manual_seed(0)
    *x, dy = (torch.randn(2, 3, 40, 8, dtype=torch.float64, requires_grad=grad) for grad in (True, True, True, False))
    want = beta_post.FORMS[f"{attention}, definition"](*x)
    for form in ("by hand", "fast form"):
        y = beta_post.FORMS[f"{attention}, {form}"](*x)
        torch.testing.assert_close(y, want, rtol=0, atol=1e-13)
        for mine, theirs in zip(*(torch.autograd.grad(f, x, dy, retain_graph=True) for f in (y, want)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_jacobians(run, tmp_path):
    """The paper's two values, 5 apart: (e^5 - 1) / (1 + p (e^5 - 1)) against 5, times p (1 - p)."""
    code, out, err = run("lab.experiments.jacobians", f"--picture={tmp_path / 'x.png'}")
    assert code == 0 and (tmp_path / "x.png").exists(), err
    exact, two = tables(out)
    assert [row[0] for row in exact] == ["softmax", "LASER", "beta"] and all(float(row[1]) < 1e-13 for row in exact)
    for p, *found in ([float(number) for number in row] for row in two):
        softmax, laser = 5 * p * (1 - p), math.expm1(5) / (1 + p * math.expm1(5)) * p * (1 - p)
        assert found == pytest.approx([softmax, laser, laser / softmax], rel=1e-3, abs=0.005)
    assert [row[3] for row in two if row[0] in ("0.001", "0.5", "0.999")] == ["25.69", "0.39", "0.20"]
    low, high = (float(x) for x in out.split("is between ")[1].split(";")[0].split(" and "))
    assert 0 <= low < high <= math.log(50)


# -----------------------------------------------------------------------------


def test_a_diverged_run_is_a_result_only_where_that_is_asked(data, tmp_path, capfd):
    command = ["config/train_shakespeare_char_cpu.py", f"--dataset={data}", "--device=cpu", "--max_iters=5"]
    command += ["--eval_iters=1", "--log_interval=1", "--n_layer=1", "--block_size=16", "--learning_rate=1e18"]
    with pytest.raises(UserError, match="this run failed"):
        runs.finished("a", command, str(tmp_path / "a"))
    assert "a smaller --learning_rate" in capfd.readouterr().err
    log = runs.finished("a", command, str(tmp_path / "a"), may_diverge=True)
    assert log[-1] == {"iter": log[-2]["iter"] + 1, "diverged": True}
    (result,) = runs.record(str(tmp_path / "x.json"), {"a": command}, str(tmp_path), 1, True).values()
    assert result["diverged"] == log[-1]["iter"] and result["val"] == result["best"] == results.short(
        log[0]["val_loss"]
    )


def test_a_changed_command_or_config_is_run_again_and_shown_as_it_is(data, tmp_path):
    config, path = tmp_path / "c.py", str(tmp_path / "x.json")
    text = f"dataset = {data!r}\ndevice = 'cpu'\nmax_iters = 1\neval_iters = 1\nn_layer = 1\nblock_size = 8\n"
    text += "n_head = 1\nn_embd = 8\nbatch_size = 1\ngradient_accumulation_steps = 1\n"
    config.write_text(text)

    def val(make: bool, *flags: str) -> float:
        return runs.record(path, {"a": [str(config), *flags]}, str(tmp_path / "r"), 1, make)["a"]["val"]

    with pytest.raises(UserError, match="no results of 'a'"):
        val(False)
    first = val(True)
    assert first == val(True) == val(False)
    second = val(True, "--learning_rate=1.0", "--warmup_iters=0")
    assert second != first
    config.write_text(text.replace("n_embd = 8", "n_embd = 4"))
    assert val(False) == second and val(True) not in (first, second)
    (tmp_path / "x.json").write_text('{"runs": []}')
    with pytest.raises(UserError, match="is damaged"):
        val(True)


def test_a_curve_is_means_of_numbers_and_the_largest_of_layers():
    log = [{"iter": i, "loss": float(i), "max_logit": [float(i), 1.0]} for i in range(10)] + [{"iter": 3, "val": 1}]
    assert runs.curve(log, "loss", most=5) == {"iter": [1, 3, 5, 7, 9], "loss": [0.5, 2.5, 4.5, 6.5, 8.5]}
    assert runs.curve(log, "max_logit", most=4)["max_logit"] == [2.0, 5.0, 8.0, 9.0]


def test_a_difference_is_bold_where_a_paired_t_test_says_so():
    for x, y in (([2.0, 2.1, 2.3], [2.1, 2.15, 2.45]), ([2.0, 2.1, 2.3], [2.1, 2.0, 2.5])):
        test = stats.ttest_rel(x, y)
        low, high = test.confidence_interval(0.95)
        assert results.difference(x, y).strip("*") == f"{sum(x) / 3 - sum(y) / 3:+.3f} ({low:+.3f} to {high:+.3f})"
        assert results.difference(x, y).startswith("**") == (test.pvalue < 0.05)
    assert results.difference([2.0], [1.5]) == "+0.500, one seed" and results.difference([], []) == ""


def test_sooner():
    """On a straight line between two evaluations; the median of the seeds; a run that never gets there is counted."""
    of = lambda *losses: {"val": losses[-1], "curves": {"val_loss": {"iter": [0, 50, 100], "val_loss": [*losses]}}}  # noqa: E731
    base = [of(4.0, 3.0, 2.5)] * 3
    assert runs.sooner([of(4.0, 2.0, 1.0)] * 3, base) == "0.38" and runs.sooner(base, base) == ""
    assert runs.sooner([of(4.0, 2.0, 1.0), of(4.0, 3.5, 2.6), of(4.0, 3.0, 2.0)], base) == "0.75, 1 of 3 never"
