"""lab/hub/formats.py: our models as a GPT-2, Llama, Mistral or Qwen 3, and what none of them has."""

import pytest
import torch

from model import GPT, GPTConfig

pytest.importorskip("transformers")
from lab.hub.formats import export

V, T, C, H = 65, 24, 32, 4
SIZES = {"block_size": T, "vocab_size": V, "n_layer": 4, "n_head": H, "n_embd": C}
LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt2", {}),
        ("gpt2", {"bias": False}),
        ("gpt2", {"mlp": "gelu_exact", "n_hidden": 50, "norm_eps": 1e-3, "tied": False}),
        ("llama", LLAMA | {"n_kv_head": 1, "rope_base": 500.0}),
        ("llama", LLAMA | {"head_dim": 12, "n_kv_head": 2, "norm_eps": 1e-3, "tied": False}),
        ("llama", LLAMA | {"bias": True}),
        ("llama", LLAMA | {"heads": "LL"}),  # spelled otherwise, as the next one
        ("llama", LLAMA | {"n_kv_head": H, "head_dim": C // H}),
        ("mistral", LLAMA | {"heads": "S", "window": 5, "n_kv_head": 2}),
        ("qwen3", LLAMA | {"qk_norm": "rmsnorm", "n_kv_head": 2, "tied": False}),
        ("qwen3", LLAMA | {"qk_norm": "rmsnorm", "heads": "L/L/S/S", "window": 5}),
    ],
)
def test_exported_and_loaded_again(tmp_path, family, fields):
    ours = GPT(GPTConfig(**SIZES | fields)).eval()
    for p in ours.parameters():  # far from their first values, so that every choice changes the result
        p.data += 0.2 * torch.randn_like(p)
    theirs, x = export(ours), torch.randint(V, (2, T))
    assert theirs.config.model_type == family and theirs.generation_config.eos_token_id is None
    torch.testing.assert_close(theirs(x).logits, ours(x, x)[0], rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path)
    torch.testing.assert_close(GPT.from_pretrained(str(tmp_path))(x, x)[0], ours(x, x)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"attention": "laser"}, "the nearest, gpt2, has no attention='laser'"),
        ({"heads": "SSSL", "window": 3}, "has no heads='SSSL', window=3"),
        ({"n_head": 3, "head_dim": 8}, "the nearest, mistral, has no"),
        ({"where": "sandwich", "logit_softcap": 30.0}, "has no where='sandwich', logit_softcap=30.0"),
        ({"short_attention": "beta", "heads": "SL", "window": 3}, "short_attention='beta'"),
        ({"n_head": 3, "head_dim": 7}, "no model of these sizes"),
    ],
)
def test_what_no_family_has_is_not_exported(fields, says):
    with pytest.raises(ValueError) as error:
        export(GPT(GPTConfig(**SIZES | fields)))
    assert says in str(error.value)
