"""The fixtures of harness.py, for every test."""

import importlib

import pytest
from harness import *  # noqa: F403
from harness import _seed  # noqa: F401

from errors import UserError


def pytest_addoption(parser):
    parser.addoption("--import", action="append", default=[], help="a module, such as my.ideas")


def pytest_configure(config):
    for module in config.getoption("--import"):
        importlib.import_module(module)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """What an imported module refuses is skipped, with its sentence."""
    try:
        return (yield)
    except UserError as error:
        if item.config.getoption("--import"):
            pytest.skip(str(error))
        raise
