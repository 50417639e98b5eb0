"""A GPT-2 of transformers, as a GPT; and a GPT as a GPT-2 of transformers.

    python sample.py --import=lab.hub.gpt2 --init_from=owner/model

The name is a folder or owner/model. In Python, `import lab.hub.gpt2` comes before
`GPT.from_pretrained`.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator

import torch

from errors import UserError, first_line, optional
from model import GPT, GPTConfig
from text.tokenizers import GPT2_VOCAB_SIZE, PRETRAINED, GPT2Tokenizer, Tokenizer
from training.pretrained import GPT2, SOURCES, TRAINING, gpt2_weights

USER = "a model of Hugging Face"  # what needs the package transformers
# name in GPTConfig: name in GPT2Config
FIELDS = {
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
# the vocabulary has no such tokens
NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}

# -----------------------------------------------------------------------------
# theirs as ours


def fields_of(config) -> dict:
    """The fields of GPTConfig. Raises UserError for a choice that GPT does not have."""
    activation = config.activation_function
    if activation not in ACTIVATIONS:
        raise UserError(
            f"activation_function={activation!r} is not one of {', '.join(ACTIVATIONS)}"
        )
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        raise UserError(
            "its attention scores are not scaled by 1 / sqrt(head width), as GPT-2's are"
        )
    fields = {ours: getattr(config, theirs) for ours, theirs in FIELDS.items()}
    return fields | {"mlp": ACTIVATIONS[activation]}


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
        if config.model_type != "gpt2":
            raise UserError(f"it is a {config.model_type}, and no gpt2")
        return fields_of(config), lambda: hub_state(name)


def hub_state(name: str) -> dict:
    """What checkpoint.model_of needs of a model that transformers loads: its name and weights."""
    from transformers import AutoModelForCausalLM

    with loading(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True
        )
        if missing := report["missing_keys"]:  # transformers fills them with random numbers
            raise UserError(f"its file has no {min(missing)}")
    return {"path": name, "model": gpt2_weights(model.state_dict())}


# -----------------------------------------------------------------------------
# ours as theirs


def exported(model: GPT) -> object:
    """Our model as a PreTrainedModel. Raises UserError, naming the choices that GPT-2 lacks."""
    import transformers

    config = config_of(model.config)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = gpt2_weights(model.state_dict())  # it turns the same matrices in both directions
    theirs.load_state_dict({name: p * 0 for name, p in theirs.state_dict().items()} | ours)
    return theirs


def config_of(config: GPTConfig) -> object:
    """transformers' config of a model."""
    import transformers

    c = config.resolved()
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    theirs = transformers.GPT2Config(
        **{theirs: getattr(c, ours) for ours, theirs in FIELDS.items()},
        resid_pdrop=c.dropout,
        embd_pdrop=c.dropout,
        attn_pdrop=c.attn_dropout,
        activation_function=names.get(c.mlp, "gelu_new"),
        **NO_SPECIAL_TOKENS,
    )
    # GPT-2 always has biases, which may be zeros
    loaded = choices(GPTConfig(**fields_of(theirs), bias=c.bias))
    lacking = [name for name, value in choices(config).items() if value != loaded[name]]
    if lacking:
        given = ", ".join(f"{name}={getattr(config, name)!r}" for name in lacking)
        raise UserError(f"transformers' GPT-2 has no {given}")
    return theirs


def choices(config: GPTConfig) -> dict:
    """The fields that a trained model depends on, with the default values filled in."""
    c = config.resolved()
    heads = "/".join(c.layer_heads(layer) for layer in range(c.n_layer))
    return {name: x for name, x in (vars(c) | {"heads": heads}).items() if name not in TRAINING}


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
