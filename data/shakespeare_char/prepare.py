"""Prepare Tiny Shakespeare (input.txt) with one token for each character.

Writes train.bin, val.bin and meta.json.
"""

import os
import sys

sys.path.insert(0, f"{sys.path[0]}/../..")  # the project's root

from text import prepare

# Which text?
source = os.path.abspath(__file__ + "/../input.txt")  # a file, a folder, or owner/name on the hub
tokenizer = "char"  # char, bytes, gpt2, sentencepiece, or the name of a prepared data set
# Where does it go?
out_dir = ""  # the folder for train.bin, val.bin and meta.json; empty: this script's

if __name__ == "__main__":
    prepare.run_with_flags(globals())
