"""Prepare Tiny Shakespeare (input.txt) with one token for each character.

Writes train.bin, val.bin and meta.json.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))  # the project's root

from configurator import configure, user_errors
from text import prepare

# Where does it go?
out_dir = os.path.dirname(__file__)  # the folder for train.bin, val.bin and meta.json

if __name__ == "__main__":
    config, _ = configure(globals())
    with user_errors():
        source = os.path.abspath(__file__ + "/../input.txt")
        prepare.run(source=source, tokenizer="char", **config)
