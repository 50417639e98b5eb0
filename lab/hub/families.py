"""Llama, Mistral and Qwen 3: importing this file adds these families of transformers' models.

    python sample.py --import=lab.hub.families --init_from=owner/model

In Python, `import lab.hub.families` comes before `GPT.from_pretrained`. training/pretrained.py
explains what a Family is.
"""

import torch

from errors import UserError
from training.pretrained import FAMILIES, Family

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


FAMILIES |= dict.fromkeys(("llama", "mistral", "qwen3"), Family(llama_fields, llama_weights))
