"""python -m lab.look in a real browser: what the page shows is what the models compute."""

import http.client
import threading
from copy import deepcopy
from shutil import which

import pytest
import torch
from reference import shaken

from lab.look.__main__ import Run, Server, look, page
from model import ATTENTION, GPTConfig
from scripts.maps import weights_of
from text.tokenizers import CharTokenizer

TEXT, TYPED, TOK = "</script> lost", "to be or not to be<a>", CharTokenizer("\n </>abcdefghijklmnopqrst")
CPU = {"block_size": 64, "vocab_size": TOK.n_vocab + 3, "n_layer": 3, "n_head": 6, "n_embd": 96}
CHOICES = [{}, {"attention": "laser", "heads": "SL", "window": 3}, {"attention": "beta"}, {"differential": True}]
RUNS = [Run(f"run {n}", "", "", shaken(GPTConfig(**CPU | choices))) for n, choices in enumerate(CHOICES)]
SHOWN = """() => [...document.querySelectorAll(".run")].map((run) => {
  const all = (kind, f) => [...run.querySelectorAll(kind)].map(f);
  return [all(".token", (x) => [+x.dataset.weight, +x.dataset.surprise, x.matches(".hatched")]),
    all(".looks li", (x) => [+x.dataset.key, x.querySelector("output").textContent.replace("−", "-")]),
    all(".predicts li", (x) => [+x.dataset.id, +x.dataset.p, x.matches(".true")]),
    all(".maps canvas", (x) => x.dataset.kind)]; })"""


@pytest.fixture(scope="module")
def browser():
    path = which("chromium") or which("chromium-browser") or which("google-chrome") or pytest.skip("install Chromium")
    with pytest.importorskip("playwright.sync_api", reason="pip install playwright").sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture
