"""Prints text that a trained model writes, token by token.

    python sample.py --out_dir=out-shakespeare-char
    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=2 --temperature=0
    python sample.py --init_from=gpt2-xl --start=FILE:prompt.txt

A line of dashes follows each sample.
"""

from typing import Literal

from configurator import DTYPE, pick_device, run_script

import torch

from attention.cache import run_definitions
from errors import UserError
from text.prepare import read_text
from text.sampling import stream
from text.tokenizers import Tokenizer
from training.checkpoint import open_model
from training.run import default_prompt

# Which model?
init_from = "resume"  # resume: the checkpoint in out_dir; gpt2, ..., a model of the hub, a folder
out_dir = "out"  # the folder of a run of train.py
which: Literal["best", "latest"] = "best"  # the checkpoint: the lowest validation loss, or latest

# Which text, and how much?
start = "\n"  # the prompt: the text that the model continues; FILE:path reads it from a file
num_samples = 10  # number of samples
max_new_tokens = 500  # tokens per sample
stop: str | None = None  # a sample ends where this text appears

# How is each token chosen?
temperature = 0.8  # 0: always the likeliest; 1.0: the model's probabilities; above: more random
top_k: int | None = 200  # choose among this many most likely tokens; None: among all tokens
top_p: float | None = None  # choose among the likeliest tokens with this probability; None: all
seed = 1337  # decides the random numbers; the first sample takes seed, the next one seed + 1, ...

# What does it run on, and how?
endless = False  # past block_size go on with the cache (running sums, short heads; rope or alibi)
plain = False  # compute attention with the definitions in model.py: the same text, but slower
use_cache = True  # keep keys and values of earlier tokens; without: the same text, but slower
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: DTYPE = "auto"  # auto: 16 bits on CUDA, else 32
compile = False  # compile the model with torch.compile


def prompt_of(start: str, tok: Tokenizer) -> tuple[str, list[int]]:
    """(text, its token ids) of a flag --start.

    Raises UserError for an empty text and for characters without an id.
    """
    text = read_text(start[5:]) if start.startswith("FILE:") else start
    prompt = tok.start(text)
    if not prompt:
        raise UserError("the prompt is empty: --start needs at least one character")
    return text, prompt


def _text_of(ids, tok, stop, prompt):
    """Yield the text of a stream of tokens in pieces, up to `stop`.

    A piece is held back while its end may be half a character or the beginning of `stop`.
    """
    halves = ("\ufffd", *(stop[:n] for n in range(1, len(stop or ""))))
    before = prompt  # decoded together with a piece: some tokenizers drop a text's first space
    piece = []
    text = ""
    for token in ids:
        piece.append(token.item())
        text = tok.decode([*before, *piece])[len(tok.decode(before)) :]
        if stop and stop in text:
            text = text[: text.index(stop)]
            break
        if not text.endswith(halves):
            yield text
            before = piece
            piece = []
            text = ""
    yield text


def main() -> None:
    # the model
    dev, _, amp = pick_device(device, dtype)
    model, tok, _, about = open_model(init_from, out_dir, which)
    print(about)
    model.eval().to(dev)
    if plain:
        run_definitions(model)
    if compile:
        model.compile()

    # the prompt
    text, prompt = default_prompt(tok) if start == "\n" else prompt_of(start, tok)
    ids = torch.tensor([prompt], device=dev)

    # the samples
    with amp:
        for i in range(num_samples):
            new = stream(
                model,
                ids,
                max_new_tokens,
                temperature,
                top_k,
                top_p,
                seed=seed + i,
                vocab_size=tok.n_vocab,
                use_cache=use_cache,
                endless=endless,
            )
            print(text, end="")
            for piece in _text_of(new, tok, stop, prompt):
                print(piece, end="", flush=True)
            print("\n---------------")


if __name__ == "__main__":
    run_script(globals())
