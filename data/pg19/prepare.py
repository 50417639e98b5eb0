"""Prepare PG-19, whole books (Rae et al. 2020), with a vocabulary of 10,000 SentencePiece tokens.

    python data/pg19/prepare.py
    python data/pg19/prepare.py --source=FOLDER   # of .txt files (a book each), or .parquet, ...

Writes train.bin (6 GB), val.bin, test.bin and meta.json. The vocabulary is trained on 20 million
characters of the train split, as a unigram model with NMT_NFKC normalisation, as in the long-short
paper (section 5.1). Line ends become spaces. Project Gutenberg's headers and licences are left out
if a book has them.

Disk: `datasets` keeps the files that it downloads, their text (12 GB) and the tokens (6 GB) in
~/.cache/huggingface (HF_HOME moves it). This cache can be deleted at the end.
"""

import sys

sys.path.insert(0, f"{sys.path[0]}/../..")  # the project's root

from text import prepare

# Which text?
source = "emozilla/pg19"  # owner/name on the Hugging Face hub, or a file or folder
column = "text"  # of files with rows: the column that holds the text
tokenizer = "sentencepiece"  # char, bytes, gpt2, sentencepiece, or a prepared data set's name
vocab_size = 10000  # number of tokens in the vocabulary of the sentencepiece tokenizer
val_share = 0.1  # the share of the books for val (every 10th) if the source has no validation split
gutenberg = True  # leave out Project Gutenberg's headers and licences
# Where does it go?
out_dir = ""  # the folder for train.bin, val.bin and meta.json; empty: this script's
num_workers = 0  # processes that make tokens; 0: one for each core

if __name__ == "__main__":
    prepare.run_with_flags(globals())
