"""Prepare Tiny Shakespeare in GPT-2's tokens, for fine-tuning.

Writes train.bin, val.bin and meta.json. The text is data/shakespeare_char/input.txt.
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
        source = os.path.abspath(__file__ + "/../../shakespeare_char/input.txt")
        prepare.run(source=source, tokenizer="gpt2", **config)
