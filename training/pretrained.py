"""Weights from and for models of Hugging Face's transformers: translates their configs and names to ours, and back.

FAMILIES has an entry for each family of models, with functions that translate in both directions (ours, theirs).
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from errors import NotInstalled, UserError, first_line, optional, refuse
from model import GPT, GPTConfig
from text.tokenizers import GPT2_VOCAB_SIZE, hub_args
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
# fields that may differ from what the weights were trained with
FREE = "dropout attn_dropout z_loss attention short_attention heads window temperature logit_softcap block_size".split()
FREE += ["label_smoothing", "activation_checkpointing"]
FREE += ["decay", "conv"]  # their weights, if they have any, begin as in a new model
NEW = ("attn.conv.weight", "attn.decay.log_slopes")
OURS = "nanoattn"  # the family of models that lab/hub/export.py --custom writes
# fields that matter only in training
TRAINING = ("dropout", "attn_dropout", "zero_init", "label_smoothing", "z_loss", "activation_checkpointing")
USER = "a model of Hugging Face"  # what needs the package transformers
SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # a vocabulary without such tokens


@dataclass
class Family:
    ours: Callable  # their config -> the fields of GPTConfig. Raises UserError for choices that we do not have
    theirs: Callable  # a resolved GPTConfig -> the arguments of their config
    modules: dict[str, list[str]]  # {our module: their modules, which lie in it one after another}
    transposed: bool = False  # their matrices are (in, out)
    halves: bool = False  # their RoPE pairs dimensions d and d + D/2, ours 2d and 2d + 1


def gpt2_ours(c) -> dict:
    if c.activation_function not in ACTIVATIONS:
        raise UserError(f"activation_function={c.activation_function!r} is not one of {', '.join(ACTIVATIONS)}")
    if not c.scale_attn_weights or c.scale_attn_by_inverse_layer_idx:
        raise UserError("its attention scores are not scaled by 1 / sqrt(head width), as GPT-2's are")
    args = {ours: getattr(c, theirs) for ours, theirs in GPT2_FIELDS.items()}
    return args | {"mlp": ACTIVATIONS[c.activation_function]}


def gpt2_theirs(c: GPTConfig) -> dict:
    activation = next((theirs for theirs, ours in ACTIVATIONS.items() if ours == c.mlp), "gelu_new")
    args = {theirs: getattr(c, ours) for ours, theirs in GPT2_FIELDS.items()}
    args |= {"resid_pdrop": c.dropout, "embd_pdrop": c.dropout, "attn_pdrop": c.attn_dropout}
    return args | {"activation_function": activation} | (SPECIAL if c.vocab_size < GPT2_VOCAB_SIZE else {})


def llama_ours(c) -> dict:
    """Llama; Mistral, whose heads are all short; Qwen 3, whose queries and keys are normalised."""
    if c.hidden_act != "silu" or c.rope_parameters["rope_type"] != "default":
        raise UserError(f"it must have hidden_act='silu' and plain RoPE, not {c.hidden_act!r} and {c.rope_parameters}")
    bias = {getattr(c, "attention_bias", False), getattr(c, "mlp_bias", False)}
    if len(bias) > 1:
        raise UserError("some of its Linears have biases and some have none")
    window = getattr(c, "sliding_window", None)
    kinds = getattr(c, "layer_types", None) or ["sliding_attention"]  # of Qwen 3's layers; Mistral's are of one kind
    if others := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UserError(f"it has layers of unknown types: {', '.join(sorted(others))}")
    heads = "/".join("S" if kind == "sliding_attention" else "L" for kind in kinds) if window else "L"
    args = {ours: getattr(c, theirs) for ours, theirs in LLAMA_FIELDS.items()}
    args |= {"position": "rope", "rope_base": c.rope_parameters["rope_theta"], "norm": "rmsnorm", "mlp": "swiglu"}
    args |= {"bias": bias.pop(), "qk_norm": "rmsnorm" if c.model_type.startswith("qwen3") else "none"}
    return args | {"heads": heads} | ({"window": window - 1} if "S" in heads else {})


def llama_theirs(c: GPTConfig, own: tuple[str, ...]) -> dict:
    """own: the names of arguments that only some of these families have."""
    args = {theirs: getattr(c, ours) for ours, theirs in LLAMA_FIELDS.items()} | SPECIAL | {"use_cache": True}
    args |= {"rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base}}
    kinds = ["sliding_attention" if "S" in c.layer_heads(i) else "full_attention" for i in range(c.n_layer)]
    more = {"sliding_window": None if c.window is None else c.window + 1, "use_sliding_window": c.window is not None}
    more |= {"layer_types": kinds, "attention_bias": c.bias, "mlp_bias": c.bias}
    return args | {name: more[name] for name in own}


def like_llama(*own: str) -> Family:
    return Family(llama_ours, lambda c: llama_theirs(c, own), LLAMA_MODULES, halves=True)


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
FAMILIES: dict[str, Family] = {
    "gpt2": Family(gpt2_ours, gpt2_theirs, GPT2_MODULES, transposed=True),
    "llama": like_llama("attention_bias", "mlp_bias"),
    "mistral": like_llama("sliding_window"),
    "qwen3": like_llama("sliding_window", "layer_types", "use_sliding_window"),
}


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
        if theirs.shape != ours.shape:
            raise UserError(f"its {names[0]} gives shape {tuple(theirs.shape)}, but {key} has {tuple(ours.shape)}")
        ours.copy_(theirs)
        used |= set(names)
    if unused := sorted(set(state) - used):
        raise UserError(f"its {unused[0]} is no weight of our model")


@contextlib.contextmanager
def loading(name: str, errors: type[Exception] = Exception) -> Iterator[None]:
    """Turns an error within it (by default any) into an OSError or a UserError that names what is loaded."""
    try:
        yield
    except MemoryError:
        raise
    except ImportError as error:
        raise NotInstalled(f"cannot load {name}: {first_line(error)}") from None
    except OSError as error:
        other = "" if os.path.isdir(name) else " (a local folder can be loaded as well)"
        raise OSError(f"cannot load {name} through transformers: {first_line(error)}{other}") from None
    except errors as error:  # of several libraries
        raise UserError(f"cannot convert {name}: {first_line(error)}") from None


def config_of(name: str, changes: dict) -> tuple[object, dict]:
    """(transformers' config, the fields of GPTConfig) of the model that `load` loads; GPT-2 needs no network.

    The config of a run's folder is None.
    """
    if checkpoint.names(name):
        return None, _changed(name, run_in(name)["model_args"], changes)
    if os.path.isfile(name):
        raise UserError(f"{name} is a file: give the folder of a run or of a model")
    if name not in GPT2 and not os.path.isdir(name) and (name.count("/") != 1 or name[0] in "./~"):
        raise UserError(f"{name!r} is not one of {', '.join(GPT2)}, no owner/model of the hub and no local folder")
    AutoConfig = with_ours().AutoConfig
    if name in GPT2 and not os.path.isdir(name):
        n_layer, n_head, n_embd = GPT2[name]
        c = AutoConfig.for_model("gpt2", n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    else:
        with loading(name):
            c = AutoConfig.from_pretrained(name, **hub_args(name))
    with loading(name, UserError):
        if c.model_type == OURS:
            fields = c.gpt
        elif c.model_type in FAMILIES:
            fields = FAMILIES[c.model_type].ours(c)
        else:
            raise UserError(f"the family {c.model_type} is not one of {', '.join(FAMILIES)}")
    return c, _changed(name, fields, changes)


def _changed(name: str, fields: dict, changes: dict) -> dict:
    """The fields of GPTConfig with these changes. Raises UserError for one that the weights do not allow."""
    if fixed := [key for key in changes if key not in FREE]:
        raise UserError(f"{fixed[0]} is fixed: {name}'s weights were trained with it. You can change {', '.join(FREE)}")
    args = fields | changes
    if "S" not in args.get("heads", "L") and "window" not in changes:
        args.pop("window", None)  # the heads are no longer short
    return args


def with_ours() -> ModuleType:
    """The package transformers, which then knows the models that lab/hub/export.py --custom writes."""
    transformers = optional("transformers", USER)
    from lab.hub.modeling_nanoattn import NanoattnConfig, NanoattnForCausalLM  # here: it needs transformers

    transformers.AutoConfig.register(OURS, NanoattnConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(NanoattnConfig, NanoattnForCausalLM, exist_ok=True)
    return transformers


def run_in(folder: str, verify: bool = False) -> dict:
    """The checkpoint with the lowest validation loss in a run's folder. verify: read all of it, for its checksums."""
    return checkpoint.load(checkpoint.path_of(folder, "best"), verify, lazily=True)


def tokens_of(name: str) -> dict | None:
    """The meta of the tokenizer that a model was trained with; None if its folder or name does not tell."""
    if name in GPT2 and not os.path.isdir(name):
        return {"kind": "gpt2"}
    with contextlib.suppress(UserError):
        return checkpoint.tokenizer_of(run_in(name)).meta if checkpoint.names(name) else None


def load(name: str, changes: dict) -> GPT:
    """The GPT with pretrained weights: of the hub, a local folder, a run's folder. changes: fields of GPTConfig."""
    c, args = config_of(name, changes)
    if c is None:
        return with_changes(checkpoint.model_of(run_in(name, verify=True)), args)
    settings = {"dtype": torch.float32, "output_loading_info": True} | hub_args(name)
    with loading(name):
        theirs, found = with_ours().AutoModelForCausalLM.from_pretrained(name, **settings)
    tied = {"lm_head.weight"} if c.tie_word_embeddings else set()
    if missing := sorted(set(found["missing_keys"]) - tied):  # transformers has filled it with random numbers
        raise UserError(f"cannot convert {name}: its file has no {missing[0]}")
    if c.model_type == OURS:
        return with_changes(theirs.gpt, args)
    learned = "position" not in args  # then all positions are copied first, and cropped afterwards
    model = GPT(GPTConfig(**args | ({"block_size": c.n_positions} if learned else {})))
    with loading(name, UserError):
        copy_from(model, theirs.state_dict(), FAMILIES[c.model_type])
    if learned:
        model.crop_block_size(args["block_size"])
    return model


def with_changes(trained: GPT, args: dict) -> GPT:
    """A GPT with the fields args and the weights of one of ours. The weights of NEW choices begin anew."""
    learned = trained.config.position == "learned"  # then all positions are copied first, and cropped afterwards
    model = GPT(GPTConfig(**args | ({"block_size": trained.config.block_size} if learned else {})))
    theirs, ours = trained.state_dict(), model.state_dict()
    new = [key for key in ours if key not in theirs and not key.endswith(NEW)]
    refuse((True, f"the changed model needs {key}, which was not trained") for key in new)
    lost = [key for key, p in theirs.items() if key not in ours or ours[key].shape != p.shape]
    refuse((True, f"the changed model has no place for the trained weight {key}") for key in lost)
    model.load_state_dict(theirs, strict=False)
    if learned:
        model.crop_block_size(args["block_size"])
    return model


def export(model: GPT) -> object:
    """Our model as a PreTrainedModel of transformers. Raises UserError, naming the choices that no family has."""
    family, config = _fitting(model.config)
    D = model.config.resolved().head_dim
    theirs = optional("transformers", USER).AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # GPT-2's biases are zeros where ours has none
    state = {key: torch.zeros_like(p) if key.endswith("bias") else p for key, p in theirs.state_dict().items()}
    for key, p in model.state_dict().items():
        names = sources(key, family.modules)
        parts = p.split([len(state[name]) for name in names]) if len(names) > 1 else [p]
        for name, part in zip(names, parts, strict=True):
            state[name] = converted(name, part, D, family, back=True).contiguous()
    theirs.load_state_dict(state)
    return theirs


def _fitting(config: GPTConfig) -> tuple[Family, object]:
    """(the family that has all of a model's choices, transformers' config of it)."""
    AutoConfig = optional("transformers", USER).AutoConfig
    ours = _choices(config)
    misfits = {}  # {family: fields in which it differs}
    for name, family in FAMILIES.items():
        arguments = family.theirs(config.resolved())
        try:
            with loading(name):
                theirs = AutoConfig.for_model(name, **arguments)
            back = _choices(GPTConfig(**family.ours(theirs)))
        except UserError:  # for sizes that the family cannot have
            continue
        free = ("bias",) if name == "gpt2" else ()
        misfits[name] = [key for key in ours if ours[key] != back[key] and key not in free]
        if not misfits[name]:
            return family, theirs
    if not misfits:
        raise UserError("transformers has no model of these sizes: n_head, head_dim and n_embd do not fit there")
    nearest, fields = min(misfits.items(), key=lambda entry: len(entry[1]))
    asked = [f"{key}={getattr(config, key)!r}" for key in fields if getattr(config, key) is not None]
    lacks = f"the nearest, {nearest}, has no {', '.join(asked or fields)}"
    raise UserError(f"transformers has no such model; {lacks}. export_hf.py --custom exports every model")


def _choices(config: GPTConfig) -> dict:
    """The fields that a trained model depends on, with every default spelled out."""
    c = config.resolved()
    heads = "/".join(c.layer_heads(layer) for layer in range(c.n_layer))
    spelled = vars(c) | {"heads": heads}
    return {key: x for key, x in spelled.items() if key not in TRAINING}
