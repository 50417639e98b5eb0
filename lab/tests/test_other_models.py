"""vit.py and conformer.py of lab/examples: each against another implementation, and run."""

import functools
import re

import pytest
import torch
from reference import randomised
from torch.nn import functional as F

from lab.examples import conformer, vit
from model import GPTConfig

# -----------------------------------------------------------------------------
# vit.py


@torch.no_grad()
def test_vit_is_the_one_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    images = {"image_size": 12, "patch_size": 3, "num_channels": 3, "num_labels": 7, "layer_norm_eps": 1e-6}
    theirs = randomised(transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **images)))
    shape = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 17, "vocab_size": 7, "tied": False}
    ours = vit.ViT(GPTConfig(**shape, mlp="gelu_exact", norm_eps=1e-6), 3, 3).eval()
    w, of = theirs.state_dict(), {}
    of["transformer.wte.class_token"] = w.pop("vit.embeddings.cls_token")
    of["transformer.wpe.weight"] = w.pop("vit.embeddings.position_embeddings")[0]
    for kind in ("weight", "bias"):
        of[f"transformer.wte.projection.{kind}"] = w.pop(f"vit.embeddings.patch_embeddings.projection.{kind}")
        of[f"transformer.ln_f.{kind}"] = w.pop(f"vit.layernorm.{kind}")
        of[f"lm_head.{kind}"] = w.pop(f"classifier.{kind}")
        for i in range(3):
            a, b = f"transformer.h.{i}", f"vit.layers.{i}"
            qkv = [w.pop(f"{b}.attention.{name}_proj.{kind}") for name in "qkv"]
            of[f"{a}.attn.c_attn.{kind}"] = torch.cat(qkv)
            of[f"{a}.attn.c_proj.{kind}"] = w.pop(f"{b}.attention.o_proj.{kind}")
            of[f"{a}.ln_1.{kind}"] = w.pop(f"{b}.layernorm_before.{kind}")
            of[f"{a}.ln_2.{kind}"] = w.pop(f"{b}.layernorm_after.{kind}")
            of[f"{a}.mlp.c_fc.{kind}"] = w.pop(f"{b}.mlp.fc1.{kind}")
            of[f"{a}.mlp.c_proj.{kind}"] = w.pop(f"{b}.mlp.fc2.{kind}")
    assert not w
    ours.load_state_dict(of)
    x, y = torch.randint(256, (5, 3, 12, 12)), torch.randint(7, (5,))
    found, loss = ours(x, y)
    wanted = theirs(pixel_values=x / 127.5 - 1, labels=y)
    assert wanted.logits.std() > 0.3  # the images differ
    torch.testing.assert_close(found[:, 0], wanted.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, wanted.loss, rtol=0, atol=1e-5)


def test_vit_moves_an_image_by_a_pixel():
    """By hand: each image is one of the nine that end up one pixel away; over many images all nine occur."""
    x = torch.randint(256, (1, 2, 4, 4)).float()
    rows = [torch.tensor(at) for at in ([0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 3])]  # borders are continued
    wanted = [x[0][:, i][:, :, j] for i in rows for j in rows]
    found = vit.moved(x.expand(200, -1, -1, -1), torch.Generator().manual_seed(0))
    assert {next(n for n, y in enumerate(wanted) if y.equal(image)) for image in found} == set(range(9))


def test_vit_tests_on_the_same_digits_for_every_seed():
    pytest.importorskip("sklearn")
    x, y, test, labels = vit.digits()
    torch.manual_seed(5)
    assert vit.digits()[2].equal(test) and (len(x), len(test)) == (1348, 449)
    assert x.shape[1:] == (1, 8, 8) and x.dtype == torch.uint8 and x.max() == 255 and x.min() == 0
    assert len(y.unique()) == len(labels.unique()) == 10


def test_vit_learns(run):
    pytest.importorskip("sklearn")
    flags = ["--steps=100", "--n_layer=1", "--shift=0", "--batch_size=32"]
    code, out, err = run("lab/examples/vit.py", *flags, "--device=cpu")
    assert code == 0 and float(out.split()[-1]) < 0.2, err


# -----------------------------------------------------------------------------
# conformer.py


def small(n_embd: int = 16, **choices: object) -> GPTConfig:
    sizes = {"block_size": 12, "vocab_size": 5, "n_layer": 2, "n_head": 4, "n_embd": n_embd, "tied": False}
    return GPTConfig(**sizes, **{"position": "rope", "mlp": "swish"} | choices)


@pytest.fixture(scope="session")
def vowels():
    """sktime reads its files once; it takes a second or more."""
    datasets = pytest.importorskip("sktime.datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_japanese_vowels", functools.cache(datasets.load_japanese_vowels))
        yield


