"""Prepares Tiny Shakespeare (input.txt) with one token per character. Writes train.bin, val.bin and meta.json."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from text import dataset, prepare

# Where does it go?
out_dir = os.path.dirname(os.path.abspath(__file__))  # the folder for train.bin, val.bin and meta.json

config, _ = configure(globals())
text = os.path.relpath(os.path.join(dataset.ROOT, "data", "shakespeare_char", "input.txt"))
with user_errors():
    prepare.run(source=text, tokenizer="char", **config)
