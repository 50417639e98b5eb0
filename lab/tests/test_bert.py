"""lab/examples/bert.py: the same numbers as transformers' BERT, what is hidden, a run, mistakes."""

import math

import pytest
import torch
from harness import SMALL, write
from reference import randomised

from lab.examples import bert, common
from model import GPTConfig
from text.tokenizers import CharTokenizer

SIZES = {"block_size": 16, "vocab_size": 23, "n_layer": 2, "n_head": 4, "n_embd": 32}
BERTS_OWN = {"position": "learned", "where": "post", "mlp": "gelu_exact", "norm_eps": 1e-12}
TINY = [*SMALL, "--steps=2", "--eval_batches=2"]


@torch.no_grad()
def test_equals_the_bert_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    theirs = transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=23, max_position_embeddings=16, hidden_act="gelu", **sizes)
    )
    theirs = randomised(theirs)
    ours = bert.Bert(GPTConfig(**SIZES, **BERTS_OWN)).eval()
    copied = set()

    def copy(own: torch.nn.Module, *others: torch.nn.Module) -> None:
        for name, p in own.named_parameters(recurse=False):
            p.copy_(torch.cat([getattr(other, name) for other in others]))
            copied.add(p)

    e, head = theirs.bert.embeddings, theirs.cls.predictions
    copy(ours.transformer.wte, e.word_embeddings)
    copy(ours.transformer.wpe, e.position_embeddings)
    ours.transformer.wpe.weight += e.token_type_embeddings.weight[0]  # all tokens are of sentence A
    copy(ours.transformer.drop[0], e.LayerNorm)
    for own, layer in zip(ours.transformer.h, theirs.bert.encoder.layer, strict=True):
        attention = layer.attention.self
        copy(own.attn.c_attn, attention.query, attention.key, attention.value)
        copy(own.attn.c_proj, layer.attention.output.dense)
        copy(own.ln_1, layer.attention.output.LayerNorm)
        copy(own.mlp.c_fc, layer.intermediate.dense)
        copy(own.mlp.c_proj, layer.output.dense)
        copy(own.ln_2, layer.output.LayerNorm)
    copy(ours.lm_head[0], head.transform.dense)
    copy(ours.lm_head[2], head.transform.LayerNorm)
    copy(ours.lm_head[3], head.decoder)
    assert copied == set(ours.parameters())
    idx, seen = torch.randint(23, (3, 16)), torch.arange(16) < torch.tensor([16, 9, 1])[:, None]
    expected = theirs(idx, attention_mask=seen.long()).logits[seen]
    assert expected.abs().max() > 1
    torch.testing.assert_close(ours(idx, idx, seen)[0][seen], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours(idx, idx)[0], theirs(idx).logits, rtol=0, atol=1e-4)


def test_what_is_hidden():
    """15% of the tokens are asked for: 80% of them are the mask, 10% random, 10% themselves (Devlin et al., 3.1)."""
    x, mask = torch.randint(50, (1000, 400)), 50
    hidden, targets = bert.hide(x, mask, torch.Generator().manual_seed(1))
    asked = targets != -1
    assert torch.equal(targets[asked], x[asked]) and torch.equal(hidden[~asked], x[~asked])
    assert asked.float().mean().item() == pytest.approx(0.15, abs=0.003)
    hidden, x = hidden[asked], x[asked]
    assert (hidden == mask).float().mean().item() == pytest.approx(0.8, abs=0.01)
    others = hidden[(hidden != mask) & (hidden != x)]
    assert len(others) / len(x) == pytest.approx(0.1 * 49 / 50, abs=0.005)  # one random token in 50 is the same
    assert others.bincount(minlength=51).tolist()[50] == 0 and others.unique().numel() == 50


def test_a_run_learns(run, tmp_path):
    """The alphabet, again and again: the letters on one side of a hidden one say what it is."""
    letters = "abcdefghij"
    write(tmp_path, CharTokenizer(letters), {"train": letters * 300, "val": letters * 50}, {"from": "letters"})
    args = [f"--dataset={tmp_path}", *SMALL, "--n_layer=1", "--n_head=2", "--batch_size=16"]
    code, out, err = run("lab/examples/bert.py", *args, "--steps=200", "--learning_rate=5e-3", "--eval_batches=3")
    assert code == 0, err
    gaps, _, filled = out.splitlines()[-3:]
    assert gaps[:10] == "abcd_fghi_" and filled[4:-5] == (letters * 4)[4 : len(filled) - 5]
    assert float(out.split("error of hidden tokens ")[1].split(",")[0]) < 0.3  # by chance 0.9


def test_a_run_is_repeatable_and_takes_every_flag(run, data):
    runs = []
    for flags in ([], [], ["--seed=2"], ["--attention=laser", "--heads=SL", "--window=4", "--position=learned"]):
        code, out, err = run("lab/examples/bert.py", f"--dataset={data}", *TINY, *flags)
        assert code == 0, err
        (line,) = [line for line in out.splitlines() if line.startswith("result: ")]
        runs.append(line)
    assert runs[0] == runs[1] != runs[2]
    assert runs[0].startswith("result: attention=softmax seed=1 error of hidden tokens ")
    assert runs[3].startswith("result: attention=laser seed=1 ")


def test_it_fills_in_the_validation_text(run, data):
    flags = [f"--dataset={data}", *TINY, "--batch_size=1", "--block_size=2"]
    code, out, err = run("lab/examples/bert.py", *flags, "--block_size=10", "--steps=1")
    assert code == 0, err
    gaps, text = out[out.index("result: ") :].split("\n", 1)[1].removesuffix("\n").split("\n\n")
    assert [n for n, c in enumerate(gaps) if c == "_"] == [4, 9] and len(gaps) == len(text) == 10
    assert all(a in ("_", b) for a, b in zip(gaps, text, strict=True))
    code, out, err = run("lab/examples/bert.py", *flags, "--steps=30")  # many batches would have no hidden token
    assert code == 0 and "nan" not in out, err


def test_the_flags_of_the_training():
    """Three steps by hand with PyTorch's NAdam, its learning rate at the top after the warm-up's share of the steps."""
    p = torch.nn.Parameter(torch.ones(2, 2))
    model = torch.nn.Module()
    model.p, model.forward = p, lambda x: (None, (p.cos() * x).sum())
    changed = {"optimizer": "nadamw", "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.9, "adam_eps": 0.1}
    config = vars(common.Training()) | changed | {"warmup_share": 0.5, "steps": 3, "learning_rate": 0.1}
    common.fit(model, lambda step: (torch.full((2, 2), 0.1 * step),), config, "cpu")
    q = torch.nn.Parameter(torch.ones(2, 2))
    own = {"decoupled_weight_decay": True, "momentum_decay": math.inf}  # a constant momentum
    nadam = torch.optim.NAdam([q], betas=(0.8, 0.9), eps=0.1, weight_decay=0.3, **own)
    for step, rate in ((1, 0.004), (2, 0.1), (3, 0.05)):  # PyTorch's warm-up begins at a 25th
        nadam.param_groups[0]["lr"] = rate
        nadam.zero_grad()
        (q.cos() * 0.1 * step).sum().backward()
        nadam.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
