"""vit.py and conformer.py of lab/examples: each against another implementation, and run."""

import re
from collections import defaultdict

import pytest
import torch
from harness import assert_equal, done, parametrize
from reference import randomised
from torch.nn import functional as F

from lab.examples import conformer, vit
from model import GPTConfig

# -----------------------------------------------------------------------------
# vit.py


NAMES = {
    "vit.embeddings.cls_token": "transformer.wte.class_token",
    "vit.embeddings.patch_embeddings": "transformer.wte",
    "vit.embeddings.position_embeddings": "transformer.wpe.weight",
    "vit.layers": "transformer.h",
    "vit.layernorm": "transformer.ln_f",
    "classifier": "lm_head",
    "attention.q_proj": "attn.c_attn",
    "attention.k_proj": "attn.c_attn",
    "attention.v_proj": "attn.c_attn",
    "attention.o_proj": "attn.c_proj",
    "layernorm_before": "ln_1",
    "layernorm_after": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


def load(ours, theirs, names):
    """Copy the weights of a model of transformers. names: the parts of names, theirs and ours."""
    parts = defaultdict(list)
    for name, p in theirs.state_dict().items():
        for their_part, our_part in names.items():
            name = name.replace(their_part, our_part)
        parts[name].append(p)
    for name, p in ours.state_dict().items():
        p.copy_(torch.cat(parts[name]).view_as(p))


@torch.no_grad()
def test_vit_is_the_one_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=12,
        patch_size=3,
        num_labels=7,
        layer_norm_eps=1e-6,
    )
    theirs = randomised(transformers.ViTForImageClassification(config))
    config = GPTConfig(
        n_layer=2,
        n_head=4,
        n_embd=32,
        block_size=17,
        vocab_size=7,
        tied=False,
        mlp="gelu_exact",
        norm_eps=1e-6,
    )
    ours = vit.ViT(config, 3, 3).eval()
    load(ours, theirs, NAMES)
    x = torch.randint(256, (5, 3, 12, 12))
    y = torch.randint(7, (5,))
    logits, loss = ours(x, y)
    expected = theirs(pixel_values=x / 127.5 - 1, labels=y)
    assert expected.logits.std() > 0.3  # the images differ
    assert_equal(logits[:, 0], expected.logits, 1e-5)
    assert_equal(loss, expected.loss, 1e-5)


def test_vit_moves_an_image_by_a_pixel():
    """Each image is one of the nine that end up one pixel away; all nine occur."""
    x = torch.randint(256, (1, 2, 4, 4)).float()
    shifts = ([0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 3])  # borders are continued
    expected = [x[0][:, rows][:, :, columns] for rows in shifts for columns in shifts]
    images = vit.moved(x.expand(200, -1, -1, -1), torch.Generator().manual_seed(0))
    assert images.unique(dim=0).equal(torch.stack(expected).unique(dim=0))


def test_vit_tests_on_the_same_digits_for_every_seed():
    pytest.importorskip("sklearn")
    x, _, test, _ = vit.digits()
    torch.manual_seed(5)
    assert vit.digits()[2].equal(test)
    assert len(x) == 1348 and len(test) == 449
    assert x.aminmax() == (0, 255)


def test_vit_learns(run):
    pytest.importorskip("sklearn")
    flags = "--steps=100 --n_layer=1 --shift=0 --batch_size=32 --patch_size=4 --device=cpu"
    out = done(run("lab/examples/vit.py", *flags.split()))
    assert float(out.split()[-1]) < 0.2


# -----------------------------------------------------------------------------
# conformer.py


def small(n_embd=16, **choices):
    sizes = {"block_size": 12, "vocab_size": 5, "n_layer": 2, "n_head": 4, "n_embd": n_embd}
    return GPTConfig(**sizes | {"tied": False, "mlp": "swish"} | choices)


@parametrize(
    "choices",
    [
        {"position": "rope"},
        {"attention": "laser", "heads": "SL", "window": 2, "position": "alibi"},
        {"attention": "beta", "conv": 3, "norm": "rmsnorm"},
    ],
    ids=str,
)
@torch.no_grad()
def test_conformer_of_a_padded_batch_is_as_each_word_alone(choices):
    model = randomised(conformer.Conformer(small(**choices), 3, 5).double())
    words = [torch.randn(n, 3, dtype=torch.float64) for n in (12, 1, 7, 2)]
    labels = torch.tensor([4, 0, 1, 2])
    frames, seen = conformer.padded(words)
    assert seen.sum(1).tolist() == [12, 1, 7, 2]
    frames[~seen] = 1000.0  # whatever stands there
    logits, loss = model(frames, seen, labels)
    losses = 0.0
    for row, word in enumerate(words):
        alone, alone_loss = model(*conformer.padded([word]), labels[[row]])
        assert_equal(logits[[row]], alone, 1e-10)
        losses += alone_loss
    assert_equal(loss, losses / 4, 1e-5)  # float32


@torch.no_grad()
def test_the_convolution_module_by_hand():
    """Section 2.2: frame t of n gets frames t - 2 to t + 2 of the same channel."""
    c = small(4, position="none").resolved()
    module = randomised(conformer.Convolution(c, 5).double())
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    y = module(x, torch.arange(6) < torch.tensor([[6], [3]]))
    for row, n in ((0, 6), (1, 3)):
        gates = module.gated(x[row, :n])
        gated = gates[:, :4] * gates[:, 4:].sigmoid()
        near = F.pad(gated, (0, 0, 2, 2)).unfold(0, 5, 1)  # (n, C, 5)
        mixed = (near * module.depthwise.weight[:, 0]).sum(-1) + module.depthwise.bias
        normal = module.norm(mixed)
        expected = module.c_proj(normal * normal.sigmoid())
        assert_equal(y[row, :n], expected, 1e-12)


@torch.no_grad()
def test_a_conformer_block_is_equation_1():
    """Half an MLP, PyTorch's attention (no positions here), convolution, half an MLP, a norm."""
    c = small(position="none").resolved()
    block = randomised(conformer.ConformerBlock(c, 0, 3).double())
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    seen = torch.arange(12) < torch.tensor([12, 8])[:, None]

    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    attention.in_proj_weight.copy_(block.attn.c_attn.weight)
    attention.in_proj_bias.copy_(block.attn.c_attn.bias)
    attention.out_proj.load_state_dict(block.attn.c_proj.state_dict())
    norms = block.norms
    y = x + 0.5 * block.mlp_before(norms[0](x))
    q = norms[1](y)
    y = y + attention(q, q, q, key_padding_mask=~seen)[0]
    y = y + block.conv(norms[2](y), seen)
    expected = norms[4](y + 0.5 * block.mlp_after(norms[3](y)))
    y = block(x, conformer.Bidirectional(seen))
    assert_equal(y[seen], expected[seen], 1e-10)


def test_conformer_learns(run):
    """Its weights by hand, with C = 64: the convolution module has 5 C of a kernel of 5."""
    pytest.importorskip("sktime")
    flags = "--steps=60 --n_layer=1 --kernel=5 --device=cpu"
    out = done(run("lab/examples/conformer.py", *flags.split()), "97,865 parameters")
    assert float(re.search(r"370 test recordings ([\d.]+)", out)[1]) < 0.2
