"""Experiments at a tiny scale, by their own commands."""

import os
import runpy

import pytest
import torch
from harness import ROOT
from reference import ONE_QUERY


@pytest.mark.slow
def test_the_table_of_choices(run, quick, data, tmp_path, monkeypatch):
    """Rows by name, resumed, timed, failed; and the README's links point at the lines that they mean."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(
        f"dataset = {data!r}\nblock_size = 32\nn_layer = 1\nn_head = 4\nn_embd = 32\nmax_iters = 2\n"
        "batch_size = 4\ngradient_accumulation_steps = 1\neval_iters = 1\ndevice = 'cpu'\nlearning_rate = 1e-3\n"
        "beta2 = 0.99\nmin_lr = 0.0\n"
    )
    base = (f"--config_file={tmp_path / 'small.py'}", f"--out_dir={tmp_path / 'runs'}")
    flags = (*base, "--seeds=1", "--repeats=2", "--jobs=2")
    code, out, err = run("lab/experiments/choices.py", *flags, "--only=swiglu,muon")
    assert code == 0, err
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in table] == ["| GPT-2", "| swiglu", "| muon"] and table[1][1] == "`--mlp=swiglu`"
    assert table[0][3] == "+0.000" and all(float(row[2].split()[0]) > 0 and row[5][-1] == "x" for row in table)
    again = run("lab/experiments/choices.py", *flags, "--only=swiglu", "--what=train")[1]
    assert "seed 1" not in again and out.splitlines()[-2] in again  # with the time from before
    for wrong, says in (("--only=swiglo", "'swiglo' is not one of GPT-2, none"),
                        ("--what=trian", "not one of train, time"), ("--jobs=0", "at least 1"),
                        ("--extra=--block_size=9999", "this run failed")):  # fmt: skip
        code, _, err = run("lab/experiments/choices.py", *flags, "--only=rope", wrong)
        assert code == 2 and says in err
    code, _, err = run("lab/experiments/choices.py", *flags, "--what=time", f"--config_file={ROOT}/README.md")
    assert code == 2 and "is no config file" in err
    code, out, err = run("lab/experiments/choices.py", *flags, "--table=speedrun", "--only=learned positions,AdamW")
    assert code == 0, err
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in table] == ["| speedrun", "| learned positions", "| AdamW"]
    assert table[1][1] == "`--position=learned --rope_base=None`" and len(table[1]) == 6
    (tmp_path / "runs" / "ms.json").write_text("{")
    code, _, err = run("lab/experiments/choices.py", *flags, "--only=rope")
    assert code == 2 and "is damaged" in err


def test_the_links_of_the_table_of_choices():
    module = runpy.run_path(os.path.join(ROOT, "lab", "experiments", "choices.py"))
    page = open(os.path.join(ROOT, "docs", "choices.md"), encoding="utf-8").read()
    assert module["relinked"](page) == page, "python -m lab.experiments.choices --what=links"
    for name, row in module["ROWS"].items():
        line = next((line for line in page.splitlines() if line.startswith(f"| {name} |")), "")
        assert module["link"](row) in line and all(flag in line for flag in module["as_flags"](row.flags)), name


def test_the_first_tables_experiment(run, quick, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(
        f"dataset = {data!r}\nblock_size = 32\nn_layer = 1\nn_head = 4\nn_embd = 32\nmax_iters = 2\n"
        "batch_size = 4\ngradient_accumulation_steps = 1\neval_iters = 1\ndevice = 'cpu'\n"
    )
    flags = (f"--config_file={tmp_path / 'small.py'}", f"--out_dir={tmp_path / 'runs'}", "--seeds=1")
    code, out, _ = run("lab/experiments/shakespeare_cores.py", *flags)
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert code == 0 and [row.split(" | ")[0] for row in rows[1:]] == [
        "| softmax", "| LASER", "| beta", "| LS", "| LASER + LS"
    ]  # fmt: skip
    again = run("lab/experiments/shakespeare_cores.py", *flags)[1]
    assert "seed 1" not in again and rows == [line for line in again.splitlines() if line.startswith("| ")]
    (tmp_path / "runs" / "beta-1" / "done").write_text("another command")
    assert run("lab/experiments/shakespeare_cores.py", *flags)[1].count("seed 1") == 1


def test_lasers_precision(run, quick, data, tmp_path):
    """That ours is as exact as softmax where rounding exp(v) is not; and that it stays so for large values."""
    (tmp_path / "small.py").write_text(
        f"dataset = {data!r}\nblock_size = 32\nn_layer = 2\nn_head = 4\nn_embd = 32\nmax_iters = 3\n"
        "batch_size = 4\ngradient_accumulation_steps = 1\neval_iters = 1\ndevice = 'cpu'\n"
    )
    flags = (f"--config_file={tmp_path / 'small.py'}", f"--out_dir={tmp_path / 'run'}", "--batches=2", "--batch_size=4")
    code, out, err = run("lab/experiments/laser_precision.py", *flags, "--device=cpu")
    assert code == 0 and "4 q, k and v of shape (4, 4, 32, 8)" in out, err
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith(("| LASER", "| softmax"))]
    error = {name: [float(e) for e in numbers] for name, *numbers in rows[:4]}
    large = {name: [float(e) for e in numbers] for name, *numbers in rows[4:]}
    assert error["LASER, ours"][0] < 1.5 * error["softmax"][0] < 0.005 < error["LASER, vanilla"][0]
    assert max(large["LASER, ours"]) < 0.005 and len(large) == 4

    code, out, err = run("lab/experiments/attention_probabilities.py", f"--out_dir={tmp_path / 'run'}", "--device=cpu")
    assert code == 0 and "laser, 10 windows of 32 tokens" in out, err
    assert [line.split(" | ")[2] for line in out.splitlines() if line.startswith(("| 0", "| 1", "| all"))] == [
        "0.0%"
    ] * 3
    flags = (f"--out_dir={tmp_path / 'run'}", "--device=cpu")
    out = run("lab/experiments/attention_probabilities.py", *flags, "--block_size=16", "--batches=3")[1]
    assert "laser, 3 windows of 16 tokens" in out
    code, _, err = run("lab/experiments/attention_probabilities.py", *flags, "--block_size=33")
    assert code == 2 and "block_size=33 is below 1 or larger than the model's 32" in err


def test_attention_probabilities_and_jacobians():
    """As autograd has the Jacobians, and as counted one by one."""
    measures = runpy.run_path(os.path.join(ROOT, "lab", "experiments", "attention_probabilities.py"))["measures"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 4, dtype=torch.float64) * size for size in (12, 1, 3))
    found = measures(q, k, v, window=9)
    for h, i in ((0, 0), (1, 3), (0, 19)):
        s, values = (x[0, h, max(0, i - 9) : i + 1] for x in (k, v))
        s = s @ q[0, h, i] / 2
        p, want = s.softmax(-1), []
        for core in ("softmax", "laser"):
            want.append(
                torch.autograd.functional.jacobian(
                    lambda s, f=ONE_QUERY[core], v=values: f(s, v, torch.ones(())), s
                ).norm()
            )
        want = [len(s), (p < 1e-3).sum(), (p < 1e-7).sum(), *want, 1]
        torch.testing.assert_close(found[0, h, i], torch.tensor(want, dtype=torch.float64))
    assert found[..., 1].sum() > found[..., 2].sum() > 0
