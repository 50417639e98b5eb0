"""The fixtures of harness.py, for every test of the lab. Its scripts run from the top folder."""

import sys
from collections.abc import Iterator

import pytest
from apart import TABLES
from harness import *  # noqa: F403
from harness import ROOT, _seed  # noqa: F401

from lab.experiments import identity
from training.log import Log


@pytest.fixture(autouse=True)
def _top_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def _a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may edit code and data."""
    monkeypatch.setattr(identity, "SEEN", {})
    identity._paths.cache_clear()


@pytest.fixture(autouse=True)
def _no_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A logger that a test imports changes Log for this test alone, and the next one's for its."""
    for name in ("open", "step", "write", "close"):
        monkeypatch.setattr(Log, name, getattr(Log, name))
    yield
    for name in ("logits", "tensorboard"):
        sys.modules.pop(f"lab.loggers.{name}", None)


@pytest.fixture
def ideas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attentions of lab/ideas are in the tables of the core."""
    for table, added in TABLES:
        for name, value in added.items():
            monkeypatch.setitem(table, name, value)
