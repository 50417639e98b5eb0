"""What a run of train.py needs around its loop, in the order in which train.py uses it.

Run: what to resume, checks of the flags, processes, device; then data, model and the first lines; then the model and
the optimizers as they are trained. Agreement: what the processes agree on after each step. finish: the end.
"""

import atexit
import collections
import importlib.util
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import NoReturn

import torch

from attention.forms import linear
from configurator import fail, pick_device
from errors import NotInstalled, UserError, first_line, refuse
from model import ATTENTION, GPT, GPTConfig
from text.dataset import Tokens, folder_of, prepare_shakespeare, read_meta
from text.tokenizers import GPT2_VOCAB_SIZE, tokenizer
from training import checkpoint, distributed
from training.distributed import by_all, by_master, connect, count, gathered, launch, say, summed
from training.estimate import VOCAB_SIZE, num_params, report
from training.log import Log, Outcome
from training.pretrained import FREE, TRAINING, config_of, tokens_of

MODEL_FIELDS = [field.name for field in fields(GPTConfig)]
# what a resumed run may change
RESHAPABLE = ("dropout", "attn_dropout", "label_smoothing", "z_loss", "activation_checkpointing")
PASSING = ("init_from", "out_dir", "eval_only", "dry_run", "allow_other_data", "plain")  # flags for one call only


