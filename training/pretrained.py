"""Pretrained weights for --init_from=: GPT-2's, read by Hugging Face's transformers, or a run's.

SOURCES has where weights come from; a file that is named by --import= may add to it.
"""

from collections.abc import Callable

from errors import UserError, optional
from model import GPT, GPTConfig
from text.tokenizers import GPT2_VOCAB_SIZE
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


def gpt2(name: str) -> tuple[dict, Callable]:
    """Of a GPT-2. Only its weights need the network."""
    n_layer, width = GPT2[name]

    def read():
        transformers = optional("transformers", f"--init_from={name}")
        return {
            "path": name,
            "model": gpt2_weights(transformers.GPT2LMHeadModel.from_pretrained(name).state_dict()),
            "tokenizer": {"kind": "gpt2"},
        }

    return {
        "n_layer": n_layer,
        "n_head": width // 64,
        "n_embd": width,
        "vocab_size": GPT2_VOCAB_SIZE,
    }, read


def gpt2_weights(theirs: dict) -> dict:
    """Only the blocks' matrices differ: they are (in, out) in transformers and (out, in) here."""
    return {name: p.T if p.dim() == 2 and ".h." in name else p for name, p in theirs.items()}


def run_in(folder: str) -> tuple[dict, Callable]:
    """Of a run: the checkpoint with its lowest validation loss."""
    state = checkpoint.load(checkpoint.path_of(folder, "best"))
    return state["model_args"], lambda: state


# {name: f(name) -> (the fields of GPTConfig, a function that returns a state for model_of: a path
# and the weights)}. The entry "other" is for each name that has no entry and is no run's folder.
SOURCES = dict.fromkeys(GPT2, gpt2)


def config_of(name: str, changes: dict) -> tuple[GPTConfig, Callable]:
    """(the configuration, a function that reads the state) of a name or of a run's folder.

    changes: fields of GPTConfig to change. Raises UserError for another name, and for a field that
    the weights depend on.
    """
    for field in changes:
        if field not in FREE:
            raise UserError(
                f"{field} is fixed: {name}'s weights were trained with it. "
                f"You can change {', '.join(FREE)}"
            )

    source = SOURCES.get(name) or SOURCES.get("other")
    if checkpoint.checkpoints_in(name):
        source = run_in
    if not source:
        raise UserError(
            f"{name!r} is not one of {', '.join(SOURCES)}, and no folder of a run "
            "(--import= adds models of the hub)"
        )

    fields, read = source(name)
    if "S" not in changes.get("heads", "S"):  # these two are of short heads alone
        fields |= {"window": None, "short_attention": None}
    return GPTConfig(**fields | changes), read


def load(name: str, changes: dict) -> GPT:
    """A GPT with the weights of a name in SOURCES or of a run's folder.

    changes: fields of GPTConfig to change. Raises UserError if they or the weights do not fit: it
    names the weights that are missing, unknown or of another shape.
    """
    config, read = config_of(name, changes)
    return checkpoint.model_of(read(), **vars(config))
