"""Experiments at a tiny scale, by their own commands."""

import json
import os
import statistics
from unittest import mock

import pytest
import torch
from harness import ROOT, write
from reference import ONE_QUERY
from torch.nn import functional as F

from attention.scores import visible
from lab.experiments import attention_probabilities, endless, lecture, local_dependencies, tables
from model import GPT, GPTConfig
from text.dataset import Tokens
from text.tokenizers import ByteTokenizer


@pytest.fixture
def small(data, tmp_path):
    """The path of a config file for runs of two steps."""
    path = tmp_path / "small.py"
    path.write_text(
        f"dataset = {data!r}\nblock_size = 32\nn_layer = 1\nn_head = 4\nn_embd = 32\nmax_iters = 2\n"
        "batch_size = 4\ngradient_accumulation_steps = 1\neval_iters = 1\ndevice = 'cpu'\nlearning_rate = 1e-3\n"
        "beta2 = 0.99\nmin_lr = 0.0\nwarmup_iters = 1\n"
    )
    return str(path)


def rows(out: str) -> list[list[str]]:
    """The cells of all tables in what a script printed."""
    table = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    return [row for row in table if "flags" not in row]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_compare(run, small, tmp_path):
    """Rows by name, with the row that they are compared with; nothing is made twice; what was wrong is said."""
    flags = (f"--config_file={small}", f"--out={tmp_path / 'x.json'}", f"--out_dir={tmp_path / 'runs'}", "--seeds=2")
    flags += ("--repeats=2", "--jobs=2")
    code, out, err = run("lab.experiments.compare", *flags, "--table=choices", "--only=swiglu;muon")
    assert code == 0, err
    gpt2, swiglu, muon = rows(out)
    assert [gpt2[0], swiglu[0], muon[0]] == ["GPT-2", "swiglu", "muon"] and swiglu[1] == "`--mlp=swiglu`"
    losses = {name: run["val"] for name, run in json.load(open(tmp_path / "x.json"))["runs"].items()}
    changes = [losses[f"choices, muon, seed {seed}"] - losses[f"choices, GPT-2, seed {seed}"] for seed in (1, 2)]
    assert muon[3].strip("*").startswith(f"{sum(changes) / 2:+.3f} (")
    assert gpt2[3] == "" and all(float(row[4]) > 0 and row[5][-1] == "x" for row in (swiglu, muon))
    again = run("lab.experiments.compare", *flags, "--table=choices", "--only=swiglu", "--what=train,show")[1]
    assert "seed 1" not in again and rows(again) == [gpt2, swiglu]
    more = run("lab.experiments.compare", *flags, "--table=laser", "--only=LASER + QK-norm", "--what=train,show")[1]
    assert [row[0] for row in rows(more)] == ["softmax + QK-norm", "LASER + QK-norm"]
    extra = run("lab.experiments.compare", *flags, "--only=beta", "--what=train,show", "--extra=--max_iters=1")[1]
    assert extra.count("--max_iters=1, seed 1") == 2 and [row[0] for row in rows(extra)] == ["softmax", "beta"]
    for wrong, says in (("--only=swiglo", "'swiglo' is not one of softmax; LASER"),
                        ("--what=trian", "not one of train, time"), ("--jobs=0", "at least 1"),
                        ("--extra=--block_size=9999", "this run failed"),
                        (f"--config_file={ROOT}/README.md", "is no config file")):  # fmt: skip
        code, _, err = run("lab.experiments.compare", *flags, wrong)
        assert code == 2 and says in err
    (tmp_path / "x.json").write_text("{")
    code, _, err = run("lab.experiments.compare", *flags)
    assert code == 2 and "is damaged" in err


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_compare_in_equal_time(run, data, tmp_path):
    """Runs of equal steps and of equal time, each once."""
    few = f"--dataset={data} --max_iters=2 --lr_decay_iters=2 --warmup_iters=1 --eval_iters=1 --n_layer=1 --device=cpu"
    flags = [f"--extra={few}", f"--out={tmp_path / 'x.json'}", f"--out_dir={tmp_path / 'runs'}", "--seeds=1"]
    flags += ["--repeats=1", "--table=256", "--only=LS, conv (rope)"]
    code, out, err = run("lab.experiments.compare", *flags)
    assert code == 0, err
    results = json.loads((tmp_path / "x.json").read_text())
    ratios = {row.removeprefix("256, "): ratio for row, (_, ratio) in results["times"].items()}
    assert [*ratios] == ["softmax (rope)", "LS, conv (rope)"] and ratios["softmax (rope)"] == 1
    steps = [round(1500 / ratio) for ratio in ratios.values()]
    assert [int(row[6]) for row in rows(out)] == steps
    names = {f"256, {row}, {n} steps" for row, equal in zip(ratios, steps, strict=True) for n in (1500, equal)}
    assert {name.split(" steps")[0] + " steps" for name in results["runs"]} == names
    again = run("lab.experiments.compare", *flags, "--what=train,equal,show")[1]
    assert "seed 1" not in again and rows(again) == rows(out)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_examples(run, data, tmp_path):
    """A row's rate is the best of the tuning seeds, a run that diverges is the worst, and nothing is made twice."""
    few = f"--dataset={data} --steps=3 --n_layer=1 --n_embd=16 --eval_batches=1 --device=cpu"
    flags = [f"--out={tmp_path / 'x.json'}", f"--extra={few}", "--seeds=2", "--table=bert"]
    bert, rates = tables.TABLES["bert"], (1e-3, 1e-2, 1e30)
    with mock.patch.object(bert, "tune", rates):
        code, out, err = run("lab.experiments.compare", *flags)
        again = run("lab.experiments.compare", *flags)[1]
    results, compared = json.loads((tmp_path / "x.json").read_text())["runs"], {}
    assert code == 0 and len(results) == 2 * 2 * 3 + 2 * 2 and rows(again) == rows(out) and "seed 1" not in again, err
    for row, cells in zip(bert.rows, rows(out), strict=True):
        name = f"bert, {row}, rate {{:g}}, {few}, seed {{}}"
        tried = {rate: [results[name.format(rate, n)] for n in (101, 102)] for rate in rates}
        error = {rate: sum(r["error of hidden tokens"] if "loss" in r else 9 for r in x) for rate, x in tried.items()}
        best = min(error, key=error.get)
        compared[row] = [results[name.format(best, n)]["val"] for n in (1, 2)]
        assert error[1e30] == 18 and f"--learning_rate={best:g}" in cells[1]
        assert cells[2].startswith(f"{statistics.mean(compared[row]):.3f} (")
    code, _, err = run("lab.experiments.compare", *flags, "--extra=--heads=SSSSSSSS")
    assert code == 2 and "heads='SSSSSSSS' is too long" in err


