"""What is said of a run while it trains: log.jsonl, lines in the terminal, wandb."""

import collections
import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from configurator import NotInstalled, UserError
from text.files import replace
from training import checkpoint, distributed
from training.distributed import by_master, say
from training.estimate import flops, peak_flops


@dataclass
class Outcome:
    """What a step has been like, the same on every process."""

    step: int
    lr: float
    loss: float  # the mean over the global batch, in nats
    norm: float  # of the gradient, before it was clipped
    stop: bool  # a process was asked to stop
    failed: bool  # a process cannot go on: the step is not made
    largest: list[float] | None  # of each layer the largest attention score (--log_logits)


class Log:
    """log.jsonl, the terminal and wandb. Opening it claims out_dir for this run; an older run there is set aside.

    When a run is resumed, the rows after its checkpoint are deleted: those steps are made again.
    """

    def __init__(self, run: object, config: dict, model: torch.nn.Module):
        self.c = SimpleNamespace(**config)
        self.terminal = sys.stdout.isatty()
        self.peak = peak_flops(run.device, run.dtype)
        self.flops = flops(model)
        self.tokens_per_step = run.rows * model.config.block_size
        self.path = os.path.join(self.c.out_dir, checkpoint.LOG)
        self.file, self.wandb = None, None
        self.wandb_id = run.saved.get("wandb_id") if run.saved else None  # a resumed run goes on in the same place
        self.recent = collections.deque(maxlen=100)  # losses
        self.high = 0  # losses in a row that were too high
        if self.c.wandb_log and distributed.master and not self.c.eval_only:
            self.open_wandb(config)
        if not self.c.eval_only:
            by_master(lambda: self.open(run.start))
        self.since, self.since_step = time.perf_counter(), run.start  # of the last step that was printed

    def open_wandb(self, config: dict) -> None:
        try:
            import wandb
        except ImportError:
            raise NotInstalled("--wandb_log needs wandb: pip install wandb") from None
        c = self.c
        try:
            wandb.init(project=c.wandb_project, name=c.wandb_run_name, config=config, id=self.wandb_id, resume="allow")
        except wandb.Error as error:
            raise UserError(f"wandb: {error} (WANDB_MODE=offline needs no account)") from None
        self.wandb, self.wandb_id = wandb, wandb.run.id

    def open(self, start: int) -> None:
        os.makedirs(self.c.out_dir, exist_ok=True)
        self.file = open(self.path, "a+")
        checkpoint.claim(self.file)
        self.file.seek(0)
        kept = [line for line in self.file if step_of(line) < start]
        if self.c.init_from != "resume":
            kept = []
            checkpoint.set_aside(self.c.out_dir)
        checkpoint.tidy(self.c.out_dir)
        replace(self.path, "".join(kept).encode())
        self.file = open(self.path, "a", buffering=1)
        checkpoint.claim(self.file)

    def write(self, row: dict, line: str, passing: bool = False) -> None:
        """A row to log.jsonl and wandb, and its line; in a terminal the next line overwrites a passing one."""
        if self.file:
            try:
                self.file.write(json.dumps(row) + "\n")
            except OSError as error:  # a full disk ends no run
                say(f"\ncannot write {self.path} ({error}): going on without that line")
        if self.wandb:
            lists = {f"{k}/{i}": x for k, xs in row.items() if isinstance(xs, list) for i, x in enumerate(xs)}
            plain = {k: x for k, x in row.items() if not isinstance(x, list)}
            self.wandb.log(plain | lists, step=row["iter"])
        if self.terminal:
            line = "\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K"
        say(line, end="" if self.terminal and passing else "\n")

    def evaluation(self, step: int, losses: dict[str, float]) -> None:
        row = {"iter": step, "train_loss": losses["train"], "val_loss": losses["val"]}
        self.write(row, f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")

    def step(self, outcome: Outcome) -> None:
        """Logs a step every log_interval steps, and warns of losses that stay high (--loss_spike)."""
        c, o = self.c, outcome
        self.watch(o)
        if o.step % c.log_interval or not distributed.master:
            return
        seconds = (time.perf_counter() - self.since) / (o.step + 1 - self.since_step)
        speed = self.tokens_per_step / seconds
        row = {"iter": o.step, "loss": o.loss, "lr": o.lr, "norm": o.norm, "ms": seconds * 1e3, "tokens_per_s": speed}
        line = f"iter {o.step}: loss {o.loss:.4f}, time {seconds * 1e3:.2f}ms, {speed:,.0f} tok/s, norm {o.norm:.3f}"
        if o.largest:
            row["max_logit"] = o.largest
            line += f", largest logit {max(o.largest):.2f}"
        if self.peak:
            row["mfu"] = self.flops * speed / (self.peak * distributed.world)
            line += f", mfu {row['mfu'] * 100:.2f}%"
        if self.terminal:
            line += f", {(c.max_iters - o.step) * seconds / 60:.1f} min left"
        self.write(row, line, passing=True)
        self.since, self.since_step = time.perf_counter(), o.step + 1

    def watch(self, outcome: Outcome) -> None:
        spike, recent = self.c.loss_spike, self.recent
        if spike and len(recent) == recent.maxlen:
            self.high = self.high + 1 if outcome.loss > spike * sum(recent) / len(recent) else 0
            if self.high == 4:
                above = f"has been above {spike} times its mean for 4 steps"
                say(f"\nstep {outcome.step}: the loss, {outcome.loss:.4f}, {above}")
        recent.append(outcome.loss)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it the clock of the step's times stands still."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began


def step_of(line: str) -> float:
    """The step of a line of log.jsonl; infinity for a line that was cut off."""
    try:
        return json.loads(line)["iter"]
    except (ValueError, KeyError, TypeError):
        return math.inf
