"""Shows the attention of trained models in a web page: what each token looks at, and what the
models predict after it.

    python -m lab.look --out_dir=out-laser,out-ls,out-beta    # then open the printed address
    python -m lab.look --init_from=gpt2 --start="The cat sat on the mat" --open
    python -m lab.look --out_dir=out-beta --out=look.html     # one file, without a server

The page is page.html with numbers put in: of a text's tokens (`look`), of one run (`seen_by`), of
one map (`packed`). When a user types, or a model writes, the page asks the server for the same
numbers of the new text. The server answers this machine only. The weights are those of
maps.py.
"""

import base64
import contextlib
import json
import pathlib
import threading
import webbrowser
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from configurator import run_script

import torch

from errors import UserError
from lab.look.maps import Map, Run, in_words, labels, open_runs, weights_of
from sample import prompt_of
from text.sampling import stream
from text.tokenizers import Tokenizer

# Which models?
out_dir = "out"  # folders of runs of train.py, with commas between them, shown side by side
init_from = "resume"  # resume: the runs in out_dir; or gpt2, local folders, ..., with commas
which: Literal["best", "latest"] = "best"  # best: the lowest validation loss; latest: the last step
# Which text?
start = "To be, or not to be: that is the question"  # the text; FILE:path reads it from a file
temperature = 0.8  # of a model that writes on; 0: always the most likely token
# Where is the page?
port = 8000  # of the server on 127.0.0.1; 0: one that is free
open = False  # open the page in a browser
out: str | None = None  # write the page with this text to a file, look.html; start no server


def look(runs: list[Run], tok: Tokenizer, ids: list[int]) -> dict:
    """What the page shows of a text: its last tokens, and each run's maps and predictions.

    If the text is longer than the smallest block_size, its first tokens are left out.
    """
    block_size = min(run.model.config.block_size for run in runs)
    left_out = max(0, len(ids) - block_size)
    ids = ids[left_out:]
    seen = [seen_by(run, tok.n_vocab, torch.tensor([ids])) for run in runs]
    predicted = {i for run in seen for best in run["next"] for i in best}
    # Each token after another one: some tokenizers drop the first token's space.
    words = {i: labels(tok, [ids[0], i])[1] for i in predicted}
    return {
        "tokens": labels(tok, ids),
        "ids": ids,
        "left_out": left_out,
        "words": words,
        "runs": seen,
    }


@torch.no_grad()
def seen_by(run: Run, n_vocab: int, idx: torch.Tensor) -> dict:
    """A run's numbers for token ids idx (1, T).

    "maps": its maps. "next", "p": the five likeliest tokens after each token, and their
    probabilities. "surprise": -log p of each token, in nats; the first token has none.
    """
    logits, _ = run.model(idx, idx)  # given targets, the model returns the logits of all positions
    log_p = logits[0].float().log_softmax(-1)
    surprise = -log_p[:-1].gather(-1, idx[0, 1:, None]).flatten()
    best = log_p[:, :n_vocab].topk(min(5, n_vocab))  # ids from n_vocab on are no tokens

    c = run.model.config
    attention = in_words(c)
    if "S" in c.heads:
        attention += f", window {c.resolved().window}"
    maps = []
    why = None  # the reason why there are no maps
    try:
        rows = sum(weights_of(run.model, idx), [])
        signed = any(m.weights.min() < 0 for m in rows)
        maps = [packed(m, signed) for m in rows]
    except UserError as error:  # an attention without weights
        why = str(error)
    return {
        "name": run.name,
        "attention": attention,
        "trained": run.about.partition(": ")[2],  # how long; nothing of pretrained weights
        "next": best.indices.tolist(),
        "p": best.values.exp().tolist(),
        "surprise": [None, *surprise.tolist()],
        "maps": maps,
        "why": why,
    }