class Run:
    """What is decided before the model is made: checks the flags, joins the other processes, picks the device.

    config: train.py's flags and GPTConfig's fields by name; a resumed run's settings go into it. given: for each flag
    that was set, "command line" or the config file. A dry run prints its report and ends here. Raises UserError.
    """

    def __init__(self, config: dict, given: dict):
        self.config, self.given = config, given
        self.saved_path, self.launches = self.found_to_resume()  # launches: names of the torchruns of all machines
        self.saved = None  # the checkpoint to go on from
        if self.saved_path:
            self.saved = checkpoint.load(self.saved_path, verify=False, lazily=True)
            again = "resume" if config["init_from"] == "resume" else "started again by torchrun"
            say(f"{again}: going on from {self.saved_path}, step {self.saved['iter_num']}")
            config["init_from"] = "resume"
            self.take_over(self.saved)
        self.start = self.saved["iter_num"] if self.saved else 0  # the step that the run begins with
        self.free = {name: config[name] for name in FREE if name in given}  # fields to change in a pretrained model
        self.flags = c = SimpleNamespace(**config)
        self.rows = c.batch_size * c.gradient_accumulation_steps  # sequences of the global batch
        self.decays = c.decay_lr and c.schedule != "constant"  # whether the learning rate goes down in the end
        refuse(wrong_flags(self))
        world = distributed.world
        self.micro_steps = math.ceil(self.rows / world / c.batch_size)  # micro-batches of this process, per step
        wsd_from = max(c.warmup_iters, c.lr_decay_iters * (1 - c.decay_share))
        self.decay_from = c.warmup_iters if c.schedule == "cosine" else wsd_from  # the step from which it goes down
        device, self.dtype, self.amp = pick_device(c.device, c.dtype)
        self.device = f"cuda:{distributed.local_rank}" if device == "cuda" else device
        self.device_type = device.split(":")[0]
        if self.device_type == "cuda":
            torch.cuda.set_device(self.device)
        self.sharded = c.parallel == "fsdp" and world > 1  # whether each process has a share of the model
        if c.parallel == "fsdp" and not self.sharded:
            say("one process: --parallel=fsdp changes nothing")
        torch.set_float32_matmul_precision("high" if c.tf32 else "highest")
        if c.dry_run:
            say(self.dry_run())
            sys.exit()
        connect(c.backend)
        torch.manual_seed(c.seed)  # the same weights everywhere
        torch.set_flush_denormal(True)  # on a CPU tiny attention weights, as ALiBi's, would cost several times a zero's

    def found_to_resume(self) -> tuple[str | None, list]:
        """(path of the newest checkpoint, if the run goes on from it; names of the torchruns of all machines)."""
        resume = self.config["init_from"] == "resume"
        if not resume and (not launch() or self.config["eval_only"]):  # torchrun starts a process again after a crash
            return None, [launch()]
        connect(self.config["backend"])
        launches = sorted({name for name in gathered(launch()) if name})  # a machine may have been replaced

        def newest() -> str | None:
            try:
                path, theirs, skipped = checkpoint.newest(self.config["out_dir"])
            except UserError:
                if resume:
                    raise
                return None
            if not resume and not set(launches) & set(theirs or []):
                return None  # another torchrun wrote it
            for why in skipped:
                say(f"resume: skipping a checkpoint: {why}")
            return path

        return by_master(newest), launches

    def take_over(self, saved: dict) -> None:
        """Takes the saved run's settings over into config, except for those on the command line, and says so."""
        config, given = self.config, self.given
        theirs = {k: v for k, v in saved["config"].items() if k in config and k not in PASSING}
        model_args = {field.name: field.default for field in fields(GPTConfig)} | saved["model_args"]
        free = RESHAPABLE if model_args["position"] == "learned" else (*RESHAPABLE, "block_size")
        theirs |= {k: v for k, v in model_args.items() if k not in free}
        for key, value in theirs.items():
            mine = config[key]
            if key not in given or mine == value:
                config[key] = value
            elif given[key] != "command line":
                config[key] = value
                say(f"resume: keeping {key}={value}. {given[key]} has {mine}: to use it, add --{key}={mine}")
            elif key in MODEL_FIELDS and key not in free:
                raise UserError(f"--{key}={mine} does not fit the saved model, which has {key}={value}")
            else:
                say(f"resume: {key} was {value}, now {mine}")

    def dry_run(self) -> str:
        """The report of --dry_run. It loads no weights and prepares no data: it estimates what is missing."""
        meta, config = None, self.config
        try:
            meta = read_meta(folder_of(config["dataset"]))
        except UserError as error:
            say(str(error))
        if config["vocab_size"] is None:
            config["vocab_size"] = meta["vocab_size"] if meta else VOCAB_SIZE.get(config["dataset"], GPT2_VOCAB_SIZE)
            if not meta and config["init_from"] == "scratch":
                say(f"so its vocabulary is unknown: assuming {config['vocab_size']:,} tokens (--vocab_size=)")
        if config["init_from"] in ("scratch", "resume"):
            shape = GPTConfig(**{k: config[k] for k in MODEL_FIELDS})
        else:
            shape = GPTConfig(**config_of(config["init_from"], self.free)[1])
            self.check_weights(shape)
        n_tokens = meta["files"]["train.bin"]["tokens"] if meta else None
        return report(shape, config, n_tokens, self.device, self.dtype, distributed.world)

    def prepared(self) -> tuple[str, dict]:
        """(folder, meta) of the data set. Prepares the two Shakespeares if needed, not the others, which take long."""
        if distributed.master:
            prepare_shakespeare(self.flags.dataset)
        summed(torch.zeros(1))  # the other processes wait here
        folder = folder_of(self.flags.dataset)
        return folder, read_meta(folder)

    def check_weights(self, theirs: GPTConfig) -> None:
        """Prints which fields of a config file the weights overrule. Raises UserError for one on the command line."""
        config, given = self.config, self.given
        for name in (name for name in given if name in MODEL_FIELDS and name not in FREE):
            own, mine = getattr(theirs, name), config[name]
            if own != mine and given[name] == "command line":
                raise UserError(f"--{name}={mine} does not fit {config['init_from']}, which has {name}={own}")
            if own != mine:
                say(f"{config['init_from']}: {name} is {own}, not {mine} as in {given[name]}")

    def pretrained_model(self, meta: dict) -> GPT:
        """The model with --init_from's weights and with the fields that the user changed; prints what that means."""
        name, dataset = self.flags.init_from, self.flags.dataset
        model = GPT.from_pretrained(name, self.free)
        theirs = tokens_of(name) or ({"kind": "gpt2"} if model.config.vocab_size == GPT2_VOCAB_SIZE else None)
        if meta["tokenizer"] != theirs:
            other = "has" if theirs else "may have"
            say(f"{name} {other} other tokens than {dataset}: then the same ids mean other texts to it")
        was = config_of(name, {})[1] if self.free else {}
        changed = {k: v for k, v in self.free.items() if was.get(k, getattr(GPTConfig, k)) != v}
        swapped = [f"{k}={v}" for k, v in changed.items() if k not in (*TRAINING, "block_size")]
        new = f"; they were trained without {', '.join(swapped)}, so the loss begins higher" if swapped else ""
        say(f"{name}: all of its weights carry over, the optimizer starts anew{new}")
        self.check_weights(model.config)
        return model

    def check_data(self, model: GPT, meta: dict) -> int | None:
        """The token between documents, with --pack=document, else None. Raises UserError where the data do not fit."""
        c, n_vocab = self.flags, model.config.vocab_size
        if n_vocab < meta["vocab_size"]:
            raise UserError(f"vocab_size={n_vocab} is less than the {meta['vocab_size']} tokens of {c.dataset}")
        eot = tokenizer(meta["tokenizer"]).eot if c.pack == "document" else None
        if c.pack == "document" and eot is None:
            raise UserError(f"--pack=document: {c.dataset} has no boundaries between documents: leave --pack out")
        return eot

    def use_triton(self, model: GPT) -> None:
        """Runs a model's attention by the Triton kernels. Raises UserError if they cannot run here."""
        if self.device_type != "cuda" or self.dtype == "float16":
            here = f"this runs on {self.device_type} in {self.dtype}: leave --triton out"
            raise UserError(f"--triton: its kernels are for CUDA, in bfloat16 and float32, and {here}")
        if importlib.util.find_spec("triton") is None:
            raise NotInstalled("Triton's kernels need Triton: pip install triton")
        from attention import kernels

        kernels.use(model, ATTENTION[model.config.attention])

    def describe(self, model: GPT, data: dict, meta: dict) -> None:
        """Says in six lines what is trained on what, how, and what to look at, before the first step."""
        c, asked, world = self.flags, model.config, distributed.world
        m, T = asked.resolved(), data["train"].block_size
        self.tokens_per_step = self.rows * T
        named = (
            "block_size vocab_size n_layer n_head n_embd attention short_attention heads window differential".split()
        )
        named += ["dropout", "attn_dropout"]
        choices = {k: v for k, v in vars(asked).items() if k not in named and v != getattr(GPTConfig, k)}
        rate = f"learning rate {c.learning_rate}"
        rate += f" (Muon's {c.muon_lr}, momentum {c.muon_beta})" if c.optimizer == "muon" else ""
        if self.decays:
            rate += f", {c.schedule} decay to {c.min_lr} from step {math.ceil(self.decay_from)} to {c.lr_decay_iters}"
        else:
            rate += ", constant"
        up_to = "" if self.rows == c.batch_size * self.micro_steps * world else "up to "
        look = f"val loss every {count(c.eval_interval, 'step')} (python scripts/plot.py --runs={c.out_dir} draws it)"
        say(
            f"{c.dataset}: {len(data['train']):,} tokens to train on, {len(data['val']):,} to validate; "
            f"source: {shortened(str(meta['source'].get('from')), 40)}\n"
            f"{num_params(model) / 1e6:.2f}M parameters: {count(m.n_layer, 'layer')}, {count(m.n_head, 'head')}, "
            f"{m.n_embd} wide, block_size {m.block_size}, vocabulary {m.vocab_size}; "
            f"unlike GPT-2: {', '.join(f'{k}={v}' for k, v in choices.items()) or 'nothing'}\n"
            f"{attention_in_words(asked, c)}\n"
            f"dropout {m.dropout}{' (on attention weights too)' if m.dropout and m.dropout == m.attn_dropout else ''}; "
            f"{c.optimizer}, {rate}\n"
            f"a step: {count(self.rows, 'sequence')} x {T} = {count(self.tokens_per_step, 'token')}; "
            f"{count(world, 'process')} x {count(self.micro_steps, 'micro-batch')} of {up_to}{c.batch_size}; "
            f"{self.device}, {self.dtype}{', ' + c.parallel if world > 1 else ''}\n"
            f"look at: {'the losses below; nothing is trained or written' if c.eval_only else look}"
        )

    def compiled(self, model: torch.nn.Module, try_it: Callable) -> torch.nn.Module:
        """torch.compile(model), if try_it (a forward and backward pass) works with it; else the model itself."""
        say("compiling the model (a minute or so)...")
        torch._dynamo.config.suppress_errors = distributed.world > 1
        if self.sharded:  # FSDP2 wraps blocks, DDP the compiled model
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

    def restore(self, meta: dict, optimizers: list, scaler: torch.amp.GradScaler) -> float:
        """Puts a saved run's state into optimizers and scaler; returns its best loss. UserError if it does not fit."""
        saved, c = self.saved, self.flags
        if saved is None:
            return math.inf
        if self.start >= c.max_iters and not c.eval_only:
            reached = f"the run is at step {self.start} already, and max_iters={c.max_iters}"
            say(f"resume: {reached}. To go on, give a larger --max_iters")
        if saved.get("tokenizer", meta["tokenizer"]) != meta["tokenizer"]:
            raise UserError(f"{c.dataset} was prepared again, and has another vocabulary than the saved run's")
        checksums = {name: entry["sha256"] for name, entry in meta["files"].items()}
        other = [name for name, checksum in saved.get("data", {}).items() if checksums.get(name) != checksum]
        if other and not c.allow_other_data:
            change = f"{' and '.join(other)} of {c.dataset} changed after the saved run"
            raise UserError(f"{change}: --allow_other_data goes on with the new data")
        if "optimizer" not in saved:
            raise UserError(f"the checkpoint in {c.out_dir} has no optimizer state, so training cannot go on from it")
        if (theirs := saved["config"].get("optimizer", "adamw")) != c.optimizer:
            raise UserError(f"--optimizer={c.optimizer} cannot go on: the saved run used --optimizer={theirs}")
        states = checkpoint.optimizer_states(self.saved_path, saved, optimizers)
        for o, state in zip(optimizers, states, strict=True):
            for theirs, mine in zip(state["param_groups"], o.param_groups, strict=True):
                theirs |= {k: v for k, v in mine.items() if k != "params"}  # a flag wins over what was saved
            o.load_state_dict(state)
        scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())  # empty except in float16
        config = {"pack": "none"} | saved["config"]
        windows = ("dataset", "eval_iters", "batch_size", "block_size", "pack")
        if saved.get("data") and not other and all(self.config[name] == config.get(name) for name in windows):
            return saved["best_val_loss"]
        say("resume: the evaluation uses other windows now, so the best validation loss starts anew")
        return math.inf

    def keeper(self) -> checkpoint.Keeper:
        """The writer of this run's checkpoints. It keeps the latest one only if the run goes on from that one."""
        c = self.flags
        background = self.device_type == "cuda" if c.save_in_background is None else c.save_in_background
        latest = self.saved_path and os.path.basename(self.saved_path) in (checkpoint.LATEST, "ckpt")
        step = self.start if latest else None
        return checkpoint.Keeper(c.out_dir, c.keep_checkpoints, background, self.sharded, step=step)

    def print_sample(self, model: GPT, meta: dict, val: Tokens, log: Log) -> None:
        """Prints text from the trained model, after a line end or, without one, after val's first token or prompt."""
        c = self.flags
        if not c.sample_tokens or c.eval_only or not (distributed.master or self.sharded):
            return

        def begin_with() -> tuple[list[int], int]:
            tok = tokenizer(meta["tokenizer"])
            newline = "\n" in meta["tokenizer"].get("vocab", "\n")
            return tok.start("\n") if newline else val.ids[:1].tolist(), tok.n_vocab

        try:
            ids, n_vocab = by_master(begin_with) if self.sharded else begin_with()
            with self.amp, torch.compiler.set_stance("force_eager"):
                prompt = torch.tensor([ids], device=self.device)
                ids = model.eval().generate(prompt, c.sample_tokens, 0.8, vocab_size=n_vocab, seed=c.seed)
            if distributed.master:
                text = tokenizer(meta["tokenizer"]).decode(ids[0].tolist())
                log.sample(text)
                say(f"\na sample (more of them: python sample.py --out_dir={c.out_dir}):\n{text}")
        except (UserError, OSError) as error:  # the run itself is done and saved
            say(f"\nno sample can be made: {error}")


