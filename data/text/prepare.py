"""Any text: train.bin, val.bin and meta.json of a file, a folder or a data set of the hub.

    python data/text/prepare.py --source=my.txt --out_dir=data/mytext     # then train.py --dataset=mytext
    python data/text/prepare.py --source=books --tokenizer=sentencepiece --vocab_size=8000 --out_dir=data/books
    python data/text/prepare.py --source=owner/name --tokenizer=gpt2 --out_dir=data/name
    python data/text/prepare.py --source=my.txt --tokenizer=pg19 --out_dir=data/my      # for a model trained on pg19

A .txt file is a document, and so is each row of a .parquet file. Files whose names, or whose folders' names, begin with
train, val or test belong to that split. Without a val split, every 10th document goes to val (--val_share=0.1), or the
end of the text if there is only one document.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import UserError, configure, user_errors  # first: from here on Ctrl-C prints a sentence
from text import corpus

source: str | None = None  # a .txt or .parquet file, a folder of them, or owner/name of the Hugging Face hub
column = "text"  # of parquet files, the column that holds the text
tokenizer = "char"  # or bytes, gpt2, sentencepiece (trained on this text), or a prepared data set, for its tokenizer
vocab_size = 8000  # of the sentencepiece tokenizer
val_share = 0.1  # of the documents, or of the one document's text
gutenberg = False  # leave out Project Gutenberg's headers and licences
out_dir = os.path.dirname(os.path.abspath(__file__))  # where train.bin, val.bin and meta.json go
num_workers: int | None = None  # threads that tokenise; None: one per core

config, _ = configure(globals())
with user_errors():
    if config["source"] is None:
        raise UserError("--source= says which text: a .txt or .parquet file, a folder of them, or owner/name")
    if config["tokenizer"] != "sentencepiece":
        config["vocab_size"] = None
    corpus.run(**config)
    print(f"to train on it: python train.py config/train_shakespeare_char_cpu.py --dataset={config['out_dir']}")
