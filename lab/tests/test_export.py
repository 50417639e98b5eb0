"""Models and tokenizers as transformers reads them: lab/hub/export.py, with --custom for every choice."""

import json
import os
import subprocess
import sys

import pytest
import torch
from harness import ROOT
from reference import shaken

from model import ATTENTION, GPT, GPTConfig
from positions import POSITION
from text import tokenizers
from training import checkpoint

pytest.importorskip("transformers")
import transformers

from lab.hub.modeling_nanoattn import NanoattnForCausalLM
from lab.hub.tokenizer_json import fast

V, T = 65, 24
SIZES = {"block_size": T, "vocab_size": V, "n_layer": 2, "n_head": 4, "n_embd": 32}
CASES = [{"attention": name, "heads": heads} for name in ATTENTION for heads in ("L", "SSL")]
CASES += [{"position": name} for name in POSITION]
CASES += [
    {"position": "t5", "tied": False},  # a table that all layers share, and a head that shares nothing
    {"differential": True, "attention": "laser", "heads": "SSLL"},
    {"attention": "beta_squared", "short_attention": "softmax", "heads": "SL", "conv": 4, "position": "rope"},
    {"attention": "beta", "decay": "learned", "conv": 3, "n_kv_head": 2},
    {"decay": "alibi", "position": "none", "logit_softcap": 20.0, "qk_norm": "l2", "per_dim_temperature": True},
    {"norm": "rmsnorm", "mlp": "swiglu", "where": "sandwich", "bias": False, "head_dim": 12, "n_kv_head": 1},
    {"position": "rope", "nope_long": True, "heads": "S/L", "block": "parallel", "where": "olmo2"},
]


def ours_of(case: dict) -> GPT:
    window = {"window": 4} if "S" in case.get("heads", "L") else {}
    return shaken(GPTConfig(**SIZES | window | case), 0.1)


def theirs_of(ours: GPT, folder: object, **kwargs: object) -> torch.nn.Module:
    """The same model, written and loaded again by transformers, with all of its weights."""
    NanoattnForCausalLM.of(ours).save_pretrained(folder)
    theirs, found = NanoattnForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(found.values()), found
    return theirs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_choice_as_a_model_of_transformers(tmp_path, case):
    ours = ours_of(case)
    theirs = theirs_of(ours, tmp_path)
    x = torch.randint(V, (3, T))
    expected = ours(x, x)[0]
    torch.testing.assert_close(theirs(x).logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs(x, logits_to_keep=3).logits, expected[:, -3:], rtol=0, atol=1e-5)
    assert theirs.gpt.config == ours.config

    pieces, past = [], None  # with the cache
    for part in x.split([5, 1, 1, 10, 7], dim=1):
        out = theirs(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=1e-4)

    mask = torch.ones(3, T, dtype=torch.long)  # padding on the left
    mask[0, :7] = mask[2, :1] = 0
    alone = [ours(row[None, seen.bool()], row[None, seen.bool()])[0][0] for row, seen in zip(x, mask, strict=True)]
    logits = theirs(x, attention_mask=mask).logits
    for row, seen, y in zip(logits, mask, alone, strict=True):
        torch.testing.assert_close(row[seen.bool()], y, rtol=0, atol=1e-4)

    # transformers' generate, greedy, past block_size: as our own, with the cache and without, alone and in a batch
    ids = torch.randint(1, V, (1, 7))  # 0 is the padding: transformers takes a 0 in a prompt for it
    own = ours.generate(ids, 25, 0.0)
    greedy = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}
    batch = torch.cat((torch.cat((torch.zeros(1, 3, dtype=torch.long), ids), 1), x[:1, :10]))
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    assert theirs.generate(ids, **greedy).equal(own)
    assert theirs.generate(batch, attention_mask=mask, **greedy)[0, 3:].equal(own[0])
    few = greedy | {"max_new_tokens": 10}
    assert theirs.generate(ids, use_cache=False, **greedy).equal(own)
    beams = theirs.generate(ids, num_beams=3, use_cache=False, **few)
    assert theirs.generate(batch, attention_mask=mask, num_beams=3, **few)[0, 3 : 3 + beams.shape[1]].equal(beams[0])


def test_their_loss_and_gradients_are_ours(tmp_path):
    """labels are shifted inside, as everywhere in transformers; the mean is over the labels that are not -100."""
    ours = ours_of({"attention": "laser"})
    theirs = theirs_of(ours, tmp_path)
    x = torch.randint(V, (2, T))
    labels, targets = x.clone(), x.roll(-1, 1)
    labels[:, :5], targets[:, :4], targets[:, -1] = -100, -1, -1
    loss = theirs(x, labels=labels, use_cache=True).loss  # the cache would have no gradient
    expected = ours(x, targets)[1]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for (name, p), q in zip(theirs.gpt.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_bfloat16(tmp_path):
    ours = ours_of({"attention": "laser", "position": "sinusoidal", "norm": "rmsnorm"})
    theirs = theirs_of(ours, tmp_path, dtype=torch.bfloat16)
    x = torch.randint(V, (2, T))
    assert theirs(x).logits.dtype == torch.bfloat16
    torch.testing.assert_close(theirs(x).logits.float(), ours(x, x)[0], rtol=0, atol=0.15)


def test_what_the_model_cannot_honour_is_refused(tmp_path):
    theirs, ids = theirs_of(ours_of({}), tmp_path), torch.zeros(1, 3, dtype=torch.long)
    long = torch.zeros(1, T + 1, dtype=torch.long)
    padded = theirs(ids, attention_mask=torch.tensor([[0, 1, 1]]), use_cache=True).past_key_values
    for arguments, says in (
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "one run of ones in each row"),
        ({"attention_mask": torch.tensor([[0, 0, 0]])}, "one run of ones in each row"),
        ({"attention_mask": torch.tensor([[1, 1, 0]]), "use_cache": True}, "padding_side = 'left'"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "does not take inputs_embeds"),
        ({"output_attentions": True}, "does not take output_attentions"),
        ({"past_key_values": ()}, "must be what this model returned"),
        ({"past_key_values": padded}, "need their attention_mask with every new token"),
        ({"input_ids": long}, f"1 to block_size={T}"),
        ({"input_ids": long, "use_cache": True}, f"1 to block_size={T}"),
    ):
        with pytest.raises(ValueError, match=says):
            theirs(**{"input_ids": ids} | arguments)


