"""Prepares Tiny Shakespeare with one token per character. Writes train.bin, val.bin and meta.json."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from text import shakespeare

# Where does it go?
out_dir = os.path.dirname(os.path.abspath(__file__))  # the folder for train.bin, val.bin and meta.json

config, _ = configure(globals(), shakespeare.Source)
with user_errors():
    shakespeare.run("char", **config)
