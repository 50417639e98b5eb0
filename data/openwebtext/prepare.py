"""OpenWebText in GPT-2's tokens: train.bin (9 billion tokens, 17 GB), val.bin and meta.json in this folder.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source=FOLDER   # of .parquet or .txt files, or another data set of the hub

The text (40 GB) is read as a stream and not kept: the disk needs 17 GB. After an interruption the same command goes on.
"""

import os
import sys
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from text import corpus, tokenizers

source = "Skylion007/openwebtext"  # owner/name of the Hugging Face hub, or a folder of .parquet or .txt files
column = "text"  # the column that holds the text
tokenizer: Literal[*tokenizers.TOKENIZER] = "gpt2"  # as in nanoGPT
val_share = 0.0005  # of the documents go to val: every 2000th, as many as in nanoGPT's
out_dir = os.path.dirname(os.path.abspath(__file__))  # where train.bin, val.bin and meta.json go
num_workers: int | None = None  # threads that tokenise; None: one per core

config, _ = configure(globals())
with user_errors():
    corpus.run(**config)
