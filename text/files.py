"""Names that other files still import from here."""

import contextlib
import os
from collections.abc import Iterator
from typing import BinaryIO

from errors import UserError as TextError  # noqa: F401
from text.dataset import sha256, version  # noqa: F401


@contextlib.contextmanager
def written_aside(path: str) -> Iterator[BinaryIO]:
    """A file to write to, renamed to path at the end. After an error path is as it was."""
    try:
        with open(path + ".tmp", "wb") as f:
            yield f
        os.replace(path + ".tmp", path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        raise


def sync_folder(folder: str) -> None: ...


def replace(path: str, data: bytes) -> None:
    with written_aside(path) as f:
        f.write(data)
