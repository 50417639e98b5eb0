"""The fixtures of harness.py, for every test."""

from harness import *  # noqa: F403
from harness import _seed  # noqa: F401
