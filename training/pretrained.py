"""Weights from and for the models of Hugging Face's transformers: which of our choices they are, and their names.

A model of ours belongs to a family where the family's two config functions agree about it. A new family is one
entry of FAMILIES; its modules are named once, for both directions.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch

from configurator import NotInstalled, UserError, first_line
from model import GPT, GPTConfig
from text.tokenizers import GPT2_VOCAB_SIZE, hub_args

GPT2 = {  # layers, heads, width
    "gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600),
}  # fmt: skip
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}  # theirs: ours
# fields that may differ from what the weights were trained with
FREE = (
    "dropout",
    "attn_dropout",
    "z_loss",
    "attention",
    "heads",
    "window",
    "temperature",
    "logit_softcap",
    "block_size",
)
TRAINING = ("dropout", "attn_dropout", "zero_init", "z_loss")  # fields that say nothing about a trained model


@dataclass
class Family:
    ours: Callable  # their config -> the fields of GPTConfig. Raises ValueError for what we do not have
    theirs: Callable  # GPTConfig -> the arguments of their config
    modules: dict[str, list[str]]  # of our modules: which of theirs lie in them, one after the other
    transposed: bool = False  # their matrices are (in, out)
    halves: bool = False  # their RoPE pairs dimensions d and d + D/2, ours 2d and 2d + 1


SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # a vocabulary without such tokens


def gpt2_ours(c) -> dict:
    if c.activation_function not in ACTIVATIONS:
        raise UserError(f"activation_function={c.activation_function!r} is none of {', '.join(ACTIVATIONS)}")
    if not c.scale_attn_weights or c.scale_attn_by_inverse_layer_idx:
        raise UserError("its scores are scaled in a way that GPT-2's are not")
    sizes = {"block_size": c.n_positions, "vocab_size": c.vocab_size, "n_layer": c.n_layer, "n_head": c.n_head}
    sizes |= {"n_embd": c.n_embd, "n_hidden": c.n_inner, "norm_eps": c.layer_norm_epsilon}
    return sizes | {"mlp": ACTIVATIONS[c.activation_function], "tied": c.tie_word_embeddings}


def gpt2_theirs(c: GPTConfig) -> dict:
    sizes = {"n_positions": c.block_size, "vocab_size": c.vocab_size, "n_layer": c.n_layer, "n_head": c.n_head}
    activation = next((theirs for theirs, ours in ACTIVATIONS.items() if ours == c.mlp), "gelu_new")
    sizes |= {"n_embd": c.n_embd, "n_inner": c.n_hidden, "layer_norm_epsilon": c.norm_eps}
    sizes |= {"resid_pdrop": c.dropout, "embd_pdrop": c.dropout, "attn_pdrop": c.weight_dropout}
    tokens = SPECIAL if c.vocab_size < GPT2_VOCAB_SIZE else {}
    return sizes | {"activation_function": activation, "tie_word_embeddings": c.tied} | tokens


def llama_ours(c) -> dict:
    """Llama; Mistral, whose heads are all short; Qwen 3, whose queries and keys are normalised."""
    if c.hidden_act != "silu" or c.rope_parameters["rope_type"] != "default":
        raise UserError(f"hidden_act={c.hidden_act!r} and RoPE {c.rope_parameters}, not silu and plain RoPE")
    bias = {getattr(c, "attention_bias", False), getattr(c, "mlp_bias", False)}
    if len(bias) > 1:
        raise UserError("some of its Linears have biases and some have none")
    window, kinds = getattr(c, "sliding_window", None), set(getattr(c, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise UserError(f"layers of the types {', '.join(sorted(kinds))}")
    heads = "S" if window else "L"
    if kinds and window:
        heads = "/".join("S" if kind == "sliding_attention" else "L" for kind in c.layer_types)
    sizes = {"block_size": c.max_position_embeddings, "vocab_size": c.vocab_size, "n_layer": c.num_hidden_layers}
    sizes |= {"n_head": c.num_attention_heads, "n_kv_head": c.num_key_value_heads, "n_embd": c.hidden_size}
    sizes |= {"head_dim": c.head_dim, "n_hidden": c.intermediate_size, "norm_eps": c.rms_norm_eps}
    choices = {"position": "rope", "rope_base": c.rope_parameters["rope_theta"], "norm": "rmsnorm", "mlp": "swiglu"}
    choices |= {"bias": bias.pop(), "tied": c.tie_word_embeddings, "heads": heads}
    choices |= {"qk_norm": "rmsnorm" if c.model_type.startswith("qwen3") else "none"}
    return sizes | choices | ({"window": window - 1} if "S" in heads else {})


def llama_theirs(c: GPTConfig) -> dict:
    sizes = {"max_position_embeddings": c.block_size, "vocab_size": c.vocab_size, "num_hidden_layers": c.n_layer}
    sizes |= {"num_attention_heads": c.n_head, "num_key_value_heads": c.kv_heads, "hidden_size": c.n_embd}
    sizes |= {"head_dim": c.head_size, "intermediate_size": c.hidden, "rms_norm_eps": c.norm_eps}
    rope = {"rope_type": "default", "rope_theta": c.base}
    return sizes | {"rope_parameters": rope, "tie_word_embeddings": c.tied, "use_cache": True} | SPECIAL


def biased_llama_theirs(c: GPTConfig) -> dict:
    return llama_theirs(c) | {"attention_bias": c.bias, "mlp_bias": c.bias}


def mistral_theirs(c: GPTConfig) -> dict:
    return llama_theirs(c) | {"sliding_window": None if c.span is None else c.span + 1}


def qwen3_theirs(c: GPTConfig) -> dict:
    kinds = ["sliding_attention" if "S" in c.layer_heads(i) else "full_attention" for i in range(c.n_layer)]
    return mistral_theirs(c) | {"layer_types": kinds, "use_sliding_window": c.span is not None}


GPT2_MODULES = {
    "transformer.wte": ["transformer.wte"],
    "transformer.wpe": ["transformer.wpe"],
    "transformer.h.*.ln_1": ["transformer.h.*.ln_1"],
    "transformer.h.*.attn.c_attn": ["transformer.h.*.attn.c_attn"],
    "transformer.h.*.attn.c_proj": ["transformer.h.*.attn.c_proj"],
    "transformer.h.*.ln_2": ["transformer.h.*.ln_2"],
    "transformer.h.*.mlp.c_fc": ["transformer.h.*.mlp.c_fc"],
    "transformer.h.*.mlp.c_proj": ["transformer.h.*.mlp.c_proj"],
    "transformer.ln_f": ["transformer.ln_f"],
    "lm_head": ["lm_head"],
}
LLAMA_MODULES = {
    "transformer.wte": ["model.embed_tokens"],
    "transformer.h.*.ln_1": ["model.layers.*.input_layernorm"],
    "transformer.h.*.attn.c_attn": [f"model.layers.*.self_attn.{x}_proj" for x in "qkv"],
    "transformer.h.*.attn.q_norm": ["model.layers.*.self_attn.q_norm"],
    "transformer.h.*.attn.k_norm": ["model.layers.*.self_attn.k_norm"],
    "transformer.h.*.attn.c_proj": ["model.layers.*.self_attn.o_proj"],
    "transformer.h.*.ln_2": ["model.layers.*.post_attention_layernorm"],
    "transformer.h.*.mlp.c_fc": ["model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"],
    "transformer.h.*.mlp.c_proj": ["model.layers.*.mlp.down_proj"],
    "transformer.ln_f": ["model.norm"],
    "lm_head": ["lm_head"],
}
FAMILIES: dict[str, Family] = {
    "gpt2": Family(gpt2_ours, gpt2_theirs, GPT2_MODULES, transposed=True),
    "llama": Family(llama_ours, biased_llama_theirs, LLAMA_MODULES, halves=True),
    "mistral": Family(llama_ours, mistral_theirs, LLAMA_MODULES, halves=True),
    "qwen3": Family(llama_ours, qwen3_theirs, LLAMA_MODULES, halves=True),
}


def sources(key: str, modules: dict[str, list[str]]) -> list[str]:
    """Their parameters that lie in ours of this name. Raises ValueError where they have none."""
    module, _, kind = key.rpartition(".")
    parts = module.split(".")
    layer = next((part for part in parts if part.isdigit()), "")
    pattern = ".".join("*" if part == layer else part for part in parts)
    if pattern not in modules:
        raise UserError(f"it has no weights for {key}")
    return [f"{name.replace('*', layer)}.{kind}" for name in modules[pattern]]


def converted(name: str, p: torch.Tensor, D: int, family: Family, back: bool = False) -> torch.Tensor:
    """A parameter of theirs, by its name, as ours lays it out; with back the other way."""
    if family.transposed and p.dim() == 2 and ".h." in name:
        return p.T
    if family.halves and any(x in name for x in ("q_proj", "k_proj", "q_norm", "k_norm")):  # of each head's rows
        pairs = p.unflatten(0, (-1, D // 2, 2) if back else (-1, 2, D // 2))
        return pairs.transpose(1, 2).flatten(0, 2)
    return p


def copy_from(model: GPT, state: dict[str, torch.Tensor], family: Family) -> None:
    """Their weights into our model, in place. Raises ValueError for one that they or we lack, or of another shape."""
    used = {"lm_head.weight"}  # which a tied model has twice
    for key, ours in model.state_dict().items():
        names = sources(key, family.modules)
        if missing := [name for name in names if name not in state]:
            raise UserError(f"it has no {missing[0]}, for {key}")
        theirs = torch.cat([converted(name, state[name], model.config.head_size, family) for name in names])
        if theirs.shape != ours.shape:
            raise UserError(f"its {names[0]} gives {tuple(theirs.shape)}, not {tuple(ours.shape)}, for {key}")
        ours.copy_(theirs)
        used |= set(names)
    if unused := sorted(set(state) - used):
        raise UserError(f"its {unused[0]} has no place here")


def transformers_classes() -> tuple:
    """(AutoConfig, AutoModelForCausalLM). Raises ImportError saying what to install."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise NotInstalled("models of other people go through transformers: pip install transformers") from None
    return AutoConfig, AutoModelForCausalLM


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Within it an error of the libraries is an OSError or a ValueError that names what is loaded."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except OSError as error:
        other = "" if os.path.isdir(name) else " (a local folder can be loaded as well)"
        raise OSError(f"cannot load {name} through transformers: {first_line(error)}{other}") from None
    except Exception as error:  # of several libraries
        raise UserError(f"cannot take over {name}: {first_line(error)}") from None