@pytest.mark.usefixtures("quick")
def test_lasers_precision(run, small, tmp_path):
    """That ours is as exact as softmax where rounding exp(v) is not; and that it stays so for large values."""
    flags = (f"--config_file={small}", "--extra=--n_layer=2 --max_iters=3", f"--out_dir={tmp_path / 'run'}")
    code, out, err = run("lab.experiments.laser_precision", *flags, "--batches=2", "--batch_size=4", "--device=cpu")
    assert code == 0 and "4 q, k and v of shape (4, 4, 32, 8)" in out, err
    found = [row for row in rows(out) if row[0].startswith(("LASER", "softmax"))]
    error = {name: [float(e) for e in numbers] for name, *numbers in found[:4]}
    large = {name: [float(e) for e in numbers] for name, *numbers in found[4:]}
    assert error["LASER, ours"][0] < 1.5 * error["softmax"][0] < 0.005 < error["LASER, vanilla"][0]
    assert max(large["LASER, ours"]) < 0.005 and len(large) == 4

    flags = (f"--out_dir={tmp_path / 'run'}", "--device=cpu")
    code, out, err = run("lab.experiments.attention_probabilities", *flags, f"--out={tmp_path / 'p.json'}")
    assert rows(out)[-1][:4] == [
        "laser, 32 tokens",
        "1",
        *[row[1] for row in rows(out) if row[0] in ("all", "0")][::-1],
    ]
    assert code == 0 and "laser, 10 windows of 32 tokens" in out, err
    assert [row[2] for row in rows(out) if row[0] in ("0", "1", "all")] == ["0.0%"] * 3


