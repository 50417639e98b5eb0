"""What a run of train.py needs around its loop, in the order in which train.py uses it."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import NoReturn

import torch

from attention.forms import SUSPECTS, linear
from errors import UserError, optional, refuse
from model import ATTENTION, GPT, GPTConfig
from text.dataset import Tokens, folder_of, read_meta
from text.tokenizers import GPT2_VOCAB_SIZE, tokenizer
from training import checkpoint, distributed
from training.distributed import count, say, summed
from training.estimate import VOCAB_SIZE, gpus_of, num_params, report
from training.pretrained import FREE, TRAINING, config_of, tokens_of

DEFAULTS = {field.name: field.default for field in fields(GPTConfig)}
NOT_RESUMED = ("init_from", "out_dir", "eval_only", "dry_run", "gpus", "allow_other_data", "plain")  # of one call only


def model_args(config: dict) -> dict:
    """Those of the settings that are fields of GPTConfig."""
    return {name: config[name] for name in DEFAULTS}


def resumed(config: dict, given: dict) -> tuple[dict, dict | None]:
    """(settings, the saved state to go on from or None), if the run is told to resume or torchrun restarts it.

    A resumed run has the saved settings, and the flags on the command line. UserError for one that does not fit.
    """
    told, out_dir = config["init_from"] == "resume", config["out_dir"]
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 and checkpoint.names(out_dir)
    if not told and (not restarted or config["eval_only"]):
        return config, None
    path, saved = checkpoint.load_newest(out_dir)
    say(f"{'resume' if told else 'started again by torchrun'}: going on from {path}, step {saved['iter_num']}")
    args = DEFAULTS | saved["model_args"]
    free = TRAINING if args["position"] == "learned" else (*TRAINING, "block_size")
    fixed = {k: v for k, v in args.items() if k not in free}
    theirs = {k: v for k, v in saved["config"].items() if k in config and k not in NOT_RESUMED} | fixed
    mine = {k: config[k] for k in theirs if given.get(k) == "command line"}
    for name, value in theirs.items():
        if mine.get(name, value) != value and name in fixed:
            new = f"--init_from={out_dir if name in FREE and name != 'block_size' else 'scratch'}, another --out_dir="
            no = f"--{name}={mine[name]} does not fit the saved model, which has {name}={value}"
            raise UserError(f"{no}: leave it out to go on, or start a new run with it ({new})")
        if mine.get(name, value) != value:
            say(f"resume: {name} was {value}, now {mine[name]}")
        elif name in given and config[name] != value:
            say(f"resume: keeping {name}={value}: to use the {config[name]} of {given[name]}, add --{name}=")
    return config | theirs | mine | {"init_from": "resume"}, saved


def restored(config: dict, saved: dict, meta: dict, optimizers: list, scaler: torch.amp.GradScaler) -> float:
    """Puts the saved states into optimizers and scaler. Returns the best validation loss, infinity on other windows.

    Raises UserError if the run cannot go on with this data set or this optimizer.
    """
    c, before = SimpleNamespace(**config), {"pack": "none", "optimizer": "adamw"} | saved["config"]
    if saved["iter_num"] >= c.max_iters and not c.eval_only:
        say(f"resume: the run is at step {saved['iter_num']} already: to go on, give a larger --max_iters")
    other = [k for k, sha256 in saved.get("data", {}).items() if meta["files"].get(k, {}).get("sha256") != sha256]
    refuse((
        (saved.get("tokenizer", meta["tokenizer"]) != meta["tokenizer"],
         f"{c.dataset} has another vocabulary than the saved run's data"),
        (bool(other) and not c.allow_other_data, f"{' and '.join(other)} of {c.dataset} changed after the saved run: "
         "--allow_other_data goes on with the new data"),
        ("optimizer" not in saved, f"the checkpoint in {c.out_dir} has no optimizer state to go on from"),
        ("tokenizer" not in saved and saved["model_args"].get("bias", True),
         "nanoGPT's optimizer has biases in another order: --init_from= with the folder's path starts a new optimizer"),
        (before["optimizer"] != c.optimizer,
         f"--optimizer={c.optimizer} cannot go on: the saved run used --optimizer={before['optimizer']}"),
    ))  # fmt: skip
    checkpoint.restore(saved, optimizers, scaler)
    windows = ("dataset", "eval_iters", "batch_size", "block_size", "pack")
    if saved.get("data") and not other and all(config[name] == before.get(name) for name in windows):
        return saved["best_val_loss"]
    say("resume: the evaluation uses other windows now, so the best validation loss starts anew")
    return float("inf")


def check_flags(config: dict, given: dict) -> None:
    """Raises UserError for train.py's flags that are wrong, or have no effect, with these settings."""
    c = SimpleNamespace(**config)
    world = gpus_of(c.gpus)[0] if c.gpus and c.dry_run else distributed.world
    decays, muon = c.decay_lr and c.schedule != "constant", c.optimizer == "muon"
    counts = "batch_size gradient_accumulation_steps eval_interval log_interval eval_iters keep_checkpoints"
    others = "seed max_iters save_interval sample_tokens warmup_iters min_lr weight_decay adam_eps grad_clip muon_lr"
    refuse((config[name] < 1, f"--{name}={config[name]} must be at least 1") for name in counts.split())
    refuse(((config[name] or 0) < 0, f"--{name}={config[name]} must not be negative") for name in others.split())
    betas = ("beta1", "beta2", "muon_beta")
    refuse((not 0 <= config[name] < 1, f"--{name}={config[name]} must be in [0, 1)") for name in betas)
    used = {"muon_lr": muon, "muon_beta": muon, "schedule": c.decay_lr, "min_lr": decays}
    used |= {"decay_share": decays and c.schedule == "wsd", "gpus": c.dry_run}
    having = f"optimizer={c.optimizer}, decay_lr={c.decay_lr}, schedule={c.schedule}, dry_run={c.dry_run}"
    typed = [name for name, source in given.items() if source == "command line"]
    refuse((not used.get(name, True), f"--{name} has no effect with {having}") for name in typed)
    steps, rows = c.gradient_accumulation_steps, c.gradient_accumulation_steps * c.batch_size
    more = next(n for n in range(steps, steps + world) if n * c.batch_size % world == 0)
    refuse((
        (not 0 < c.decay_share <= 1, f"--decay_share={c.decay_share} must be above 0 and at most 1"),
        (c.learning_rate <= 0, f"--learning_rate={c.learning_rate} must be positive"),
        (decays and c.lr_decay_iters <= c.warmup_iters, f"lr_decay_iters={c.lr_decay_iters} must be greater than "
         f"warmup_iters={c.warmup_iters}: the learning rate decays between the two"),
        (decays and c.min_lr > c.learning_rate, f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}"),
        (c.plain and c.triton, "--plain runs the definitions of model.py, --triton kernels: leave one out"),
        (rows % world != 0, f"batch_size={c.batch_size} times gradient_accumulation_steps={steps} cannot be divided "
         f"among {world} processes: use --gradient_accumulation_steps={more}"),
    ))  # fmt: skip


