"""Pretrained weights for --init_from=: GPT-2's, read by Hugging Face's transformers, or a run's.

FAMILIES has an entry for each family of models in transformers. A file that is named by --import=
may add others. `load` returns a model with its weights; `config_of` reads only its config.
"""

import contextlib
import os
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from errors import UserError, first_line, optional
from model import GPT, GPTConfig
from training import checkpoint

# layers, width; each head is 64 wide
GPT2 = {
    "gpt2": (12, 768),
    "gpt2-medium": (24, 1024),
    "gpt2-large": (36, 1280),
    "gpt2-xl": (48, 1600),
}
# fields that matter only in training
TRAINING = "dropout attn_dropout zero_init label_smoothing z_loss activation_checkpointing".split()
# fields that may differ from what the weights were trained with
FREE = (
    "dropout attn_dropout label_smoothing z_loss activation_checkpointing attention "
    "short_attention heads window temperature logit_softcap block_size decay conv"
).split()
# weights that a free field may add to a model; they begin as in a new model
NEW = ("attn.conv.weight", "attn.decay.log_slopes")
USER = "a model of Hugging Face"  # what needs the package transformers

# -----------------------------------------------------------------------------
# families of models in transformers


@dataclass
class Family:
    """How a model of transformers becomes a GPT; config is transformers' config of the model."""

    # fields(config) -> the fields of GPTConfig; UserError for a choice that GPT does not have
    fields: Callable
    # weights(state_dict, config) -> a state dict of GPT, with the same numbers in other places
    weights: Callable


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
# name in GPT2Config: name in choices.ACTIVATION
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


def gpt2_weights(state: dict, config) -> dict:
    """Only the blocks' matrices differ: they are (in, out) in transformers and (out, in) here."""
    return {name: p.T if p.dim() == 2 and ".h." in name else p for name, p in state.items()}


FAMILIES = {"gpt2": Family(gpt2_fields, gpt2_weights)}

# -----------------------------------------------------------------------------
# a model's config


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn errors of transformers, and of libraries below it, into a sentence with this name."""
    try:
        yield
    except Exception as error:  # of several libraries
        raise UserError(f"cannot load {name} through transformers: {first_line(error)}") from None


def hub_config(name: str) -> tuple:
    """(transformers' config, fields of GPTConfig) of a name in GPT2, a folder, or owner/model."""
    is_folder = os.path.isdir(name)
    is_path = name.count("/") != 1 or name[0] in "./~" or os.path.isfile(name)
    if is_path and not is_folder and name not in GPT2:
        raise UserError(
            f"{name!r} is not one of {', '.join(GPT2)}, no folder, and no owner/model of the hub"
        )
    transformers = optional("transformers", USER)
    with loading(name):
        if name in GPT2 and not is_folder:
            n_layer, width = GPT2[name]
            config = transformers.GPT2Config(n_layer=n_layer, n_head=width // 64, n_embd=width)
        else:
            config = transformers.AutoConfig.from_pretrained(name)
        family = config.model_type
        if family not in FAMILIES:
            raise UserError(
                f"the family {family} is not one of {', '.join(FAMILIES)} (--import= adds families)"
            )
        return config, FAMILIES[family].fields(config)


def run_in(folder: str) -> dict:
    """The checkpoint with the lowest validation loss in a run's folder."""
    return checkpoint.load(checkpoint.path_of(folder, "best"))


def config_of(name: str, changes: dict) -> tuple:
    """(transformers' config, or None for a run's folder; the fields of GPTConfig) of a model.

    changes: fields of GPTConfig to change. Raises UserError for a field that the weights depend on.
    GPT-2's names need no network.
    """
    for field in changes:
        if field not in FREE:
            raise UserError(
                f"{field} is fixed: {name}'s weights were trained with it. "
                f"You can change {', '.join(FREE)}"
            )
    if checkpoint.checkpoints_in(name):
        config = None
        fields = run_in(name)["model_args"]
    else:
        config, fields = hub_config(name)
    args = fields | changes
    if "S" not in args.get("heads", "L") and "window" not in changes:
        args.pop("window", None)  # no head is short any more
    return config, args


def tokenizer_meta(name: str) -> dict | None:
    """The meta of the tokenizer that a model was trained with; None if its name does not tell."""
    if name in GPT2 and not os.path.isdir(name):
        return {"kind": "gpt2"}
    with contextlib.suppress(UserError):  # there is no run
        return checkpoint.tokenizer_of(run_in(name)).meta


# -----------------------------------------------------------------------------
# its weights


def hub_weights(name: str, config) -> dict:
    """The weights of a model that transformers loads, as a state dict of GPT."""
    from transformers import AutoModelForCausalLM

    with loading(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True
        )
        if missing := report["missing_keys"]:  # transformers fills them with random numbers
            raise UserError(f"its file has no {min(missing)}")
        return FAMILIES[config.model_type].weights(model.state_dict(), config)


def copy_weights(model: GPT, state: dict, name: str) -> None:
    """Copy all weights of the pretrained model `name`; those of NEW that it lacks stay as they are.

    Raises UserError, with the weights that are missing, unknown or of another shape.
    """
    new = {key: p for key, p in model.state_dict().items() if key.endswith(NEW)}
    try:
        model.load_state_dict(new | state)
    except RuntimeError as error:
        why = textwrap.shorten(str(error), 300)
        raise UserError(f"{name}'s weights do not fit the model: {why}") from error


def load(name: str, changes: dict) -> GPT:
    """A GPT with the weights of a name in GPT2, a model on the hub, a local folder or a run.

    changes: fields of GPTConfig to change. Raises UserError if they or the weights do not fit.
    """
    config, args = config_of(name, changes)
    ours = GPTConfig(**args)  # raises before weights are downloaded
    state = run_in(name)["model"] if config is None else hub_weights(name, config)
    learned = state.get("transformer.wpe.weight")  # all positions are loaded, and cropped below
    model = GPT(ours if learned is None else replace(ours, block_size=len(learned)))
    copy_weights(model, state, name)
    if model.config.block_size != ours.block_size:
        model.crop_block_size(ours.block_size)
    return model
