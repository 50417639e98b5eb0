"""Prepare Tiny Shakespeare (input.txt) with one token for each character.

Writes train.bin, val.bin and meta.json.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))  # the project's root

from configurator import run_script
from text import prepare

# Where does it go?
out_dir = os.path.dirname(__file__)  # the folder for train.bin, val.bin and meta.json


def main() -> None:
    source = os.path.abspath(__file__ + "/../input.txt")
    prepare.run(out_dir, source, "char")


if __name__ == "__main__":
    run_script(globals())