def packed(m: Map, signed: bool) -> dict:
    """A map whose weights are 8-bit numbers in base64: the lower triangle, row by row.

    signed: whether weights below 0 are possible. A number q means the weight sign(q) (q / n)^2
    most; n = 255, or 127 in a signed map. The square gives small weights more digits.
    """
    w = m.weights[torch.ones_like(m.weights, dtype=torch.bool).tril()]
    most = w.abs().max().item()
    roots = w.sign() * (w.abs() / (most or 1.0)).sqrt()
    q = (roots * 127).round().to(torch.int8) if signed else (roots * 255).round().to(torch.uint8)
    data = base64.b64encode(q.numpy().tobytes()).decode()
    fields = m._asdict()
    del fields["weights"]
    return {**fields, "signed": signed, "most": most, "data": data}


def page(live: bool, text: str, numbers: dict) -> str:
    """The page in HTML, with the numbers of a text. live: a server will answer it."""
    data = json.dumps({"live": live, "text": text, **numbers})
    html = pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return html.replace("DATA", data.replace("<", "\\u003c"))  # a text may hold </script>


class Server(ThreadingHTTPServer):
    """Serves the page on 127.0.0.1.

    It has threads because a browser keeps connections open, which must not block other requests.
    """

    def __init__(self, runs: list[Run], tok: Tokenizer, page: str, port: int):
        self.runs = runs
        self.tok = tok
        self.page = page.encode()
        self.one_at_a_time = threading.Lock()  # looking into a model changes it for a moment
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:  # the port is in use, or not a port's number
            raise UserError(f"--port={port}: {error}. --port=0 finds a port that is free") from None
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")]

    def looks(self, text: str, new: int = 0, run: int = 0) -> Iterator[dict]:
        """Yields what the page shows of the text, and of the text with each new token.

        new: how many tokens runs[run] writes after the text.
        """
        try:
            ids = self.tok.start(text)
            if not ids:
                raise UserError("The text is empty: type at least one character.")
            n_chars = len(self.tok.decode(ids))
            tokens = stream(
                self.runs[run].model,
                torch.tensor([ids]),
                new,
                temperature,
                vocab_size=self.tok.n_vocab,
            )
            for n in range(new + 1):
                with self.one_at_a_time:
                    if n > 0:
                        ids.append(next(tokens).item())
                    numbers = look(self.runs, self.tok, ids)
                yield {"text": text + self.tok.decode(ids)[n_chars:], **numbers}
        except UserError as error:
            yield {"error": str(error)}


class Handler(BaseHTTPRequestHandler):
    """GET / is the page. POST /look takes {"text", "new", "run"} as JSON, the arguments of
    Server.looks, and is answered with JSON, a line for each of its dicts."""

    def do_GET(self) -> None:
        if self.begin("/", "text/html; charset=utf-8"):
            self.wfile.write(self.server.page)

    def do_POST(self) -> None:
        if self.begin("/look", "application/jsonl"):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with contextlib.suppress(ConnectionError):  # the page has stopped listening
                for numbers in self.server.looks(**request):
                    self.wfile.write(json.dumps(numbers).encode() + b"\n")

    def begin(self, path: str, content_type: str) -> bool:
        """Begins the answer. Returns False, and sends an error, if there is nothing to answer.

        That is so for another path, and for requests that do not come from this server's page.
        """
        origins = [None, *(f"http://{host}" for host in self.server.hosts)]
        known_host = self.headers["Host"] in self.server.hosts  # another name can lead to 127.0.0.1
        if self.path != path or not known_host or self.headers["Origin"] not in origins:
            self.send_error(403)
            return False
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.end_headers()
        return True

    def log_message(self, *_: object) -> None:
        """Prints nothing: requests come with every key that is typed."""


def main() -> None:
    runs, tok = open_runs(init_from, out_dir, which)
    text, ids = prompt_of(start, tok)
    first = page(out is None, text, look(runs, tok, ids))
    if out is not None:
        pathlib.Path(out).write_text(first, encoding="utf-8")
        print(f"wrote {out}")
        return
    with Server(runs, tok, first, port) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        print(address, "(Ctrl-C ends it)", flush=True)
        if open:
            webbrowser.open(address)
        server.serve_forever()


if __name__ == "__main__":
    run_script(globals())
