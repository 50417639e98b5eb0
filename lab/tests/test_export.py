"""lab/hub/export.py: models (with --custom for every choice) and tokenizers of transformers."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from harness import ROOT, assert_equal, done, parametrize, refusal, refused, slow
from reference import SIZES, shaken
from torch.nn import functional as F

import lab.ideas.positions  # noqa: F401
from model import ATTENTION, GPTConfig
from parts import POSITION
from text import tokenizers
from training import checkpoint

pytest.importorskip("transformers")
import transformers

from lab.hub.gpt2 import hub_tokenizer
from lab.hub.modeling_nanoattn import NanoattnForCausalLM
from lab.hub.tokenizer_json import fast

V, T = 65, 24
CASES = [{"attention": name, "heads": "SSL"} for name in ATTENTION]
CASES += [{"position": name} for name in POSITION]
CASES += [
    {"position": "t5", "tied": False},  # all layers share a table; the head shares nothing
    {"attention": "beta", "heads": "SL", "short_attention": "softmax", "position": "rope"},
    {"attention": "beta", "decay": "learned", "conv": 3, "n_kv_head": 2, "head_dim": 12},
    {"heads": "S/L", "position": "rope", "nope_long": True, "block": "parallel", "where": "olmo2"},
    {"logit_softcap": 20.0, "mlp": "swiglu", "where": "sandwich", "bias": False},
]


def ours_of(case):
    window = {"window": 4} if "S" in case.get("heads", "") else {}
    return shaken(GPTConfig(**SIZES | window | case), 0.1)


def theirs_of(ours, folder, **kwargs):
    """The same model, written and loaded again by transformers, with all of its weights."""
    NanoattnForCausalLM.of(ours).save_pretrained(folder)
    theirs, report = NanoattnForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(report.values()), report
    return theirs


@parametrize("case", CASES, ids=str)
def test_every_choice_as_a_model_of_transformers(tmp_path, case):
    """Logits: of a whole text, piece by piece with the cache, and with padding on the left."""
    ours = ours_of(case)
    theirs = theirs_of(ours, tmp_path)
    assert theirs.gpt.config == ours.config
    x = torch.randint(V, (3, T))
    expected = ours(x, x)[0]
    assert_equal(theirs(x).logits, expected, 1e-5)
    assert_equal(theirs(x, logits_to_keep=3).logits, expected[:, -3:], 1e-5)

    pieces = []
    past = None
    for part in x.split([5, 1, 1, 10, 7], dim=1):
        out = theirs(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        pieces.append(out.logits)
    assert_equal(torch.cat(pieces, 1), expected, 1e-4)

    mask = torch.ones(3, T, dtype=torch.long)
    mask[0, :7] = 0
    logits = theirs(x, attention_mask=mask).logits
    for row, seen, y in zip(x, mask.bool(), logits, strict=True):
        text = row[None, seen]
        assert_equal(y[seen], ours(text, text)[0][0], 1e-4)
    check_generate(ours, theirs, x)


def check_generate(ours, theirs, x):
    """transformers' generate, greedy and past block_size, writes what ours writes.

    With and without the cache, alone and beside a longer text. With beams a text in a batch is
    continued as it is alone.
    """
    ids = torch.randint(1, V, (1, 7))  # 0 is the padding: a 0 in a prompt would be taken for it
    expected = ours.generate(ids, 25, 0.0)
    greedy = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}
    assert theirs.generate(ids, **greedy).equal(expected)
    assert theirs.generate(ids, use_cache=False, **greedy).equal(expected)

    padded = F.pad(ids, (3, 0))
    batch = torch.cat((padded, x[:1, :10]))
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    assert theirs.generate(batch, attention_mask=mask, **greedy)[0, 3:].equal(expected[0])
    beams = greedy | {"max_new_tokens": 10, "num_beams": 3}
    (alone,) = theirs.generate(ids, use_cache=False, **beams)
    assert theirs.generate(ids, **beams)[0].equal(alone)
    beside = theirs.generate(batch, attention_mask=mask, **beams)[0, 3:]
    assert beside[: len(alone)].equal(alone)


def test_their_loss_and_gradients_are_ours(tmp_path):
    """labels are shifted inside, as in all of transformers; -100 is no target."""
    ours = ours_of({"attention": "laser"})
    theirs = theirs_of(ours, tmp_path)
    x = torch.randint(V, (2, T))
    labels = x.clone()
    labels[:, :5] = -100
    targets = labels.roll(-1, 1).clamp(min=-1)  # the last one is -1 too
    loss = theirs(x, labels=labels, use_cache=True).loss  # the cache would have no gradient
    expected = ours(x, targets)[1]
    assert_equal(loss, expected, 1e-5)
    loss.backward()
    expected.backward()
    gradients = ([p.grad for p in model.parameters()] for model in (theirs.gpt, ours))
    assert_equal(*gradients, 1e-5)

    theirs.resize_token_embeddings(V + 3)
    assert_equal(theirs(x).logits[..., :V], ours(x, x)[0], 1e-5)


def test_bfloat16(tmp_path):
    ours = ours_of({"attention": "laser", "position": "sinusoidal", "norm": "rmsnorm"})
    theirs = theirs_of(ours, tmp_path, dtype=torch.bfloat16)
    x = torch.randint(V, (2, T))
    assert theirs(x).logits.dtype == torch.bfloat16
    assert_equal(theirs(x).logits.float(), ours(x, x)[0], 0.15)


IDS = torch.zeros(1, 3, dtype=torch.long)


@parametrize(
    "arguments, says",
    [
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "one run of ones in each row"),
        ({"attention_mask": torch.tensor([[1, 1, 0]]), "use_cache": True}, "side = 'left'"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "does not take inputs_embeds"),
        ({"past_key_values": ()}, "must be what this model returned"),
        ({"input_ids": IDS.expand(9, -1).reshape(1, -1), "use_cache": True}, "1 to block_size=24"),
    ],
)
def test_what_the_model_does_not_take(arguments, says):
    theirs = NanoattnForCausalLM.of(ours_of({}))
    with refusal(says):
        theirs(**{"input_ids": IDS} | arguments)


def test_padded_texts_need_their_mask_with_every_token():
    theirs = NanoattnForCausalLM.of(ours_of({}))
    mask = torch.tensor([[0, 1, 1]])
    past = theirs(IDS, attention_mask=mask, use_cache=True).past_key_values
    with refusal("need their attention_mask with every new token"):
        theirs(IDS, past_key_values=past)


# -----------------------------------------------------------------------------
# tokenizers

ODD = "naïve 漢字 😀 don't  I'll   x\n\n\tEND ﬁ ½ e\u0301 a\u00a0b <unk> ▁y\r\n Romans, countrymen"


def sentencepiece(text):
    pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    return tokenizers.train_sentencepiece([text, "naive citizens of Rome are all noble lords"], 285)


def characters(text, **settings):
    return tokenizers.CharTokenizer("".join(sorted({*text, *ODD})), **settings)


TOKENIZERS = {
    "char": characters,
    "char, documents": partial(characters, eot=True),
    "bytes": lambda text: tokenizers.ByteTokenizer(),
    "gpt2": lambda text: tokenizers.GPT2Tokenizer(),
    "sentencepiece": sentencepiece,
}


@parametrize("name", TOKENIZERS)
def test_their_tokenizer_gives_our_tokens(tmp_path, name, text):
    tok = TOKENIZERS[name](text)
    fast(tok, T).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == tok.n_vocab
    assert theirs.padding_side == "left"
    assert theirs.model_max_length == T
    assert theirs.eos_token_id == theirs.bos_token_id == tok.eot
    documents = [f"the lord{tokenizers.END}of all", tokenizers.END] if tok.eot is not None else []
    for sample in ["", "the", " the  lord ", text[:500], ODD, *documents]:
        ids = tok.encode(sample)
        assert theirs.encode(sample) == ids, sample
        if sample not in documents:
            assert theirs.decode(ids) == tok.decode(ids)
    if name == "gpt2":  # also beside a model of the hub
        assert hub_tokenizer(str(tmp_path)).meta == tok.meta
    if name == "char":
        with pytest.raises(Exception, match="Missing"):
            theirs.encode("€")


# -----------------------------------------------------------------------------
# the script


LASER = "--attention=laser --heads=SSSL --window=4 --position=rope"
ALONE = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

folder, root = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("the lord", return_tensors="pt").input_ids
logits = model(ids).logits
writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
text = writer("the lord", max_new_tokens=40, do_sample=False)[0]["generated_text"]
files = [str(getattr(module, "__file__", "")) for module in sys.modules.values()]
model.save_pretrained(folder + "-again")
again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True)
print(json.dumps({
    "ids": ids.tolist(),
    "logits": logits.tolist(),
    "text": text,
    "files of the repository": [file for file in files if file.startswith(root)],
    "saved again": again(ids).logits.equal(logits),
}))
"""


