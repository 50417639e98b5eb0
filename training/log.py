"""The log of a run while it trains: log.jsonl, lines in the terminal, Weights & Biases, TensorBoard."""

import collections
import contextlib
import html
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from errors import UserError, optional
from text.files import replace
from training import checkpoint, distributed
from training.distributed import by_master, say
from training.estimate import flops, peak_flops


class Outcome(NamedTuple):
    """The result of a step, the same on every process."""

    step: int
    lr: float
    loss: float  # the mean over the global batch, in nats
    norm: float  # of the gradient, before it was clipped
    stop: bool  # a process was asked to stop
    failed: bool  # a process cannot go on: the step is not made
    largest: list[float] | None  # of each layer the largest attention score (--log_logits)


class Log:
    """log.jsonl, the terminal, wandb and TensorBoard. Opening it claims out_dir; an older run there is set aside."""

    def __init__(self, run: object, model: torch.nn.Module):
        self.c = c = run.flags
        self.terminal = sys.stdout.isatty()
        self.peak = peak_flops(run.device, run.dtype)
        self.flops = flops(model)
        self.tokens_per_step = run.tokens_per_step
        self.path = os.path.join(c.out_dir, checkpoint.LOG)
        self.file, self.wandb, self.board = None, None, None
        self.wandb_id = run.saved.get("wandb_id") if run.saved else None  # a resumed run goes on in the same place
        self.recent = collections.deque(maxlen=100)  # losses
        self.high = 0  # losses in a row that were too high
        if c.wandb_log and distributed.master and not c.eval_only:
            self.wandb = optional("wandb", "--wandb_log")
            project, name = c.wandb_project, c.wandb_run_name
            try:
                self.wandb.init(project=project, name=name, config=run.config, id=self.wandb_id, resume="allow")
            except self.wandb.Error as error:
                raise UserError(f"wandb: {error} (WANDB_MODE=offline needs no account)") from None
            self.wandb_id = self.wandb.run.id
        if c.tensorboard:
            optional("tensorboard", "--tensorboard")
        if not c.eval_only:
            by_master(lambda: self.open(run.start))
            if c.tensorboard and distributed.master:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(os.path.join(c.out_dir, checkpoint.BOARD), purge_step=run.start)
                self.board.add_text("settings", "".join(f"    {k} = {v!r}\n" for k, v in run.config.items()))
        self.since, self.since_step = time.perf_counter(), run.start  # of the last step that was printed

    def open(self, start: int) -> None:
        os.makedirs(self.c.out_dir, exist_ok=True)
        self.file = open(self.path, "a+")
        checkpoint.claim(self.file)
        self.file.seek(0)
        # a resumed run makes the steps after its checkpoint again; the last line may have been cut off
        steps = ((line, re.fullmatch(r'\{"iter": (\d+)[^{]*\}\n', line)) for line in self.file)
        kept = [line for line, step in steps if step and int(step[1]) < start]
        if self.c.init_from != "resume":  # then start is 0, and nothing is kept
            checkpoint.set_aside(self.c.out_dir)
        checkpoint.tidy(self.c.out_dir)
        replace(self.path, "".join(kept).encode())
        self.file = open(self.path, "a", buffering=1)
        checkpoint.claim(self.file)

    def write(self, row: dict, line: str, passing: bool = False) -> None:
        """A row to the logs, and its line to the terminal, where the next line overwrites a passing one."""
        if self.file:
            try:
                self.file.write(json.dumps(row) + "\n")
            except OSError as error:  # a full disk ends no run
                say(f"\ncannot write {self.path} ({error}): training continues without this line of the log")
        step, layers = row["iter"], {f"max_logit/{i}": x for i, x in enumerate(row.get("max_logit", []))}
        values = {name: x for name, x in row.items() if name not in ("iter", "max_logit")} | layers
        if self.wandb:
            self.wandb.log(values | {"iter": step}, step=step)
        if self.board:
            for name, x in values.items():
                self.board.add_scalar(name, x, step)
        if self.terminal:
            line = "\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K"
        say(line, end="" if self.terminal and passing else "\n")

    def evaluation(self, step: int, losses: dict[str, float]) -> None:
        row = {"iter": step, "train_loss": losses["train"], "val_loss": losses["val"]}
        self.write(row, f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")

    def step(self, outcome: Outcome) -> None:
        """Logs a step every log_interval steps, and warns of losses that stay high (--loss_spike)."""
        c, recent = self.c, self.recent
        step, lr, loss, norm, _, _, largest = outcome
        if c.loss_spike and len(recent) == recent.maxlen:
            self.high = self.high + 1 if loss > c.loss_spike * sum(recent) / len(recent) else 0
            if self.high == 4:
                mean = f"{c.loss_spike} times the mean of the last {recent.maxlen}"
                say(f"\nstep {step}: the loss is {loss:.4f}: 4 losses in a row were above {mean}")
        recent.append(loss)
        if step % c.log_interval or not distributed.master:
            return
        seconds = (time.perf_counter() - self.since) / (step + 1 - self.since_step)
        speed = self.tokens_per_step / seconds
        row = {"iter": step, "loss": loss, "lr": lr, "norm": norm, "ms": seconds * 1e3, "tokens_per_s": speed}
        line = f"iter {step}: loss {loss:.4f}, time {seconds * 1e3:.2f}ms, {speed:,.0f} tok/s, norm {norm:.3f}"
        if largest:
            row["max_logit"] = largest
            line += f", largest logit {max(largest):.2f}"
        if self.peak:
            row["mfu"] = self.flops * speed / (self.peak * distributed.world)
            line += f", mfu {row['mfu'] * 100:.2f}%"
        if self.terminal:
            line += f", {(c.max_iters - step) * seconds / 60:.1f} min left"
        self.write(row, line, passing=True)
        self.since, self.since_step = time.perf_counter(), step + 1

    def sample(self, text: str) -> None:
        """The text that the model writes at the end, to wandb and TensorBoard."""
        if self.wandb:
            self.wandb.log({"sample": self.wandb.Html(f"<pre>{html.escape(text)}</pre>")})
        if self.board:
            self.board.add_text("sample", "    " + text.replace("\n", "\n    "), self.c.max_iters)

    def close(self) -> None:
        """Waits until wandb and TensorBoard have everything."""
        if self.wandb:
            self.wandb.finish()
        if self.board:
            self.board.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it the clock of the step's times stands still."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began
