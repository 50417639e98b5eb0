"""python -m lab.look in a real browser: the page shows what the models compute."""

import http.client
import threading
from copy import deepcopy
from shutil import which

import pytest
import torch
from harness import assert_equal, done, refused
from reference import shaken
from torch.nn import functional as F

from lab.look.__main__ import Server, look, page
from lab.look.maps import Run, weights_of
from model import ATTENTION, GPTConfig
from text.tokenizers import CharTokenizer

TEXT = "</script> lost"
TYPED = "to be or not to be<a>"
TOK = CharTokenizer("\n </>abcdefghijklmnopqrst")
SIZES = {"block_size": 64, "vocab_size": TOK.n_vocab + 3, "n_layer": 3, "n_head": 6, "n_embd": 96}
CHOICES = [{}, {"attention": "laser", "heads": "SL", "window": 3}, {"attention": "beta"}]
RUNS = [Run("", "", shaken(GPTConfig(**SIZES | choices))) for choices in CHOICES]
SHOWN = """() => [...document.querySelectorAll(".run")].map((run) => {
  const all = (kind, f) => [...run.querySelectorAll(kind)].map(f);
  const numberOf = (x) => x.querySelector("output").textContent.replace("−", "-");
  const digitsOf = (x) => numberOf(x).split(".")[1]?.length ?? 0;
  return {
    tokens: all(".token", (x) => [+x.dataset.weight, +x.dataset.surprise, x.matches(".hatched")]),
    looks: [...run.querySelectorAll(".looks li")]
      .filter((x) => numberOf(x) !== "not seen")
      .map((x) => [+x.dataset.key, +numberOf(x), 10 ** -digitsOf(x)]),
    ids: all(".predicts li", (x) => +x.dataset.id),
    p: all(".predicts li", (x) => +x.dataset.p),
    true: all(".predicts li", (x) => x.matches(".true")),
    signed: all(".maps canvas", (x) => x.dataset.signed) }; })"""


