"""Trains and evaluates on packed documents: a token sees only its own document.

    python train.py config/train_shakespeare_char_cpu.py --dataset=books --out_dir=out-books \
        --import=lab.ideas.packed
    python eval.py --out_dir=out-books --import=lab.ideas.packed

Positions begin at 0 in each document. Importing this file changes GPT.forward.
"""

from errors import UserError
from lab.ideas.documents import Documents, positions_in_documents
from model import GPT
from text.dataset import Tokens
from text.tokenizers import tokenizer

forward = GPT.forward
open_tokens = Tokens.__init__
boundaries = []  # the token between documents, of each data set that is open


def open_documents(self, folder: str, *args, **kwargs) -> None:
    """Tokens.__init__. Raises UserError for data without boundaries between documents."""
    open_tokens(self, folder, *args, **kwargs)
    eot = tokenizer(self.meta["tokenizer"]).eot
    if eot is None or self.meta["files"]["train.bin"].get("documents") == 1:
        raise UserError(
            f"{folder} has no boundaries between documents "
            "(data/text/prepare.py --split_documents makes some of <|endoftext|>)"
        )
    boundaries.append(eot)


def forward_in_documents(self, idx, targets=None, cache=None) -> tuple:
    """GPT.forward. A cache holds one document."""
    if cache is not None or not boundaries:
        return forward(self, idx, targets, cache)
    context = Documents(positions_in_documents(idx, boundaries[-1]))
    return self.predict(self.hidden(idx, context), targets)


Tokens.__init__ = open_documents
GPT.forward = forward_in_documents