def config_of(name: str, override_args: dict | None = None) -> tuple[object, dict]:
    """(transformers' config, the fields of GPTConfig) of what from_pretrained loads; of GPT-2 without a network."""
    if name not in GPT2 and not os.path.isdir(name) and (name.count("/") != 1 or name[0] in "./~"):
        raise UserError(f"{name!r} is none of {', '.join(GPT2)}, nor owner/model of the hub, nor a local folder")
    AutoConfig, _ = transformers_classes()
    if fixed := [key for key in override_args or {} if key not in FREE]:
        raise UserError(f"{fixed[0]} is what {name}'s weights were trained with; free are {', '.join(FREE)}")
    with loading(name):
        if name in GPT2 and not os.path.isdir(name):
            c = AutoConfig.for_model("gpt2", **dict(zip(("n_layer", "n_head", "n_embd"), GPT2[name], strict=True)))
        else:
            c = AutoConfig.from_pretrained(name, **hub_args(name))
        if c.model_type not in FAMILIES:
            raise UserError(f"the family {c.model_type} is none of {', '.join(FAMILIES)}")
        args = FAMILIES[c.model_type].ours(c) | (override_args or {})
    if "S" not in args.get("heads", "L") and "window" not in (override_args or {}):
        args.pop("window", None)  # of heads that are no longer short
    return c, args


