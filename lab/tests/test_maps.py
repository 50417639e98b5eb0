"""lab/look/maps.py: the weights of every attention against its heads' own outputs, its refusals,
its picture."""

import pytest
import torch
from harness import assert_equal, done, legal, pairwise, parametrize, refusal
from reference import SIZES, shaken

import lab.ideas.positions  # noqa: F401
from attention.scores import distances, visible
from errors import UserError
from lab.ideas.differential import DifferentialLASER
from lab.look.maps import Map, chosen_maps, draw, in_words, labels, weights_of
from lab.look.probe import Probe
from model import ATTENTION, GPTConfig
from text.tokenizers import ByteTokenizer, CharTokenizer

T = 12
IDX = torch.arange(T)[None]
TOK = CharTokenizer("abcdefghijklmnopqrst")


def gpt(**choices):
    return shaken(GPTConfig(**SIZES | choices), 0.3, torch.float64)


HEADS = {"heads": "SLSL/L", "window": 4}
CASES = [
    {},
    {"heads": "SLLS/LS", "window": 2, "n_kv_head": 2, "temperature": 0.7},
    {"heads": "S/L", "window": 0, "n_kv_head": 1},
    {"heads": "LS", "window": 3, "nope_long": True, "position": "rope"},
    *(HEADS | {"position": name} for name in ("rope", "alibi", "t5", "relative")),
    HEADS | {"position": "alibi", "short_attention": "laser"},
    HEADS | {"position": "rope", "short_attention": "softmax", "decay": "alibi"},
]
ROWS = pairwise(ATTENTION, CASES, legal=lambda name, case: legal(gpt, attention=name, **case))
PAIRS = {"heads": "LLSS", "window": 4, "n_kv_head": 2}


@parametrize("attention, case", [*ROWS, ("pairs", PAIRS)], ids=str)
@torch.no_grad()
def test_the_weights_give_what_the_heads_compute(attention, case, monkeypatch):
    monkeypatch.setitem(ATTENTION, "pairs", DifferentialLASER)
    model = gpt(attention=attention, **case)
    row_of = {}
    for block, row in zip(model.transformer.h, weights_of(model, IDX), strict=True):
        row_of |= dict.fromkeys(block.attn.heads, row)
        assert [m.head for m in row] == [0, 1, 2, 3]

    def check(heads, q, k, v, *, vectors=None, **settings):
        if vectors is not None:
            settings["vectors"] = vectors
        outputs = heads.run(q, k, v, **settings)[0]
        for m, values, y in zip(row_of[heads][heads.queries], v[0], outputs, strict=True):
            w = m.weights[..., None]  # (T, T, 1)
            assert m.window == heads.window
            assert not w[~visible(w[0], w[0], m.window)].any()
            if vectors is not None:  # of the values in position="relative"
                values = values + vectors[1][distances(T, T, w.device).clamp(0, 16)]
            if heads.name == "laser":
                assert_equal((w * values.exp()).sum(1).log(), y, 1e-9)
            else:
                assert_equal((w * values).sum(1), y, 1e-9)

    model.hidden(IDX, Probe(check))


def test_the_model_stays_as_it_was():
    model = gpt(dropout=0.5).train()
    first, second = (weights_of(model, IDX)[1][0].weights for _ in range(2))
    assert torch.equal(first, second)  # without dropout
    assert model.training


def sigmoid_attention(s, seen, v):
    return 2 * (s.sigmoid() * seen) @ v


def squared(s, seen, v):
    return sigmoid_attention(s, seen, v) ** 2


def centred(s, seen, v):
    """Linear, but it mixes the channels of its values: one-hot values do not give its weights."""
    return sigmoid_attention(s, seen, v - v.mean(-1, keepdim=True))


def test_a_new_attention_has_maps(monkeypatch):
    monkeypatch.setitem(ATTENTION, "new", sigmoid_attention)
    m = weights_of(gpt(attention="new", heads="SL", window=3), IDX)[1][0]
    assert 1 < m.weights.max() < 2
    assert not m.weights[5, :2].any()


