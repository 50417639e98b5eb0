"""The fixtures of harness.py, for every test of the lab. Its scripts run from the top folder."""

import apart  # noqa: F401
import pytest
from harness import *  # noqa: F403
from harness import ROOT, _seed  # noqa: F401


@pytest.fixture(autouse=True)
def _top_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
