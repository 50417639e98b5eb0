"""What a run of train.py needs around its loop, in the order in which train.py uses it."""

import atexit
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import NoReturn

import torch

from attention.forms import linear
from errors import UserError, first_line, optional, refuse
from model import ATTENTION, GPT, GPTConfig
from text.dataset import Tokens, folder_of, prepare_shakespeare, read_meta
from text.tokenizers import GPT2_VOCAB_SIZE, tokenizer
from training import checkpoint, distributed
from training.distributed import by_master, count, say, summed
from training.estimate import VOCAB_SIZE, num_params, report
from training.log import Log
from training.pretrained import FREE, TRAINING, config_of, tokens_of

MODEL_FIELDS = [field.name for field in fields(GPTConfig)]
# what a resumed run may change
RESHAPABLE = ("dropout", "attn_dropout", "label_smoothing", "z_loss", "activation_checkpointing")
PASSING = ("init_from", "out_dir", "eval_only", "dry_run", "allow_other_data", "plain")  # flags for one call only

# -----------------------------------------------------------------------------
# what to resume, and with which settings


def saved_run(config: dict) -> dict | None:
    """The state to go on from; None: the run begins anew. It goes on if it is told to, and if torchrun restarts it."""
    resume = config["init_from"] == "resume"
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 and checkpoint.names(config["out_dir"])
    if not resume and (not restarted or config["eval_only"]):
        return None
    path, saved = checkpoint.load_newest(config["out_dir"])
    say(f"{'resume' if resume else 'started again by torchrun'}: going on from {path}, step {saved['iter_num']}")
    return saved


def taken_over(config: dict, given: dict, saved: dict) -> dict:
    """The saved run's settings, and the flags on the command line. UserError for one that the model does not fit."""
    config = config | {"init_from": "resume"}
    theirs = {k: v for k, v in saved["config"].items() if k in config and k not in PASSING}
    model_args = {field.name: field.default for field in fields(GPTConfig)} | saved["model_args"]
    free = RESHAPABLE if model_args["position"] == "learned" else (*RESHAPABLE, "block_size")
    theirs |= {k: v for k, v in model_args.items() if k not in free}
    for key, value in theirs.items():
        mine = config[key]
        if given.get(key) != "command line":
            config[key] = value
            if key in given and mine != value:
                say(f"resume: keeping {key}={value}. {given[key]} has {mine}: to use it, add --{key}={mine}")
        elif mine != value and key in MODEL_FIELDS and key not in free:
            raise UserError(f"--{key}={mine} does not fit the saved model, which has {key}={value}")
        elif mine != value:
            say(f"resume: {key} was {value}, now {mine}")
    return config


def restored(config: dict, saved: dict, meta: dict, optimizers: list, scaler: torch.amp.GradScaler) -> float:
    """Puts the saved states into optimizers and scaler. Returns the best validation loss, infinity on other windows.

    Raises UserError if the run cannot go on with this data set or this optimizer.
    """
    c, before = SimpleNamespace(**config), {"pack": "none", "optimizer": "adamw"} | saved["config"]
    if saved["iter_num"] >= c.max_iters and not c.eval_only:
        reached = f"the run is at step {saved['iter_num']} already, and max_iters={c.max_iters}"
        say(f"resume: {reached}. To go on, give a larger --max_iters")
    other = [k for k, sha256 in saved.get("data", {}).items() if meta["files"].get(k, {}).get("sha256") != sha256]
    refuse((
        (saved.get("tokenizer", meta["tokenizer"]) != meta["tokenizer"],
         f"{c.dataset} was prepared again, and has another vocabulary than the saved run's"),
        (bool(other) and not c.allow_other_data, f"{' and '.join(other)} of {c.dataset} changed after the saved run: "
         "--allow_other_data goes on with the new data"),
        ("optimizer" not in saved,
         f"the checkpoint in {c.out_dir} has no optimizer state, so training cannot go on from it"),
        (before["optimizer"] != c.optimizer,
         f"--optimizer={c.optimizer} cannot go on: the saved run used --optimizer={before['optimizer']}"),
    ))  # fmt: skip
    checkpoint.restore(saved, optimizers, scaler)
    windows = ("dataset", "eval_iters", "batch_size", "block_size", "pack")
    if saved.get("data") and not other and all(config[name] == before.get(name) for name in windows):
        return saved["best_val_loss"]
    say("resume: the evaluation uses other windows now, so the best validation loss starts anew")
    return math.inf


