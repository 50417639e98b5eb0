"""lab.verdict.calibration: from made-up losses to what it prints."""

import re

import numpy as np
import pytest
from harness import parametrize

from lab.experiments.results import Interval
from lab.verdict import calibration, judge, method

SMALL = np.array([0.0, 0.01, 0.05, -0.2])
LARGE = np.array([0.0, -0.01, 0.02, -0.3])


@parametrize(
    "low, high, same", [(0.0, 0.03, [False]), (0.03, 0.08, [True, True]), (0.08, 9.0, [True] * 3)]
)
def test_pairs_by_how_far_they_are_apart(low, high, same):
    assert calibration.pairs(SMALL, LARGE, low, high).tolist() == same


def test_intervals_draw_attentions():
    """Where all pairs agree there is no interval."""
    assert calibration.sides(SMALL, LARGE, 0.0, 9.0).tolist() == [False, True, True]
    everything = np.arange(17) / 10
    assert calibration.counted(calibration.pairs, *[everything] * 2, 0.0, 0.15) == "16 of 16"
    assert calibration.resampled(lambda x, _: x.mean(), np.arange(2.0), SMALL[:2]) == (
        " (0.00 to 1.00)"
    )


def test_rates_are_moved_as_softmaxs():
    """With half the steps: softmax's best is 1, that of sink 0.4, and of all others 0."""

    class Made(judge.Judge):
        def make(self, runs):
            assert all("1172 steps" in name and name.endswith("seed 101") for name, _ in runs)
            found = []
            for name, _ in runs:
                best = 0.4 if "sink" in name else 0.0 if "=" in name.split("; ")[0] else 1.0
                found.append(3 + (float(re.search("rate ([-0-9]+)", name)[1]) - best) ** 2)
            return found

    rates = calibration.rates_of(made(Made))
    expected = dict.fromkeys(calibration.IDEAS, calibration.SOFTMAX - 1)
    expected |= {"softmax": calibration.SOFTMAX, "sink": calibration.SOFTMAX - 0.6}
    assert rates == pytest.approx(expected)


def made(kind):
    settings = {"batch_size": 3, "block_size": 32, "n_head": 6}
    settings |= {"learning_rate": 0.02, "muon_lr": 0.01}
    return kind("config/modern_shakespeare_char_cpu.py", (), settings, 65, "", 1)


@pytest.fixture
def losses(tmp_path, monkeypatch):
    """Both sizes' losses, as train writes them. Only sink differs, and top_k in its seeds."""
    monkeypatch.setattr(calibration, "PATH", str(tmp_path / "calibration.json"))
    monkeypatch.setattr(calibration, "picture", str(tmp_path / "calibration.png"))

    class Made(judge.Judge):
        def make(self, runs):
            found = []
            for name, words in runs:
                seed = int(name[-1])
                loss = 3 + seed / 1024
                if "--attention=sink" in name:
                    loss += 1 / 16 if "--n_embd=144" in words else -1 / 16
                if "--attention=top_k" in name:
                    loss += (seed - 1.5) / 256
                found.append(loss)
            return found

    monkeypatch.setattr(calibration, "rates_of", lambda _: dict.fromkeys(calibration.MODELS, -1.0))
    calibration.train(made(Made))
    return tmp_path


def test_what_is_printed(losses, capsys):
    calibration.show()
    calibration.draw()
    out = capsys.readouterr().out
    # top_k's rest is 1 / 512 times 16 / 17, that of each other one 1 / 17; tau is 0.006, t 2.12
    assert "| sink | 0.71x | +0.001 | -0.062 (-0.075 to -0.050) | +0.062 (" in out
    assert ", the same text | inf |  | 0 of 16 |  |  | 0 of 1 | -1.00 |" in out
    assert "; then its other seed | inf | 0 of 15 | 16 of 16 |" in out
    assert "| softmax | -1 | 1 | +0.000 | +0.000 |" in out
    assert (losses / "calibration.png").stat().st_size > 1000


def test_the_line_of_a_report(losses, monkeypatch):
    """On this card only sink and top_k are not much worse, and they change their order."""
    monkeypatch.setattr(calibration, "on_card", lambda: np.roll(np.arange(17) / 20, 10))
    (line,) = calibration.lines(-0.05)
    assert "that are 0.03 to 0.08 apart on the card, 0 of 1 pairs had" in line


def test_a_slope_for_each_doubling():
    two = [Interval(0.3, 0.03, 9), Interval(0.1, 0.04, 5)]
    assert method.slope([1, 4], two) == pytest.approx((-0.1, 0.025, 5))
    y, errors = [0.3, 0.1, 0.2], [0.03, 0.04, 0.01]
    found = method.slope([2, 4, 16], list(map(Interval, y, errors, [9, 9, 9])))
    (expected, _), covariance = np.polyfit([1, 2, 4], y, 1, w=1 / np.array(errors), cov="unscaled")
    assert found == pytest.approx((expected, covariance[0, 0] ** 0.5, 9))


@parametrize("size, narrower", [("4 x 144", []), ("4 x 160", ["--head_dim=26"])])
def test_a_width_that_heads_do_not_divide(size, narrower):
    assert judge.shape_of(size, 6)[2:] == narrower
