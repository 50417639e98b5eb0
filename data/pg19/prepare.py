"""PG-19, whole books (Rae et al. 2020), in 10,000 SentencePiece tokens: the long-short paper's setting (section 5.1).

    python data/pg19/prepare.py
    python data/pg19/prepare.py --source=FOLDER   # of .txt files, a book each, or of .parquet files

Writes train.bin, val.bin, test.bin and meta.json into this folder. The text (11.5 GB) is read as a stream and not kept;
the tokens take 6 GB. The vocabulary is trained on 20 million characters of the train split: NMT_NFKC normalisation
(line ends become spaces), unigram. Project Gutenberg's headers and licences are left out where a book has them
(sources.without_gutenberg). After an interruption the same command goes on.
"""

import os
import sys
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from text import corpus, tokenizers

source = "emozilla/pg19"  # owner/name of the Hugging Face hub, or a folder of .parquet or .txt files
column = "text"  # the column that holds the text
tokenizer: Literal[*tokenizers.TOKENIZER] = "sentencepiece"  # as in the paper
vocab_size = 10000  # of the sentencepiece tokenizer
val_share = 0.1  # of the books go to val where the source has no validation split: every 10th
gutenberg = True  # leave out Project Gutenberg's headers and licences
out_dir = os.path.dirname(os.path.abspath(__file__))  # where train.bin, val.bin, test.bin and meta.json go
num_workers: int | None = None  # threads that tokenise; None: one per core

config, _ = configure(globals())
with user_errors():
    corpus.run(**config)
