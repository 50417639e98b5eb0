"""Prompts with their answers, to fine-tune a model on a task: from JSONL to tokens on disk, and batches of them.

A line of the JSONL is {"prompt": "...", "answer": "..."}; other keys, such as the "choices" of lab/hub/lm_eval.py, are
left alone. The text is the prompt and, directly after it, the answer, which often begins with a space. Only the
answer's tokens are targets.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator

import numpy as np
import torch
from text.sources import SPLITS

from errors import UserError
from text.dataset import Tokens, read_meta
from text.files import TextError, replace
from text.tokenizers import Tokenizer


def read_examples(path: str) -> Iterator[tuple[str, str]]:
    """Yields (prompt, answer) of each line of a JSONL file. Raises TextError, naming the line that is wrong."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                prompt, answer = row["prompt"], row["answer"]
                if not (isinstance(prompt, str) and isinstance(answer, str) and prompt and answer):
                    raise TypeError("prompt and answer must be text, and not empty")
                (prompt + answer).encode()  # half a character is an error
            except (ValueError, KeyError, TypeError) as error:
                what = f"{type(error).__name__}: {error}"
                need = 'a line must be {"prompt": "...", "answer": "..."}'
                raise TextError(f"{path}, line {number}: {need} ({what})") from None
            yield prompt, answer


def sources_of(source: str) -> dict[str, str]:
    """{train, val, test: path of its JSONL}, of a folder with train.jsonl, val.jsonl and maybe test.jsonl."""
    names = sorted(os.listdir(source)) if os.path.isdir(source) else []
    stems = [name.removesuffix(".jsonl") for name in names if name.endswith(".jsonl")]
    found = {SPLITS[stem]: os.path.join(source, f"{stem}.jsonl") for stem in stems if stem in SPLITS}
    if not {"train", "val"} <= found.keys():
        raise UserError(f"--source={source} must be a folder with train.jsonl and val.jsonl")
    return found


def encode(tok: Tokenizer, prompt: str, answer: str) -> tuple[np.ndarray, int]:
    """(ids of an example, how many of them are the prompt's); eot ends the answer, if the tokenizer has one.

    A token with the prompt's end and the answer's beginning, such as " Paris" after "France is ", is the answer's.
    """
    before, ids = tok.ids(prompt), tok.ids(prompt + answer)
    n = min(len(before), len(ids) - 1)
    differ = np.flatnonzero(before[:n] != ids[:n])
    end = [] if tok.eot is None else [tok.eot]
    return np.concatenate((ids, np.array(end, dtype=ids.dtype))), int(differ[0]) if len(differ) else n


def prepare(folder: str, source: str, tok: Tokenizer) -> dict:
    """Writes <split>.bin and meta.json, whose entry "answers" says where answers are. Returns meta.json's content."""
    os.makedirs(folder, exist_ok=True)
    dtype = np.min_scalar_type(tok.n_vocab - 1)
    files, data = {}, {}
    for split, path in sources_of(source).items():
        ids, answers, size, texts = [], [], 0, []
        for prompt, answer in read_examples(path):
            example, begin = encode(tok, prompt, answer)
            answers.append([size + begin, size + len(example)])
            size += len(example)
            ids.append(example)
            texts.append(prompt + answer)
        if not ids:
            raise TextError(f"{path} holds no examples")
        data[f"{split}.bin"] = written = np.concatenate(ids).astype(dtype).tobytes()
        text = "\n".join(texts)
        files[f"{split}.bin"] = {
            "tokens": size, "documents": len(ids), "bytes": len(text.encode()), "words": len(text.split()),
            "sha256": hashlib.sha256(written).hexdigest(), "answers": answers,
        }  # fmt: skip
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder, "meta.json"))  # first, because it describes the others
    for name, written in data.items():
        replace(os.path.join(folder, name), written)
    meta = {"tokenizer": tok.meta, "vocab_size": tok.n_vocab, "dtype": dtype.name, "source": {"from": source}}
    meta |= {"files": files}
    replace(os.path.join(folder, "meta.json"), json.dumps(meta, ensure_ascii=False).encode())
    return meta


class Examples(Tokens):
    """One split of prompts and answers: a window is an example, padded on the right, with targets -1 but for answers.

    An example of more than block_size tokens loses the beginning of its prompt. Raises UserError, as Tokens does.
    """

    def __init__(self, folder: str, split: str, block_size: int):
        super().__init__(folder, split, 1)
        self.begin, self.end = np.array(self.meta["files"][f"{split}.bin"]["answers"]).T
        self.start = np.concatenate(([0], self.end[:-1]))  # an example begins where the one before it ends
        longest = int((self.end - self.begin).max())
        if longest > block_size:
            raise UserError(f"{folder}: an answer of {split} has {longest} tokens, more than block_size={block_size}")
        self.block_size = min(block_size, int((self.end - self.start).max()) - 1)
        self.beginning = int(self.begin[0])

    @property
    def places(self) -> int:
        return len(self.end)

    apart = places

    def _windows(self, which: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, y) of these examples, (n, T)."""
        x = torch.zeros(len(which), self.block_size, dtype=torch.int64)
        y = torch.full_like(x, -1)
        for row, i in enumerate(which):
            start = max(self.start[i], self.end[i] - self.block_size - 1)
            ids = torch.from_numpy(self.ids[start : self.end[i]].astype(np.int64))
            x[row, : len(ids) - 1] = ids[:-1]
            first = max(0, self.begin[i] - start - 1)  # this token predicts the answer's first one
            y[row, first : len(ids) - 1] = ids[first + 1 :]
        return x, y


def open_split(folder: str, split: str, block_size: int) -> Tokens:
    """A split of a prepared data set: running text, or prompts and answers."""
    tasks = any("answers" in entry for entry in read_meta(folder)["files"].values())
    return (Examples if tasks else Tokens)(folder, split, block_size)
