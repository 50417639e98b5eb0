"""Prepare Tiny Shakespeare in GPT-2's tokens, for fine-tuning.

Writes train.bin, val.bin and meta.json. The text is data/shakespeare_char/input.txt.
"""

import os
import sys

sys.path.insert(0, f"{sys.path[0]}/../..")  # the project's root

from text import prepare

# Which text?
source = os.path.abspath(__file__ + "/../../shakespeare_char/input.txt")  # file, folder, hub name
tokenizer = "gpt2"  # char, bytes, gpt2, sentencepiece, or the name of a prepared data set
# Where does it go?
out_dir = ""  # the folder for train.bin, val.bin and meta.json; empty: this script's

if __name__ == "__main__":
    prepare.run_with_flags(globals())