def port():
    with Server(deepcopy(RUNS), TOK, page(True, TEXT, look(RUNS, TOK, TOK.encode(TEXT))), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def opened(browser, url: str, width: int = 1280) -> tuple:
    """(a tab with the page, the addresses that it has asked for and the errors that it has told)."""
    tab, heard = browser.new_page(viewport={"width": width, "height": 800}), []
    for event, words in (("request", lambda x: x.url), ("console", lambda x: x.text), ("pageerror", str)):
        tab.on(event, lambda x, words=words: heard.append(words(x)))
    tab.goto(url)
    return tab, heard


def check_numbers(tab, text: str, layer: int, head: int, token: int) -> list[list[str]]:
    """The page's weights, predictions and surprises are those of the models. Returns the kinds of each run's maps."""
    idx, after = torch.tensor([TOK.encode(text)]), TOK.encode(text)[token + 1 : token + 2]
    for run, (tokens, looks, predicts, _) in zip(RUNS, shown := tab.evaluate(SHOWN), strict=True):
        m = next(m for m in weights_of(run.model, idx)[layer] if m.head == head)
        weights, surprise, hatched = map(list, zip(*tokens, strict=True))
        row, close = m.weights[token, : token + 1], m.weights.abs().max().item() / (127 if m.signed else 255)
        torch.testing.assert_close(torch.tensor(weights[: token + 1]), row, rtol=0, atol=close)
        assert hatched == [m.window is not None and j < token - m.window for j in range(len(text))]
        for j, number in (x for x in looks if x[1] != "not seen"):  # the last digit can be off by one
            assert abs(float(number) - row[j]) < 10 ** -len(number.partition(".")[2]) + 1e-6
        p = run.model(idx, idx)[0][0].softmax(-1)
        torch.testing.assert_close(torch.tensor(surprise[1:]), -p[:-1].gather(1, idx[0, 1:, None])[:, 0].log())
        ids, probabilities, true = map(list, zip(*predicts, strict=True))
        assert ids == [*dict.fromkeys(p[token, : TOK.n_vocab].topk(5).indices.tolist() + after)]
        assert true == [i in after for i in ids]
        torch.testing.assert_close(torch.tensor(probabilities), p[token, ids])
    return [kinds for *_, kinds in shown]


def test_the_page_shows_what_the_models_compute(browser, port):
    tab, heard = opened(browser, f"http://127.0.0.1:{port}/")
    tab.fill("#text", TYPED)
    tab.hover(f".run:nth-child(2):has([data-token='{len(TYPED) - 1}']) [data-token='9']")
    check_numbers(tab, TYPED, 0, 0, 9)
    tab.click(".run:nth-child(3) .thumbnails button >> nth=8")
    assert check_numbers(tab, TYPED, 1, 2, 9)[2:] == [["signed weights"], ["weights", "weights", "difference"]]
    for key in ("ArrowRight", "ArrowUp", "Shift+ArrowRight"):
        tab.keyboard.press(key)
    check_numbers(tab, TYPED, 0, 3, 10)
    surprise = torch.tensor([run["surprise"][1:] for run in look(RUNS, TOK, TOK.encode(TYPED))["runs"]])
    apart = ((surprise.amax(0) - surprise.amin(0)).topk(5).indices + 1).tolist()
    assert [int(x.get_attribute("data-go")) for x in tab.locator("[data-go]").all()] == apart
    tab.click("[data-go] >> nth=2")
    check_numbers(tab, TYPED, 0, 3, apart[2])
    tab.select_option("#writer", "2")
    tab.click("#write")
    tab.wait_for_selector("#state:has-text('no room for the')")  # past block_size
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#write:has-text('Write on')")
    assert (text := tab.input_value("#text")).startswith(TYPED) and len(text) > 64
    check_numbers(tab, text[-64:], 0, 3, 63)
    for mistake, says in (("a!", "the text holds"), ("", "The text is empty")):
        tab.fill("#text", mistake)
        tab.wait_for_selector(f".problem:has-text('{says}')")
    assert all(x.startswith(f"http://127.0.0.1:{port}/") for x in heard)


def test_a_file_needs_no_server(browser, tmp_path, monkeypatch):
    monkeypatch.setitem(ATTENTION, "odd", lambda s, seen, v: (s * seen @ v) ** 2)
    odd, paths = shaken(GPTConfig(**CPU, attention="odd")), [tmp_path / "look.html", tmp_path / "odd.html"]
    for path, runs, text in zip(paths, (RUNS, [Run("", "", "", odd)]), ((TEXT * 5)[:64], TEXT), strict=True):
        path.write_text(page(False, text, look(runs, TOK, TOK.encode(text))), encoding="utf-8")
    (tab, heard), (other, more) = (opened(browser, path.as_uri(), width=360) for path in paths)
    tab.click(".run:last-child .token >> nth=63")
    check_numbers(tab, (TEXT * 5)[:64], 0, 0, 63)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360 and not tab.is_visible("#write")
    assert "attention='odd' has no weights to draw" in other.inner_text(".maps") and other.is_visible(".predicts li")
    assert heard + more == [path.as_uri() for path in paths] and paths[0].stat().st_size < 2 * 2**20


@pytest.mark.filterwarnings("ignore:'lab.look.__main__' found in sys.modules")
def test_the_command_and_its_server(run, train, tmp_path, port):
    train("--max_iters=2", "--eval_interval=2")
    folder, out, other = tmp_path / "out", tmp_path / "look.html", tmp_path / "other"
    code, printed, err = run("lab.look", f"--out_dir={folder}", "--start=the lord", f"--out={out}")
    assert code == 0 and f"wrote {out}" in printed and '"tokens": ["t", "h", "e", "\\u2423"' in out.read_text(), err
    run("data/text/prepare.py", f"--source={__file__}", f"--out_dir={tmp_path / 'data'}")
    train("--max_iters=1", "--eval_interval=1", f"--dataset={tmp_path / 'data'}", f"--out_dir={other}")
    says = {f"--port={port}": "in use", "--port=70000": "--port=70000: ", "--start=": "is empty"}
    for flag, sentence in (says | {f"--out_dir={folder},{other}": "have different tokenizers"}).items():
        code, _, err = run("lab.look", f"--out_dir={folder}", "--start=the lord", flag)
        assert code == 2 and sentence in err
    own = {"Host": f"127.0.0.1:{port}"}  # other web pages cannot use it
    for headers, status in ((own, 200), ({"Host": f"x.com:{port}"}, 403), (own | {"Origin": "http://x.com"}, 403)):
        connection = http.client.HTTPConnection(own["Host"])
        connection.request("GET", "/", headers=headers)
        assert connection.getresponse().status == status
