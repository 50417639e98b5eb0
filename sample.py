"""Prints text from a checkpoint, as it comes.

python sample.py --out_dir=out-shakespeare-char
python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=2 --temperature=0
python sample.py --init_from=gpt2-xl --start=FILE:prompt.txt
"""

import pathlib
from collections.abc import Iterator
from typing import Literal

from configurator import UserError, configure, pick_device, user_errors  # first: from here on Ctrl-C is a sentence

# isort: split
import torch

from text.tokenizers import Tokenizer
from training.checkpoint import open_model

init_from = "resume"  # resume: the checkpoint in out_dir; gpt2, gpt2-xl, ..., owner/model, or a local folder of one
out_dir = "out"  # the folder that train.py wrote
which: Literal["best", "latest"] = "best"  # the lowest validation loss, or the last state
start = "\n"  # the prompt, or FILE:path to read it from a file
num_samples = 10  # how many
max_new_tokens = 500  # tokens per sample
temperature = 0.8  # 0: greedy; 1.0: as the model says; more: wilder
top_k: int | None = 200  # sample from the k most likely tokens; None: from all
top_p: float | None = None  # sample from the fewest tokens that hold this probability; None: from all
stop: str | None = None  # end a sample where this text comes up
seed = 1337  # of the first sample; the others take the next ones
use_cache = True  # keep what the model has computed of earlier tokens; the text is the same without, slowly
plain = False  # attention by the definitions of model.py as they stand; the text is the same, slowly
device = "auto"  # auto (cuda, mps or cpu, the first there is), cpu, cuda, cuda:0, mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # bfloat16 on a GPU that has it, else float16
compile = False  # torch.compile the model


def text_of(ids: Iterator[torch.Tensor], tok: Tokenizer, stop: str | None, prompt: list[int]) -> Iterator[str]:
    """Yields the text of a stream of tokens in pieces, up to `stop`; half a character or half a `stop` is held back."""
    seen = [*prompt]  # what is decoded together: some tokenizers drop a text's first space
    before = len(tok.decode(prompt))
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
    yield tok.decode(seen)[before + shown :]


def main() -> None:
    if num_samples < 1 or max_new_tokens < 1:
        raise UserError(f"num_samples={num_samples} and max_new_tokens={max_new_tokens} must be at least 1")
    device, _, amp = pick_device(config["device"], config["dtype"])
    torch.set_flush_denormal(True)  # as train.py
    model, tok, _, about = open_model(init_from, out_dir, which)
    print(about)
    model.eval().to(device)
    if plain:
        model.run_definitions()
    if compile:
        torch._dynamo.config.suppress_errors = True  # if compiling fails, go on without it and say why
        model.compile()
    try:
        text = pathlib.Path(start[5:]).read_text(encoding="utf-8-sig") if start.startswith("FILE:") else start
    except UnicodeDecodeError as error:
        raise UserError(f"{start[5:]} is not UTF-8 text: {error}") from None
    try:
        prompt = tok.start(text)
    except UserError as error:
        raise UserError(f"--start={text[:20]!r}: {error}") from None
    if not prompt:
        raise UserError("the prompt is empty: --start needs at least one character")
    if len(prompt) > model.config.block_size:
        print(f"the prompt has {len(prompt)} tokens; the model sees the last {model.config.block_size}")
    ids = torch.tensor([prompt], device=device)
    with amp:
        for i in range(num_samples):
            sampling = {"vocab_size": tok.n_vocab, "seed": seed + i, "use_cache": use_cache}
            tokens = model.stream(ids, max_new_tokens, temperature, top_k, top_p, **sampling)
            print(text, end="")
            for piece in text_of(tokens, tok, stop, prompt):
                print(piece, end="", flush=True)
            print("\n---------------")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
