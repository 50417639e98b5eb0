"""Our models in transformers' own formats: export(model) is a GPT-2, Llama, Mistral or Qwen 3."""

import torch
import transformers

from errors import UserError
from lab.hub.families import (
    ACTIVATIONS,
    FAMILIES,
    GPT2_FIELDS,
    LLAMA_FIELDS,
    Family,
)
from model import GPT, GPTConfig
from training.pretrained import TRAINING

# the vocabulary has no such tokens
NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def export(model: GPT) -> object:
    """Our model as a PreTrainedModel. Raises UserError, naming the choices that no family has."""
    name, config = converted(model.config)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = moved_back(model.state_dict(), theirs.state_dict(), FAMILIES[name], config)
    theirs.load_state_dict(state)
    return theirs


def moved_back(ours: dict, theirs: dict, family: Family, config) -> dict:
    """The weights of the state dict `ours` in the places of transformers' state dict `theirs`.

    Family.weights only moves numbers. So it is a linear function, and its transpose, which
    torch.func.vjp computes, is its inverse. Biases that GPT does not have become zeros.
    """
    places, transpose = torch.func.vjp(lambda state: family.weights(state, config), theirs)
    assert ours.keys() <= places.keys()
    (state,) = transpose({key: ours.get(key, torch.zeros_like(p)) for key, p in places.items()})
    return state


def converted(config: GPTConfig) -> tuple[str, object]:
    """(the family that a model belongs to, transformers' config of the model)."""
    c = config.resolved()
    name = family_of(c)
    args = gpt2_args(c) if name == "gpt2" else llama_args(c, name)
    try:
        theirs = transformers.AutoConfig.for_model(name, **args, **NO_SPECIAL_TOKENS)
        loaded = choices(GPTConfig(**FAMILIES[name].fields(theirs)))
    except Exception:  # of several libraries
        sizes = f"n_head={c.n_head}, head_dim={c.head_dim}, n_embd={c.n_embd}"
        raise UserError(f"transformers has no {name} of these sizes: {sizes}") from None
    if name == "gpt2":
        loaded["bias"] = c.bias  # GPT-2 always has biases: they may be zeros
    misfits = [key for key, value in choices(config).items() if value != loaded[key]]
    if misfits:
        given = {key: getattr(config, key) for key in misfits}
        lacking = [f"{key}={value!r}" for key, value in given.items() if value is not None]
        raise UserError(
            f"transformers has no such model; the nearest, {name}, "
            f"has no {', '.join(lacking or misfits)}"
        )
    return name, theirs


def family_of(c: GPTConfig) -> str:
    """The family that a model with these choices is nearest to. c is resolved."""
    if c.norm == "layernorm":
        return "gpt2"
    if c.qk_norm == "rmsnorm":
        return "qwen3"
    return "mistral" if "S" in c.heads else "llama"


def choices(config: GPTConfig) -> dict:
    """The fields that a trained model depends on, with the default values filled in."""
    c = config.resolved()
    heads = "/".join(c.layer_heads(layer) for layer in range(c.n_layer))
    fields = vars(c) | {"heads": heads, "rope_base": c.rope_base or 10000.0}
    return {name: value for name, value in fields.items() if name not in TRAINING}


def gpt2_args(c: GPTConfig) -> dict:
    """The arguments of GPT2Config for a resolved GPTConfig."""
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    args = {theirs: getattr(c, ours) for ours, theirs in GPT2_FIELDS.items()}
    return args | {
        "resid_pdrop": c.dropout,
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.attn_dropout,
        "activation_function": names.get(c.mlp, "gelu_new"),
    }


def llama_args(c: GPTConfig, name: str) -> dict:
    """The arguments of the config of llama, mistral or qwen3 for a resolved GPTConfig."""
    args = {theirs: getattr(c, ours) for ours, theirs in LLAMA_FIELDS.items()}
    args["rope_parameters"] = {"rope_type": "default", "rope_theta": c.rope_base or 10000.0}
    if name == "llama":
        return args | {"attention_bias": c.bias, "mlp_bias": c.bias}
    if c.window is not None:
        args["sliding_window"] = c.window + 1  # transformers counts the token itself
    if name == "qwen3":
        args["use_sliding_window"] = c.window is not None
        args["layer_types"] = [
            "sliding_attention" if "S" in c.layer_heads(layer) else "full_attention"
            for layer in range(c.n_layer)
        ]
    return args
