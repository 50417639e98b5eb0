"""Prepares OpenWebText in GPT-2's tokens. Writes train.bin (9 billion tokens, 17 GB), val.bin and meta.json.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source=FOLDER   # of .parquet, .txt, .jsonl or .csv files

Disk: `datasets` keeps the files that it downloads, their text (40 GB) and the tokens (17 GB) in ~/.cache/huggingface
(HF_HOME moves it), which can be deleted in the end; train.bin takes another 17 GB.
"""

import os
import sys
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from text import prepare, tokenizers

# Which text?
source = "Skylion007/openwebtext"  # owner/name on the Hugging Face hub, or a file or folder
column = "text"  # of .parquet, .jsonl and .csv files: the column that holds the text
tokenizer: Literal[*tokenizers.TOKENIZER] = "gpt2"  # how text becomes tokens; nanoGPT takes gpt2 too
val_share = 0.0005  # the share of the documents that go to val: every 2000th, as many as in nanoGPT
# Where does it go?
out_dir = os.path.dirname(os.path.abspath(__file__))  # the folder for train.bin, val.bin and meta.json
num_workers: int | None = None  # processes that make tokens; None: one per CPU core

config, _ = configure(globals())
with user_errors():
    prepare.run(**config)