@pytest.fixture(scope="module")
def browser():
    path = which("chromium")
    if path is None:
        pytest.skip("install Chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr("lab.look.__main__.temperature", 0.0)
    first = page(True, TEXT, look(RUNS, TOK, TOK.encode(TEXT)))
    with Server(deepcopy(RUNS), TOK, first, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def opened(browser, url, width=1280):
    """(a tab with the page, the addresses that it asks for and the errors that it reports)."""
    tab = browser.new_page(viewport={"width": width, "height": 800})
    heard = []
    tab.on("request", lambda request: heard.append(request.url))
    for mistake in ("console", "pageerror"):
        tab.on(mistake, lambda message: heard.append(str(message)))
    tab.goto(url)
    return tab, heard


def check_numbers(tab, text, layer, head, token):
    """Checks the page's weights, predictions and surprises against the models.

    Returns for each run of its large maps whether they are signed, "true" or "false".
    """
    idx = torch.tensor([TOK.encode(text)])
    after = idx[0, token + 1 : token + 2].tolist()
    shown = tab.evaluate(SHOWN)
    for run, numbers in zip(RUNS, shown, strict=True):
        m = next(m for m in weights_of(run.model, idx)[layer] if m.head == head)
        weights, surprise, hatched = torch.tensor(numbers["tokens"]).T
        row = m.weights[token, : token + 1]
        levels = 127 if run.model.config.attention == "beta" else 255
        assert_equal(weights[: token + 1], row, m.weights.abs().max().item() / levels)
        first = token - (m.window or len(text))
        assert hatched.tolist() == [j < first for j in range(len(text))]
        for j, number, digit in numbers["looks"]:  # the last digit can be off by one
            assert abs(number - row[j]) < digit + 1e-6
        logits = run.model(idx, idx)[0][0]
        expected = F.cross_entropy(logits[:-1], idx[0, 1:], reduction="none")
        assert_equal(surprise[1:], expected, 1e-5)
        best = logits[token, : TOK.n_vocab].topk(5).indices.tolist()
        ids = [*dict.fromkeys(best + after)]
        assert numbers["ids"] == ids
        assert numbers["true"] == [i in after for i in ids]
        assert_equal(torch.tensor(numbers["p"]), logits[token].softmax(-1)[ids], 1e-5)
    return [numbers["signed"] for numbers in shown]


def test_the_page_shows_what_the_models_compute(browser, port):
    tab, heard = opened(browser, f"http://127.0.0.1:{port}/")
    tab.fill("#text", TYPED)
    tab.hover(f".run:nth-child(2):has([data-token='{len(TYPED) - 1}']) [data-token='9']")
    check_numbers(tab, TYPED, 0, 0, 9)
    tab.click(".run:nth-child(3) .thumbnails button >> nth=8")
    assert check_numbers(tab, TYPED, 1, 2, 9) == [["false"], ["false"], ["true"]]
    for key in ("ArrowRight", "ArrowUp", "Shift+ArrowRight"):
        tab.keyboard.press(key)
    check_numbers(tab, TYPED, 0, 3, 10)

    surprise = torch.tensor([run["tokens"] for run in tab.evaluate(SHOWN)])[:, 1:, 1]
    apart = (surprise.amax(0) - surprise.amin(0)).argmax() + 1
    tab.click("[data-go]")  # the first of the tokens that surprise the models most differently
    check_numbers(tab, TYPED, 0, 3, apart)

    tab.select_option("#writer", "2")
    tab.click("#write")
    # Past block_size. On a busy machine it takes long.
    tab.wait_for_selector("#state:has-text('no room for the')", timeout=200_000)
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#write:has-text('Write on')")
    text = tab.input_value("#text")
    idx = torch.tensor([TOK.encode(TYPED)])
    n = len(text) - len(TYPED)
    written = RUNS[2].model.generate(idx, n, 0.0, vocab_size=TOK.n_vocab)
    assert text == TOK.decode(written[0].tolist())
    check_numbers(tab, text[-64:], 0, 3, 63)
    tab.fill("#text", "a!")
    tab.wait_for_selector(".problem:has-text('the text holds')")
    assert all(x.startswith(f"http://127.0.0.1:{port}/") for x in heard)


def test_a_file_needs_no_server(browser, tmp_path):
    path = tmp_path / "look.html"
    long = (TEXT * 5)[:64]
    path.write_text(page(False, long, look(RUNS, TOK, TOK.encode(long))))
    tab, heard = opened(browser, path.as_uri(), width=360)
    tab.click(".run:last-child .token >> nth=63")
    check_numbers(tab, long, 0, 0, 63)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert not tab.is_visible("#write")
    assert heard == [path.as_uri()]


def test_an_attention_without_weights(monkeypatch):
    monkeypatch.setitem(ATTENTION, "odd", lambda s, seen, v: (s * seen @ v) ** 2)
    odd = Run("", "", shaken(GPTConfig(**SIZES, attention="odd")))
    [numbers] = look([odd], TOK, [1, 2])["runs"]
    assert numbers["maps"] == [] and "attention='odd' has no weights" in numbers["why"]


@pytest.mark.filterwarnings("ignore:'lab.look.__main__' found in sys.modules")
def test_the_commands_and_the_server(run, train, tmp_path, port):
    out = tmp_path / "look.html"
    flags = ("lab.look", f"--out_dir={tmp_path}/out", "--start=the lord")
    train("--max_iters=2 --heads=SL --window=9")
    done(run(*flags, f"--out={out}", "--which=latest"), "/out/ckpt.pt: ")
    shown = out.read_text()
    assert '"tokens": ["t", "h", "e", "\\u2423"' in shown
    assert '"attention": "softmax, heads SL, window 9", "trained": "step 2, ' in shown

    run("data/text/prepare.py", f"--source={__file__}", f"--out_dir={tmp_path}/data")
    train(f"--max_iters=2 --dataset={tmp_path}/data --out_dir={tmp_path}/other")
    for flag, says in (
        (f"--port={port}", "in use"),
        ("--port=70000", "--port=70000: "),
        (f"--out_dir={tmp_path}/out,{tmp_path}/other", "have different tokenizers"),
    ):
        refused(run(*flags, flag), says)

    connection = http.client.HTTPConnection(f"127.0.0.1:{port}")
    # Other web pages cannot use the server.
    for headers in ({"Host": f"x.com:{port}"}, {"Origin": "http://x.com"}):
        connection.request("GET", "/", headers=headers)
        assert connection.getresponse().status == 403