def print_estimates(config: dict, given: dict, device: str, dtype: str) -> None:
    """The report of --dry_run. It loads no weights and prepares no data: it estimates what is missing."""
    ours, n_tokens = config["init_from"] in ("scratch", "resume"), None
    vocab_size = VOCAB_SIZE.get(config["dataset"], GPT2_VOCAB_SIZE)
    try:
        meta = read_meta(folder_of(config["dataset"]))
        n_tokens, vocab_size = meta["files"]["train.bin"]["tokens"], meta["vocab_size"]
    except UserError as error:
        say(str(error))
        if ours and config["vocab_size"] is None:
            say(f"so its vocabulary is unknown: assuming {vocab_size:,} tokens (--vocab_size=)")
    config = config | {"vocab_size": config["vocab_size"] or vocab_size}
    if ours:
        shape = GPTConfig(**model_args(config))
    else:
        shape = GPTConfig(**config_of(config["init_from"], {k: config[k] for k in FREE if k in given})[1])
        check_weights(shape, config, given)
    if n_tokens:
        check_data(config, shape, meta)
    if config["dtype"] == "auto" and (config["gpus"] or device == "cpu"):  # a CPU is not what the run is for
        dtype = "bfloat16"
    say(report(shape, config, n_tokens, device, dtype, distributed.world))


def check_weights(theirs: GPTConfig, config: dict, given: dict) -> None:
    """Says which fields of a config file the weights overrule. Raises UserError for one on the command line."""
    for name in (k for k in given if k in DEFAULTS and k not in FREE and getattr(theirs, k) != config[k]):
        own, mine, weights = getattr(theirs, name), config[name], config["init_from"]
        if given[name] == "command line":
            raise UserError(f"--{name}={mine} does not fit {weights}, which has {name}={own}")
        say(f"{weights}: {name} is {own}, not {mine} as in {given[name]}")


