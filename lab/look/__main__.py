"""Shows the attention of trained models in a web page: what each token looks at, and what the models predict after it.

    python -m lab.look --out_dir=out-shakespeare-char-cpu,out-laser,out-ls,out-beta    # then open the printed address
    python -m lab.look --init_from=gpt2 --start="The cat sat on the mat" --open
    python -m lab.look --out_dir=out-beta --out=look.html                              # one file, without a server

The page is page.html with numbers put in: of a text's tokens (`look`), of one run (`seen_by`), of one map (`packed`).
As one types, or as a model writes, the page asks the server for the same numbers of the new text.
The server answers this machine only. The weights are those of scripts/maps.py.
"""

import base64
import contextlib
import json
import pathlib
import threading
import webbrowser
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple

import torch

from errors import NotFinite, UserError
from lab.experiments import results
from model import GPT, GPTConfig
from rules import attentions
from sample import prompt_of
from scripts.maps import Map, labels, weights_of
from text.sampling import stream
from text.tokenizers import Tokenizer
from training.checkpoint import open_model

# Which models?
out_dir = "out"  # the folder of a run of train.py; several, with commas between them, are shown side by side
init_from = "resume"  # resume: the checkpoints in out_dir; or gpt2, ..., a local folder; several, with commas
which: Literal["best", "latest"] = "best"  # the checkpoint with the lowest validation loss, or the latest one
# Which text?
start = "To be, or not to be: that is the question"  # the first text; FILE:path reads it from a file
temperature = 0.8  # of a model that writes on; 0: always the most likely token
# Where is the page?
port = 8000  # of the server on 127.0.0.1; 0: one that is free
open = False  # open the page in a browser
out: str | None = None  # write the page with this text to a file, look.html, and start no server


class Run(NamedTuple):
    name: str
    attention: str  # in words
    trained: str  # how long, and to which loss; empty for pretrained weights
    model: GPT


def open_runs(init_from: str, out_dir: str, which: str) -> tuple[list[Run], Tokenizer]:
    """The models that the flags name, and their tokenizer. Raises UserError if they have different ones."""
    runs, tokenizers = [], []
    resume = init_from == "resume"
    for name in dict.fromkeys(x.strip().rstrip("/") for x in (out_dir if resume else init_from).split(",")):
        model, tok, _, about = open_model(init_from if resume else name, name, which)
        print(about)
        runs.append(Run(name, in_words(model.config), about.partition(": ")[2], model.eval()))
        tokenizers.append((tok.meta, tok.n_vocab))
        if tokenizers[-1] != tokenizers[0]:
            raise UserError(f"{name} and {runs[0].name} have different tokenizers: look at them one by one")
    return runs, tok


def in_words(c: GPTConfig) -> str:
    """The attention of a configuration: "softmax, heads SSSL, window 16"."""
    long, *short = (f"{name} (weights of its softmax)" if name == "laser" else name for name in attentions(c))
    words = [f"{short[0]} in short heads, {long} in long heads" if short else long]
    words += [f"heads {c.heads}, window {c.resolved().window}"] if "S" in c.heads else []
    return ", ".join([*words, *(["differential"] if c.differential else [])])


def look(runs: list[Run], tok: Tokenizer, ids: list[int]) -> dict:
    """What the page shows of a text: its last tokens, as many as every model takes, and what each run makes of them."""
    most = min(run.model.config.block_size for run in runs)
    ids, left_out = ids[-most:], max(0, len(ids) - most)
    seen = [seen_by(run, tok.n_vocab, torch.tensor([ids])) for run in runs]
    predicted = {i for run in seen for best in run["next"] for i in best}
    words = {i: labels(tok, [ids[0], i])[1] for i in predicted}  # some tokenizers drop the first token's space
    return {"tokens": labels(tok, ids), "ids": ids, "left_out": left_out, "words": words, "runs": seen}


