"""Prints text that a trained model writes, token by token.

    python sample.py --out_dir=out-shakespeare-char
    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=2 --temperature=0
    python sample.py --init_from=gpt2-xl --start=FILE:prompt.txt

A line of dashes follows each sample.
"""

import pathlib
from collections.abc import Iterator
from typing import Literal

from configurator import at_least_one, configure, pick_device, user_errors  # first: see train.py
from errors import UserError

# isort: split
import torch

from attention.cache import run_definitions, why_it_ends
from text.sampling import stream
from text.tokenizers import Tokenizer
from training.checkpoint import open_model

# Which model?
init_from = "resume"  # resume: the checkpoint in out_dir; or gpt2, gpt2-xl, ..., a model of the hub, a local folder
out_dir = "out"  # the folder of a run of train.py
which: Literal["best", "latest"] = "best"  # the checkpoint with the lowest validation loss, or the latest one
# Which text, and how much?
start = "\n"  # the prompt: the text that the model continues; FILE:path reads it from a file
num_samples = 10  # number of samples
max_new_tokens = 500  # tokens per sample
stop: str | None = None  # a sample ends where this text appears
# How is each token chosen?
temperature = 0.8  # 0: always the most likely token; 1.0: the probabilities of the model; above: more random
top_k: int | None = 200  # choose among this many most likely tokens; None: among all tokens
top_p: float | None = None  # choose among the likeliest tokens that sum to this probability; None: among all tokens
seed = 1337  # decides the random numbers of the first sample; the next samples take seed + 1, seed + 2, ...
# What does it run on, and how?
endless = False  # past block_size go on with the cache, at constant speed (beta and short heads; with rope or alibi)
use_cache = True  # keep keys and values of earlier tokens; without a cache the text is the same, but slower
plain = False  # compute attention with the definitions in model.py themselves; the text is the same, but slower
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 or float16 on CUDA, else float32
compile = False  # compile the model with torch.compile

TAIL = 64  # tokens that are decoded together with the next one


def prompt_of(start: str, tok: Tokenizer) -> tuple[str, list[int]]:
    """(text, its token ids) of a flag --start. Raises UserError for an empty text and for characters without an id."""
    try:
        text = pathlib.Path(start[5:]).read_text(encoding="utf-8-sig") if start.startswith("FILE:") else start
        prompt = tok.start(text)
    except ValueError as error:  # a UserError of the tokenizer, or a file that is not UTF-8
        raise UserError(f"--start={start[:20]!r}: {error}") from None
    if not prompt:
        raise UserError("the prompt is empty: --start needs at least one character")
    return text, prompt


def text_of(ids: Iterator[torch.Tensor], tok: Tokenizer, stop: str | None, prompt: list[int]) -> Iterator[str]:
    """Yields the text of a stream of tokens in pieces, up to `stop`; half a character or half a `stop` is held back."""
    seen = [*prompt]  # decoded together with the prompt: some tokenizers drop a text's first space
    before = len(tok.decode(prompt))  # characters that are not part of what is yielded
    shown = 0  # characters that have been yielded
    for token in ids:
        seen.append(token.item())
        text = tok.decode(seen)[before:]
        if stop and stop in text:
            yield text[shown : text.index(stop)]
            return
        held = next((n for n in range(len(stop or "") - 1, 0, -1) if text.endswith(stop[:n])), 0)
        ready = len(text) - held if held else len(text.rstrip("\ufffd"))
        yield text[shown:ready]  # nothing, if all of it is held back
        shown = max(shown, ready)
        if shown == len(text) and len(seen) > 2 * TAIL:  # to decode all of a text for each token takes ever longer
            seen = seen[-TAIL:]
            before, shown = len(tok.decode(seen)), 0
    yield tok.decode(seen)[before + shown :]


def main() -> None:
    at_least_one(num_samples=num_samples, max_new_tokens=max_new_tokens)
    device, _, amp = pick_device(config["device"], config["dtype"])
    torch.set_flush_denormal(True)  # as train.py: on a CPU the tiniest numbers become zeros
    model, tok, _, about = open_model(init_from, out_dir, which)
    print(about)
    model.eval().to(device)
    if plain:
        run_definitions(model)
    if endless and (why := why_it_ends(model)):
        raise UserError(f"--endless: this model cannot go on past its block_size={model.config.block_size}: {why}")
    if compile:
        torch._dynamo.config.suppress_errors = True  # if compiling fails, go on without it and say why
        model.compile()
    text, prompt = prompt_of(start, tok)
    if len(prompt) > model.config.block_size and not endless:
        print(f"the prompt has {len(prompt)} tokens; the model sees the last {model.config.block_size}")
    ids = torch.tensor([prompt], device=device)
    with amp:
        for i in range(num_samples):
            chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed + i}
            how = {"vocab_size": tok.n_vocab, "use_cache": use_cache, "endless": endless}
            print(text, end="")
            for piece in text_of(stream(model, ids, max_new_tokens, **chosen, **how), tok, stop, prompt):
                print(piece, end="", flush=True)
            print("\n---------------")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
