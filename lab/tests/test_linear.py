"""lab/experiments/linear.py at a tiny scale."""

import json

import pytest


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_experiment_on_linear_time(run, data, tmp_path, monkeypatch):
    """Runs of equal steps and of equal time, each once; times; a sorted table."""
    monkeypatch.chdir(tmp_path)
    small = (
        f"--dataset={data} --max_iters=2 --lr_decay_iters=2 --warmup_iters=1 --eval_iters=1 --n_layer=1 --device=cpu"
    )
    flags = [f"--extra={small}", f"--out={tmp_path / 'linear.json'}", f"--out_dir={tmp_path / 'runs'}", "--seeds=1"]
    flags += ["--repeats=1", "--table=64"]

    code, out, err = run("lab/experiments/linear.py", *flags, "--only=softmax; beta, decay")
    assert code == 0, err
    results = json.loads((tmp_path / "linear.json").read_text())
    ratios = {row: ratio for row, (_, ratio) in results["times"]["64"].items()}
    assert sorted(ratios) == sorted(f"{row}; {p}" for row in ("softmax", "beta, decay") for p in ("learned", "rope"))
    assert ratios["softmax; rope"] == 1 and len(results["losses"]) == 6  # softmax in equal time is softmax itself
    steps = {int(command.split("--max_iters=")[1].split()[0]) for command in results["losses"]}
    assert steps == {1500} | {round(1500 / ratio) for ratio in ratios.values()}
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    losses = [float(row.split(" | ")[3].split()[0]) for row in rows[1:]]
    assert len(losses) == 4 and losses == sorted(losses) and sum("**beta, decay**" in row for row in rows) == 2

    again = run("lab/experiments/linear.py", *flags, "--only=softmax; beta, decay", "--what=steps,equal,print")[1]
    assert "seed 1" not in again and [line for line in again.splitlines() if line.startswith("| ")] == rows
    for wrong in ("--only=softmaxx", "--table=65", "--what=time", "--jobs=0"):
        code, _, err = run("lab/experiments/linear.py", *flags, wrong)
        assert code == 2 and ("is not one of" in err or "at least 1" in err)
