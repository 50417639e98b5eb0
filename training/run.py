"""What a run of train.py needs around its loop, in the order in which train.py uses it.

config: all settings, {name: value}. given: {name of a setting: "command line" or a config file}.
meta: the content of the data set's meta.json.
"""

import atexit
import contextlib
import math
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from types import SimpleNamespace
from typing import NoReturn

import torch

from attention.cache import groups_of
from attention.forms import unchanged
from attention.trial import LEAK, change_by_later_tokens
from errors import UserError, out_of_range, refuse
from model import ATTENTION, GPT, GPTConfig
from rules import attentions
from text.dataset import Tokens, folder_of, read_meta
from text.tokenizers import GPT2_VOCAB_SIZE, tokenizer
from training import checkpoint, distributed
from training.distributed import by_all, count, say, summed
from training.estimate import VOCAB_SIZE, gpus_of, num_params, report
from training.optimizers import OPTIMIZER
from training.origin import imported
from training.pretrained import FREE, TRAINING, config_of, tokenizer_meta

DEFAULTS = {field.name: field.default for field in fields(GPTConfig)}
# Flags of one call only: a resumed run does not take them from its checkpoint
NOT_RESUMED = "init_from out_dir eval_only dry_run gpus allow_other_data plain".split()


def model_args(config: dict) -> dict:
    """The settings that GPTConfig takes."""
    return {name: config[name] for name in DEFAULTS}


def resumed(config: dict, given: dict) -> tuple[dict, dict | None]:
    """(settings, saved state) of a run that goes on; (config, None) of a new one.

    A run goes on if --init_from=resume says so, or if torchrun has started this run's processes
    again. It has the saved settings, and the flags on the command line. Raises UserError for a flag
    that does not fit.
    """
    out_dir = config["out_dir"]
    why = "resume"
    if config["init_from"] != "resume":
        if config["eval_only"] or not checkpoint.begun_by(distributed.launch, out_dir):
            return config, None
        why = "started again by torchrun"
    saved = checkpoint.load_newest(out_dir)
    say(f"{why}: going on from {saved['path']}, step {saved['iter_num']}")

    fixed = DEFAULTS | saved["model_args"]
    for name in TRAINING:
        del fixed[name]
    if fixed["position"] != "learned":
        del fixed["block_size"]
    before = {k: v for k, v in saved["config"].items() if k in config and k not in NOT_RESUMED}
    before |= fixed
    settings = kept("the saved run", before, fixed, config, given)
    return settings | {"init_from": "resume"}, saved


def kept(source: str, values: dict, fixed: Iterable, config: dict, given: dict) -> dict:
    """config with the values of a source, but for the flags on the command line; says what differs.

    Raises UserError for a flag in `fixed` on the command line.
    """
    settings = config | values
    for name, value in values.items():
        new = config[name]
        if name not in given or new == value:
            continue
        if given[name] != "command line":
            say(f"{source}: keeping {name}={value}, not the {new} of {given[name]}")
        elif name in fixed:
            raise UserError(
                f"--{name}={new} does not fit {source}, which has {name}={value}: leave it out, "
                "or start a new run with it (--init_from=scratch, another --out_dir=)"
            )
        else:
            say(f"{source}: {name} was {value}, now {new}")
            settings[name] = new
    return settings


