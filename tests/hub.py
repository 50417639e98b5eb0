"""A local stand-in for the Hugging Face hub: it answers what `datasets` asks to read a data set."""

import contextlib
import hashlib
import http.server
import json
import posixpath
import re
import threading
import urllib.parse

URL = re.compile(
    r"(?:/api)?/datasets/(?P<name>[^/]+/[^/]+)(/(?P<what>resolve|tree|revision)/\w+/?(?P<path>.*))?"
)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        url = URL.fullmatch(urllib.parse.unquote(self.path.partition("?")[0]))
        files = self.server.repositories.get(url["name"]) if url else None
        if files is None:
            return self.answer(404, X_Error_Code="RepoNotFound")
        path = url["path"]
        commit = sha1(repr(files).encode())
        if url["what"] == "tree":
            self.json(entries(files, path))
        elif url["what"] != "resolve":
            self.json({"id": url["name"], "sha": commit, "siblings": []})
        elif path not in files:
            self.answer(404, X_Error_Code="EntryNotFound")
        else:
            status = self.server.fault(path) if self.command == "GET" else None
            if status:
                return self.answer(status, X_Error_Code="GatedRepo")
            data = files[path]
            self.answer(200, data, ETag=f'"{sha1(data)}"', X_Repo_Commit=commit)

    do_HEAD = do_GET

    def json(self, answer):
        self.answer(200, json.dumps(answer).encode())

    def answer(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", len(data))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


def sha1(data):
    return hashlib.sha1(data).hexdigest()


def entries(files, folder):
    """The hub's description of what is in a folder."""
    answer = []
    for path in {*files, *map(posixpath.dirname, files)} - {""}:
        if posixpath.dirname(path) == folder:
            family = "file" if path in files else "directory"
            entry = {"type": family, "path": path, "oid": sha1(path.encode())}
            answer.append(entry | {"size": len(files.get(path, ""))})
    return answer


@contextlib.contextmanager
def serve(repositories):
    """A running hub, at .url, with repositories {"owner/name": {"data/train.parquet": bytes}}.

    A GET of a file is answered with the status .fault(path); None: with the file itself.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.repositories = repositories
        server.fault = lambda path: None
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
