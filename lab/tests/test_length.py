"""lab/experiments/length.py at a tiny scale."""

import json
import os

import pytest


@pytest.mark.usefixtures("no_new_processes")
def test_the_length_experiment(run, tmp_path):
    pytest.importorskip("matplotlib")
    flags = [f"--out={tmp_path / 'length.json'}", f"--picture={tmp_path / 'length.png'}", "--repeats=1"]

    def length(*args: str) -> tuple[int, str, str]:
        return run("lab/experiments/length.py", *flags, "--lengths=64,128", "--double=64,128", *args)

    only = "--only=softmax;beta, decay"
    code, out, err = length(only)
    assert code == 0, err
    results = json.loads((tmp_path / "length.json").read_text())
    assert {part: [*rows] for part, rows in results.items()} == dict.fromkeys(
        ["steps", "double"], ["softmax", "beta, decay"]
    )
    assert [*results["steps"]["softmax"]] == ["64", "128"] and os.path.getsize(tmp_path / "length.png") > 10_000
    tables = [line for line in out.splitlines() if line.startswith("|")]
    assert len(tables) == 4 and "| softmax |" in tables[2]

    again = length(only)[1]
    assert tables == [line for line in again.splitlines() if line.startswith("|")] and "steps, " not in again
    out = length("--what=steps", "--only=softmax", "--lengths=64,128,256", "--patience=0")[1]
    assert "steps, softmax: no 128 tokens (--patience" in out
    for wrong, says in (("--what=stepps", "not one of"), ("--only=x", "not one of"), ("--lengths=0", "positive")):
        code, _, err = length("--what=steps", wrong)
        assert code == 2 and says in err
    for damaged in ("[]", "{", "1"):
        (tmp_path / "length.json").write_text(damaged)
        code, _, err = length("--what=steps", "--only=beta")
        assert code == 2 and "length.json is damaged" in err
