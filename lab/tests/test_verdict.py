"""lab.verdict: how it decides, and one verdict from the command to the card."""

import json
import os

from harness import done, parametrize, slow

from lab.ideas.gated_delta import GatedDelta
from lab.verdict import checks, judge
from model import ATTENTION, GPT, GPTConfig

SIZES = {"block_size": 32, "vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 8}


@parametrize("best, found", [(5, (4, False)), (1.1, (1, False)), (64, (32, True))])
def test_a_grid_is_made_wider_twice_at_most(best, found, monkeypatch):
    """The rates 2, 4 and 8; each new rate adds its two runs to the plan."""

    def make(self, runs):
        return {name: abs(best - float(name.split("rate ")[1].split(",")[0])) for name, _ in runs}

    monkeypatch.setattr(judge.Judge, "make", make)
    monkeypatch.setattr(judge, "final", lambda loss: loss)
    one = judge.Judge("", (), [2.0, 4.0, 8.0], [1], (101, 102), "", 1)
    setting = judge.Setting(judge.Arm("idea", ()), "1 x 2", 10)
    tuned = one.tuned([setting])[setting]
    assert tuned[:2] == found and one.planned == 2 * len(tuned.means) - 6


@parametrize(
    "definition, says",
    [
        (
            lambda s, seen, v: s.softmax(-1) @ v,
            "no later token seen: FAILS, logits change with later tokens by",
        ),
        (lambda s, seen, v: (s * seen).sqrt() @ v, "gradients finite: FAILS, not on zeros"),
    ],
)
def test_a_model_that_fails_a_check(definition, says, monkeypatch):
    monkeypatch.setitem(ATTENTION, "own", definition)
    gpt = GPT(GPTConfig(**SIZES, attention="own"))
    found = [check(gpt) for check in (checks.later_tokens, checks.cached, checks.gradients)]
    assert says in " ".join(str(check) for check in found if not check.ok)
    good = GPT(GPTConfig(**SIZES))
    assert all(check(good).ok for check in (checks.later_tokens, checks.cached, checks.gradients))


@slow
@parametrize(
    "name, flags, maps",
    [("laser", "", True), ("gated_delta", "--import=lab.ideas.gated_delta", False)],
)
def test_from_an_idea_to_the_card(
    name, flags, maps, run, quick, no_new_processes, data, tmp_path, monkeypatch
):
    """A second call makes no run again, and the card has a row. A layer has no maps."""
    monkeypatch.setitem(ATTENTION, "gated_delta", GatedDelta)  # the import happened already
    monkeypatch.setattr(
        "lab.experiments.recall.SCALES", {"small": {"steps": 2, "tokens": 128, "sequences": 4}}
    )
    monkeypatch.setattr("lab.verdict.report.VERDICTS", (str(tmp_path / "verdict-*" / "runs.json"),))
    args = [
        f"--attention={name}",
        *flags.split(),
        "--quick",
        "--steps=10",
        "--seeds=2",
        f"--dataset={data}",
    ]
    args += [f"--out_dir={tmp_path / 'runs'}", "--both=--batch_size=2 --block_size=32"]
    monkeypatch.setattr("lab.verdict.report.FOLDER", str(tmp_path / "verdict-"))
    out = done(run("lab.verdict", *args), f"{name} against softmax: about", "VERDICT    ")
    folder = tmp_path / f"verdict-{name}"
    files = set(os.listdir(folder))
    assert {"report.md", "curves.png", "runs.json"} <= files
    assert ("maps.png" in files) == maps
    numbers = json.loads((folder / "runs.json").read_text())
    assert numbers["made"][0] > 8 and "cached = uncached" in out
    again = done(run("lab.verdict", *args), f"{name} against softmax: about 0 runs")
    assert again.split("VERDICT")[1].splitlines()[0] == out.split("VERDICT")[1].splitlines()[0]
    row = f"| {name} `--attention={name}", " --quick --steps=10 ", "| softmax |"
    done(run("lab.verdict", "--what=card"), *row)
