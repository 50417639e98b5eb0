"""A local stand-in for the Hugging Face hub: it answers what huggingface_hub and `datasets` ask to read a data set."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import PurePosixPath

CUT = 0  # instead of a status: the connection closes in the middle of the file
ERRORS = {401: "GatedRepo", 404: "EntryNotFound"}
URL = re.compile(r"(?:/api)?/datasets/(?P<name>[^/]+/[^/]+)(/(?P<what>resolve|tree|revision)/\w+/?(?P<path>.*))?")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        url = URL.fullmatch(urllib.parse.unquote(self.path.partition("?")[0]))
        files = self.server.repositories.get(url["name"]) if url else None
        if files is None:
            return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        path = url["path"]
        commit = sha1(repr(files).encode())
        if url["what"] == "resolve":
            status = self.server.fault(path) if self.command == "GET" else None
            if status or path not in files:
                return self.answer(status or 404)
            self.file(files[path], commit, cut=status == CUT)
        elif url["what"] == "tree":
            inside = [entry for entry in entries(files) if str(PurePosixPath(entry["path"]).parent) == (path or ".")]
            self.answer(200 if inside else 404, json.dumps(inside).encode() if inside else b"")
        else:
            self.answer(200, json.dumps({"id": url["name"], "sha": commit, "siblings": []}).encode())

    do_HEAD = do_GET

    def file(self, data: bytes, commit: str, cut: bool):
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = data[int(asked[1]) : int(asked[2]) + 1] if asked else data
        headers = {"ETag": f'"{sha1(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}"
        self.answer(206 if asked else 200, part, headers, cut=cut)

    def answer(self, status: int, data: bytes = b"", headers: dict | None = None, cut: bool = False):
        self.send_response(status)
        error = {"X-Error-Code": ERRORS[status]} if status in ERRORS else {}
        for name, value in ({"Content-Length": len(data)} | error | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection |= cut

    def log_message(self, *args):
        pass


def sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def entries(files: dict[str, bytes]) -> list[dict]:
    """The hub's description of the files and of their folders."""
    folders = {str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."}
    found = [{"type": "directory", "path": path, "oid": sha1(path.encode())} for path in folders]
    return found + [{"type": "file", "path": p, "oid": sha1(data), "size": len(data)} for p, data in files.items()]


@contextlib.contextmanager
def serve(repositories: dict[str, dict[str, bytes]]) -> Iterator[http.server.HTTPServer]:
    """A running hub, at .url, with the repositories {"owner/name": {"data/train.parquet": its bytes}}.

    A GET of a file is answered with the status .fault(path): CUT, or None for the file itself.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.repositories, server.fault = repositories, lambda path: None
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
