"""Tokenizers: text to token ids and back. tokenizer() makes the one that meta.json describes."""

import base64
import io
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
        ids = []
        for document in [text] if self.eot is None else text.split(END):
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
        return self.encode(text) or [self.eot] * bool(text)

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
        self._id = {character: i for i, character in enumerate(vocab)}

    def ids(self, text):
        if unknown := sorted(set(text) - self._id.keys()):
            raise UserError(
                f"the text holds {', '.join(map(repr, unknown[:10]))}, which the "
                f"{len(self.vocab)} characters of this vocabulary do not include"
            )
        return np.array([self._id[character] for character in text], np.int32)

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
        try:
            self._bpe = optional("tiktoken", "the GPT-2 tokenizer").get_encoding("gpt2")
        except OSError as error:  # no network
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
        self._sp = optional("sentencepiece", "this tokenizer").SentencePieceProcessor(
            model_proto=base64.b64decode(model)
        )
        self.n_vocab = self._sp.vocab_size()
        self.eot = self._sp.eos_id()

    def ids(self, text):
        return self._sp.encode_as_numpy(text.encode("utf-8", "replace"))

    def text(self, ids):
        return self._sp.decode(ids)


def train_sentencepiece(lines: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Train a unigram vocabulary as in the long-short paper (5.1).

    NMT_NFKC normalisation is SentencePiece's default. Unlike the paper's, characters that are too
    rare for the vocabulary become bytes, and </s> is the end of a document. Raises UserError if the
    text is too short.
    """
    spm = optional("sentencepiece", "this tokenizer")
    model = io.BytesIO()  # the trainer writes into it

    print(f"training a SentencePiece vocabulary of {vocab_size:,}...", flush=True)
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            # bytes for rare characters, and two of the four special tokens
            byte_fallback=True,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            # a line may be a whole paragraph
            max_sentence_length=2**20,
            num_threads=16,  # the vocabulary depends on this number
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"SentencePiece can make no vocabulary of {vocab_size:,} tokens from this text "
            f"({first_line(error)}). Try another --vocab_size= or more text"
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
    kind = arguments.pop("kind")
    if kind not in TOKENIZER:
        raise UserError(
            f"unknown tokenizer {kind!r}; known are {', '.join(TOKENIZER)}, and prepared data sets"
        )
    return TOKENIZER[kind](**arguments)


# {"other": f(name) -> the tokenizer of pretrained weights}. Core has GPT-2's weights alone; a file
# that adds others to training.pretrained.SOURCES sets this entry too.
PRETRAINED = {"other": lambda name: GPT2Tokenizer()}
