"""What a run of train.py needs around its loop, in the order in which train.py uses it.

config: all settings, {name: value}. given: {name of a setting: "command line" or a config file}.
meta: the content of the data set's meta.json.
"""

import contextlib
import copy
import math
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Container, Iterator
from types import SimpleNamespace

from configurator import at_least_one

import torch

from attention.cache import heads_of
from errors import UserError, note, refuse
from model import GPT, MOST_LOGITS, GPTConfig
from text.dataset import Tokens, folder_of, read_meta
from text.tokenizers import GPT2_VOCAB_SIZE, Tokenizer, tokenizer
from training import checkpoint, distributed
from training.distributed import by_all, count, say, summed
from training.estimate import num_params, report
from training.optimizers import OPTIMIZER
from training.origin import imported
from training.pretrained import FREE, TRAINING, config_of

# What decides, with the validation split, which windows an evaluation uses
WINDOWS = ("eval_iters", "batch_size", "block_size")
DEFAULTS = vars(GPTConfig())
# Flags of one call only: a resumed run does not take them from its checkpoint
NOT_RESUMED = "init_from out_dir eval_only dry_run gpus allow_other_data plain".split()
AT_LEAST_ONE = (
    "batch_size gradient_accumulation_steps eval_interval log_interval eval_iters keep_checkpoints"
).split()


def model_args(config: dict) -> dict:
    """The settings that GPTConfig takes."""
    return {name: config[name] for name in DEFAULTS}


# -----------------------------------------------------------------------------
# which settings?


def settings_of(config: dict, given: dict) -> tuple[dict, dict | None, Callable | None]:
    """(settings, saved state, a function that reads the state that has the weights).

    A run goes on from its saved state if --init_from=resume says so, or if torchrun has started
    this run's processes again. It has the saved settings, and the flags on the command line. There
    are no weights with --init_from=scratch. Raises UserError for a flag that does not fit.
    """
    out_dir = config["out_dir"]
    is_restart = False
    with contextlib.suppress(UserError):  # there is no checkpoint, or a damaged one
        launch = distributed.launch
        is_restart = launch and launch in checkpoint.load_newest(out_dir).get("launch", ())
    if config["init_from"] != "resume" and (config["eval_only"] or not is_restart):
        return pretrained(config, given)

    saved = checkpoint.load_newest(out_dir)
    why = "started again by torchrun" if is_restart else "resume"
    say(f"{why}: going on from {saved['path']}, step {saved['iter_num']}")

    fixed = {*DEFAULTS, "optimizer"} - {*TRAINING}  # what weights and optimizer depend on
    if saved["model_args"].get("position", "learned") != "learned":
        fixed.remove("block_size")
    settings = DEFAULTS | saved["config"] | saved["model_args"]
    settings |= {name: config[name] for name in NOT_RESUMED}
    settings = merge_saved_settings("the saved run", settings, fixed, config, given)
    return settings | {"init_from": "resume"}, saved, lambda: saved


def pretrained(config: dict, given: dict) -> tuple[dict, None, Callable | None]:
    """What settings_of returns for a new run."""
    init_from = config["init_from"]
    if init_from == "scratch":
        return config, None, None
    shape, read = config_of(init_from, {k: config[k] for k in FREE if k in given})
    settings = merge_saved_settings(init_from, vars(shape), vars(shape), config, given)
    say(
        f"{init_from}: all of its weights carry over, the optimizer starts anew; "
        "with another attention the loss is higher"
    )
    return settings, None, read


def merge_saved_settings(
    source: str, saved: dict, fixed: Container, config: dict, given: dict
) -> dict:
    """config with the saved settings, but for flags on the command line; says what differs.

    source: where they are saved, in words. Raises UserError for a flag in `fixed` on the command
    line.
    """
    settings = config | saved
    for name, where in given.items():
        new = config[name]
        old = settings[name]
        if new == old:
            continue
        if where != "command line":
            say(f"{source}: keeping {name}={old}, not the {new} of {where}")
        elif name in fixed:
            raise UserError(
                f"--{name}={new} does not fit {source}, which has {name}={old}: leave it out, "
                "or start a new run with it (--init_from=scratch, another --out_dir=)"
            )
        else:
            say(f"{source}: {name} was {old}, now {new}")
            settings[name] = new
    return settings


