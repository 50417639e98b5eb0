"""scripts/maps.py: the weights of every attention against its layer's own output, its refusals, its picture."""

import json
import struct

import pytest
import torch
from harness import legal, pairwise
from reference import shaken

import model as model_file
from attention.scores import visible
from errors import UserError
from model import ATTENTION, GPT, GPTConfig
from scripts.maps import Map, draw, labels, weights_of
from text.tokenizers import ByteTokenizer, CharTokenizer
from training import checkpoint

T = 12
SIZES = {"block_size": 32, "vocab_size": 20, "n_layer": 2, "n_head": 4, "n_embd": 32}


def gpt(**choices: object) -> GPT:
    return shaken(GPTConfig(**SIZES | choices), 0.3, torch.float64)


def layer_by_layer(model: GPT, idx: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer the values of all query heads, (H, T, D), and what c_proj gets, (T, H D)."""
    c, found = model.config.resolved(), []
    n_map = 2 if c.differential else 1

    def before(c_proj, args):
        v = qkv[-1][0][:, -c.n_kv_head * c.head_dim :].view(T, -1, n_map * c.head_dim).transpose(0, 1)
        found.append((v.repeat_interleave(c.n_head // len(v), dim=0), args[0][0]))

    qkv = []
    for block in model.transformer.h:
        (block.attn.conv or block.attn.c_attn).register_forward_hook(lambda module, args, y: qkv.append(y))
        block.attn.c_proj.register_forward_pre_hook(before)
    with torch.no_grad():
        model.eval()(idx)
    return found


CASES = [
    {},
    {"heads": "SLSL", "window": 2},
    {"heads": "SLLS/LS", "window": 2, "n_kv_head": 2, "qk_norm": "l2", "temperature": 0.7},
    {"heads": "S/L", "window": 0, "n_kv_head": 1, "per_dim_temperature": True},
    {"heads": "LS", "window": 3, "nope_long": True, "position": "rope"},
    {"differential": True, "heads": "LLSS", "window": 2},
    {"differential": True, "n_kv_head": 2, "n_layer": 3},
    *({"position": name, "heads": "SLSL/L", "window": 4} for name in ("sinusoidal", "rope", "none")),
    *({"position": name, "heads": "SLSL/L", "window": 4} for name in ("alibi", "t5", "relative")),
    {"position": "relative", "differential": True, "max_distance": 3, "heads": "LLSS", "window": 4},
    {"position": "rope", "decay": "learned", "heads": "SLSL/L", "window": 4, "short_attention": "softmax"},
    {"position": "alibi", "heads": "SLSL/L", "window": 4, "short_attention": "laser"},
    {"differential": True, "heads": "LLSS", "window": 4, "short_attention": "beta_squared", "conv": 3},
]


@pytest.mark.parametrize(
    ("attention", "case"),
    pairwise(ATTENTION, CASES, legal=lambda name, case: legal(GPTConfig, **SIZES | case, attention=name)),
    ids=str,
)
def test_the_weights_give_what_the_layer_computes(attention, case):
    model = gpt(attention=attention, **case)
    c = model.config.resolved()
    idx = torch.randint(20, (1, T))
    rows = weights_of(model, idx)
    for i, (maps, (values, y)) in enumerate(zip(rows, layer_by_layer(model, idx), strict=True)):
        attn = model.transformer.h[i].attn
        plain = [m for m in maps if m.kind != "difference"]
        assert [m.head for m in plain] == list(range(4)) and all(m.layer == i for m in maps)
        assert "".join(m.letter for m in plain) == c.layer_heads(i)
        v = values[:, None].expand(-1, T, -1, -1)  # (H, T, T, D): by query and key
        if c.position == "relative":
            distance = torch.arange(T)[:, None] - torch.arange(T)
            v = v + attn.position.v.detach()[distance.clamp(0, len(attn.position.v) - 1)]
        seen = [visible(v[0, 0], v[0, 0], m.window) for m in plain]
        names = [c.short_attention if m.letter == "S" else attention for m in plain]
        for m, of, name in zip(plain, seen, names, strict=True):
            assert m.window == {"S": c.window, "L": None}[m.letter] and not m.weights[~of].any(), m.title
            assert m.kind == ("signed weights" if attention == "beta" else "weights")  # in all maps of a model
            if name in ("softmax", "laser"):
                torch.testing.assert_close(m.weights.sum(-1), torch.ones(T).double(), rtol=0, atol=1e-12)
        w = torch.stack([m.weights for m in plain])[..., None]  # (H, T, T, 1)
        laser = torch.tensor([name == "laser" for name in names])[:, None, None]
        expected = torch.where(laser, (w * v.exp()).sum(-2).log(), (w * v).sum(-2))
        if c.differential:
            lam = (attn.lambda_q1 @ attn.lambda_k1).exp() - (attn.lambda_q2 @ attn.lambda_k2).exp() + attn.lambda_init
            expected = expected[::2] - lam * expected[1::2]
            linear = ~laser[::2, 0, 0]  # in LASER the difference is one of logarithms
            between = [m.weights for m in maps if m.kind == "difference"]
            assert len(between) == linear.sum()
            if between:
                difference = w[::2, ..., 0] - lam.detach() * w[1::2, ..., 0]
                torch.testing.assert_close(torch.stack(between), difference[linear])
            expected = attn.ln_head(expected).detach() * (1 - attn.lambda_init)
        torch.testing.assert_close(expected.transpose(0, 1).flatten(1), y, rtol=1e-9, atol=1e-9)


def test_the_model_stays_as_it_was():
    model = gpt(dropout=0.5).train()
    idx = torch.randint(20, (1, T))
    (group,) = model.transformer.h[0].attn.groups
    core = group.core
    first, again = weights_of(model, idx), weights_of(model, idx)
    assert model.training and group.core is core
    for a, b in zip(sum(first, []), sum(again, []), strict=True):
        assert torch.equal(a.weights, b.weights)  # without dropout
    assert weights_of(model, idx[:, :1])[0][0].weights.tolist() == [[1.0]]


def sigmoid_attention(s, seen, v):
    return 2 * (s.sigmoid() * seen) @ v


def squared(s, seen, v):
    return sigmoid_attention(s, seen, v) ** 2


def centred(s, seen, v):
    """It is linear, but it mixes the channels of its values: one-hot values do not give its weights."""
    return sigmoid_attention(s, seen, v - v.mean(-1, keepdim=True))


def test_a_new_attention_has_maps(monkeypatch):
    monkeypatch.setitem(model_file.ATTENTION, "new", sigmoid_attention)
    rows = weights_of(gpt(attention="new", heads="SL", window=3), torch.randint(20, (1, T)))
    assert {m.kind for row in rows for m in row} == {"weights"}
    weights = rows[1][0].weights
    assert 1 < weights.max() < 2 and not weights[5, :2].any() and weights[5, 2] > 0
    figure = draw(rows, [*"abcdefghijkl"])
    assert len(figure.axes) == 8 + 1  # one colour bar


def test_an_attention_without_weights_is_refused(monkeypatch):
    for name, definition, of in (
        ("new", squared, "its values"),
        ("new", centred, "its values"),
        ("laser", sigmoid_attention, "the f.v. that LINEAR_IN"),  # an edited laser does not get maps of the old one
    ):
        monkeypatch.setitem(model_file.ATTENTION, name, definition)
        with pytest.raises(UserError, match=f"{name!r} has no weights to draw: it is not linear in {of}"):
            weights_of(gpt(attention=name), torch.randint(20, (1, T)))


def test_labels():
    tok = CharTokenizer("\n\t $ab")
    assert labels(tok, tok.encode("a b\n\t$")) == ["a", "\u2423", "b", "\\n", "\\t", "$"]
    assert labels(ByteTokenizer(), "é".encode()) == ["#195", "#169"]


# -----------------------------------------------------------------------------
# the pictures


def texts(ax) -> list[str]:
    return [label.get_text() for label in (*ax.get_xticklabels(), *ax.get_yticklabels())]


def test_a_picture():
    pytest.importorskip("matplotlib")
    weights = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    signed = torch.tensor([[-0.5, 0.0], [0.2, 0.1]])
    rows = [
        [Map(0, 0, "weights", "L", None, "first", weights), Map(0, 1, "weights", "S", 0, "second", weights.tril(0))],
        [Map(1, 0, "signed weights", "L", None, "third", signed)],
    ]
    figure = draw(rows, ["a", "$b$"], "title")
    maps = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title() for ax in maps] == ["first", "second", "third"] and len(figure.axes) == 4 + 2
    assert [texts(ax) for ax in maps] == [["a", "$b$"], ["a", "$b$"], ["a", "$b$", "a", "$b$"]]  # on the outer axes
    shown = [ax.images[0].get_array() for ax in maps]
    assert shown[0].mask.tolist() == [[False, True], [False, False]]
    assert shown[2].filled(9).tolist() == signed.masked_fill(torch.tensor([[0, 1], [0, 0]]).bool(), 9).tolist()
    assert [(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for ax in maps] == [(0, 1), (0, 1), (-0.5, 0.5)]


def size_of(path) -> tuple[int, int]:
    assert path.read_bytes()[:4] == b"\x89PNG"
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_the_script(run, train, tmp_path):
    """Runs in one picture, of which one has short heads and one is differential; their weights as JSON."""
    pytest.importorskip("matplotlib")
    train("--max_iters=5", "--eval_interval=5")
    train("--max_iters=5", "--eval_interval=5", "--attention=beta", "--heads=SL", f"--out_dir={tmp_path / 'b'}")
    train("--max_iters=5", "--eval_interval=5", "--differential", f"--out_dir={tmp_path / 'd'}")
    a, b, d = (str(tmp_path / name) for name in ("out", "b", "d"))
    picture, numbers = tmp_path / "maps.png", tmp_path / "maps.json"

    def maps(*flags: str) -> tuple[list[dict], tuple[int, int]]:
        code, out, err = run("scripts/maps.py", "--start=all citizens", f"--out={picture}", f"--json={numbers}", *flags)
        assert code == 0 and f"wrote {picture}" in out, err
        found = json.loads(numbers.read_text())
        assert found["tokens"] == [*"all\u2423citizens"]
        return found["maps"], size_of(picture)

    found, (width, height) = maps(f"--out_dir={a}")
    assert [(m["layer"], m["head"]) for m in found] == [(i, h) for i in range(2) for h in range(4)] and width > height
    found, _ = maps(f"--out_dir={a}, {b}/ ,{d}", "--layer=1", "--head=2")
    assert [m["run"] for m in found] == [a, b, d, d, d]
    assert [m["kind"] for m in found] == ["weights", "signed weights", "weights", "weights", "difference"]
    assert [m["head"] for m in found] == [2, 2, 2, 3, 2] and [m["letter"] for m in found] == [*"LSLLL"]
    assert found[1]["title"] == "layer 1, head 2: S, window 50" and found[1]["window"] == 50
    assert found[1]["attention"] == "beta, heads SL" and found[2]["attention"] == "softmax, differential"
    model, tok, _, _ = checkpoint.open_model("resume", b, "best")
    direct = weights_of(model, torch.tensor([tok.encode("all citizens")]))[1][2].weights
    assert torch.equal(torch.tensor(found[1]["weights"]), direct)
    found, (wide, low) = maps(f"--out_dir={a},{b}", "--layer=0")
    assert len(found) == 8 and wide > low
    found, (narrow, high) = maps(f"--out_dir={a},{a}", "--head=1")
    assert len(found) == 2 and high > narrow  # a run that is named twice is drawn once
    prompt = tmp_path / "p.txt"
    prompt.write_text("all citizens")
    maps(f"--out_dir={a}", f"--start=FILE:{prompt}", "--which=latest", "--layer=0", "--head=0")
    for flags, says in (
        ([f"--out_dir={tmp_path / 'none'}"], "there is no checkpoint"),
        (["--layer=2"], "--layer=2: " + a + " has the layers 0 to 1"),
        (["--head=4"], "has the heads 0 to 3"),
        (["--start=#"], "the text holds '#'"),
        (["--start=" + 33 * "a"], "33 tokens, but " + a + " sees at most 32"),
        ([f"--out={tmp_path / 'maps.doc'}"], "must end in .png, .pdf or .svg"),
        ([f"--json={tmp_path / 'none' / 'maps.json'}"], "No such file"),
        (["--init_from=" + str(tmp_path / "none")], "none"),
    ):
        picture.unlink(missing_ok=True)
        code, _, err = run("scripts/maps.py", f"--out_dir={a}", "--start=all", f"--out={picture}", *flags)
        assert code == 2 and says in err and not picture.exists(), (flags, err)