@pytest.fixture
def export(run, tmp_path):
    """export("--custom") exports the run of `train` to tmp_path / "exported"."""
    flags = [f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / 'exported'}"]
    return partial(run, "lab/hub/export.py", *flags)


@slow
@pytest.mark.usefixtures("ideas")
@parametrize(
    "flags",
    [
        LASER,
        "--import=lab.ideas.positions --position=relative",
        "--import=lab.ideas.after --attention=beta_gate",
    ],
)
def test_a_process_without_the_repository_loads_and_samples_it(export, train, tmp_path, flags):
    done(train(flags))
    modules = [flag for flag in flags.split() if flag.startswith("--import=")]
    done(export("--custom", *modules), "NanoattnForCausalLM")
    env = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    argv = [sys.executable, "-c", ALONE, tmp_path / "exported", ROOT]
    alone = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    said = json.loads(alone.stdout.splitlines()[-1])
    model, tok, _, _ = checkpoint.open_model("resume", str(tmp_path / "out"), "best")
    ids = torch.tensor([tok.encode("the lord")])
    assert said["ids"] == ids.tolist()
    assert said["files of the repository"] == []
    assert said["saved again"]
    assert_equal(torch.tensor(said["logits"]), model.eval()(ids, ids)[0], 1e-5)
    assert said["text"] == tok.decode(model.generate(ids, 40, 0.0)[0].tolist())