# -----------------------------------------------------------------------------
# words for the first lines of a run


def shortened(text: str, most: int) -> str:
    """The text, without its middle if it has more than so many characters."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 - most // 2 :]}"


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


# -----------------------------------------------------------------------------
# which flags fit, and what the processes agree on


# fmt: off
def wrong_flags(run: Run) -> Iterator[tuple[bool, str]]:
    """Yields (whether a rule is broken, the message for it). A rule may assume that all rules before it hold."""
    c, world = run.flags, distributed.world
    for name in "batch_size gradient_accumulation_steps eval_interval log_interval eval_iters keep_checkpoints".split():
        yield getattr(c, name) < 1, f"--{name}={getattr(c, name)} must be at least 1"
        yield getattr(c, name) > 2**31, f"--{name}={getattr(c, name)} is too large"
    or_zero = "seed max_iters save_interval sample_tokens warmup_iters min_lr weight_decay adam_eps grad_clip"
    for name in (*or_zero.split(), "loss_spike"):
        yield getattr(c, name) < 0, f"--{name}={getattr(c, name)} must not be negative"
    yield (run.decays and c.lr_decay_iters <= c.warmup_iters,
           f"lr_decay_iters={c.lr_decay_iters} must be greater than warmup_iters={c.warmup_iters}: the "
           f"learning rate decays between the two (--schedule=constant has no decay)")
    for name in ("learning_rate", "muon_lr"):
        yield getattr(c, name) <= 0, f"--{name}={getattr(c, name)} must be positive"
    for name in ("beta1", "beta2", "muon_beta"):
        yield not 0 <= getattr(c, name) < 1, f"--{name}={getattr(c, name)} must be in [0, 1)"
    yield not 0 < c.decay_share <= 1, f"--decay_share={c.decay_share} must be above 0 and at most 1"
    for name, used, by in (
        ("adam_eps", c.optimizer != "lamb", "another --optimizer than lamb"),
        ("muon_lr", c.optimizer == "muon", "--optimizer=muon"),
        ("muon_beta", c.optimizer == "muon", "--optimizer=muon"),
        ("decay_share", c.decay_lr and c.schedule == "wsd", "--schedule=wsd"),
        ("schedule", c.decay_lr, "--decay_lr=True"),
        ("min_lr", run.decays, "a schedule that decays"),
    ):
        yield run.given.get(name) == "command line" and not used, f"--{name} is used only with {by}"
    yield (run.decays and c.min_lr > c.learning_rate,
           f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}: the decay would go up")
    yield (bool(c.save_in_background) and not c.dry_run and c.parallel == "fsdp" and world > 1,
           "--save_in_background does not work with --parallel=fsdp: all processes write together, and training waits")
    yield c.plain and c.triton, "--plain runs the definitions of model.py, --triton kernels: leave one out"
    steps = c.gradient_accumulation_steps
    more = next(n for n in range(steps, steps + world) if n * c.batch_size % world == 0)
    yield (run.rows % world != 0,
           f"{run.rows} sequences (gradient_accumulation_steps={steps} times batch_size={c.batch_size}) cannot be "
           f"divided among {world} processes: use --gradient_accumulation_steps={more}, "
           f"or start {' or '.join(str(n) for n in range(1, 129) if run.rows % n == 0)} processes")
# fmt: on


def read_by_all(batches: Iterator) -> list:
    """The batches of an evaluation. If a process cannot read them, all raise the error, before any computes."""
    read = []
    by_all(lambda: read.extend(batches))
    return read


class Agreement:
    """What the processes agree on after each step: its outcome, and whether one was asked to stop or cannot go on.

    lag: how many steps later the outcome of a step is read; with 1 the host does not wait for a GPU. listen: whether
    SIGINT and SIGTERM stop the run at the end of the step.
    """

    def __init__(self, log: Log, keeper: checkpoint.Keeper, scaler: torch.amp.GradScaler, lag: int, listen: bool):
        self.log, self.keeper, self.scaler, self.lag = log, keeper, scaler, lag
        self.waiting = collections.deque()  # outcomes on their way from the device
        self.outcome: Outcome | None = None  # the newest that was read
        self.problem = ""  # why this process cannot go on; the others do not know it yet
        self.stop = self.failed = False  # agreed by all: a process was asked to stop; one cannot go on
        self.signal, self.asked_at = 0, 0.0
        if listen:
            signal.signal(signal.SIGINT, self.ask)
            signal.signal(signal.SIGTERM, self.ask)

    def ask(self, number: int, frame: object) -> None:
        """Handles a signal. A second one stops the run at once, unless it is torchrun's copy of the first."""
        if self.signal and time.monotonic() - self.asked_at > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.signal:
            self.signal, self.asked_at = number, time.monotonic()
            if distributed.master:  # not print: the signal may have interrupted a print
                os.write(2, b"\nstopping after this step (a second signal stops at once)\n")

    def stops_now(self) -> bool:
        """Whether any process was asked to stop; for use between two steps. Every process must call it."""
        self.stop = self.stop or bool(summed(torch.tensor(float(self.signal != 0))))
        return self.stop

    def fail(self, problem: str) -> None:
        """Notes a problem that every process knows of; only the first process will print it."""
        self.failed, self.problem = True, problem if distributed.master else ""

    def put(self, step: int, lr: float, loss, norm, largest: list | None) -> torch.Tensor:
        """Sends [loss, gradient norm, stop, failed] of all processes on its way, and returns it, on the device."""
        flags = [torch.full((), float(flag), device=loss.device) for flag in (self.signal != 0, self.problem != "")]
        status = summed(torch.stack((loss / distributed.world, norm / distributed.world, *flags)))
        here, arrived = status, None
        if self.lag:
            here, arrived = status.to("cpu", non_blocking=True), torch.cuda.Event()
            arrived.record()
        self.waiting.append((step, lr, here, arrived, largest))
        return status

    def settle(self, left: int) -> None:
        """Reads the outcomes of all but the last `left` steps and logs them; ends the run where it has diverged."""
        while len(self.waiting) > left:
            step, lr, status, arrived, largest = self.waiting.popleft()
            if arrived is not None:
                arrived.synchronize()
            loss, norm, stopping, failing = status.tolist()
            self.outcome = Outcome(step, lr, loss, norm, stopping > 0, failing > 0, largest)
            self.stop = self.stop or self.outcome.stop
            if self.outcome.failed:
                self.failed = True
                self.waiting.clear()
                return
            smaller_scale_may_help = self.scaler.is_enabled() and self.scaler.get_scale() >= 1
            if not math.isfinite(loss) or not (math.isfinite(norm) or smaller_scale_may_help):
                diverged(step, f"the loss is {loss} and the gradient norm {norm}", self.keeper)
            self.log.step(self.outcome)

    def makes_step(self) -> bool:
        """Whether the optimizers make a step: not after a failure, nor if float16's gradients overflowed."""
        return not self.failed and not (self.scaler.is_enabled() and not math.isfinite(self.outcome.norm))