@torch.no_grad()
def seen_by(run: Run, n_vocab: int, idx: torch.Tensor) -> dict:
    """A run's maps, its likeliest next tokens after each token of idx (1, T), and each token's surprise -log p."""
    logits, _ = run.model(idx, idx)  # with targets, which are not used, it gives the logits of all positions
    log_p = logits[0].float().log_softmax(-1)
    if not log_p.isfinite().all():
        raise NotFinite(f"the logits of {run.name} are not finite; has its training diverged?")
    surprise = -log_p[:-1].gather(-1, idx[0, 1:, None]).flatten()  # the first token is not predicted
    best = log_p[:, :n_vocab].topk(min(5, n_vocab))  # ids past n_vocab are no tokens
    maps, why = [], None
    try:
        maps = [packed(m) for layer in weights_of(run.model, idx) for m in layer]
    except UserError as error:  # an attention without weights
        why = str(error)
    numbers = {"next": best.indices.tolist(), "p": best.values.exp().tolist(), "surprise": [None, *surprise.tolist()]}
    about = {"name": run.name, "attention": run.attention, "trained": run.trained}
    return about | numbers | {"maps": maps, "why": why}


def packed(m: Map) -> dict:
    """A map whose weights are 8-bit numbers in base64: the lower triangle, row by row.

    A number q means the weight sign(q) (q / n)^2 most; n = 255, or 127 in a signed map. Small weights lose little.
    """
    w = m.weights[torch.ones_like(m.weights, dtype=torch.bool).tril()]
    most = w.abs().max().item()
    roots = w.sign() * (w.abs() / (most or 1.0)).sqrt()
    q = (roots * 127).round().to(torch.int8) if m.signed else (roots * 255).round().to(torch.uint8)
    packed = {"signed": m.signed, "most": most, "data": base64.b64encode(q.numpy().tobytes()).decode()}
    return {name: x for name, x in m._asdict().items() if name != "weights"} | packed


def page(live: bool, text: str, found: dict) -> str:
    """The page in HTML, with the numbers of a text. live: a server will answer it."""
    data = json.dumps({"live": live, "text": text, **found}).replace("<", "\\u003c")  # a text may hold </script>
    return pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8").replace("DATA", data)


class Server(ThreadingHTTPServer):
    """Serves the page on 127.0.0.1. Threads: a browser keeps connections open, and must not block the others."""

    def __init__(self, runs: list[Run], tok: Tokenizer, page: str, port: int):
        self.runs, self.tok, self.page = runs, tok, page.encode()
        self.one_at_a_time = threading.Lock()  # looking into a model changes it for a moment
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:  # it is in use, or no number of a port
            raise UserError(f"--port={port}: {error}. --port=0 finds a port that is free") from None
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")]

    def looks(self, text: str, new: int = 0, run: int = 0) -> Iterator[dict]:
        """Yields what the page shows of the text and, as a run writes on, of the text with each of `new` tokens."""
        try:
            ids = self.tok.start(text)
            if not ids:
                raise UserError("The text is empty: type at least one character.")
            before, model = len(self.tok.decode(ids)), self.runs[run].model
            tokens = stream(model, torch.tensor([ids]), new, temperature, vocab_size=self.tok.n_vocab)
            for n in range(new + 1):
                with self.one_at_a_time:
                    ids += [next(tokens).item()] if n else []
                    found = look(self.runs, self.tok, ids)
                yield {"text": text + self.tok.decode(ids)[before:], **found}
        except UserError as error:
            yield {"error": str(error)}


class Handler(BaseHTTPRequestHandler):
    """GET / is the page. POST /look {"text", "new", "run"} is answered with JSON, a line for each of Server.looks."""

    def do_GET(self) -> None:
        if self.begin("/", "text/html; charset=utf-8"):
            self.wfile.write(self.server.page)

    def do_POST(self) -> None:
        if self.begin("/look", "application/jsonl"):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with contextlib.suppress(ConnectionError):  # the page does not want to hear more
                for found in self.server.looks(**asked):
                    self.wfile.write(json.dumps(found).encode() + b"\n")

    def begin(self, path: str, kind: str) -> bool:
        """Begins the answer. Returns False if it is an error: for another path, or to the pages of other servers."""
        own = self.headers["Host"] in self.server.hosts  # not so if another name leads to 127.0.0.1
        own &= self.headers["Origin"] in (None, *(f"http://{host}" for host in self.server.hosts))
        status = 403 if not own else 200 if self.path == path else 404
        if status != 200:
            self.send_error(status)
            return False
        self.send_response(status)
        self.send_header("Content-Type", kind)
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
        print(address := f"http://127.0.0.1:{server.server_port}", "(Ctrl-C ends it)", flush=True)
        if open:
            webbrowser.open(address)
        server.serve_forever()


if __name__ == "__main__":
    results.start(globals())
