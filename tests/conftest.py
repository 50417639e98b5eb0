"""The fixtures of harness.py, for every test."""

import importlib

from harness import *  # noqa: F403
from harness import _seed  # noqa: F401


def pytest_addoption(parser):
    parser.addoption("--import", action="append", default=[], help="a module, such as my.ideas")


def pytest_configure(config):
    for module in config.getoption("--import"):
        importlib.import_module(module)
