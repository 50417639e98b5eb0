"""lab/hub/formats.py: our models as a GPT-2, Llama, Mistral or Qwen 3, and what no family has."""

import re

import torch
from harness import assert_equal, parametrize, refusal
from reference import SIZES, shaken
from test_export import T, V  # skips this file too if transformers is missing

from lab.hub.formats import export
from model import GPT, GPTConfig

LLAMA = {
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
}
QWEN3 = LLAMA | {"qk_norm": "rmsnorm"}
OTHER_GPT2 = {
    "mlp": "gelu_exact",
    "n_hidden": 50,
    "norm_eps": 1e-3,
    "tied": False,
    "bias": False,
}


@parametrize(
    "family, fields",
    [
        ("gpt2", {}),
        ("gpt2", OTHER_GPT2),
        ("llama", LLAMA | {"n_kv_head": 1, "rope_base": 500.0, "bias": True}),
        ("llama", LLAMA | {"head_dim": 12, "n_kv_head": 2, "norm_eps": 1e-3, "tied": False}),
        # Other spellings of the defaults.
        ("llama", LLAMA | {"heads": "LL", "n_kv_head": 4, "head_dim": 8}),
        ("mistral", LLAMA | {"heads": "S", "window": 5, "n_kv_head": 2}),
        ("qwen3", QWEN3 | {"n_kv_head": 2, "tied": False}),
        ("qwen3", QWEN3 | {"heads": "L/S", "window": 5}),
    ],
)
def test_exported_and_loaded_again(tmp_path, family, fields):
    ours = shaken(GPTConfig(**SIZES | fields))
    theirs = export(ours)
    assert theirs.config.model_type == family
    assert theirs.generation_config.eos_token_id is None
    x = torch.randint(V, (2, T))
    logits = ours(x, x)[0]
    assert_equal(theirs(x).logits, logits, 1e-5)
    theirs.save_pretrained(tmp_path)
    loaded = GPT.from_pretrained(str(tmp_path))
    assert_equal(loaded(x, x)[0], logits, 1e-5)
    for name, p in ours.named_parameters():
        assert p.equal(loaded.get_parameter(name)), name


@parametrize(
    "fields, says",
    [
        (
            {"short_attention": "beta", "heads": "SSSL", "window": 3},
            "has no heads='SSSL', short_attention='beta', window=3",
        ),
        ({"where": "sandwich", "logit_softcap": 3.0}, "no where='sandwich', logit_softcap=3.0"),
        (LLAMA | {"heads": "SL", "window": 3}, "the nearest, mistral, has no heads='SL'"),
        ({"n_head": 3, "head_dim": 8}, "no gpt2 of these sizes: n_head=3, head_dim=8, n_embd=32"),
    ],
)
def test_what_no_family_has_is_not_exported(fields, says):
    with refusal(re.escape(says)):
        export(GPT(GPTConfig(**SIZES | fields)))