def check_flags(config: dict, sharing: int) -> None:
    """Raises UserError for settings that are wrong, alone or together.

    sharing: the number of processes that share a sequence.
    """
    c = SimpleNamespace(**config)
    at_least_one(**{name: config[name] for name in AT_LEAST_ONE})

    decays = c.decay_lr and c.schedule != "constant"
    rows = c.batch_size * c.gradient_accumulation_steps
    world = distributed.world

    # what does not go together
    refuse([
        (c.optimizer not in OPTIMIZER,
         f"optimizer={c.optimizer!r} is not one of {', '.join(OPTIMIZER)}: --import= its module"),
        (decays and c.lr_decay_iters <= c.warmup_iters,
         f"lr_decay_iters={c.lr_decay_iters} must be greater than warmup_iters={c.warmup_iters}"),
        (min(c.grad_clip, c.seed) < 0 or c.learning_rate <= 0,
         f"grad_clip={c.grad_clip} and seed={c.seed} must be at least 0, "
         f"and learning_rate={c.learning_rate} above 0"),
        (decays and c.min_lr > c.learning_rate,
         f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}"),

        # how many processes there are
        (c.context_processes and c.parallel != "context",
         f"context_processes={c.context_processes} needs --parallel=context"),
        (sharing < 1 or world % sharing,
         f"context_processes={sharing} does not divide {count(world, 'process')}"),
        (rows * sharing % world,
         f"the {rows} sequences of a step cannot be divided among {world // sharing} processes: "
         f"make --gradient_accumulation_steps a multiple of {world // sharing}"),
    ])  # fmt: skip


def print_estimates(config: dict) -> None:
    """Prints the report of --dry_run. It loads no weights and prepares no data."""
    vocab_size = GPT2_VOCAB_SIZE  # of data that are not prepared
    with contextlib.suppress(UserError):
        vocab_size = read_meta(folder_of(config["dataset"]))["vocab_size"]
    sizes = {"vocab_size": config["vocab_size"] or vocab_size}
    say(report(GPTConfig(**model_args(config | sizes)), config))


# -----------------------------------------------------------------------------
# the first lines, and the model as it is trained


def launches(start: int) -> list[str]:
    """The distributed.launch of each process that torchrun has started.

    Raises UserError if the processes do not begin at the same step.
    """
    steps, of_processes = zip(*by_all(lambda: (start, distributed.launch)), strict=True)
    if len({*steps}) > 1:
        raise UserError(
            "torchrun has started some of the processes again, and others are new: "
            "add --init_from=resume, so that all of them go on"
        )
    return sorted({*of_processes} - {""})


def describe(c: SimpleNamespace, model: GPT, train: Tokens, device: str, dtype: str) -> None:
    """Says what is trained on what, before the first step. c: the settings."""
    choices = [f"{k}={x}" for k, x in vars(model.config).items() if x != DEFAULTS[k]]
    say(f"{num_params(model) / 1e6:.2f}M parameters: {', '.join(choices)}; for the rest GPT-2's")

    # each attention: in how many heads it is, and which code runs
    heads = Counter()
    for part in heads_of(model):
        heads[part.name, part.window, part.words] += part.n
    for (name, window, code), n in heads.items():
        kind = count(n, "long head")
        if window is not None:
            kind = f"{count(n, 'short head')} (window={window})"
        say(f"{name} attention in {kind}: {code}")

    rows = c.batch_size * c.gradient_accumulation_steps
    say(
        f"{count(c.max_iters, 'step')} of "
        f"{rows} x {c.block_size} = {rows * c.block_size:,} tokens, "
        f"from the {len(train):,} of {c.dataset}; "
        f"{count(distributed.world, 'process')}, {device}, {dtype}"
    )


LEAK = 1e-4  # see change_by_later_tokens


