"""Models of the hub: a GPT-2, Llama, Mistral or Qwen 3 of transformers, as a GPT.

    python sample.py --import=lab.hub.families --init_from=owner/model

The name is a folder or owner/model. In Python, `import lab.hub.families` comes before
`GPT.from_pretrained`.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from errors import UserError, first_line, optional
from text.tokenizers import GPT2_VOCAB_SIZE, PRETRAINED, GPT2Tokenizer, Tokenizer
from training.pretrained import GPT2, SOURCES, gpt2_weights

USER = "a model of Hugging Face"  # what needs the package transformers


@dataclass
class Family:
    """How a model of transformers becomes a GPT; config is transformers' config of the model."""

    # fields(config) -> the fields of GPTConfig; UserError for a choice that GPT does not have
    fields: Callable
    # weights(state_dict, config) -> a state dict of GPT, with the same numbers in other places
    weights: Callable


# -----------------------------------------------------------------------------
# GPT-2

# name in GPTConfig: name in GPT2Config
GPT2_FIELDS = {
    "block_size": "n_positions",
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "n_hidden": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
}
# name in GPT2Config: name in parts.ACTIVATION
ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}


def gpt2_fields(config) -> dict:
    activation = config.activation_function
    if activation not in ACTIVATIONS:
        raise UserError(
            f"activation_function={activation!r} is not one of {', '.join(ACTIVATIONS)}"
        )
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        raise UserError(
            "its attention scores are not scaled by 1 / sqrt(head width), as GPT-2's are"
        )
    fields = {ours: getattr(config, theirs) for ours, theirs in GPT2_FIELDS.items()}
    return fields | {"mlp": ACTIVATIONS[activation]}


# -----------------------------------------------------------------------------
# Llama, Mistral, Qwen 3