@parametrize("name, definition", [("new", squared), ("new", centred), ("laser", sigmoid_attention)])
def test_an_attention_without_weights_is_refused(name, definition, monkeypatch):
    """Nor does an edited laser get maps of the old one."""
    monkeypatch.setitem(ATTENTION, name, definition)
    with refusal(f"{name!r} has no weights to draw: it is not linear in", UserError):
        weights_of(gpt(attention=name), IDX)


def test_words():
    tok = CharTokenizer("\n\t $ab'")
    assert labels(tok, tok.encode("a b\n\t$'")) == ["a", "\u2423", "b", "\\n", "\\t", "$", "'"]
    assert labels(ByteTokenizer(), [*"aé".encode()]) == ["a", "#195", "#169"]
    c = GPTConfig(**SIZES | PAIRS, attention="laser", short_attention="beta")
    assert in_words(c) == "laser (its softmax), short heads: beta, heads LLSS"


def test_chosen_maps():
    """Short heads come first, wherever their letters stand."""
    model = gpt(heads="LS", window=2)
    words, [[m]] = chosen_maps(model, TOK, "abc", 1, 1)
    assert (words, m.title) == (["a", "b", "c"], "layer 1, head 1: S, window 2")
    _, rows = chosen_maps(model, TOK, "abc", None, 2)
    assert [[m.title for m in row] for row in rows] == [["layer 0, head 2"], ["layer 1, head 2"]]


@parametrize(
    "start, layer, head, says",
    [
        ("a", 2, None, "the layers 0 to 1"),
        ("a", None, 4, "the heads 0 to 3"),
        (25 * "a", None, None, "25 tokens, but this model sees at most 24"),
    ],
)
def test_what_cannot_be_chosen_is_refused(start, layer, head, says):
    with refusal(says, UserError):
        chosen_maps(gpt(), TOK, start, layer, head)


# -----------------------------------------------------------------------------
# the pictures


def test_a_picture():
    pytest.importorskip("matplotlib")
    first = Map(0, 0, "the first of two long titles", None, torch.eye(2))
    second = first._replace(window=0)
    third = Map(1, 0, "third", None, torch.tensor([[-0.5, 0.0], [0.25, 0.0]]))

    figure = draw([[first, second], [third]], ["a", "$b$"])
    *maps, bar = figure.axes
    images = [ax.images[0] for ax in maps]
    assert [image.get_array().tolist() for image in images] == [
        [[1.0, None], [0.0, 1.0]],
        [[1.0, None], [None, 1.0]],
        [[-0.5, None], [0.25, 0.0]],
    ]
    assert images[0].norm.vmin == -1.0
    assert draw([[first]], ["a", "b"]).axes[0].images[0].norm.vmin == 0.0
    assert [text.get_text() for text in maps[0].get_yticklabels()] == ["a", "$b$"]

    figure.draw_without_rendering()
    left, right, _ = (ax.title.get_window_extent() for ax in maps)
    assert left.x1 < right.x0


def test_the_script(run, train, tmp_path):
    pytest.importorskip("matplotlib")
    train("--max_iters=5")
    picture = tmp_path / "maps.png"
    prompt = tmp_path / "p.txt"
    prompt.write_text("all citizens")
    flags = ("lab.look.maps", f"--out_dir={tmp_path / 'out'}/", f"--out={picture}")
    result = run(*flags, f"--start=FILE:{prompt}", "--which=latest")
    done(result, "/out/ckpt.pt: step 5, ")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_maps_of_several_runs(run, train, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    train("--max_iters=2")
    train(f"--max_iters=2 --attention=beta --heads=SL --out_dir={tmp_path}/b")
    folders = f"{tmp_path}/out, {tmp_path}/b/,{tmp_path}/b/../out"
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: figures.append(self)
    )
    for flags in ([], ["--layer=1", "--head=1"]):
        done(run("lab.look.maps", f"--out_dir={folders}", "--start=all", *flags))
    assert figures[0].axes[0].get_gridspec().get_geometry() == (6, 4)
    assert [ax.get_title() for ax in figures[1].axes[:-1]] == [
        f"softmax, {tmp_path}/out\nlayer 1, head 1",
        "beta, heads SL\nlayer 1, head 1: S, window 50",
        f"softmax, {tmp_path}/b/../out\nlayer 1, head 1",
    ]