@torch.no_grad()
def change_by_later_tokens(model: GPT) -> float:
    """How far a GPT's logits change with later tokens, as a share of their spread.

    Random tokens are read as a whole, and without the last one, half or seven eighths of them: what
    is left must have the logits that it had. An attention that uses the number of tokens is found
    too. Above LEAK the model sees later tokens; below it is rounding.
    """
    c = model.config
    T = min(c.block_size, MOST_LOGITS // c.vocab_size)
    device = next(model.parameters()).device
    random = torch.Generator(device).manual_seed(0)
    x = torch.randint(c.vocab_size, (1, T), generator=random, device=device)

    # in a copy without zeros, such as --zero_init's, which would hide what a layer does
    model = copy.deepcopy(model).eval()
    for p in model.parameters():
        if not p.any():
            p.normal_(std=0.02, generator=random)

    logits = model(x, x)[0]
    change = logits.new_zeros(())
    for n in {T - 1, T // 2, T // 8} - {0}:
        first = x[:, :n]
        change = change.maximum((model(first, first)[0] - logits[:, :n]).abs().max())
    return (change / logits.std()).item()


def try_causality(model: GPT) -> None:
    """Says whether the logits change with later tokens: then the losses of a GPT mean nothing."""
    change = change_by_later_tokens(model)
    if change <= LEAK:
        say("the model sees no later tokens: its logits do not change with them")
    else:
        note(
            "\nTHE MODEL SEES LATER TOKENS, so its losses mean nothing: its logits change with "
            f"them, or with their number, by {change:.2g} of their spread"
        )


# -----------------------------------------------------------------------------
# a state to go on from


def best_loss(c: SimpleNamespace, saved: dict, checksums: dict) -> float:
    """The best validation loss of a resumed run; infinite if it evaluates on other windows now.

    checksums: of the data set's files. Raises UserError if the run cannot go on with this data set
    or this optimizer.
    """
    data = saved.get("data", {})
    refuse([
        (not data.items() <= checksums.items() and not c.allow_other_data,
         f"the files of {c.dataset} have changed since the run was saved: "
         "--allow_other_data goes on with the new data"),
        ("optimizer" not in saved
         or ("tokenizer" not in saved and saved["model_args"].get("bias", True)),
         "the checkpoint has no optimizer state, or nanoGPT's, where biases have another order: "
         f"--init_from={shlex.quote(c.out_dir)} with another --out_dir= starts a new one"),
    ])  # fmt: skip

    # losses on other windows do not compare
    same = all(saved["config"].get(name) == getattr(c, name) for name in WINDOWS)
    if same and data.get("val.bin") == checksums["val.bin"]:
        return saved["best_val_loss"]
    say("resume: the evaluation uses other windows now, so the best validation loss starts anew")
    return math.inf


# -----------------------------------------------------------------------------
# the end

# Ctrl-C; a scheduler's end; a closed terminal; a scheduler's warnings (SLURM, SGE); a time limit
STOPS = "SIGINT SIGTERM SIGHUP SIGUSR1 SIGUSR2 SIGXCPU".split()


@contextlib.contextmanager
def caught_signals(on: bool) -> Iterator[list[int]]:
    """A list to which the signals of STOPS are added inside of this context, if it is on.

    The handlers are put back at its end, also of an error: an interpreter may go on after it.
    """
    caught = []
    handlers = {}
    for number in signal.Signals if on else ():
        # after nohup SIGHUP is ignored, and stays so
        if number.name in STOPS and signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stopped_by(caught: list[int]) -> int:
    """The first signal that was caught, or 0; SIGTERM if only another process got one.

    Every process must call this. The sum is of numbers on the CPU: it waits for no GPU.
    """
    if not summed(torch.tensor(len(caught))):
        return 0
    return caught[0] if caught else signal.SIGTERM


def default_prompt(tok: Tokenizer) -> tuple[str, list[int]]:
    """(text, its token ids) of the prompt that nobody chose: a line end.

    If the vocabulary has none, it is its first token, and a line says so.
    """
    with contextlib.suppress(UserError):
        return "\n", tok.start("\n")
    text = tok.decode([0])
    say(f"the vocabulary has no line end: the prompt is {text!r}")
    return text, [0]


def print_sample(c: SimpleNamespace, model: GPT, meta: dict, amp: object, device: str) -> None:
    """Prints text from the trained model, after the default prompt."""
    tok = tokenizer(meta["tokenizer"])
    _, prompt = default_prompt(tok)
    idx = torch.tensor([prompt], device=device)
    with amp:
        ids = model.eval().generate(idx, c.sample_tokens, 0.8, vocab_size=tok.n_vocab, seed=c.seed)
    imports = (f"--import={module}" for module in imported())
    command = shlex.join(["python", "sample.py", f"--out_dir={c.out_dir}", *imports])
    say(f"\na sample (more of them: {command}):\n{tok.decode(ids[0].tolist())}")
