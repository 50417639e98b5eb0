"""Prints text that a trained model writes, token by token.

    python sample.py --out_dir=out-shakespeare-char
    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=2 --temperature=0
    python sample.py --init_from=gpt2-xl --start=FILE:prompt.txt

A line of dashes follows each sample.
"""

from typing import Literal

import torch

from attention.cache import run_definitions, why_it_ends
from configurator import at_least_one, can_compile, pick_device, run_script
from errors import UserError
from text.prepare import read_text
from text.sampling import stream
from text.tokenizers import Tokenizer
from training.checkpoint import open_model

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
endless = False  # past block_size go on with the cache (beta and short heads; with rope or alibi)
use_cache = True  # keep keys and values of earlier tokens; without: the same text, but slower
plain = False  # compute attention with the definitions in model.py: the same text, but slower
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: 16 bits on CUDA, else 32
compile = False  # compile the model with torch.compile

TAIL = 64  # tokens that are decoded together with the next one


def prompt_of(start: str, tok: Tokenizer) -> tuple[str, list[int]]:
    """(text, its token ids) of a flag --start. tok: a tokenizer.

    Raises UserError for an empty text and for characters without an id.
    """
    try:
        text = read_text(start[5:]) if start.startswith("FILE:") else start
        prompt = tok.start(text)
    except UserError as error:
        raise UserError(f"--start={start[:20]!r}: {error}") from None
    if not prompt:
        raise UserError("the prompt is empty: --start needs at least one character")
    return text, prompt


def _text_of(ids, tok, stop, prompt):
    """Yield the text of a stream of tokens in pieces, up to `stop`.

    The end of the text is held back while it may be half a character or the beginning of `stop`.
    """
    seen = [*prompt]  # decoded together with the prompt: some tokenizers drop a text's first space
    before = len(tok.decode(prompt))  # characters that are not part of what is yielded
    shown = 0  # characters that have been yielded
    for token in ids:
        seen.append(token.item())
        text = tok.decode(seen)[before:]
        if stop and stop in text:
            yield text[shown : text.index(stop)]
            return
        ready = len(text.rstrip("\ufffd"))
        for n in range(1, len(stop or "")):
            if text.endswith(stop[:n]):
                ready = len(text) - n
        yield text[shown:ready]  # nothing, if all of it is held back
        shown = max(shown, ready)
        # To decode the whole text takes ever longer.
        if shown == len(text) and len(seen) > 2 * TAIL:
            seen = seen[-TAIL:]
            before = len(tok.decode(seen))
            shown = 0
    yield tok.decode(seen)[before + shown :]


def main() -> None:
    at_least_one(num_samples=num_samples, max_new_tokens=max_new_tokens)
    dev, _, amp = pick_device(device, dtype)
    torch.set_flush_denormal(True)  # as train.py: on a CPU the tiniest numbers become zeros
    model, tok, _, about = open_model(init_from, out_dir, which)
    print(about)
    model.eval().to(dev)
    block_size = model.config.block_size
    if plain:
        run_definitions(model)
    if endless and (why := why_it_ends(model)):
        raise UserError(
            f"--endless: this model cannot go on past its block_size={block_size}: {why}"
        )
    if compile and can_compile(dev):
        model.compile()
    text, prompt = prompt_of(start, tok)
    if len(prompt) > block_size and not endless:
        print(f"the prompt has {len(prompt)} tokens; the model sees the last {block_size}")
    ids = torch.tensor([prompt], device=dev)
    with amp:
        for i in range(num_samples):
            new = stream(
                model,
                ids,
                max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
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
