"""Weights for --init_from: of a model of Hugging Face's transformers, or of the folder of a run.

FAMILIES has an entry for each family of transformers' models: how its config and the names of its weights become ours.
`config_of` reads a model's config, `load` the model.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from errors import UserError, first_line, optional, refuse
from model import GPT, GPTConfig
from training import checkpoint

# layers, heads, width
GPT2 = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}
GPT2_FIELDS = {  # ours: theirs
    "block_size": "n_positions", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
    "n_embd": "n_embd", "n_hidden": "n_inner", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
}  # fmt: skip
LLAMA_FIELDS = {
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size",
    "head_dim": "head_dim", "n_hidden": "intermediate_size", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings",
}  # fmt: skip
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}  # theirs: ours
# fields that matter only in training
TRAINING = ("dropout", "attn_dropout", "zero_init", "label_smoothing", "z_loss", "activation_checkpointing")
# fields that may differ from what the weights were trained with
FREE = (
    "dropout", "attn_dropout", "label_smoothing", "z_loss", "activation_checkpointing", "attention", "short_attention",
    "heads", "window", "temperature", "logit_softcap", "block_size", "decay", "conv",
)  # fmt: skip
NEW = ("attn.conv.weight", "attn.decay.log_slopes")  # weights of these choices, which begin as in a new model
USER = "a model of Hugging Face"  # what needs the package transformers


@dataclass
class Family:
    fields: Callable  # their config -> the fields of GPTConfig. Raises UserError for choices that we do not have
    modules: dict[str, list[str]]  # {our module: their modules, which lie in it one after another}
    transposed: bool = False  # their matrices are (in, out)
    halves: bool = False  # their RoPE pairs dimensions d and d + D/2, ours 2d and 2d + 1


def from_gpt2(c) -> dict:
    if c.activation_function not in ACTIVATIONS:
        raise UserError(f"activation_function={c.activation_function!r} is not one of {', '.join(ACTIVATIONS)}")
    if not c.scale_attn_weights or c.scale_attn_by_inverse_layer_idx:
        raise UserError("its attention scores are not scaled by 1 / sqrt(head width), as GPT-2's are")
    args = {ours: getattr(c, theirs) for ours, theirs in GPT2_FIELDS.items()}
    return args | {"mlp": ACTIVATIONS[c.activation_function]}


def from_llama(c) -> dict:
    """Llama; Mistral, whose heads are all short; Qwen 3, whose queries and keys are normalised."""
    if c.hidden_act != "silu" or c.rope_parameters["rope_type"] != "default":
        raise UserError(f"it must have hidden_act='silu' and plain RoPE, not {c.hidden_act!r} and {c.rope_parameters}")
    window = getattr(c, "sliding_window", None)
    kinds = getattr(c, "layer_types", None) or ["sliding_attention"]  # of Qwen 3's layers; Mistral's are of one kind
    if others := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UserError(f"it has layers of unknown types: {', '.join(sorted(others))}")
    heads = "/".join("S" if kind == "sliding_attention" else "L" for kind in kinds) if window else "L"
    args = {ours: getattr(c, theirs) for ours, theirs in LLAMA_FIELDS.items()}
    args |= {"position": "rope", "rope_base": c.rope_parameters["rope_theta"], "norm": "rmsnorm", "mlp": "swiglu"}
    args |= {"bias": getattr(c, "attention_bias", False)}  # and in the MLP, or copy_from finds what differs
    args |= {"qk_norm": "rmsnorm" if c.model_type.startswith("qwen3") else "none"}
    return args | {"heads": heads} | ({"window": window - 1} if "S" in heads else {})


GPT2_PARTS = "wte wpe h.*.ln_1 h.*.attn.c_attn h.*.attn.c_proj h.*.ln_2 h.*.mlp.c_fc h.*.mlp.c_proj ln_f".split()
GPT2_MODULES = {name: [name] for name in (*(f"transformer.{x}" for x in GPT2_PARTS), "lm_head")}
LLAMA_PARTS = {
    "ln_1": ["input_layernorm"], "ln_2": ["post_attention_layernorm"],
    "attn.c_attn": [f"self_attn.{x}_proj" for x in "qkv"], "attn.c_proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"], "attn.k_norm": ["self_attn.k_norm"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"], "mlp.c_proj": ["mlp.down_proj"],
}  # fmt: skip
LLAMA_MODULES = {f"transformer.h.*.{k}": [f"model.layers.*.{x}" for x in parts] for k, parts in LLAMA_PARTS.items()}
LLAMA_MODULES |= {"transformer.wte": ["model.embed_tokens"], "transformer.ln_f": ["model.norm"], "lm_head": ["lm_head"]}
FAMILIES = {"gpt2": Family(from_gpt2, GPT2_MODULES, transposed=True)}
FAMILIES |= dict.fromkeys(("llama", "mistral", "qwen3"), Family(from_llama, LLAMA_MODULES, halves=True))


def sources(key: str, modules: dict[str, list[str]]) -> list[str]:
    """The names of their parameters that make up our parameter `key`. Raises UserError if there are none."""
    module, _, kind = key.rpartition(".")
    layer = next(filter(str.isdigit, module.split(".")), "")
    pattern = module.replace(f".{layer}.", ".*.")
    if pattern not in modules:
        raise UserError(f"it has no weights for {key}")
    return [f"{name.replace('*', layer)}.{kind}" for name in modules[pattern]]


def converted(name: str, p: torch.Tensor, D: int, family: Family, back: bool = False) -> torch.Tensor:
    """Their parameter `name` in our layout; with back=True, ours in their layout."""
    if family.transposed and p.dim() == 2 and ".h." in name:
        return p.T
    if family.halves and any(x in name for x in ("q_proj", "k_proj", "q_norm", "k_norm")):  # the rows of each head
        pairs = p.unflatten(0, (-1, D // 2, 2) if back else (-1, 2, D // 2))
        return pairs.transpose(1, 2).flatten(0, 2)
    return p


def copy_from(model: GPT, state: dict[str, torch.Tensor], family: Family) -> None:
    """Copies their weights into our model. Raises UserError if either lacks a weight, or if a shape differs."""
    D = model.config.resolved().head_dim
    used = {"lm_head.weight"}  # a tied model has it twice
    for key, ours in model.state_dict().items():
        if key.endswith(NEW):
            continue
        names = sources(key, family.modules)
        refuse((name not in state, f"it has no {name}, for {key}") for name in names)
        theirs = torch.cat([converted(name, state[name], D, family) for name in names])
        refuse([(theirs.shape != ours.shape, f"its {names[0]} is {tuple(theirs.shape)}, not {tuple(ours.shape)}")])
        ours.copy_(theirs)
        used |= set(names)
    if unused := sorted(set(state) - used):
        raise UserError(f"its {unused[0]} is no weight of our model")


def copy_own(model: GPT, state: dict[str, torch.Tensor]) -> None:
    """Copies the weights of one of our models. Raises UserError where they do not fit; those of NEW begin anew."""
    needed = {key: p.shape for key, p in model.state_dict().items() if key in state or not key.endswith(NEW)}
    given = {key: p.shape for key, p in state.items()}
    if differing := sorted(key for key in needed | given if needed.get(key) != given.get(key)):
        raise UserError(f"the trained weights do not fit the changed model: see {differing[0]}")
    model.load_state_dict(state, strict=False)


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Turns an error of transformers, or of what it calls, into a sentence that names what is loaded."""
    try:
        yield
    except Exception as error:  # of several libraries
        raise UserError(f"cannot load {name} through transformers: {first_line(error)}") from None