def test_attention_probabilities_and_jacobians():
    """As autograd has the Jacobians, and as counted one by one."""
    q, k, v = (torch.randn(1, 2, 20, 4, dtype=torch.float64) * size for size in (12, 1, 3))
    found = attention_probabilities.measures(q, k, v, window=9)
    for h, i in ((0, 0), (1, 3), (0, 19)):
        s, values = (x[0, h, max(0, i - 9) : i + 1] for x in (k, v))
        s = s @ q[0, h, i] / 2
        p, want = s.softmax(-1), []
        for core in ("softmax", "laser"):
            attend = lambda s, f=ONE_QUERY[core], v=values: f(s, v, torch.ones(()))  # noqa: E731
            want.append(torch.autograd.functional.jacobian(attend, s).norm())
        want = [len(s), (p < 1e-3).sum(), (p < 1e-7).sum(), *want, 1]
        torch.testing.assert_close(found[0, h, i], torch.tensor(want, dtype=torch.float64))
    assert found[..., 1].sum() > found[..., 2].sum() > 0


def test_training_on_a_gpu(run, tmp_path):
    """Other ways to compute the loss give the same loss."""
    same = "plain,no wait,flash,triton,logits in bfloat16,chunks"
    args = ("--size=tiny", "--device=cpu", "--dtype=float32", "--no-compile", "--steps=6")
    args += (f"--out={tmp_path / 't.json'}",)
    code, out, err = run("lab.experiments.gpu_training", *args, f"--only={same},beta")
    assert code == 0, err
    results = json.loads((tmp_path / "t.json").read_text())["rows"]
    losses = [results[name]["loss"] for name in same.split(",")]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5) and 3 < losses[0] < 5
    assert abs(results["beta"]["loss"] - losses[0]) > 1e-6 and results["plain"]["tokens_per_s"] > 0


@pytest.mark.parametrize("window", [None, 50])
def test_fits_have_the_gradients_of_autograd(window):
    task = local_dependencies
    p, (q, k) = task.target(300).double(), torch.randn(2, 300, 5, dtype=torch.float64)
    q.requires_grad_(), k.requires_grad_()
    distance = torch.arange(300)[:, None] - torch.arange(300)
    assert not p[(distance < 1) | (distance > 50)].any() and 20 < p[50:].count_nonzero(-1).double().mean() < 30
    assert p.sum(-1)[p.any(-1)].allclose(torch.ones((), dtype=torch.float64))
    a = (q @ k.T).masked_fill(~visible(q, k, window), -torch.inf).softmax(-1)
    missed = (a - p)[p.any(-1)].square().sum()
    missed.backward()
    pieces = task.pieces(p, window)
    found, dq, dk = task.gradients(q, k, pieces)
    assert found.item() == pytest.approx(missed.item(), rel=1e-6)
    torch.testing.assert_close((dq, dk), (q.grad, k.grad), rtol=0, atol=1e-12)


def test_local_dependencies(run, tmp_path):
    flags = (f"--out={tmp_path / 'x.json'}", f"--picture={tmp_path / 'x.png'}", "--steps=20", "--seeds=1")
    code, out, err = run("lab.experiments.local_dependencies", *flags, "--what=full,show", "--n=60")
    assert code == 0 and (tmp_path / "x.png").stat().st_size > 10_000, err
    found = json.loads((tmp_path / "x.json").read_text())["fits"]
    assert len(found) == 2 * 3 + 2  # three learning rates for a tenth of the steps, and the best one
    (missed,) = (fit["1"]["missed"] for name, fit in found.items() if "short" in name and "1" in fit)
    assert missed[-1] < 0.9 * missed[0] and [row[3] for row in rows(out)][1:] == ["long", "short"]
    assert "fits" not in run("lab.experiments.local_dependencies", *flags, "--what=full,show", "--n=60")[1]