# -----------------------------------------------------------------------------
# which flags fit


def decay_start(config: dict) -> float | None:
    """The step from which the learning rate goes down; None: it never does."""
    if not config["decay_lr"] or config["schedule"] == "constant":
        return None
    flat = config["lr_decay_iters"] * (1 - config["decay_share"]) if config["schedule"] == "wsd" else 0
    return max(config["warmup_iters"], flat)


# fmt: off
def wrong_flags(config: dict, given: dict) -> Iterator[tuple[bool, str]]:
    """Yields (whether a rule is broken, the message for it). A rule may assume that all rules before it hold."""
    c, world, decays = SimpleNamespace(**config), distributed.world, decay_start(config) is not None
    counts = "batch_size gradient_accumulation_steps eval_interval log_interval eval_iters keep_checkpoints"
    not_negative = "seed max_iters save_interval sample_tokens warmup_iters min_lr weight_decay adam_eps grad_clip"
    for names, right, must in (
        (counts, lambda x: x >= 1, "must be at least 1"),
        (not_negative, lambda x: x >= 0, "must not be negative"),
        ("learning_rate muon_lr", lambda x: x > 0, "must be positive"),
        ("beta1 beta2 muon_beta", lambda x: 0 <= x < 1, "must be in [0, 1)"),
        ("decay_share", lambda x: 0 < x <= 1, "must be above 0 and at most 1"),
    ):
        yield from ((not right(config[name]), f"--{name}={config[name]} {must}") for name in names.split())
    yield (decays and c.lr_decay_iters <= c.warmup_iters,
           f"lr_decay_iters={c.lr_decay_iters} must be greater than warmup_iters={c.warmup_iters}: the "
           f"learning rate decays between the two (--schedule=constant has no decay)")
    for name, used, by in (
        ("adam_eps", c.optimizer != "lamb", "another --optimizer than lamb"),
        ("muon_lr", c.optimizer == "muon", "--optimizer=muon"),
        ("muon_beta", c.optimizer == "muon", "--optimizer=muon"),
        ("decay_share", c.decay_lr and c.schedule == "wsd", "--schedule=wsd"),
        ("schedule", c.decay_lr, "--decay_lr=True"),
        ("min_lr", decays, "a schedule that decays"),
    ):
        yield given.get(name) == "command line" and not used, f"--{name} is used only with {by}"
    yield (decays and c.min_lr > c.learning_rate,
           f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}: the decay would go up")
    yield c.plain and c.triton, "--plain runs the definitions of model.py, --triton kernels: leave one out"
    steps, rows = c.gradient_accumulation_steps, c.gradient_accumulation_steps * c.batch_size
    more = next(n for n in range(steps, steps + world) if n * c.batch_size % world == 0)
    yield (rows % world != 0,
           f"{rows} sequences (gradient_accumulation_steps={steps} times batch_size={c.batch_size}) cannot be "
           f"divided among {world} processes: use --gradient_accumulation_steps={more}, "
           f"or start {' or '.join(str(n) for n in range(1, 129) if rows % n == 0)} processes")
# fmt: on


