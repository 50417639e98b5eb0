"""Tiny Shakespeare in GPT-2's tokens, for fine-tuning GPT-2: train.bin, val.bin and meta.json in this folder.

Where the text comes from: see ../shakespeare_char/tiny_shakespeare.py.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(os.path.dirname(HERE)), os.path.join(os.path.dirname(HERE), "shakespeare_char")]

from configurator import configure, user_errors  # noqa: E402  # first: from here on Ctrl-C prints a sentence

# isort: split
import tiny_shakespeare  # noqa: E402

input: str | None = None  # prepare this text file (UTF-8) instead of Tiny Shakespeare
out_dir = HERE  # where train.bin, val.bin and meta.json go
url = tiny_shakespeare.URL  # Tiny Shakespeare
url_sha256 = tiny_shakespeare.SHA256  # of the file at url
timeout = 20.0  # seconds to wait for the url

if __name__ == "__main__":
    config, _ = configure(globals())
    with user_errors():
        tiny_shakespeare.run("gpt2", **config)
