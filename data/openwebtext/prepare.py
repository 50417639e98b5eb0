"""Prepare OpenWebText in GPT-2's tokens.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source=FOLDER   # of .parquet, .txt, .jsonl, ... files

Writes train.bin (9 billion tokens, 17 GB), val.bin and meta.json.

Disk: `datasets` keeps the files that it downloads, their text (40 GB) and the tokens (17 GB) in
~/.cache/huggingface (HF_HOME moves it). This cache can be deleted at the end. train.bin takes
another 17 GB.
"""

import sys

sys.path.insert(0, f"{sys.path[0]}/../..")  # the project's root

from text import prepare

# Which text?
source = "Skylion007/openwebtext"  # owner/name on the Hugging Face hub, or a file or folder
column = "text"  # of files with rows: the column that holds the text
tokenizer = "gpt2"  # char, bytes, gpt2, sentencepiece, or the name of a prepared data set
val_share = 0.0005  # the share of the documents for val: every 2000th, as many as in nanoGPT
# Where does it go?
out_dir = ""  # the folder for train.bin, val.bin and meta.json; empty: this script's
num_workers = 0  # processes that make tokens; 0: one for each core

if __name__ == "__main__":
    prepare.run_with_flags(globals())
