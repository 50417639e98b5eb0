"""Which exercises are done?

python -m lab.course              # a line for each
python -m lab.course --solutions  # of the solutions
"""

import importlib

from configurator import run_script

from errors import UserError
from lab.course.checks import CHECKS

solutions = False  # look at the solutions, not at the exercises


def state(name: str) -> str:
    """done, to do, or what is wrong."""
    folder = "lab.course.solutions" if solutions else "lab.course"
    for check in CHECKS[name]:
        try:
            check(importlib.import_module(f"{folder}.{name}"))
        except NotImplementedError as error:  # raised by an exercise, without a text, or by torch
            return f"to do: {check.__name__} {error}".rstrip()
        except AssertionError as error:
            return f"{check.__name__}: {error}"
        except (Exception, SystemExit) as error:
            return f"{check.__name__}: {type(error).__name__}: {error}"
    return "done"


def main() -> None:
    if not __debug__:
        raise UserError("python -O leaves the checks out: start it without -O")
    for name in CHECKS:
        print(f"{name:16}{state(name)}")


if __name__ == "__main__":
    run_script(globals())