def print_estimates(config: dict, given: dict, device: str, dtype: str) -> None:
    """The report of --dry_run. It loads no weights and prepares no data: it estimates what is missing."""
    try:
        meta = read_meta(folder_of(config["dataset"]))
    except UserError as error:
        meta = None
        say(str(error))
    if config["vocab_size"] is None:
        guess = VOCAB_SIZE.get(config["dataset"], GPT2_VOCAB_SIZE)
        config = config | {"vocab_size": meta["vocab_size"] if meta else guess}
        if not meta and config["init_from"] == "scratch":
            say(f"so its vocabulary is unknown: assuming {config['vocab_size']:,} tokens (--vocab_size=)")
    if config["init_from"] in ("scratch", "resume"):
        shape = GPTConfig(**{k: config[k] for k in MODEL_FIELDS})
    else:
        changes = {name: config[name] for name in FREE if name in given}
        shape = GPTConfig(**config_of(config["init_from"], changes)[1])
        check_weights(shape, config, given)
    n_tokens = meta["files"]["train.bin"]["tokens"] if meta else None
    say(report(shape, config, n_tokens, device, dtype, distributed.world))


# -----------------------------------------------------------------------------
# data and weights


def prepared(dataset: str) -> tuple[str, dict]:
    """(folder, meta) of the data set. Prepares the two Shakespeares if needed, not the others, which take long."""
    by_master(lambda: prepare_shakespeare(dataset))
    folder = folder_of(dataset)
    return folder, read_meta(folder)


def check_weights(theirs: GPTConfig, config: dict, given: dict) -> None:
    """Says which fields of a config file the weights overrule. Raises UserError for one on the command line."""
    for name in (name for name in given if name in MODEL_FIELDS and name not in FREE):
        own, mine = getattr(theirs, name), config[name]
        if own != mine and given[name] == "command line":
            raise UserError(f"--{name}={mine} does not fit {config['init_from']}, which has {name}={own}")
        if own != mine:
            say(f"{config['init_from']}: {name} is {own}, not {mine} as in {given[name]}")


def pretrained_model(config: dict, given: dict, meta: dict) -> GPT:
    """The model with --init_from's weights and with the fields that the user changed; says what that means."""
    name, changes = config["init_from"], {name: config[name] for name in FREE if name in given}
    model = GPT.from_pretrained(name, changes)
    theirs = tokens_of(name) or ({"kind": "gpt2"} if model.config.vocab_size == GPT2_VOCAB_SIZE else None)
    if meta["tokenizer"] != theirs:
        has = "has" if theirs else "may have"
        say(f"{name} {has} other tokens than {config['dataset']}: then the same ids mean other texts to it")
    was = config_of(name, {})[1] if changes else {}
    changes = {k: v for k, v in changes.items() if was.get(k, getattr(GPTConfig, k)) != v}
    swapped = [f"{k}={v}" for k, v in changes.items() if k not in (*TRAINING, "block_size")]
    new = f"; they were trained without {', '.join(swapped)}, so the loss begins higher" if swapped else ""
    say(f"{name}: all of its weights carry over, the optimizer starts anew{new}")
    check_weights(model.config, config, given)
    return model


def check_data(config: dict, model: GPT, meta: dict) -> int | None:
    """The token between documents, with --pack=document, else None. Raises UserError where the data do not fit."""
    n, dataset, pack = model.config.vocab_size, config["dataset"], config["pack"] == "document"
    eot = tokenizer(meta["tokenizer"]).eot if pack else None
    refuse((
        (n < meta["vocab_size"], f"vocab_size={n} is less than the {meta['vocab_size']} tokens of {dataset}"),
        (pack and eot is None, f"--pack=document: {dataset} has no boundaries between documents: leave --pack out"),
    ))  # fmt: skip
    return eot


def use_triton(model: GPT, device: str, dtype: str) -> None:
    """Runs a model's attention by the Triton kernels. Raises UserError if they cannot run here."""
    if not device.startswith("cuda") or dtype == "float16":
        here = f"this runs on {device} in {dtype}: leave --triton out"
        raise UserError(f"--triton: its kernels are for CUDA, in bfloat16 and float32, and {here}")
    optional("triton", "--triton")
    from attention import kernels

    kernels.use(model, ATTENTION[model.config.attention])


