"""Our models in transformers' own formats: export(model) is a GPT-2, Llama, Mistral or Qwen 3.

It is the inverse of training/pretrained.py, whose tables it reads the other way round.
"""

from collections.abc import Callable

import torch

from errors import UserError, optional
from model import GPT, GPTConfig
from text.tokenizers import GPT2_VOCAB_SIZE
from training import pretrained
from training.pretrained import FAMILIES, GPT2_FIELDS, LLAMA_FIELDS, TRAINING, USER

SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # a vocabulary without such tokens


def to_gpt2(c: GPTConfig) -> dict:
    activation = next((theirs for theirs, ours in pretrained.ACTIVATIONS.items() if ours == c.mlp), "gelu_new")
    args = {theirs: getattr(c, ours) for ours, theirs in GPT2_FIELDS.items()}
    args |= {"resid_pdrop": c.dropout, "embd_pdrop": c.dropout, "attn_pdrop": c.attn_dropout}
    return args | {"activation_function": activation} | (SPECIAL if c.vocab_size < GPT2_VOCAB_SIZE else {})


def to_llama(*own: str) -> Callable[[GPTConfig], dict]:
    """own: the names of arguments that only some of these families have."""

    def to(c: GPTConfig) -> dict:
        args = {theirs: getattr(c, ours) for ours, theirs in LLAMA_FIELDS.items()} | SPECIAL | {"use_cache": True}
        args |= {"rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base}}
        kinds = ["sliding_attention" if "S" in c.layer_heads(i) else "full_attention" for i in range(c.n_layer)]
        more = {"layer_types": kinds, "attention_bias": c.bias, "mlp_bias": c.bias}
        more |= {"sliding_window": None if c.window is None else c.window + 1}
        more |= {"use_sliding_window": c.window is not None}
        return args | {name: more[name] for name in own}

    return to


THEIRS: dict[str, Callable[[GPTConfig], dict]] = {  # a resolved GPTConfig -> the arguments of their config
    "gpt2": to_gpt2,
    "llama": to_llama("attention_bias", "mlp_bias"),
    "mistral": to_llama("sliding_window"),
    "qwen3": to_llama("sliding_window", "layer_types", "use_sliding_window"),
}


def export(model: GPT) -> object:
    """Our model as a PreTrainedModel of transformers. Raises UserError, naming the choices that no family has."""
    transformers, D = optional("transformers", USER), model.config.resolved().head_dim
    name, config = fitting(model.config, transformers.AutoConfig)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # GPT-2's biases are zeros where ours has none
    state = {key: torch.zeros_like(p) if key.endswith("bias") else p for key, p in theirs.state_dict().items()}
    for key, p in model.state_dict().items():
        names = pretrained.sources(key, FAMILIES[name].modules)
        parts = p.split([len(state[of]) for of in names]) if len(names) > 1 else [p]
        for of, part in zip(names, parts, strict=True):
            state[of] = pretrained.converted(of, part, D, FAMILIES[name], back=True).contiguous()
    theirs.load_state_dict(state)
    return theirs


def fitting(config: GPTConfig, AutoConfig: type) -> tuple[str, object]:
    """(the family that has all of a model's choices, transformers' config of it)."""
    ours, misfits = choices(config), {}  # misfits: {family: fields in which it differs}
    for name, to in THEIRS.items():
        try:
            with pretrained.loading(name):
                theirs = AutoConfig.for_model(name, **to(config.resolved()))
            back = choices(GPTConfig(**FAMILIES[name].fields(theirs)))
        except UserError:  # for sizes that the family cannot have
            continue
        free = ("bias",) if name == "gpt2" else ()
        misfits[name] = [key for key in ours if ours[key] != back[key] and key not in free]
        if not misfits[name]:
            return name, theirs
    if not misfits:
        raise UserError("transformers has no model of these sizes: n_head, head_dim and n_embd do not fit there")
    nearest, fields = min(misfits.items(), key=lambda entry: len(entry[1]))
    asked = [f"{key}={getattr(config, key)!r}" for key in fields if getattr(config, key) is not None]
    raise UserError(f"transformers has no such model; the nearest, {nearest}, has no {', '.join(asked or fields)}")


def choices(config: GPTConfig) -> dict:
    """The fields that a trained model depends on, with every default spelled out."""
    c = config.resolved()
    heads = "/".join(c.layer_heads(layer) for layer in range(c.n_layer))
    return {key: x for key, x in (vars(c) | {"heads": heads}).items() if key not in TRAINING}