def run_in(folder: str) -> dict:
    """The checkpoint with the lowest validation loss in a run's folder."""
    return checkpoint.load(checkpoint.path_of(folder, "best"))


def config_of(name: str, changes: dict) -> tuple[object, dict]:
    """(transformers' config, the fields of GPTConfig) of the model that `load` loads; GPT-2 needs no network.

    The config of a run's folder is None. changes: fields to change. Raises UserError for one that the weights fix.
    """
    if fixed := [key for key in changes if key not in FREE]:
        raise UserError(f"{fixed[0]} is fixed: {name}'s weights were trained with it. You can change {', '.join(FREE)}")
    c, fields = (None, run_in(name)["model_args"]) if checkpoint.names(name) else _their_config(name)
    args = fields | changes
    if "S" not in args.get("heads", "L") and "window" not in changes:
        args.pop("window", None)  # the heads are no longer short
    return c, args


def _their_config(name: str) -> tuple[object, dict]:
    is_folder = os.path.isdir(name)
    if not is_folder and name not in GPT2 and (name.count("/") != 1 or name[0] in "./~" or os.path.isfile(name)):
        raise UserError(f"{name!r} is not one of {', '.join(GPT2)}, no folder, and no owner/model of the hub")
    AutoConfig = optional("transformers", USER).AutoConfig
    with loading(name):
        if name in GPT2 and not is_folder:
            n_layer, n_head, n_embd = GPT2[name]
            c = AutoConfig.for_model("gpt2", n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        else:
            c = AutoConfig.from_pretrained(name)
        if c.model_type not in FAMILIES:
            raise UserError(f"the family {c.model_type} is not one of {', '.join(FAMILIES)}")
        return c, FAMILIES[c.model_type].fields(c)


def tokens_of(name: str) -> dict | None:
    """The meta of the tokenizer that a model was trained with; None if its folder or name does not tell."""
    if name in GPT2 and not os.path.isdir(name):
        return {"kind": "gpt2"}
    with contextlib.suppress(UserError):
        return checkpoint.tokenizer_of(run_in(name)).meta if checkpoint.names(name) else None


def load(name: str, changes: dict) -> GPT:
    """The GPT with pretrained weights: of the hub, a local folder, a run's folder. changes: fields of GPTConfig."""
    c, args = config_of(name, changes)
    learned = args.get("position", "learned") == "learned"  # then all are copied first, and cropped afterwards
    trained_at = config_of(name, {})[1]["block_size"] if learned else args["block_size"]
    model = GPT(GPTConfig(**args | {"block_size": trained_at}))
    if c is None:
        copy_own(model, run_in(name)["model"])
    else:
        AutoModel = optional("transformers", USER).AutoModelForCausalLM
        with loading(name):
            theirs, found = AutoModel.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
            tied = {"lm_head.weight"} if c.tie_word_embeddings else set()
            if missing := sorted(set(found["missing_keys"]) - tied):  # transformers has filled it with random numbers
                raise UserError(f"its file has no {missing[0]}")
            copy_from(model, theirs.state_dict(), FAMILIES[c.model_type])
    if trained_at != args["block_size"]:
        model.crop_block_size(args["block_size"])
    return model