@contextmanager
def reading() -> Iterator[None]:
    """Ends this process with a sentence and exit code 2 if its data cannot be read; torchrun ends the others."""
    try:
        yield
    except (UserError, OSError) as error:
        print(f"\n{error}. --init_from=resume goes on from the last checkpoint", file=sys.stderr)
        sys.exit(2)


# -----------------------------------------------------------------------------
# words for the first lines of a run


def attention_in_words(config: GPTConfig, flags: SimpleNamespace) -> str:
    """Which attention, what is special about it in this run, and which tokens its heads see."""
    m = config.resolved()
    name = m.attention
    if m.short_attention not in (None, name) and "L" in m.heads:
        name = f"{m.short_attention} (short heads) and {name} (long heads)"
    attention = f"{'differential ' if m.differential else ''}{name} attention"
    attention += f" in {count(m.n_head // 2, 'pair')} of heads" if m.differential else ""
    attention += ", by its definition" if flags.plain else ", by its Triton kernels" if flags.triton else ""
    if m.dropout and not m.attn_dropout:
        attention += ", no dropout on weights"
    elif m.attn_dropout != m.dropout:
        attention += f", dropout {m.attn_dropout} on weights"
    if m.attn_dropout and linear(replace(config, attn_dropout=0.0)):
        attention += ", quadratic in time because of its dropout (--attn_dropout=0 avoids it)"
    seen = f"a token sees itself and {{}} before it{' in its document' if flags.pack == 'document' else ''}"
    near, far = seen.format(f"the {m.window}"), seen.format("all tokens")
    if m.window == 0:
        near = "a token sees itself alone"
    elif m.window is not None and m.window >= m.block_size - 1:
        near = f"{far} (window {m.window}, block_size {m.block_size})"
    layers = [m.layer_heads(i) for i in range(m.n_layer)]
    letters = layers[0] if len(set(layers)) == 1 else "".join(layers)  # of one layer, if they are alike
    short = letters.count("S")
    if short in (0, len(letters)):
        return f"{attention}; all heads are {'short' if short else 'long'}: {near if short else far}"
    all_of = "all of its document" if flags.pack == "document" else "all"
    return f"{attention}; {short} of {len(letters)} heads are short ({m.heads}): {near}; in long heads {all_of}"


def describe(config: dict, model: GPT, data: dict[str, Tokens], meta: dict, device: str, dtype: str) -> None:
    """Says in six lines what is trained on what, how, and what to look at, before the first step."""
    c, m, world = SimpleNamespace(**config), model.config.resolved(), distributed.world
    T, rows = c.block_size, c.batch_size * c.gradient_accumulation_steps
    micro_steps = math.ceil(rows / world / c.batch_size)
    source = str(meta["source"].get("from"))
    source = source if len(source) <= 40 else f"{source[:20]}...{source[-17:]}"
    named = "block_size vocab_size n_layer n_head n_embd attention short_attention heads window differential dropout"
    named = (*named.split(), "attn_dropout")  # in the other lines
    choices = {k: v for k, v in vars(model.config).items() if k not in named and v != getattr(GPTConfig, k)}
    rate = f"learning rate {c.learning_rate}"
    rate += f" (Muon's {c.muon_lr}, momentum {c.muon_beta})" if c.optimizer == "muon" else ""
    start = decay_start(config)
    decay = f"{c.schedule} decay to {c.min_lr} from step {math.ceil(start or 0)} to {c.lr_decay_iters}"
    look = f"val loss every {count(c.eval_interval, 'step')} (python scripts/plot.py --runs={c.out_dir} draws it)"
    say(
        f"{c.dataset}: {len(data['train']):,} tokens to train on, {len(data['val']):,} to validate; source: {source}\n"
        f"{num_params(model) / 1e6:.2f}M parameters: {count(m.n_layer, 'layer')}, {count(m.n_head, 'head')}, "
        f"{m.n_embd} wide, block_size {m.block_size}, vocabulary {m.vocab_size}; "
        f"unlike GPT-2: {', '.join(f'{k}={v}' for k, v in choices.items()) or 'nothing'}\n"
        f"{attention_in_words(model.config, c)}\n"
        f"dropout {m.dropout}{' (on attention weights too)' if m.dropout and m.dropout == m.attn_dropout else ''}; "
        f"{c.optimizer}, {rate}, {'constant' if start is None else decay}\n"
        f"a step: {count(rows, 'sequence')} x {T} = {count(rows * T, 'token')}; {count(world, 'process')} x "
        f"{count(micro_steps, 'micro-batch')} of {'' if rows == c.batch_size * micro_steps * world else 'up to '}"
        f"{c.batch_size}; {device}, {dtype}{', ' + c.parallel if world > 1 else ''}\n"
        f"look at: {'the losses below; nothing is trained or written' if c.eval_only else look}"
    )