def pretrained_model(config: dict, given: dict, meta: dict) -> GPT:
    """The model with --init_from's weights and with the fields that the user changed; says what that means."""
    name, changes = config["init_from"], {k: config[k] for k in FREE if k in given}
    model = GPT.from_pretrained(name, changes)
    theirs = tokens_of(name) or ({"kind": "gpt2"} if model.config.vocab_size == GPT2_VOCAB_SIZE else None)
    if meta["tokenizer"] != theirs:
        say(f"{name} {'has' if theirs else 'may have'} other tokens than {config['dataset']}")
    say(f"{name}: all of its weights carry over, the optimizer starts anew; with another attention the loss is higher")
    check_weights(model.config, config, given)
    return model


def check_data(config: dict, model: GPTConfig, meta: dict) -> int | None:
    """The token between documents, with --pack=document, else None. Raises UserError where the data do not fit."""
    n, data_has = model.vocab_size, meta["vocab_size"]
    refuse([(n < data_has, f"vocab_size={n} is less than the {data_has} tokens of {config['dataset']}")])
    if config["pack"] == "none":
        return None
    eot = tokenizer(meta["tokenizer"]).eot
    if eot is None:
        raise UserError(f"--pack=document: {config['dataset']} has no boundaries between documents")
    return eot


def use_triton(model: GPT, device: str, dtype: str) -> None:
    """Runs a model's attention by the Triton kernels. Raises UserError if they cannot run here."""
    if not device.startswith("cuda") or dtype == "float16":
        raise UserError(f"--triton: its kernels run on CUDA in bfloat16 and float32, not on {device} in {dtype}")
    optional("triton", "--triton")
    from attention import kernels

    kernels.use(model, ATTENTION[model.config.attention])


def attention_in_words(config: GPTConfig, flags: SimpleNamespace) -> str:
    """Which attention the short and the long heads have, and what is special about it in this run."""
    m = config.resolved()
    heads = "".join(m.layer_heads(layer) for layer in range(m.n_layer))
    short = f"{m.short_attention} attention in {count(heads.count('S'), 'short head')} (window={m.window})"
    long = f"{m.attention} attention in {count(heads.count('L'), 'long head')}"
    more = {
        ", by its definition": flags.plain,
        ", by Triton kernels": flags.triton,
        ", within documents": flags.pack == "document",
        f", dropout {m.attn_dropout} on its weights": m.attn_dropout,
        ", which makes it quadratic in time": m.attn_dropout and linear(replace(config, attn_dropout=0.0)),
    }
    kinds = [words for letter, words in (("S", short), ("L", long)) if letter in heads]
    return " and ".join(kinds) + "".join(words for words, fits in more.items() if fits)


def describe(config: dict, model: GPT, data: dict[str, Tokens], device: str, dtype: str) -> None:
    """Says in six lines what is trained on what, how, and what to look at, before the first step."""
    c, world = SimpleNamespace(**config), distributed.world
    rows = c.batch_size * c.gradient_accumulation_steps
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    choices = [name for name, default in DEFAULTS.items() if config[name] != default and name not in sizes]
    rate = ["learning_rate"] + (["muon_lr"] if c.optimizer == "muon" else [])
    rate += ["warmup_iters", "schedule"] if c.decay_lr else []
    rate += ["lr_decay_iters", "min_lr"] if c.decay_lr and c.schedule != "constant" else []
    shown = lambda names: ", ".join(f"{name}={config[name]}" for name in names)  # noqa: E731
    early = f"; the run ends before that, at max_iters={c.max_iters}" if c.max_iters < c.lr_decay_iters else ""
    look = f"val loss every {count(c.eval_interval, 'step')} (python scripts/plot.py --runs={c.out_dir} draws it)"
    say(
        f"{c.dataset}: {len(data['train']):,} tokens to train on, {len(data['val']):,} to validate\n"
        f"{num_params(model) / 1e6:.2f}M parameters: {shown(sizes)}; unlike GPT-2: {shown(choices) or 'nothing'}\n"
        f"{attention_in_words(model.config, c)}\n"
        f"{c.optimizer}: {shown(rate)}{early if 'lr_decay_iters' in rate else ''}\n"
        f"{count(c.max_iters, 'step')}, each of {count(rows, 'sequence')} x {c.block_size} = "
        f"{count(rows * c.block_size, 'token')}, in micro-batches of {c.batch_size}; "
        f"{count(world, 'process')}{f' ({c.parallel})' if world > 1 else ''}, {device}, {dtype}\n"
        f"look at: {'the losses below; nothing is trained or written' if c.eval_only else look}"
    )