def load(name: str, override_args: dict | None = None) -> GPT:
    """GPT.from_pretrained: see there."""
    c, args = config_of(name, override_args)
    family, (_, AutoModelForCausalLM) = FAMILIES[c.model_type], transformers_classes()
    with loading(name):
        theirs, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, **hub_args(name)
        )
        # which they would fill with random numbers
        if missing := sorted(set(found["missing_keys"]) - ({"lm_head.weight"} if c.tie_word_embeddings else set())):
            raise UserError(f"its file has no {missing[0]}")
    learned = "position" not in args
    model = GPT(GPTConfig(**args | ({"block_size": c.n_positions} if learned else {})))
    try:
        copy_from(model, theirs.state_dict(), family)
    except ValueError as error:
        raise UserError(f"cannot take over {name}: {error}") from None
    if learned:
        model.crop_block_size(args["block_size"])
    return model


def export(model: GPT) -> object:
    """The model of transformers that is ours: a PreTrainedModel, whose save_pretrained writes safetensors.

    GPT-2 has biases; where ours has none they are zeros, which is the same model. Raises ValueError where no
    family has all of our model's choices, naming those that are in the way.
    """
    AutoConfig, AutoModelForCausalLM = transformers_classes()
    ours, misfits = _choices(model.config), {}
    for name, family in FAMILIES.items():
        try:
            config = AutoConfig.for_model(name, **family.theirs(model.config))
            back = _choices(GPTConfig(**family.ours(config)))
        except Exception:  # of several libraries: sizes that they cannot have
            continue
        free = ("bias", "norm_bias") if name == "gpt2" else ()
        misfits[name] = [key for key in ours if ours[key] != back[key] and key not in free]
        if not misfits[name]:
            break
    else:
        if not misfits:
            raise UserError("transformers has no model of these sizes: n_head, head_dim and n_embd do not fit there")
        nearest = min(misfits, key=lambda name: len(misfits[name]))
        wrong = {key: getattr(model.config, key) for key in misfits[nearest]}
        wrong = ", ".join(f"{key}={value!r}" for key, value in wrong.items() if value is not None) or ", ".join(wrong)
        raise UserError(f"transformers has no such model; the nearest, {nearest}, has no {wrong}")
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {key: torch.zeros_like(p) if key.endswith("bias") else p for key, p in theirs.state_dict().items()}
    for key, p in model.state_dict().items():
        names = sources(key, family.modules)
        parts = p.split([len(state[name]) for name in names]) if len(names) > 1 else [p]
        for name, part in zip(names, parts, strict=True):
            state[name] = converted(name, part, model.config.head_size, family, back=True).contiguous()
    theirs.load_state_dict(state)
    return theirs


def _choices(config: GPTConfig) -> dict:
    """The fields that a trained model depends on, with what None stands for spelled out."""
    spelled = replace(
        config, n_kv_head=config.kv_heads, head_dim=config.head_size, n_hidden=config.hidden, window=config.span,
        norm_bias=config.has_norm_bias(config.norm),
        heads="/".join(config.layer_heads(layer) for layer in range(config.n_layer)),
    )  # fmt: skip
    if config.position == "rope":
        spelled = replace(spelled, rope_base=config.base)
    return {field.name: getattr(spelled, field.name) for field in fields(GPTConfig) if field.name not in TRAINING}
