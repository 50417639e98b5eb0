"""Prepares PG-19, whole books (Rae et al. 2020), with a vocabulary of 10,000 SentencePiece tokens.

    python data/pg19/prepare.py
    python data/pg19/prepare.py --source=FOLDER  # of .parquet or .txt files (a book each)

Writes train.bin, val.bin, test.bin and meta.json. The text (11.5 GB) is read as a stream and not kept; the tokens take
6 GB. The vocabulary is trained on 20 million characters of the train split, as a unigram model with NMT_NFKC
normalisation, as in the long-short paper (section 5.1); line ends become spaces. Project Gutenberg's headers and
licences are left out if a book has them. After an interruption, the same command continues.
"""

import os
import sys
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from text import corpus, tokenizers

# Which text?
source = "emozilla/pg19"  # owner/name on the Hugging Face hub, or a folder of .parquet or .txt files
column = "text"  # .parquet files: the column that holds the text
tokenizer: Literal[*tokenizers.TOKENIZER] = "sentencepiece"  # how text becomes tokens
vocab_size = 10000  # number of tokens in the vocabulary of the sentencepiece tokenizer
val_share = 0.1  # the share of the books that go to val if the source has no validation split: every 10th
gutenberg = True  # leave out Project Gutenberg's headers and licences
# Where does it go?
out_dir = os.path.dirname(os.path.abspath(__file__))  # the folder for train.bin, val.bin, test.bin and meta.json
num_workers: int | None = None  # threads that make tokens; None: one per CPU core

config, _ = configure(globals())
with user_errors():
    corpus.run(**config)
