"""Opens a trained model for a script: from a run's checkpoint, or from pretrained weights."""

from configurator import UserError
from model import GPT, GPTConfig
from text import dataset, tokenizers
from training import checkpoint, pretrained


def open_model(init_from: str, out_dir: str, which: str) -> tuple[GPT, tokenizers.Tokenizer, dict, str]:
    """(model, its tokenizer, the settings of its run, a line about it).

    init_from: "resume" for out_dir's checkpoint, "best" or "latest"; or the name of pretrained weights, without a run.
    """
    if init_from != "resume":
        model = pretrained.load(init_from)
        return model, tokenizers.pretrained_tokenizer(init_from, model.config.vocab_size), {}, init_from
    path = checkpoint.path_of(out_dir, which)
    state = checkpoint.load(path, lazily=True)  # only the weights are used
    about = f"{path}: step {state['iter_num']}, best validation loss {state['best_val_loss']:.4f}"
    return from_checkpoint(state), tokenizer_of(state), state["config"], about


def from_checkpoint(state: dict, **overrides: object) -> GPT:
    """The model of a checkpoint that checkpoint.load has read. overrides: fields of GPTConfig that are to differ."""
    if unknown := set(state["model_args"]) - set(GPTConfig.__dataclass_fields__):
        raise UserError(f"the checkpoint's model has fields unknown here: {', '.join(sorted(unknown))}")
    model = GPT(GPTConfig(**state["model_args"] | overrides))
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:  # PyTorch's, for other names or shapes
        raise UserError(f"the checkpoint's weights do not fit its model: {str(error).splitlines()[-1]}") from None
    return model


def tokenizer_of(state: dict) -> tokenizers.Tokenizer:
    """The tokenizer of a checkpoint. nanoGPT's checkpoints name none: then it is their data set's, or GPT-2's."""
    if "tokenizer" in state:
        return tokenizers.tokenizer(state["tokenizer"])
    vocab_size = state["model_args"]["vocab_size"]
    try:
        meta = dataset.read_meta(dataset.folder_of(state["config"].get("dataset", "")))
    except UserError:  # the data set is not here
        meta = {"vocab_size": None}
    if meta["vocab_size"] == vocab_size:
        return tokenizers.tokenizer(meta["tokenizer"])
    if vocab_size < tokenizers.GPT2_VOCAB_SIZE:
        raise UserError("this checkpoint names no tokenizer, and its data set is not prepared in data/ to take it from")
    return tokenizers.GPT2Tokenizer()