# name in GPTConfig: name in LlamaConfig, MistralConfig and Qwen3Config
LLAMA_FIELDS = {
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "head_dim": "head_dim",
    "n_hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
# module of GPT: modules of transformers, whose weights lie in it one after another
TOP = {
    "transformer.wte": ["model.embed_tokens"],
    "transformer.ln_f": ["model.norm"],
    "lm_head": ["lm_head"],
}
# the same inside a block
BLOCK = {
    "ln_1": ["input_layernorm"],
    "ln_2": ["post_attention_layernorm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.c_proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"],
    "attn.k_norm": ["self_attn.k_norm"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.c_proj": ["mlp.down_proj"],
}
# the modules of transformers whose outputs RoPE rotates, or that normalise them
ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")


def llama_fields(config) -> dict:
    """Llama; Mistral, whose heads are all short; Qwen 3, which normalises queries and keys."""
    rope = config.rope_parameters
    if config.hidden_act != "silu" or rope["rope_type"] != "default":
        raise UserError(
            f"it must have hidden_act='silu' and plain RoPE, not {config.hidden_act!r} and {rope}"
        )
    bias = getattr(config, "attention_bias", False)
    if bias != getattr(config, "mlp_bias", False):
        raise UserError(
            "it has biases only in attention or only in the MLP; GPT: in both or neither"
        )
    fields = {ours: getattr(config, theirs) for ours, theirs in LLAMA_FIELDS.items()}
    fields |= {
        "position": "rope",
        "rope_base": rope["rope_theta"],
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": bias,
        "qk_norm": "rmsnorm" if config.model_type == "qwen3" else "none",
        "heads": heads(config),
    }
    if "S" in fields["heads"]:
        fields["window"] = config.sliding_window - 1  # ours does not count the token itself
    return fields


def heads(config) -> str:
    """GPTConfig.heads: Qwen 3 says for each layer whether its heads are short, Mistral for all."""
    letters = {"sliding_attention": "S", "full_attention": "L"}
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    for layer in layers:
        if layer not in letters:
            raise UserError(f"it has a layer of unknown type: {layer}")
    if not getattr(config, "sliding_window", None):
        return "L"
    return "/".join(letters[layer] for layer in layers)


def llama_weights(state: dict, config) -> dict:
    """A state dict of GPT. A weight for which GPT has no place keeps its name."""
    modules = dict(TOP)
    for layer in range(config.num_hidden_layers):
        for ours, theirs in BLOCK.items():
            names = [f"model.layers.{layer}.{name}" for name in theirs]
            modules[f"transformer.h.{layer}.{ours}"] = names
    rest = dict(state)
    weights = {}
    for ours, theirs in modules.items():
        for suffix in (".weight", ".bias"):
            names = [name + suffix for name in theirs]
            if all(name in rest for name in names):
                parts = [paired(name, rest.pop(name), config.head_dim) for name in names]
                weights[ours + suffix] = torch.cat(parts)
    return weights | rest


def paired(name: str, p: torch.Tensor, D: int) -> torch.Tensor:
    """Reorder each head's rows: RoPE pairs d and d + D/2 in transformers, 2d and 2d + 1 here."""
    if not any(module in name for module in ROTATED):
        return p
    return p.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).flatten(0, 2)


# -----------------------------------------------------------------------------
# any of them

llama = Family(llama_fields, llama_weights)
FAMILIES = {
    "gpt2": Family(gpt2_fields, lambda state, config: gpt2_weights(state)),
    "llama": llama,
    "mistral": llama,
    "qwen3": llama,
}


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn errors of transformers, and of libraries below it, into a sentence with this name."""
    try:
        yield
    except Exception as error:  # of several libraries
        raise UserError(f"cannot load {name} through transformers: {first_line(error)}") from None


def hub(name: str) -> tuple[dict, Callable]:
    """(fields of GPTConfig, a function that reads the weights) of a folder or owner/model."""
    transformers = optional("transformers", USER)
    with loading(name):
        config = transformers.AutoConfig.from_pretrained(name)
        family = config.model_type
        if family not in FAMILIES:
            raise UserError(f"the family {family} is not one of {', '.join(FAMILIES)}")
        return FAMILIES[family].fields(config), lambda: hub_state(name, config)


def hub_state(name: str, config) -> dict:
    """What checkpoint.model_of needs of a model that transformers loads: its name and weights."""
    from transformers import AutoModelForCausalLM

    with loading(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True
        )
        if missing := report["missing_keys"]:  # transformers fills them with random numbers
            raise UserError(f"its file has no {min(missing)}")
        weights = FAMILIES[config.model_type].weights(model.state_dict(), config)
    return {"path": name, "model": weights}


# -----------------------------------------------------------------------------
# their tokenizers


class HubTokenizer(Tokenizer):
    """The tokenizer beside weights that have been loaded through transformers."""

    meta = {"kind": "hub"}  # no data set has such tokens, so this kind is not in TOKENIZER

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        self._tok = AutoTokenizer.from_pretrained(name)
        self.n_vocab = len(self._tok)
        self.eot = self._tok.eos_token_id
        gpt2_ids = [270, 338, 220, 17031, 2231]  # by which GPT-2's tokenizer is recognised
        if self.n_vocab == GPT2_VOCAB_SIZE and self.encode("it's  12345") == gpt2_ids:
            self.meta = GPT2Tokenizer.meta  # data sets may have these tokens

    def encode(self, text):
        return self._tok.encode(text)

    def decode(self, ids):
        return self._tok.decode(ids, skip_special_tokens=True)


def hub_tokenizer(name: str) -> Tokenizer:
    """The tokenizer beside pretrained weights (a folder, or a name on the hub).

    GPT-2's names get GPT-2's tokenizer, and so does a folder with weights only. Raises UserError
    if such a folder's vocabulary does not have GPT-2's size.
    """
    if name in GPT2:
        return GPT2Tokenizer()
    if not os.path.isdir(name) or re.search("token|vocab", " ".join(os.listdir(name))):
        return HubTokenizer(name)

    fields, _ = hub(name)
    n = fields["vocab_size"]
    if n != GPT2_VOCAB_SIZE:
        raise UserError(f"{name} has no tokenizer beside it, and its {n} tokens are not GPT-2's")
    return GPT2Tokenizer()


SOURCES["other"] = hub
PRETRAINED["other"] = hub_tokenizer
