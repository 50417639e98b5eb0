"""Prepare the source of Python's standard library, a text of another kind that needs no network.

Writes train.bin, val.bin and meta.json. The text is the first 8 MB of the library's files, in the
order of their names. It stays beside this script, in a file whose name has Python's version, which
is in meta.json.
"""

import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, f"{sys.path[0]}/../..")  # the project's root

from text import prepare

# Which text?
source = f"{Path(__file__).parent}/python-{sys.version.split()[0]}.txt"  # this script writes it
tokenizer = "bytes"  # char, bytes, gpt2, sentencepiece, or the name of a prepared data set
# Where does it go?
out_dir = ""  # the folder for train.bin, val.bin and meta.json; empty: this script's

if __name__ == "__main__":
    text = "".join(
        path.read_text("utf-8", "ignore")
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        if "-packages" not in str(path)
    )
    Path(source).write_text(text[:8_000_000], "utf-8")
    prepare.run_with_flags(globals())
