"""Prepare your own text: a file, a folder or a data set of the Hugging Face hub.

    python data/text/prepare.py --source=my.txt --out_dir=data/mytext
    python train.py config/train_shakespeare_char_cpu.py --dataset=mytext --out_dir=out-mytext
    python data/text/prepare.py --source=books --tokenizer=sentencepiece --out_dir=data/books
    python data/text/prepare.py --source=my.txt --tokenizer=pg19 --out_dir=data/my

Writes train.bin, val.bin and meta.json. A text file is one document; in .parquet, .jsonl, .csv,
.tsv and .arrow files each row is one. A file of a folder belongs to a split if train, val or test
stands between separators in its name, or in the name of a folder above it: a-val.000.jsonl. Without
a val split, every 10th document goes to val (--val_share=0.1). If there is only one document, the
end of its text goes to val. --tokenizer=pg19 takes the tokenizer of the data set pg19, for a model
that was trained on pg19.

Disk: `datasets` keeps what it downloads, the text and the tokens in ~/.cache/huggingface (HF_HOME
moves it). This cache can be deleted at the end. A single text file is just read.
"""

import sys

sys.path.insert(0, f"{sys.path[0]}/../..")  # the project's root

from text import prepare

# Which text?
source = ""  # a file, a folder of files, or owner/name on the Hugging Face hub
column = "text"  # of files with rows: the column that holds the text
split_documents = False  # <|endoftext|> in a text ends a document
tokenizer = "char"  # char, bytes, gpt2, sentencepiece, or the name of a prepared data set
vocab_size = 8000  # number of tokens in the vocabulary of the sentencepiece tokenizer
val_share = 0.1  # the share of the documents that go to val, or of the text of a single document
gutenberg = False  # leave out Project Gutenberg's headers and licences
# Where does it go?
out_dir = ""  # the folder for train.bin, val.bin and meta.json; empty: this script's
num_workers = 0  # processes that make tokens; 0: one for each core

if __name__ == "__main__":
    prepare.run_with_flags(globals())
