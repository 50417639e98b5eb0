"""Prompts with their answers, to fine-tune a model on a task: from JSONL to tokens, and batches.

    python -m lab.hub.prepare_answers --source=endings --init_from=out-books --out_dir=data/endings
    python -m lab.hub.finetune lab/hub/finetune_task.py --init_from=out-books --dataset=endings

The source is a folder with train.jsonl and val.jsonl. Each line is an example:
{"prompt": "The capital of France is", "answer": " Paris"}. Other keys, such as the "choices" of
lab/hub/lm_eval.py, are ignored. The model sees the prompt and, directly after it, the answer. In
training only the answer's tokens are targets. The tokens are those of the model to fine-tune.
"""

import json
import os
from collections.abc import Iterator

import numpy as np
import torch

from configurator import run_script
from errors import UserError
from text.dataset import Tokens, read_meta
from text.prepare import COUNTS, read_text, write
from text.tokenizers import Tokenizer, tokenizer
from training.pretrained import GPT2, tokenizer_meta

# Which examples, for which model?
source: str | None = None  # a folder with train.jsonl and val.jsonl
init_from = "gpt2"  # the model to fine-tune: a run's folder, gpt2, gpt2-medium, ...
# Where do they go?
out_dir = "data/answers"  # the folder for train.bin, val.bin and meta.json


def read_examples(path: str) -> Iterator[tuple[str, str]]:
    """Yield (prompt, answer) of each line of a JSONL file. A UserError names the wrong line."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, answer = row["prompt"], row["answer"]
            if not (isinstance(prompt, str) and isinstance(answer, str) and prompt and answer):
                raise TypeError("prompt and answer must be text, and not empty")
            (prompt + answer).encode()  # raises for half of a surrogate pair
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'{path}, line {number}: a line must be {{"prompt": "...", "answer": "..."}} '
                f"({type(error).__name__}: {error})"
            ) from None
        yield prompt, answer


def encode(tok: Tokenizer, prompt: str, answer: str) -> tuple[np.ndarray, int]:
    """(ids of an example, how many of them are the prompt's).

    If the tokenizer has an eot, it ends the answer. A token that begins in the prompt and ends in
    the answer, such as " Paris" after "France is ", is the answer's.
    """
    ids = tok.ids(prompt + answer)
    n = len(os.path.commonprefix([tok.ids(prompt).tolist(), ids[:-1].tolist()]))
    if tok.eot is not None:
        ids = np.append(ids, ids.dtype.type(tok.eot))
    return ids, n


def prepare(folder: str, source: str, tok: Tokenizer) -> dict:
    """Write train.bin, val.bin and meta.json; return what meta.json holds.

    Its entry "answers" says where answers are: {split: [[begin, end], ...]}. source: a folder with
    train.jsonl and val.jsonl.
    """
    rows = {}
    counts = dict.fromkeys(COUNTS, 0) | {"documents": 1}  # bytes and words are those of texts
    answers = {}
    dtype = np.min_scalar_type(tok.n_vocab - 1)
    for split in ("train", "val"):
        path = os.path.join(source, f"{split}.jsonl")
        if not os.path.isfile(path):
            raise UserError(f"--source={source} must be a folder with train.jsonl and val.jsonl")
        rows[split] = []
        answers[split] = []
        end = 0
        for prompt, answer in read_examples(path):
            ids, n = encode(tok, prompt, answer)
            answers[split].append([end + n, end + len(ids)])
            end += len(ids)
            rows[split].append(counts | {"ids": ids.astype(dtype).tobytes()})
        if not answers[split]:
            raise UserError(f"{path} holds no examples")
    return write(folder, tok, rows, {"from": source}, answers=answers)


class Examples(Tokens):
    """One split of prompts and answers. A window is an example, padded on the right.

    Its targets are -1 except for the answer's tokens. An example of more than block_size tokens
    loses the beginning of its prompt. Raises UserError for a longer answer, and as Tokens does.
    """

    def __init__(self, folder: str, split: str, block_size: int):
        super().__init__(folder, split, 1)
        self.begin, self.end = np.array(self.meta["answers"][split]).T
        self.start = np.append(0, self.end[:-1])  # of each example: the end of the one before it
        longest = max(self.end - self.begin)
        if longest > block_size:
            raise UserError(
                f"{folder}: an answer of {split} has {longest} tokens, "
                f"more than block_size={block_size}"
            )
        self.block_size = min(block_size, int(max(self.end - self.start)) - 1)
        self.places = self.apart = len(self.end)

    def _windows(self, which: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, y) of these examples, (n, T)."""
        x = torch.zeros(len(which), self.block_size, dtype=torch.int64)
        y = torch.full_like(x, -1)
        for row, i in enumerate(which):
            start = max(self.start[i], self.end[i] - self.block_size - 1)
            ids = torch.from_numpy(self.ids[start : self.end[i]].astype(np.int64))
            n = len(ids) - 1
            x[row, :n] = ids[:-1]
            first = max(0, self.begin[i] - start - 1)  # this token predicts the answer's first one
            y[row, first:n] = ids[first + 1 :]
        return x, y


def open_split(folder: str, split: str, block_size: int) -> Tokens:
    """A split of a prepared data set: running text, or prompts and answers."""
    cls = Examples if "answers" in read_meta(folder) else Tokens
    return cls(folder, split, block_size)


def main() -> None:
    if source is None:
        raise UserError("--source= says which examples: a folder with train.jsonl and val.jsonl")
    meta = tokenizer_meta(init_from)
    if meta is None:
        raise UserError(
            f"--init_from={init_from} is no folder of a run, nor one of {', '.join(GPT2)}"
        )
    for name, entry in prepare(out_dir, source, tokenizer(meta))["files"].items():
        print(f"{out_dir}/{name}: {entry['documents']:,} examples, {entry['tokens']:,} tokens")


if __name__ == "__main__":
    run_script(globals())
