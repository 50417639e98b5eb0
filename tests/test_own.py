"""Code of one's own: what a run keeps of it, numbers of a token, whole layers, later tokens."""

import itertools
import shutil
import sys

import pytest
import torch
from harness import assert_equal, done, log_of, parametrize, refusal, refused, state_of
from reference import FUNCTIONS, assert_one_model, cached, shaken
from test_attention import forgetting
from torch import nn
from torch.nn import functional as F

import model
from attention.cache import heads_of
from attention.scores import of_token, plain_form
from model import ATTENTION, GPT, CausalSelfAttention, GPTConfig
from parts import QKV
from training import run
from training.estimate import flops, num_params

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": 11, "block_size": 160}
names = map("own{}".format, itertools.count())
CODE = '''
from {helper} import SCALE
from model import ATTENTION

def own_attention(s, seen, v, drop):
    """Own."""
    return drop((SCALE * s).where(seen, -1e9).softmax(-1)) @ v

ATTENTION["own"] = own_attention
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """own() -> the names of a module with an attention "own", and of one that it imports."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ATTENTION, "own", None)  # so that it leaves the table after the test

    def own(code=CODE):
        module, helper = next(names), next(names)
        (tmp_path / f"{helper}.py").write_text("SCALE = 2.0\n")
        (tmp_path / f"{module}.py").write_text(code.format(helper=helper))
        return module, helper

    return own


def edited(path, old, new):
    """Edits a module, and forgets it, as a new process would."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    for name in list(sys.modules):
        if name.startswith("own"):
            del sys.modules[name]


def test_a_run_keeps_what_made_it(own, train, run, tmp_path):
    module, _ = own()
    flags = f"--import={module} --import=math --attention=own --max_iters=5"
    done(train(flags), "the model sees no later tokens")
    first, saved = log_of(tmp_path)[0], state_of(tmp_path)["origin"]
    assert first | saved == first
    assert "train.py --dataset=" in saved["command"] and flags in saved["command"]
    assert saved["versions"]["torch"] == torch.__version__
    assert saved["commit"].removesuffix("-dirty").isalnum()
    assert set(saved["sources"]) == {"own", module, "math"}
    assert not saved["sources"]["math"]  # it has none
    assert "def own_attention" in saved["sources"]["own"]
    out = done(run("training.checkpoint", tmp_path / "out/ckpt.pt"), "def own_attention", module)
    assert f"--import={module}" in out


@parametrize(
    "file, old, new, is_said",
    [
        (0, "SCALE * s", "SCALE * s * 0.0", True),
        (0, "    return", "\n    # a comment\n    return", False),
    ],
)
def test_other_code_than_was_trained(own, train, run, tmp_path, file, old, new, is_said):
    """sample.py, eval.py and a resume say it; not for comments."""
    modules = own()
    flags = f"--import={modules[0]} --attention=own"
    done(train(flags, "--max_iters=5"))
    edited(tmp_path / f"{modules[file]}.py", old, new)
    out_dir = f"--out_dir={tmp_path / 'out'}"
    sample = ["sample.py", out_dir, "--num_samples=1", "--max_new_tokens=2", "--start=the"]
    results = [
        run(*sample, f"--import={modules[0]}"),
        run("eval.py", out_dir, f"--import={modules[0]}"),
        train(flags, "--init_from=resume --max_iters=6"),
    ]
    for result in results:
        done(result)
        assert ("is not what was trained" in result[2]) == is_said, result[2]
    ATTENTION.pop("own")
    refused(run(*sample), "attention='own' is not one of", f"--import={modules[0]}")


def test_scores_and_the_mask_count_as_code(train, run, tmp_path, monkeypatch):
    done(train("--max_iters=5"))
    scores = sys.modules["attention.scores"]
    monkeypatch.setattr(
        scores, "visible", lambda q, k, window: scores.distances(1, 1, q.device) >= 0
    )
    _, _, err = run("eval.py", f"--out_dir={tmp_path / 'out'}")
    assert "the code of softmax (or of attention/scores.py)" in err


# -----------------------------------------------------------------------------
# numbers of a token


@parametrize(
    "choices",
    [
        {},
        {"heads": "SSLL", "window": 5, "n_kv_head": 2, "position": "rope", "conv": 3},
        {"heads": "SSLL", "window": 5, "short_attention": "softmax", "position": "alibi"},
    ],
)
def test_numbers_of_a_token(choices, monkeypatch):
    """They act, go into the cache, and bfloat16 does not round them."""
    monkeypatch.setitem(ATTENTION, "own", forgetting)
    c = GPTConfig(**SIZES, attention="own", **choices)
    gpt = shaken(c, dtype=torch.float64)
    x = torch.randint(11, (2, 160))
    logits = gpt(x, x)[0]
    assert_equal(cached(gpt, x, [70, 80, *[1] * 10]), logits, 1e-12)

    gpt.float()
    with torch.autocast("cpu", torch.bfloat16):
        error = (gpt(x, x)[0] - logits).abs().max()
    numbers = [p for name, p in gpt.named_parameters() if "token_numbers" in name]
    for p in numbers:
        p.data.mul_(1.004)  # half of what 8 bits show
    moved = (gpt(x, x)[0] - logits).abs().max()
    assert numbers and 0 < moved and error < 0.1 * logits.abs().max()
    gpt(x, x)[1].backward()
    assert all(p.grad.abs().max() > 0 for p in numbers)
    gpt.bfloat16()
    change = cached(gpt, x, [70, 80, *[1] * 10]) - gpt(x, x)[0]
    assert change.abs().max() < 0.05 * logits.abs().max()


def test_numbers_of_a_token_begin_as_they_say(monkeypatch):
    """As softmax with a decay: log sigmoid(4) for each token after a key."""
    monkeypatch.setitem(ATTENTION, "own", forgetting)
    gpt = GPT(GPTConfig(**SIZES, attention="own"))
    x = torch.randint(11, (1, 9))
    logits = gpt(x, x)[0]
    slope = -F.logsigmoid(torch.tensor(4.0))
    plain = plain_form(model.softmax_attention)
    for heads in heads_of(gpt):
        heads.run = lambda q, k, v, scale: plain(q, k[..., :4], v, scale=scale, decay=slope)
    assert_equal(logits, gpt(x, x)[0], 1e-5)

    def of_two(s, seen, v, f=of_token(1.0), g=of_token(2.0)):
        assert (f == 1).all() and (g == 2).all()
        return s.where(seen, 0.0) @ v

    monkeypatch.setitem(ATTENTION, "own", of_two)
    GPT(GPTConfig(**SIZES, attention="own", n_kv_head=2))(x)


# -----------------------------------------------------------------------------
# a whole layer


class Means(nn.Module):
    """The mean of all tokens so far."""

    uses = ("conv",)
    endless = True

    def __init__(self, c, layer):
        super().__init__()
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x, context=None):
        n = torch.ones_like(x).cumsum(1) + context.length
        sums = x.cumsum(1) + context.state.get(self, 0)
        context.state[self] = sums[:, -1:]
        return self.c_proj(sums / n)


@parametrize(
    "choices",
    [
        {"attention": "own"},
        {"attention": "own", "short_attention": "softmax", "heads": "S/L", "window": 4},
    ],
)
def test_a_whole_layer(choices, monkeypatch):
    monkeypatch.setitem(ATTENTION, "own", Means)
    c = GPTConfig(**SIZES, **choices)
    gpt = shaken(c, dtype=torch.float64)
    x = torch.randint(11, (2, 40))
    assert_equal(cached(gpt, x, [20, 10, *[1] * 10]), gpt(x, x)[0], 1e-12)
    cache = gpt.new_cache()
    gpt(x, cache=cache)
    of_heads = sum(x.nbytes for part in cache.parts.values() for x in part.values())
    n = 1 if heads_of(gpt) else 2  # layers of one's own, with (2, 1, 16) numbers each
    assert cache.nbytes == of_heads + n * 2 * 16 * 8
    if n == 2:
        assert flops(gpt) == 6 * num_params(gpt)


@parametrize(
    "choices, says",
    [
        (
            {"heads": "SL", "short_attention": "softmax"},
            "all heads of a layer need the same letter",
        ),
        ({"qk_norm": "rmsnorm"}, "qk_norm='rmsnorm' is not used by attention=own"),
        ({"position": "rope"}, "position='rope' is not used"),
        ({"heads": "S", "window": 4}, "window=4 is not used"),
        ({"heads": "SL"}, "heads='SL' is not used by attention=own: use 'L'"),
        ({"attn_dropout": 0.1}, "attn_dropout=0.1 is not used"),
    ],
)
def test_flags_that_a_layer_does_not_use_are_refused(choices, says, monkeypatch):
    monkeypatch.setitem(ATTENTION, "own", Means)
    GPTConfig(**SIZES, attention="own", conv=4, dropout=0.1)
    with refusal(says):
        GPTConfig(**SIZES, attention="own", **choices)


@parametrize("n_kv_head", [None, 1])
@parametrize("name", [*QKV, *sorted(ATTENTION.keys() - {*FUNCTIONS})])
def test_an_entry_of_ones_own(name, n_kv_head):
    """With --import=my -k NAME: cached = uncached, causal, and the same if recomputed."""
    field = "qkv" if name in QKV else "attention"
    c = GPTConfig(**SIZES, n_kv_head=n_kv_head, **{field: name})
    x = torch.randint(11, (2, 160))
    assert_one_model(shaken(c, dtype=torch.float64), x, [70, 80, *[1] * 10], 90)


def test_a_layer_of_ones_own_trains_and_resumes(train, run, tmp_path, monkeypatch):
    monkeypatch.setitem(ATTENTION, "own", Means)
    flags = "--attention=own --short_attention=softmax --heads=S/L"
    done(train(flags, "--max_iters=5"))
    done(train("--init_from=resume --max_iters=7"))
    done(run("sample.py", f"--out_dir={tmp_path / 'out'}", "--num_samples=1", "--start=the"))
    monkeypatch.setattr(Means, "endless", False)
    done(train("--attention=own --position=none --max_iters=5"))
    result = run("sample.py", f"--out_dir={tmp_path / 'out'}", "--endless", "--start=the")
    refused(result, "a layer of Means is not for endless texts")


# -----------------------------------------------------------------------------
# later tokens, of the whole model


class Late(CausalSelfAttention):
    """Attention that sees a later token, from token 24 on. Its heads compute softmax."""

    def attend(self, q, k, v, x, context):
        y = super().attend(q, k, v, x, context)
        return torch.where(torch.arange(y.shape[2])[:, None] >= 24, y.roll(-1, dims=2), y)


def test_a_model_that_sees_later_tokens(own, train, monkeypatch):
    """Said at the start."""
    monkeypatch.setitem(ATTENTION, "late", Late)
    result = train("--attention=late", f"--import={own()[0]} --max_iters=22")
    done(result, ", 0 s left")
    assert "THE MODEL SEES LATER TOKENS" in result[2]


def test_later_tokens_are_looked_for_without_tf32(train, monkeypatch):
    """Its rounding, which depends on the number of tokens, would look like them."""
    precisions = []

    def look(gpt):
        precisions.append(torch.get_float32_matmul_precision())

    monkeypatch.setattr(run, "try_causality", look)
    torch.set_float32_matmul_precision("high")  # as an earlier training leaves it
    done(train("--max_iters=1"))
    assert precisions == ["highest"]
