"""Tokenizers: text to token ids and back. tokenizer() makes the one that meta.json describes."""

import base64
import io
import os
from collections.abc import Iterable

import numpy as np

from errors import UserError, first_line, optional

END = "<|endoftext|>"  # the text of the boundary between two documents, with every tokenizer


class Tokenizer:
    """encode(text) -> ids and decode(ids) -> text. A new tokenizer is a subclass with two methods:

    ids(text: str) -> np.ndarray: the ids of a corpus's text, in which END has no special meaning
    text(ids: list[int]) -> str: the text of ids, none of which is eot

    n_vocab is the number of its ids. meta, for meta.json and checkpoints, is a dict of which
    tokenizer(meta) makes the same tokenizer: "kind", the name in TOKENIZER, and its arguments.
    A lone surrogate in a text (Python's sign for a stray byte) is encoded as a "?".
    """

    eot = None  # the id of the boundary between documents, if there is one

    def encode(self, text: str) -> list[int]:
        """Return the ids of text; END becomes eot.

        Raises UserError for characters that are not in the vocabulary.
        """
        if self.eot is None:
            return self.ids(text).tolist()
        ids = []
        for document in text.split(END):
            ids += [*self.ids(document).tolist(), self.eot]
        return ids[:-1]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; eot becomes END."""
        documents = [[]]
        for i in map(int, ids):
            if i == self.eot:
                documents.append([])
            else:
                documents[-1].append(i)
        return END.join(map(self.text, documents))

    def start(self, text: str) -> list[int]:
        """Return the ids of a prompt.

        SentencePiece has no ids for a prompt of spaces and line ends: there it is [eot], the
        beginning of a document.
        """
        ids = self.encode(text)
        if text and not ids and self.eot is not None:
            ids.append(self.eot)
        return ids

    def __reduce__(self):
        """Pickle a tokenizer as its meta: for other processes, and for the cache of `datasets`."""
        return tokenizer, (self.meta,)


class CharTokenizer(Tokenizer):
    """One id for each character of `vocab`; with eot=True one more, for the end of a document."""

    def __init__(self, vocab: str, eot: bool = False):
        self.vocab = vocab
        self.n_vocab = len(vocab) + eot
        self.meta = {"kind": "char", "vocab": vocab}
        if eot:
            self.eot = len(vocab)
            self.meta["eot"] = True
        self._id = np.zeros(0x110000, np.int64)  # by code point
        self._id[[*map(ord, vocab)]] = np.arange(len(vocab))

    def ids(self, text):
        unknown = sorted(set(text) - set(self.vocab))
        if unknown:
            raise UserError(
                f"the text holds {', '.join(map(repr, unknown[:10]))}, which the "
                f"{len(self.vocab)} characters of this vocabulary do not include"
            )
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return self._id[codes]

    def text(self, ids):
        return "".join(self.vocab[i] for i in ids)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8. Byte 255, which never occurs in UTF-8, is the end of a document."""

    n_vocab = 256
    eot = 255
    meta = {"kind": "bytes"}

    def ids(self, text):
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)

    def text(self, ids):
        return bytes(ids).decode("utf-8", "replace")


GPT2_VOCAB_SIZE = 50257


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding. tiktoken downloads its two files once; OSError if it cannot."""

    meta = {"kind": "gpt2"}

    def __init__(self):
        tiktoken = optional("tiktoken", "the GPT-2 tokenizer")
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # no network, or another page instead of the file
            raise OSError(
                f"tiktoken cannot download GPT-2's files ({first_line(error)}); "
                "docs/data.md says how to put them there by hand"
            ) from None
        self.n_vocab = self._bpe.n_vocab
        self.eot = self._bpe.eot_token

    def ids(self, text):
        return self._bpe.encode_to_numpy(
            text.encode("utf-8", "replace").decode(), disallowed_special=()
        )

    def text(self, ids):
        return self._bpe.decode(ids)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, given in base64. Line ends and runs of spaces become one space."""

    def __init__(self, model: str):
        self.meta = {"kind": "sentencepiece", "model": model}
        spm = optional("sentencepiece", "this tokenizer")
        self._sp = spm.SentencePieceProcessor(model_proto=base64.b64decode(model))
        self.n_vocab = self._sp.vocab_size()
        self.eot = self._sp.eos_id()

    def ids(self, text):
        return self._sp.encode_as_numpy(text.encode("utf-8", "replace"))

    def text(self, ids):
        return self._sp.decode(ids)


def train_sentencepiece(lines: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Train a unigram vocabulary with NMT_NFKC normalisation, as in the long-short paper (5.1).

    Unlike the paper's, characters that are too rare for the vocabulary become bytes, and </s> is
    the end of a document. Raises UserError if the text is too short.
    """
    spm = optional("sentencepiece", "this tokenizer")
    model = io.BytesIO()
    print(f"training a SentencePiece vocabulary of {vocab_size:,}...", flush=True)
    lines = list(lines)  # here, since SentencePiece would hide an error in reading them
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            normalization_rule_name="nmt_nfkc",
            byte_fallback=True,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=2**20,
            num_threads=16,  # the vocabulary depends on this number
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        why = first_line(error).rpartition("]")[2].strip() or "it holds no words"
        raise UserError(
            f"SentencePiece can make no vocabulary of {vocab_size:,} tokens from this text "
            f"({why}). Try another --vocab_size= or more text"
        ) from None
    return SentencePieceTokenizer(base64.b64encode(model.getvalue()).decode())


TOKENIZER = {
    "char": CharTokenizer,
    "bytes": ByteTokenizer,
    "gpt2": GPT2Tokenizer,
    "sentencepiece": SentencePieceTokenizer,
}


def tokenizer(meta: dict) -> Tokenizer:
    """Return the tokenizer that the "tokenizer" of meta.json or of a checkpoint describes.

    Raises UserError for a kind that is not in TOKENIZER.
    """
    arguments = dict(meta)
    kind = arguments.pop("kind", None)
    if kind not in TOKENIZER:
        raise UserError(f"unknown tokenizer {kind!r}; known are {', '.join(TOKENIZER)}")
    return TOKENIZER[kind](**arguments)


class HubTokenizer(Tokenizer):
    """The tokenizer beside weights that have been loaded through transformers."""

    meta = {"kind": "hub"}  # no data set has such tokens, so this kind is not in TOKENIZER

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        self._tok = AutoTokenizer.from_pretrained(name)
        self.n_vocab = len(self._tok)
        self.eot = self._tok.eos_token_id
        gpt2_ids = [270, 338, 220, 17031, 2231]  # by which GPT-2's tokenizer is recognised
        if self.n_vocab == GPT2_VOCAB_SIZE and self.encode("it's  12345") == gpt2_ids:
            self.meta = GPT2Tokenizer.meta  # data sets may have these tokens

    def encode(self, text):
        return self._tok.encode(text)

    def decode(self, ids):
        return self._tok.decode(ids, skip_special_tokens=True)


def pretrained_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer beside pretrained weights (a folder, or a name on the hub).

    GPT-2's names get GPT-2's tokenizer, and so does a folder with weights only. Raises UserError
    if such a folder's vocab_size is not GPT-2's.
    """
    if os.path.isdir(name):
        has_tokenizer = any("token" in file or "vocab" in file for file in os.listdir(name))
    else:
        has_tokenizer = "/" in name
    if has_tokenizer:
        return HubTokenizer(name)
    if vocab_size != GPT2_VOCAB_SIZE:
        raise UserError(
            f"{name} has no tokenizer beside it, and its {vocab_size} tokens are not GPT-2's"
        )
    return GPT2Tokenizer()