# -----------------------------------------------------------------------------
# tokenizers

ODD = "naïve 漢字 😀 don't  I'll   x\n\n\tEND ﬁ ½ e\u0301 a\u00a0b <unk> ▁y\r\n Romans, countrymen"


def sentencepiece(text: str) -> tokenizers.Tokenizer:
    pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    return tokenizers.train_sentencepiece([text, "naive citizens of Rome are all noble lords"], 285)


@pytest.mark.parametrize("kind", ["char", "char, documents", "bytes", "gpt2", "sentencepiece"])
def test_their_tokenizer_gives_our_tokens(tmp_path, kind, text, bpe):
    gpt2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    bpe(b"th", b"the", b" the", b"or", b" l", b"lor", b"ord", b" lord", b"\n\n", "ï".encode(), pattern=gpt2)
    alphabet = "".join(sorted(set(text + ODD)))
    tok = {
        "char": lambda: tokenizers.CharTokenizer(alphabet),
        "char, documents": lambda: tokenizers.CharTokenizer(alphabet, True),
        "bytes": tokenizers.ByteTokenizer, "gpt2": tokenizers.GPT2Tokenizer,
        "sentencepiece": lambda: sentencepiece(text),
    }[kind]()  # fmt: skip
    fast(tok, T).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == tok.n_vocab and theirs.eos_token_id == theirs.bos_token_id == tok.eot
    documents = [f"the lord{tokenizers.END}of all", tokenizers.END] if tok.eot is not None else []
    for sample in ["", "the", " the  lord ", text[:500], ODD, *documents]:
        assert theirs.encode(sample) == tok.encode(sample), sample
    for sample in (text[:500], " the lord", ODD):
        ids = tok.encode(sample)
        assert theirs.decode(ids) == tok.decode(ids)
    if kind == "char":
        with pytest.raises(Exception, match="Missing"):
            theirs.encode("€")


def test_gpt2s_tokens_are_known_beside_a_model_of_the_hub(tmp_path):
    fast(tokenizers.GPT2Tokenizer(), T).save_pretrained(tmp_path)
    tok = tokenizers.pretrained_tokenizer(str(tmp_path), tokenizers.GPT2_VOCAB_SIZE)
    assert tok.meta == {"kind": "gpt2"} and tok.decode(tok.encode("the lord")) == "the lord"


# -----------------------------------------------------------------------------
# the script


LASER = ("--attention=laser", "--heads=SSSL", "--window=4", "--position=rope")
ALONE = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("the lord", return_tensors="pt").input_ids
writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
written = writer("the lord", max_new_tokens=40, do_sample=False)[0]["generated_text"]
own = [name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(sys.argv[2])]
model.save_pretrained(folder + "-again")
again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True)
same = again(ids).logits.equal(model(ids).logits)
found = {"logits": model(ids).logits.tolist(), "ids": ids.tolist(), "text": written, "own": own, "same": same}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_process_without_the_repository_loads_and_samples_it(run, train, tmp_path):
    assert train(*LASER)[0] == 0
    trained, to = str(tmp_path / "out"), str(tmp_path / "exported")
    code, out, err = run("lab/hub/export.py", f"--out_dir={trained}", f"--to={to}", "--custom")
    assert code == 0 and "NanoattnForCausalLM" in out, err
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HOME": str(tmp_path / "cache")}
    argv = [sys.executable, "-c", ALONE, to, ROOT]
    env |= {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    model, tok, _, _ = checkpoint.open_model("resume", trained, "best")
    ids = torch.tensor([tok.encode("the lord")])
    assert found["ids"] == ids.tolist() and found["own"] == [] and found["same"]
    torch.testing.assert_close(torch.tensor(found["logits"]), model.eval()(ids, ids)[0], rtol=0, atol=1e-5)
    assert found["text"] == tok.decode(model.generate(ids, 40, 0.0)[0].tolist())


def test_a_plain_export_is_sampled_and_trained_on(run, train, tmp_path):
    assert train("--max_iters=5")[0] == 0
    to = str(tmp_path / "exported")
    code, _, err = run("lab/hub/export.py", f"--out_dir={tmp_path / 'out'}", f"--to={to}")
    assert code == 0, err
    flags = ["--start=the lord", "--num_samples=1", "--max_new_tokens=40", "--device=cpu"]
    outs = [run("sample.py", which, *flags)[1] for which in (f"--out_dir={tmp_path / 'out'}", f"--init_from={to}")]
    assert "the lord" in outs[0] and outs[0].splitlines()[1:] == outs[1].splitlines()[1:]
    code, out, err = train(f"--init_from={to}", f"--out_dir={tmp_path / 'more'}", "--max_iters=2")
    assert code == 0 and "all of its weights carry over" in out, err


def test_what_is_exported_can_become_plain_only_if_a_family_has_it(run, train, tmp_path):
    assert train(*LASER, "--max_iters=1")[0] == 0
    code, _, err = run("lab/hub/export.py", f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / 'to'}")
    assert code == 2 and "attention='laser'" in err and "--custom" in err and not os.path.exists(tmp_path / "to")