@pytest.mark.parametrize("attention", ["softmax", "laser", "beta"])
@pytest.mark.parametrize(
    "choices",
    [{}, {"heads": "SL", "window": 2}, {"position": "learned", "conv": 3}, {"position": "alibi", "norm": "rmsnorm"}],
    ids=str,
)
@torch.no_grad()
def test_conformer_of_a_padded_batch_is_as_each_word_alone(attention, choices):
    model = randomised(conformer.Conformer(small(attention=attention, **choices), 3, 5).double())
    words = [torch.randn(n, 3, dtype=torch.float64) for n in (12, 1, 7, 2)]
    frames, seen = conformer.padded(words)
    assert frames.shape == (4, 12, 3) and seen.sum(1).tolist() == [12, 1, 7, 2] and not frames[~seen].any()
    labels = torch.tensor([4, 0, 1, 2])
    frames[~seen] = 1000.0  # whatever stands there
    found, loss = model(frames, seen, labels)
    alone = [model(*conformer.padded([word]), label[None]) for word, label in zip(words, labels, strict=True)]
    torch.testing.assert_close(found, torch.cat([logits for logits, _ in alone]), rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, torch.stack([loss for _, loss in alone]).mean(), rtol=0, atol=1e-5)  # float32


@torch.no_grad()
def test_the_convolution_module_by_hand():
    """Section 2.2, a number at a time: frame t of n gets frames t - 2 to t + 2 of the same channel."""
    C, kernel, lengths = 4, 5, (6, 3)
    module = randomised(conformer.Convolution(small(C, position="none").resolved(), kernel).double())
    x = torch.randn(2, 6, C, dtype=torch.float64)
    found = module(x, torch.arange(6) < torch.tensor(lengths)[:, None])
    for row, n in enumerate(lengths):
        gates = [module.gated.weight @ x[row, t] + module.gated.bias for t in range(n)]
        gated = [gate[:C] / (1 + (-gate[C:]).exp()) for gate in gates]
        for t in range(n):
            mixed = module.depthwise.bias.clone()
            for channel in range(C):
                for o in range(kernel):
                    if 0 <= t + o - 2 < n:
                        mixed[channel] += module.depthwise.weight[channel, 0, o] * gated[t + o - 2][channel]
            normal = (mixed - mixed.mean()) / (mixed.var(correction=0) + 1e-5).sqrt()
            normal = normal * module.norm.weight + module.norm.bias
            wanted = module.c_proj.weight @ (normal / (1 + (-normal).exp())) + module.c_proj.bias
            torch.testing.assert_close(found[row, t], wanted, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_conformer_block_is_equation_1():
    """With PyTorch's own layers: half an MLP, attention (no positions here), convolution, half an MLP, a norm."""
    c = small(position="none").resolved()
    block = randomised(conformer.ConformerBlock(c, 0, None, 3).double())
    x, seen = torch.randn(2, 12, 16, dtype=torch.float64), torch.arange(12) < torch.tensor([12, 8])[:, None]
    norms = [lambda x, ln=ln: F.layer_norm(x, (16,), ln.weight, ln.bias) for ln in block.norms]

    def mlp(m, x):
        return F.linear(F.silu(F.linear(x, m.c_fc.weight, m.c_fc.bias)), m.c_proj.weight, m.c_proj.bias)

    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64).eval()
    of = {"in_proj_": block.attn.c_attn, "out_proj.": block.attn.c_proj}
    attention.load_state_dict({name + kind: getattr(of[name], kind) for name in of for kind in ("weight", "bias")})
    y = x + 0.5 * mlp(block.mlp_before, norms[0](x))
    q = norms[1](y)
    y = y + attention(q, q, q, key_padding_mask=~seen, need_weights=False)[0]
    y = y + block.conv(norms[2](y), seen)
    y = norms[4](y + 0.5 * mlp(block.mlp_after, norms[3](y)))
    found = block(x, conformer.Bidirectional(seen))
    torch.testing.assert_close(found[seen], y[seen], rtol=0, atol=1e-10)


def test_the_words_of_the_japanese_vowels(vowels):
    for split, n in (("train", 270), ("test", 370)):
        words, labels = conformer.vowels(split)
        assert len(words) == len(labels) == n and set(labels.tolist()) == set(range(9))
        assert {word.shape[1] for word in words} == {12} and all(7 <= len(word) <= 29 for word in words)
        assert all(word.isfinite().all() for word in words)


def test_conformer_learns(run, vowels):
    code, out, err = run("lab/examples/conformer.py", "--steps=60", "--n_layer=1", "--device=cpu")
    assert code == 0 and float(re.search(r"test recordings ([\d.]+)", out)[1]) < 0.2, err