def compiled(model: torch.nn.Module, sharded: bool) -> torch.nn.Module:
    """The model for torch.compile. What it cannot trace runs uncompiled, with a warning."""
    say("compiling the model in its first steps (a minute or so; --no-compile trains without it)...")
    torch._dynamo.config.suppress_errors = True
    if not sharded:
        return torch.compile(model)
    for block in model.transformer.h:  # FSDP2 wraps blocks, DDP the compiled model
        block.compile()
    return model


def first_not_finite(model: GPT, loss_of: Callable) -> str:
    """A sentence on where a NaN or an infinity first appears in a model; empty if all is finite on this batch.

    loss_of(): the loss of a batch. Its forward and backward pass are made once more.
    """
    if distributed.world > 1 or not all(p.isfinite().all() for p in model.parameters()):  # a step has spread it
        return "(One process with --log_interval=1 finds where it begins)"
    found = []

    def look(name: str, module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        if ".attn." in name and not args[0].isfinite().all():  # its projections are modules, the attention is none
            found.append(f"in what the attention of layer {name.split('.')[2]} gives")
        elif torch.is_tensor(output) and not output.isfinite().all():
            found.append(f"in the output of {name}")

    hooks = [m.register_forward_hook(partial(look, name)) for name, m in model.named_modules() if name]
    model.zero_grad()
    loss_of().backward()
    for hook in hooks:
        hook.remove()
    grads = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    found += [f"in the gradient of {name}" for name in grads[:-2:-1]]  # the backward pass comes to the last one first
    return f"It begins {found[0]}" if found else ""


class Signals:
    """SIGINT and SIGTERM end the run after its step, with a checkpoint. A second signal ends it at once."""

    def __init__(self):
        self.number, self.asked_at = 0, 0.0
        signal.signal(signal.SIGINT, self.ask)
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, number: int, frame: object) -> None:
        if self.number and time.monotonic() - self.asked_at > 1:  # sooner it may be torchrun's copy of the first
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.number:
            self.number, self.asked_at = number, time.monotonic()
            if distributed.master:  # not print: the signal may have interrupted a print
                os.write(2, b"\nstopping after this step (a second signal stops at once)\n")

    def received(self) -> int:
        """The signal that stops the run, or 0; SIGTERM if another process got it. Every process must call this."""
        if not summed(torch.tensor(float(self.number))):  # on the CPU, by gloo: no GPU is waited for
            return 0
        return self.number or signal.SIGTERM


def print_sample(config: dict, model: GPT, val: Tokens, amp: object, device: str) -> None:
    """Prints text from the trained model, after a line end or, if the tokenizer has none, after val's first token."""
    try:
        tok = tokenizer(val.meta["tokenizer"])
        prompt = (tok.encode("\n") if "\n" in tok.meta.get("vocab", "\n") else []) or val.ids[:1].tolist()
    except (UserError, OSError) as error:  # the run itself is done and saved
        say(f"\nno sample can be made: {error}")
        return
    idx = torch.tensor([prompt], device=device)
    with amp, torch.compiler.set_stance("force_eager"):
        ids = model.eval().generate(idx, config["sample_tokens"], 0.8, vocab_size=tok.n_vocab, seed=config["seed"])
    say(f"\na sample (more of them: python sample.py --out_dir={config['out_dir']}):\n{tok.decode(ids[0].tolist())}")


def exit_with_code(it: int, stop: int, unsaved: OSError | None) -> NoReturn:
    """Ends the process: exit code 2 if the last save failed, 128 + the signal that stopped the run, or 0."""
    if SUSPECTS:
        say(f"\nattention={SUSPECTS[0]!r}: if it sees later tokens, the losses above mean nothing")
    if stop and not unsaved:
        say(f"\nstopped by signal after {count(it, 'step')} and saved: --init_from=resume goes on")
    code = 2 if unsaved else 128 + stop if stop else 0
    if distributed.world > 1:
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        atexit.register(os._exit, code)  # at once: a thread of PyTorch that still runs could abort the process
    sys.exit(code)