# -----------------------------------------------------------------------------
# around the loop


def compiled(model: torch.nn.Module, try_it: Callable, sharded: bool) -> torch.nn.Module:
    """torch.compile(model), if try_it (a forward and backward pass) works with it; else the model itself."""
    say("compiling the model (a minute or so)...")
    torch._dynamo.config.suppress_errors = distributed.world > 1
    if sharded:  # FSDP2 wraps blocks, DDP the compiled model
        for block in model.transformer.h:
            block.compile()
        return model
    fast = torch.compile(model)
    if distributed.world > 1:  # not tried: what does not compile runs uncompiled, with a warning
        return fast
    try:
        try_it(fast)
    except Exception as error:  # if it is a bug of the model, the model itself will show it
        say(f"torch.compile does not work here, going on without it ({type(error).__name__}: {first_line(error)})")
        fast = model
    model.zero_grad(set_to_none=True)
    return fast


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

    def of_any_process(self) -> int:
        """The signal that stops the run, or 0; SIGTERM if another process got it. Every process must call this."""
        if not summed(torch.tensor(float(self.number))):  # on the CPU, by gloo: no GPU is waited for
            return 0
        return self.number or signal.SIGTERM


def print_sample(config: dict, model: GPT, val: Tokens, log: Log, amp: object, device: str) -> None:
    """Prints and logs text from the trained model, after a line end or, without one, after val's first token."""
    meta = val.meta["tokenizer"]
    try:
        tok = tokenizer(meta)
        prompt = tok.start("\n") if "\n" in meta.get("vocab", "\n") else val.ids[:1].tolist()
        with amp, torch.compiler.set_stance("force_eager"):
            sampling = {"vocab_size": tok.n_vocab, "seed": config["seed"]}
            prompt = torch.tensor([prompt], device=device)
            ids = model.eval().generate(prompt, config["sample_tokens"], 0.8, **sampling)
    except (UserError, OSError) as error:  # the run itself is done and saved
        say(f"\nno sample can be made: {error}")
        return
    text = tok.decode(ids[0].tolist())
    log.sample(text)
    say(f"\na sample (more of them: python sample.py --out_dir={config['out_dir']}):\n{text}")


def leave(config: dict, it: int, stop: int, unsaved: OSError | None) -> NoReturn:
    """Ends the run: exit code 2 if its last save failed, 128 + the signal that stopped it, or 0."""
    if stop and not unsaved:
        resume = f"to go on, add --init_from=resume --out_dir={config['out_dir']}"
        say(f"\nstopped by signal after {count(it, 'step')}; {config['out_dir']} is saved: {resume}")
    code = 2 if unsaved else 128 + stop if stop else 0
    if distributed.world > 1:
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        atexit.register(os._exit, code)  # at once: a thread of PyTorch that still runs could abort the process
    sys.exit(code)
