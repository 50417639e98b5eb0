"""How fast text/corpus.py turns text files into tokens, compared with the libraries of the tokenizers.

    python -m lab.experiments.tokenizing --source=books

Both get the same text and the same number of threads, in turns. One MB is a million bytes of text. The library has each
document in memory, and keeps the tokens in memory. corpus.py reads the files, cuts and counts the text, and writes the
tokens to the disk.
"""

import contextlib
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable

from configurator import configure, user_errors
from errors import UserError
from text import corpus, sources, tokenizers

# Which text, and how is it measured?
source: str | None = None  # a .txt file or a folder of them
vocab_size = 10000  # number of tokens in the vocabulary of sentencepiece
copies = 3  # copies of the text, one after the other; at least 2
rounds = 5  # how often everything is timed
num_workers = 2  # threads


def mb_per_s(mb: float, f: Callable[[], object]) -> float:
    """The speed of f(), a call that works on so many MB."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(None):
        f()
    return mb / (time.perf_counter() - start)


def prepare(train: sources.Split, tok: tokenizers.Tokenizer) -> None:
    """What a prepare.py does: it looks at the whole text first, then writes its tokens."""
    for _ in range(copies):
        sources.open_source(source)
    share = max(0.1, 1.1 / train.count(11))  # at least one document for val
    with tempfile.TemporaryDirectory() as folder:
        corpus.prepare(folder, {"train": train}, tok.meta, {}, val_share=share, num_workers=num_workers)


def main() -> None:
    if source is None or min(copies - 1, rounds, num_workers) < 1:
        raise UserError("--source= says which text; --copies= is at least 2, --rounds= and --num_workers= 1")
    split = sources.open_source(source).get("train")
    if split is None:
        raise UserError(f"{source} has no train split")
    texts = ["".join(document) for document in split.documents()] * copies
    train = sources.Split(split.shards * copies, split.about, split.size * copies)
    mb = train.size / 1e6
    gpt2 = tokenizers.GPT2Tokenizer()
    sp = corpus.new_tokenizer({"kind": "sentencepiece", "vocab_size": vocab_size}, {"train": split}, 0.0, True)
    toks = {"gpt2": gpt2, "sentencepiece": sp, "bytes": tokenizers.ByteTokenizer()}
    library = {
        "gpt2": lambda: gpt2._bpe.encode_ordinary_batch(texts, num_threads=num_workers),
        "sentencepiece": lambda: sp._sp.encode(texts, num_threads=num_workers),
    }
    speeds = {name: [] for name in toks}
    for _ in range(rounds):
        for name, tok in toks.items():
            theirs = mb_per_s(mb, library[name]) if name in library else math.nan
            ours = mb_per_s(mb, functools.partial(prepare, train, tok))
            speeds[name].append((ours, theirs))
    print(f"{mb:.0f} MB, {num_workers} threads")
    print("| tokens | MB/s | its library | ratio: median, range |\n|---|---|---|---|")
    for name, pairs in speeds.items():
        ratios = [ours / theirs for ours, theirs in pairs]
        ours = statistics.median(ours for ours, _ in pairs)
        theirs = statistics.median(theirs for _, theirs in pairs)
        last = f"{theirs:.1f} | {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"| {name} | {ours:.1f} | {last if name in library else '|'} |")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