def diverged(step: int, what: object, keeper: checkpoint.Keeper) -> NoReturn:
    """Ends the run because a loss or other values are not finite."""
    advice = "No checkpoint was changed; a smaller --learning_rate, --grad_clip or --dtype=float32 may help"
    say(f"\nstep {step}: {what}: stopped before the optimizer used it. {advice}", file=sys.stderr)
    keeper.wait()
    sys.exit(1)


def finish(run: Run, agreement: Agreement, it: int, seconds: float, model: GPT, meta: dict, val: Tokens) -> NoReturn:
    """Prints how the run ended, and a sample. Exits with 0, 2 after a failure, 128 + the signal after a stop."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    c, keeper = run.flags, agreement.keeper
    keeper.wait()
    if not c.eval_only:
        say(f"{count(it - run.start, 'step')} in {seconds:.1f} s, without the imports")
    if keeper.error:
        fail(keeper.error)
    if agreement.failed:
        if agreement.problem or distributed.master:
            kept = f"; {c.out_dir} is saved" if it > run.start and not c.eval_only else ""
            print(f"\nstep {it}: {agreement.problem or 'another process cannot go on'}{kept}", file=sys.stderr)
    elif agreement.stop:
        resume = f"to go on, add --init_from=resume --out_dir={c.out_dir}"
        say(f"\nstopped by signal after {count(it, 'step')}; {c.out_dir} is saved: {resume}")
    else:
        run.print_sample(model, meta, val, agreement.log)
    agreement.log.close()
    stopped = 128 + (agreement.signal or signal.SIGTERM)  # another process may have got the signal
    code = 2 if agreement.failed else stopped if agreement.stop else 0
    if distributed.world > 1:
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        atexit.register(os._exit, code)  # at once: a thread of PyTorch that still runs could abort the process
    sys.exit(code)