@pytest.mark.usefixtures("quick", "no_new_processes")
def test_endless(run, data, small, tmp_path):
    flags = [f"--dataset={data}", f"--config_file={small}", f"--out_dir={tmp_path / 'runs'}", "--steps=3"]
    flags += [f"--out={tmp_path / 'x.json'}", "--block_size=32", "--only=beta, alibi", "--tokens=100", "--slide=20"]
    code, out, err = run("lab.experiments.endless", *flags)
    assert code == 0, err
    results = json.loads((tmp_path / "x.json").read_text())
    assert {part: [*found] for part, found in results.items()} == {"decode": ["beta, alibi"], "far": ["beta, alibi"]}
    wrote, read = results["decode"]["beta, alibi"]["32"]["endless"], results["far"]["beta, alibi"]["32"]
    assert wrote["first"]["cache_bytes"] == wrote["last"]["cache_bytes"] > 0
    assert [*read["sums"]] == [*read["slides"]] and [*read["sums"]][:2] == ["0-64", "64-256"]
    assert sum("beta, alibi" in row for row in rows(out)) == 2 + 1
    again = run("lab.experiments.endless", *flags)[1]
    assert rows(out) == rows(again) and "far, " not in again


def test_losses_by_position(tmp_path):
    """Through a cache as without one; and in windows each loss is that of a window that ends at most a hop later."""
    few = endless.MIXED | endless.ROPE | {"window": 4, "vocab_size": 29, "n_layer": 2, "n_head": 4, "n_embd": 32}
    gpt, whole = (GPT(GPTConfig(**few, block_size=n)).eval() for n in (16, 70))
    for p in gpt.parameters():
        p.data += 0.1 * torch.randn_like(p)
    whole.load_state_dict(gpt.state_dict())
    write(tmp_path, ByteTokenizer(), {"val": "to be or not to be " * 4}, {})
    text = Tokens(str(tmp_path), "val", 16)
    text.ids = text.ids[:71] % 29
    x = torch.from_numpy(text.ids.astype("int64"))[None]
    found = endless.in_windows(gpt, text)[None]  # a hop of 1
    for t in range(70):
        at = max(0, t + 1 - 16)
        logits = gpt(x[:, at : t + 1])[0][:, 0]
        torch.testing.assert_close(found[:, t], F.cross_entropy(logits, x[:, t + 1], reduction="none"))
    logits = whole(x[:, :-1], x[:, 1:])[0]
    want = F.cross_entropy(logits.mT, x[:, 1:], reduction="none")
    torch.testing.assert_close(endless.through_a_cache(gpt, x, piece=13), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[:, :16], want[:, :16], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_new_processes")
def test_length(run, tmp_path):
    pytest.importorskip("matplotlib")
    flags = [f"--out={tmp_path / 'x.json'}", f"--picture={tmp_path / 'x.png'}", "--repeats=1", "--double=64,128"]

    def length(*args: str) -> tuple[int, str, str]:
        return run("lab.experiments.length", *flags, "--lengths=64,128", *args)

    only = "--only=softmax;beta, decay"
    code, out, err = length(only)
    assert code == 0, err
    results = json.loads((tmp_path / "x.json").read_text())
    assert {part: [*x] for part, x in results.items()} == dict.fromkeys(["steps", "double"], ["softmax", "beta, decay"])
    assert [*results["steps"]["softmax"]] == ["64", "128"] and os.path.getsize(tmp_path / "x.png") > 10_000
    assert [row[0] for row in rows(out)][1:] == ["softmax", "beta, decay"]
    again = length(only)[1]
    assert rows(out) == rows(again) and "steps, " not in again
    out = length("--what=steps", "--only=softmax", "--lengths=64,128,256", "--patience=0")[1]
    assert "steps, softmax: no 128 tokens (--patience" in out


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_lecture(capsys, monkeypatch, tmp_path):
    """The table of weight decays; what is there is not made again."""
    few = {"DECAYS": (0.0, 0.1), "SCHEDULES": ("cosine",), "steps": 105, "seeds": 1, "what": "decay,show"}
    few |= {"out": str(tmp_path / "x.json"), "out_dir": str(tmp_path / "runs")}
    for name, value in few.items():
        monkeypatch.setattr(lecture, name, value)
    lecture.main()
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())["decay"]
    gaps = [run["1"]["val"] - run["1"]["train"] for run in found.values()]
    assert [*found] == ["cosine 0", "cosine 0.1"] and "cosine 0.1, seed 1\n" in out
    assert [float(row[4]) for row in rows(out) if row[0] == "cosine"] == pytest.approx(gaps, abs=6e-4)
    lecture.main()
    again = capsys.readouterr().out
    assert rows(again) == rows(out) and ", seed 1\n" not in again
