"""Tokenizers: text to token ids and back. tokenizer() makes the tokenizer that a meta.json describes."""

import base64
import io
import itertools
import os
from collections.abc import Iterable

import numpy as np

from errors import UserError, first_line, optional

END = "<|endoftext|>"  # the text of the boundary between two documents, with every tokenizer


class Tokenizer:
    """encode(text) -> ids and decode(ids) -> text. A new kind is a subclass, named in TOKENIZER, with two methods:

    ids(text): the ids of a corpus's text, as an array; END has no special meaning in it
    text(ids): the text of a list of ids, none of which is eot
    """

    n_vocab: int
    eot: int | None = None  # the id of the boundary between two documents; None: the vocabulary has none
    meta: dict  # a description, for meta.json and checkpoints: tokenizer(meta) makes the same tokenizer

    def encode(self, text: str) -> list[int]:
        """The ids of text; END becomes eot. Raises UserError for characters that the vocabulary lacks."""
        ids = []
        for document in text.split(END) if self.eot is not None else [text]:
            ids += [*self.ids(document).tolist(), self.eot]
        return ids[:-1]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; eot becomes END."""
        runs = itertools.groupby(map(int, ids), lambda i: i == self.eot)
        return "".join(END * len(list(run)) if is_eot else self.text(list(run)) for is_eot, run in runs)

    def __reduce__(self) -> tuple:  # it is sent to other processes, and known to the cache of `datasets`, as its meta
        return tokenizer, (self.meta,)

    def start(self, text: str) -> list[int]:
        """The ids of a prompt; [eot], the beginning of a document, if the tokenizer leaves nothing of it."""
        return self.encode(text) or ([self.eot] if text and self.eot is not None else [])


class CharTokenizer(Tokenizer):
    """One id for each character of `vocab` and, with eot=True, one more for the boundary of documents."""

    def __init__(self, vocab: str, eot: bool = False):
        self.vocab = vocab
        self.n_vocab = len(vocab) + eot
        self.eot = len(vocab) if eot else None
        self.meta = {"kind": "char", "vocab": vocab} | ({"eot": True} if eot else {})
        codes = self._codes(vocab)
        self._id = np.full(int(codes.max(initial=0)) + 2, -1, dtype=np.int64)  # by code point; last: all higher
        self._id[codes] = np.arange(len(vocab))

    @staticmethod
    def _codes(text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)

    def ids(self, text: str) -> np.ndarray:
        ids = self._id[np.minimum(self._codes(text), len(self._id) - 1)]
        if ids.min(initial=0) < 0:
            unknown = ", ".join(map(repr, sorted(set(text) - set(self.vocab))[:10]))
            lack = f"which the {len(self.vocab)} characters of this vocabulary lack: {self.vocab[:500]!r}"
            raise UserError(f"the text holds {unknown}, {lack}")
        return ids

    def text(self, ids: list[int]) -> str:
        return "".join(self.vocab[i] for i in ids)


def utf8(text: str) -> bytes:
    """text in UTF-8. A lone surrogate, such as Python makes of a stray byte on the command line, becomes a "?"."""
    return text.encode("utf-8", "replace")


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8. The byte 255, which never occurs in UTF-8, is the boundary of documents."""

    n_vocab = 256
    eot = 255
    meta = {"kind": "bytes"}

    def ids(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8)

    def text(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


GPT2_VOCAB_SIZE = 50257
GPT2_TEXT = "it's  12345 naïve\n\n漢"  # a text by whose ids GPT-2's tokens are recognised
GPT2_IDS = [270, 338, 220, 17031, 2231, 41492, 198, 198, 162, 120, 95]


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, by tiktoken, which downloads its two files once. OSError if it cannot."""

    meta = {"kind": "gpt2"}

    def __init__(self):
        tiktoken = optional("tiktoken", "the GPT-2 tokenizer")
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # no network, or another page
            put = "docs/data.md says how to put them there by hand"
            raise OSError(f"tiktoken cannot download GPT-2's files ({first_line(error)}); {put}") from None
        self.n_vocab = self._bpe.n_vocab
        self.eot = self._bpe.eot_token

    def ids(self, text: str) -> np.ndarray:
        return self._bpe.encode_to_numpy(utf8(text).decode(), disallowed_special=())

    def text(self, ids: list[int]) -> str:
        return self._bpe.decode(ids)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, given in base64. It normalises text: line ends and runs of spaces become one space."""

    def __init__(self, model: str):
        self.meta = {"kind": "sentencepiece", "model": model}
        spm = optional("sentencepiece", "this tokenizer")
        self._sp = spm.SentencePieceProcessor(model_proto=base64.b64decode(model))
        self.n_vocab = self._sp.vocab_size()
        self.eot = self._sp.eos_id() if self._sp.eos_id() >= 0 else None

    def ids(self, text: str) -> np.ndarray:
        return self._sp.encode_as_numpy(utf8(text))

    def text(self, ids: list[int]) -> str:
        return self._sp.decode(ids)


def train_sentencepiece(lines: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """A unigram vocabulary with NMT_NFKC normalisation, as the long-short paper's for PG-19 (section 5.1).

    Beyond the paper, characters that are too rare for the vocabulary become bytes, and </s> is the boundary of
    documents. The result depends on the number of threads, which is fixed. Raises UserError if the text is too short.
    """
    spm = optional("sentencepiece", "this tokenizer")
    model = io.BytesIO()
    print(f"training a SentencePiece vocabulary of {vocab_size:,}...", flush=True)
    lines = list(lines)  # first: SentencePiece would hide an error in reading them
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, model_type="unigram",
            normalization_rule_name="nmt_nfkc", byte_fallback=True, unk_id=0, eos_id=1, bos_id=-1, pad_id=-1,
            max_sentence_length=2**20, num_threads=16, minloglevel=2,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        why = f"{first_line(error)} ".rpartition("] ")[2].strip() or "it holds no words"
        no = f"SentencePiece can make no vocabulary of {vocab_size:,} tokens from this text: {why.removesuffix('.')}"
        raise UserError(f"{no}. Try another --vocab_size= or more text") from None
    return SentencePieceTokenizer(base64.b64encode(model.getvalue()).decode())


TOKENIZER = dict(char=CharTokenizer, bytes=ByteTokenizer, gpt2=GPT2Tokenizer, sentencepiece=SentencePieceTokenizer)


def tokenizer(meta: dict) -> Tokenizer:
    """The tokenizer that a meta.json (its "tokenizer") or a checkpoint describes. Raises UserError for unknown ones."""
    kind = meta.get("kind")
    if kind not in TOKENIZER:
        raise UserError(f"unknown tokenizer {kind!r}; known are {', '.join(TOKENIZER)}")
    return TOKENIZER[kind](**{name: value for name, value in meta.items() if name != "kind"})


class HubTokenizer(Tokenizer):
    """The tokenizer beside weights that have been loaded through transformers."""

    meta = {"kind": "hub"}  # no data set has such tokens: the kind is not in TOKENIZER

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        self._tok = AutoTokenizer.from_pretrained(name)
        self.n_vocab = len(self._tok)
        self.eot = self._tok.eos_token_id
        if self.n_vocab == GPT2_VOCAB_SIZE and self.encode(GPT2_TEXT) == GPT2_IDS:
            self.meta = GPT2Tokenizer.meta  # data sets may have these tokens

    def encode(self, text: str) -> list[int]:
        return self._tok.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tok.decode(ids, skip_special_tokens=True)


def pretrained_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer beside pretrained weights (a folder, or a name on the hub).

    GPT-2's names get GPT-2's, and so does a folder with weights only, unless its vocab_size differs (UserError).
    """
    is_folder = os.path.isdir(name)
    if not is_folder and "/" not in name:
        return GPT2Tokenizer()
    if not is_folder or any("token" in file or "vocab" in file for file in os.listdir(name)):
        return HubTokenizer(name)
    if vocab_size != GPT2_VOCAB_SIZE:
        raise UserError(f"{name} has no tokenizer beside its weights, and its {vocab_size} tokens are not GPT-2's")
    return GPT2Tokenizer()
