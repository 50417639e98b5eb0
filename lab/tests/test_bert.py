"""lab/examples/bert.py: the same numbers as transformers' BERT, what is hidden, runs, training."""

import math

import pytest
import torch
from harness import SMALL, assert_equal, done, write
from reference import randomised
from test_other_models import load

from lab.examples import bert
from lab.ideas import lamb  # noqa: F401, adds optimizers
from model import GPTConfig
from text.tokenizers import CharTokenizer

SCRIPT = "lab/examples/bert.py"
TINY = [*SMALL, "--steps=2", "--eval_batches=2"]


NAMES = {
    "bert.embeddings.word_embeddings": "transformer.wte",
    "bert.embeddings.position_embeddings": "transformer.wpe",
    "bert.embeddings.LayerNorm": "transformer.drop.0",
    "bert.encoder.layer": "transformer.h",
    "attention.self.query": "attn.c_attn",
    "attention.self.key": "attn.c_attn",
    "attention.self.value": "attn.c_attn",
    "attention.output.dense": "attn.c_proj",
    "attention.output.LayerNorm": "ln_1",
    "intermediate.dense": "mlp.c_fc",
    "output.dense": "mlp.c_proj",
    "output.LayerNorm": "ln_2",
    "cls.predictions.transform.dense": "lm_head.0",
    "cls.predictions.transform.LayerNorm": "lm_head.2",
    "cls.predictions.decoder": "lm_head.3",
}


@torch.no_grad()
def test_equals_the_bert_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=23,
        max_position_embeddings=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
    )
    theirs = randomised(transformers.BertForMaskedLM(config))
    config = GPTConfig(
        block_size=16,
        vocab_size=23,
        n_layer=2,
        n_head=4,
        n_embd=32,
        where="post",
        mlp="gelu_exact",
        norm_eps=1e-12,
    )
    ours = bert.Bert(config).eval()
    load(ours, theirs, NAMES)
    # All tokens are of sentence A.
    ours.transformer.wpe.weight += theirs.bert.embeddings.token_type_embeddings.weight[0]
    idx = torch.randint(23, (3, 16))
    seen = torch.arange(16) < torch.tensor([16, 9, 1])[:, None]
    expected = theirs(idx, attention_mask=seen.long()).logits[seen]
    assert expected.abs().max() > 1
    assert_equal(ours(idx, idx, seen)[0][seen], expected, 1e-4)
    assert_equal(ours(idx, idx)[0], theirs(idx).logits, 1e-4)


def test_what_is_hidden():
    """15% of the tokens: 80% of them are the mask, 10% random, 10% themselves."""
    mask = 50
    x = torch.randint(mask, (1000, 400))
    hidden, targets = bert.hide(x, mask, torch.Generator().manual_seed(1))
    asked = targets != -1
    assert targets[asked].equal(x[asked])
    assert hidden[~asked].equal(x[~asked])
    assert asked.float().mean().item() == pytest.approx(0.15, abs=0.003)
    hidden = hidden[asked]
    x = x[asked]
    assert (hidden == mask).float().mean().item() == pytest.approx(0.8, abs=0.01)
    others = hidden[(hidden != mask) & (hidden != x)]
    # one random token in 50 is the token itself
    assert len(others) / len(x) == pytest.approx(0.1 * 49 / 50, abs=0.005)
    assert others.unique().tolist() == list(range(50))


def test_a_run_learns(run, tmp_path):
    """The alphabet, again and again: the letters on one side of a hidden one say what it is."""
    letters = "abcdefghij"
    texts = {"train": letters * 300, "val": letters * 50}
    write(tmp_path, CharTokenizer(letters), texts, {"from": "letters"})
    flags = "--n_layer=1 --batch_size=16 --steps=200 --learning_rate=5e-3 --eval_batches=3"
    out = done(run(SCRIPT, f"--dataset={tmp_path}", *SMALL, *flags.split()))
    gaps, _, filled = out.splitlines()[-3:]
    assert gaps == ("abcd_fghi_" * 4)[:32]
    assert len(filled) == 32
    assert filled[4:-5] == (letters * 4)[4 : len(filled) - 5]
    assert float(out.split("error of hidden tokens ")[1].split(",")[0]) < 0.3  # by chance 0.9


def test_a_run_is_repeatable_and_takes_every_flag(run, data):
    results = []
    for flags in (
        "",
        "",
        "--seed=2",
        "--attention=laser --heads=SL --window=4 --position=learned",
        "--optimizer=nadamw --warmup_share=0.5 --weight_decay=0.3 --adam_eps=0.1",
        "--batch_size=1 --block_size=2 --steps=30",  # each of these batches has a hidden token
    ):
        out = done(run(SCRIPT, f"--dataset={data}", *TINY, *flags.split()))
        assert "nan" not in out
        results += [line for line in out.splitlines() if line.startswith("result: ")]
    assert results[0] == results[1] != results[2]
    loss = float(results[0].split()[-1])
    assert loss == pytest.approx(math.log(24), abs=0.3)  # 24 characters; little is learned
    assert results[3].startswith("result: attention=laser seed=1 ")
