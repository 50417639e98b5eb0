"""Tiny Shakespeare (text/shakespeare.py), one token per character: writes train.bin, val.bin and meta.json."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from text import shakespeare

input: str | None = None  # prepare this text file (UTF-8) instead of Tiny Shakespeare
out_dir = os.path.dirname(os.path.abspath(__file__))  # where train.bin, val.bin and meta.json go
url = shakespeare.URL  # Tiny Shakespeare
url_sha256 = shakespeare.SHA256  # of the file at url
timeout = 20.0  # seconds to wait for the url

config, _ = configure(globals())
with user_errors():
    shakespeare.run("char", **config)