def test_a_plain_export_is_sampled(run, export, train, tmp_path):
    done(train("--max_iters=5"))
    done(export("--which=latest"), "/out/ckpt.pt is ")
    texts = []
    for model in (f"--out_dir={tmp_path / 'out'}", f"--init_from={tmp_path / 'exported'}"):
        flags = "--start=the --num_samples=1 --max_new_tokens=40 --device=cpu".split()
        _, out, _ = run("sample.py", model, *flags)
        texts.append(out.splitlines()[1:])
    assert texts[0] == texts[1] and texts[0]


@parametrize("flags", [["--custom"], []])
def test_a_padded_vocabulary_is_never_written(export, train, tmp_path, flags):
    done(train("--max_iters=2 --vocab_size=64"))
    tok = checkpoint.open_model("resume", str(tmp_path / "out"), "latest")[1]
    done(export("--which=latest", *flags))
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "exported")
    assert config.suppress_tokens == [*range(tok.n_vocab, 64)]


def test_what_is_not_exported(export, train, tmp_path):
    """A choice that no family has, without --custom; and into a folder that is not empty."""
    done(train(LASER, "--max_iters=1"))
    refused(export(), "attention='laser'", "--custom")
    assert not (tmp_path / "exported").exists()
    says = "must name a folder that is empty or does not exist yet"
    refused(export(f"--to={tmp_path / 'out'}"), says)