RANGES = [  # see errors.out_of_range
    (
        "batch_size gradient_accumulation_steps eval_interval log_interval eval_iters "
        "keep_checkpoints",
        lambda x: x >= 1,
        "at least 1",
    ),
    (
        "seed max_iters save_interval sample_tokens warmup_iters min_lr weight_decay adam_eps "
        "grad_clip muon_lr",
        lambda x: x >= 0,
        "0 or more",
    ),
    ("beta1 beta2 muon_beta", lambda x: 0 <= x < 1, "in [0, 1)"),
    ("decay_share", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    ("learning_rate", lambda x: x > 0, "a positive number"),
]


def check_flags(config: dict, given: dict) -> None:
    """Raises UserError for flags that are wrong, or have no effect, with these settings."""
    c = SimpleNamespace(**config)
    distributed.check_environment()
    refuse(out_of_range(config, RANGES))
    decays = c.decay_lr and c.schedule != "constant"
    is_muon = c.optimizer == "muon"
    has_effect = {
        "muon_lr": is_muon,
        "muon_beta": is_muon,
        "schedule": c.decay_lr,
        "min_lr": decays,
        "decay_share": decays and c.schedule == "wsd",
        "gpus": c.dry_run,
    }
    for name, effect in has_effect.items():
        if given.get(name) == "command line" and not effect:
            raise UserError(
                f"--{name} has no effect with optimizer={c.optimizer}, decay_lr={c.decay_lr}, "
                f"schedule={c.schedule}, dry_run={c.dry_run}"
            )

    world = gpus_of(c.gpus)[0] if c.gpus and c.dry_run else distributed.world
    steps = c.gradient_accumulation_steps
    shares = world // math.gcd(c.batch_size, world)
    refuse([
        (c.optimizer not in OPTIMIZER,
         f"optimizer={c.optimizer!r} is not one of {', '.join(OPTIMIZER)}: --import= its module"),
        (decays and c.lr_decay_iters <= c.warmup_iters,
         f"lr_decay_iters={c.lr_decay_iters} must be greater than warmup_iters={c.warmup_iters}"),
        (decays and c.min_lr > c.learning_rate,
         f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}"),
        (steps % shares != 0,
         f"batch_size={c.batch_size} times gradient_accumulation_steps={steps} cannot be divided "
         f"among {world} processes: make --gradient_accumulation_steps a multiple of {shares}"),
    ])  # fmt: skip


def print_estimates(config: dict, given: dict) -> None:
    """Prints the report of --dry_run. It loads no weights and prepares no data."""
    init_from = config["init_from"]
    n_tokens = None
    vocab_size = config["vocab_size"]
    try:
        meta = read_meta(folder_of(config["dataset"]))
        n_tokens = meta["files"]["train.bin"]["tokens"]
        vocab_size = vocab_size or meta["vocab_size"]
    except UserError as error:
        say(error)
    if init_from not in ("scratch", "resume"):
        changes = {name: config[name] for name in FREE if name in given}
        shape = GPTConfig(**config_of(init_from, changes)[1])
        check_weights(shape, config, given)
    else:
        if vocab_size is None:
            vocab_size = VOCAB_SIZE.get(config["dataset"], GPT2_VOCAB_SIZE)
            say(f"so its vocabulary is unknown: assuming {vocab_size:,} tokens (--vocab_size=)")
        shape = GPTConfig(**model_args(config | {"vocab_size": vocab_size}))
    say(report(shape, config, n_tokens, distributed.world))


def check_weights(weights: GPTConfig, config: dict, given: dict) -> None:
    """Says which fields of a config file the weights overrule.

    Raises UserError for such a field on the command line.
    """
    values = {name: value for name, value in vars(weights).items() if name not in FREE}
    kept(config["init_from"], values, values, config, given)


def pretrained_model(config: dict, given: dict, meta: dict) -> GPT:
    """The model with --init_from's weights and the user's changes; says what differs."""
    init_from = config["init_from"]
    model = GPT.from_pretrained(init_from, {k: config[k] for k in FREE if k in given})
    tokens = tokenizer_meta(init_from)
    if tokens is None and model.config.vocab_size == GPT2_VOCAB_SIZE:
        tokens = {"kind": "gpt2"}
    if meta["tokenizer"] != tokens:
        say(f"{init_from} may have other tokens than {config['dataset']}")
    say(
        f"{init_from}: all of its weights carry over, the optimizer starts anew; "
        "with another attention the loss is higher"
    )
    check_weights(model.config, config, given)
    return model


def check_vocabulary(model: GPTConfig, meta: dict, dataset: str) -> None:
    """Raises UserError if the model has fewer tokens than the data."""
    if model.vocab_size < meta["vocab_size"]:
        raise UserError(
            f"vocab_size={model.vocab_size} is less than "
            f"the {meta['vocab_size']} tokens of {dataset}"
        )


def end_of_documents(config: dict, meta: dict) -> int | None:
    """The token between documents, for --pack=document; else None.

    Raises UserError for data without it.
    """
    if config["pack"] == "none":
        return None
    eot = tokenizer(meta["tokenizer"]).eot
    if eot is None or meta["files"]["train.bin"].get("documents") == 1:
        raise UserError(
            f"--pack=document: {config['dataset']} has no boundaries between documents "
            "(data/text/prepare.py --split_documents makes some of <|endoftext|>)"
        )
    return eot


def launches(start: int) -> list[str]:
    """The distributed.launch of each process that torchrun has started.

    Raises UserError if the processes do not begin at the same step.
    """
    answers = by_all(lambda: (start, distributed.launch))
    if len({step for step, _ in answers}) > 1:
        raise UserError(
            "torchrun has started some of the processes again, and others are new: "
            "add --init_from=resume, so that all of them go on"
        )
    return sorted({launch for _, launch in answers if launch})


def attention_in_words(model: GPT) -> list[str]:
    """A line for each attention of the model: in how many heads it is, and which code runs."""
    heads = Counter()
    for group in groups_of(model):
        heads[group.name, group.window, group.form_name] += len(group.heads)
    own_layers = Counter(
        type(block.attn) for block in model.transformer.h if not hasattr(block.attn, "groups")
    )
    lines = []
    for own, n in own_layers.items():
        line = f"{own.__name__} in {count(n, 'layer')}: no scores for maps and --log_logits"
        if not hasattr(own, "flops_per_token"):
            line += ", and no flops_per_token, so FLOPs lack those of its attention"
        lines.append(line)
    for (name, window, words), n in heads.items():
        which = count(n, "long head")
        if window is not None:
            which = f"{count(n, 'short head')} (window={window})"
        lines.append(f"{name} attention in {which}: {words}")
    return lines


def describe(config: dict, model: GPT, train: Tokens, device: str, dtype: str) -> None:
    """Says what is trained on what, before the first step."""
    c = SimpleNamespace(**config)
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    choices = [
        f"{name}={config[name]}"
        for name, default in DEFAULTS.items()
        if config[name] != default or name in sizes
    ]
    rows = c.batch_size * c.gradient_accumulation_steps
    processes = count(distributed.world, "process")
    if distributed.world > 1:
        processes += f" ({c.parallel})"
    say(
        f"{num_params(model) / 1e6:.2f}M parameters: {', '.join(choices)}; for the rest GPT-2's",
        *attention_in_words(model),
        f"{count(c.max_iters, 'step')} of "
        f"{rows} x {c.block_size} = {rows * c.block_size:,} tokens, "
        f"from the {len(train):,} of {c.dataset}; "
        f"{processes}, {device}, {dtype}",
        sep="\n",
    )

    natively = map(torch.cpu.get_capabilities().get, ("avx512_bf16", "amx_bf16", "bf16"))
    if device == "cpu" and c.dtype == "auto" and any(natively):
        say("this CPU multiplies bfloat16: --dtype=bfloat16 is faster in most models")


def is_own(config: GPTConfig) -> bool:
    """Whether a model may have code that no test of this repository knows."""
    known = all(unchanged(name, ATTENTION[name]) for name in attentions(config))
    return bool(imported()) or not known


def try_causality(model: GPT) -> None:
    """Says whether the logits of a GPT change with later tokens: then its losses mean nothing."""
    if not distributed.master:
        return
    change = change_by_later_tokens(model)
    if change <= LEAK:
        say("the model sees no later tokens: its logits do not change with them")
    else:
        say(
            "\nTHE MODEL SEES LATER TOKENS, so its losses mean nothing: its logits change with "
            f"them, by {change:.2g} of their spread",
            file=sys.stderr,
        )


def compiled(model: torch.nn.Module, sharded: bool) -> torch.nn.Module:
    """The model for torch.compile. What it cannot trace runs uncompiled, with a warning."""
    say(
        "compiling the model in its first steps (a minute or so; --no-compile trains without it)..."
    )
    if not sharded:
        return torch.compile(model)
    for block in model.transformer.h:  # FSDP2 wraps blocks, DDP the compiled model
        block.compile()
    return model


def restored(
    config: dict, saved: dict, val: Tokens, optimizers: list, scaler: torch.amp.GradScaler
) -> float:
    """Puts the saved states into the optimizers and the scaler. Returns the best validation loss.

    It is infinite if the evaluation uses other windows now. Raises UserError if the run cannot go
    on with this data set or this optimizer.
    """
    c = SimpleNamespace(**config)
    meta = val.meta
    optimizer = saved["config"].get("optimizer", "adamw")
    if saved["iter_num"] >= c.max_iters and not c.eval_only:
        say(
            f"resume: the run is at step {saved['iter_num']} already: "
            "to go on, give a larger --max_iters"
        )
    data = {name: entry["sha256"] for name, entry in meta["files"].items()}
    changed = not saved.get("data", {}).items() <= data.items()
    refuse([
        (saved.get("tokenizer", meta["tokenizer"]) != meta["tokenizer"],
         f"{c.dataset} has another vocabulary than the saved run's data"),
        (changed and not c.allow_other_data,
         f"the files of {c.dataset} have changed since the run was saved: "
         "--allow_other_data goes on with the new data"),
        ("optimizer" not in saved
         or ("tokenizer" not in saved and saved["model_args"].get("bias", True)),
         "the checkpoint has no optimizer state, or nanoGPT's, where biases have another order: "
         f"--init_from={shlex.quote(c.out_dir)} with another --out_dir= starts a new optimizer"),
        (optimizer != c.optimizer,
         f"--optimizer={c.optimizer} cannot go on: "
         f"the saved run used --optimizer={optimizer}"),
    ])  # fmt: skip
    checkpoint.restore(saved, optimizers, scaler)
    if c.decay_lr and c.schedule != "constant" and c.max_iters > c.lr_decay_iters:
        say(
            f"resume: from step {c.lr_decay_iters} on the learning rate is min_lr={c.min_lr}: "
            f"--lr_decay_iters={c.max_iters} lets it fall until the end"
        )
    best = saved
    if checkpoint.BEST in checkpoint.checkpoints_in(c.out_dir):
        best = checkpoint.load(checkpoint.path_of(c.out_dir, "best"), verify=False)
    if "data" in best and windows(best["config"], val, best["data"]) == windows(config, val, data):
        return best["best_val_loss"]
    say("resume: the evaluation uses other windows now, so the best validation loss starts anew")
    return math.inf


def windows(config: dict, val: Tokens, data: dict) -> tuple:
    """What decides which windows an evaluation uses. data: the checksum of each file."""
    number = min(config["eval_iters"] * config["batch_size"], val.apart)
    return number, config["block_size"], config.get("pack", "none"), data["val.bin"]


# Ctrl-C; a scheduler's end; a closed terminal; a scheduler's warnings (SLURM, SGE); a time limit
STOPS = "SIGINT SIGTERM SIGHUP SIGBREAK SIGUSR1 SIGUSR2 SIGXCPU".split()


class Signals:
    """A signal of STOPS ends the run after its step, with a checkpoint; a second one, at once."""

    def __init__(self):
        self.number = 0
        for number in [number for number in signal.Signals if number.name in STOPS]:
            ignored = signal.getsignal(number) == signal.SIG_IGN  # SIGHUP, by nohup
            if not (ignored and number.name == "SIGHUP" and distributed.world == 1):
                with contextlib.suppress(ValueError):  # not the main thread: it alone gets signals
                    signal.signal(number, self.ask)

    def ask(self, number: int, frame: object) -> None:
        """Remembers a first signal. Within a second another one may be torchrun's copy of it."""
        if not self.number:
            self.number = number
            self.asked_at = time.monotonic()
            if distributed.master and sys.stderr:  # no print: the signal may have interrupted one
                with contextlib.suppress(OSError):  # the terminal is closed
                    os.write(2, b"\nstopping after this step (a second signal stops at once)\n")
        elif time.monotonic() - self.asked_at > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def received(self) -> int:
        """The signal that stops the run, or 0; SIGTERM if another process got it.

        Every process must call this. The sum is of numbers on the CPU: it waits for no GPU.
        """
        if not summed(torch.tensor(float(self.number))):
            return 0
        return self.number or signal.SIGTERM


def print_sample(config: dict, model: GPT, val: Tokens, amp: object, device: str) -> None:
    """Prints text from the trained model, after a line end.

    If the tokenizer has no line end, the text follows the first token of the validation split.
    """
    try:
        tok = tokenizer(val.meta["tokenizer"])
        prompt = tok.encode("\n") if "\n" in tok.meta.get("vocab", "\n") else []
    except (UserError, OSError) as error:  # the run itself is done and saved
        say(f"\nno sample can be made: {error}")
        return
    idx = torch.tensor([prompt or val.ids[:1].tolist()], device=device)
    with amp, torch.compiler.set_stance("force_eager"):
        ids = model.eval().generate(
            idx, config["sample_tokens"], 0.8, vocab_size=tok.n_vocab, seed=config["seed"]
        )
    command = ["python", "sample.py", f"--out_dir={config['out_dir']}"]
    command += [f"--import={module}" for module in imported()]
    if not prompt:
        command.append(f"--start={tok.decode(idx[0].tolist())}")
    more = ""
    if checkpoint.checkpoints_in(config["out_dir"]):  # else no step was made
        more = f" (more of them: {shlex.join(command)})"
    say(f"\na sample{more}:\n{tok.decode(ids[0].tolist())}")


def exit_with_code(it: int, stop: int, unsaved: OSError | None) -> NoReturn:
    """Ends the process with exit code 2 if the last save failed, 128 + the signal `stop`, or 0."""
    code = 0
    if unsaved:
        code = 2
    elif stop:
        code = 128 + stop
        say(f"\nstopped by signal after {count(it, 'step')} and saved: --init_from=resume goes on")
    at_once = distributed.world > 1  # a thread of PyTorch that still runs could abort the process
    if at_once:
        torch.distributed.destroy_process_group()
    try:
        print(end="", flush=True)
    except OSError:  # the same error at the exit would change the exit code
        at_once = True
    if at_once:
        atexit.register(os._exit, code)
    sys.exit(code)
