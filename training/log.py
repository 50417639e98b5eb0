"""The log of a run while it trains: log.jsonl, lines in the terminal, Weights & Biases, TensorBoard."""

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NoReturn

from errors import UserError, optional
from training import checkpoint, distributed
from training.distributed import by_master, say
from training.estimate import duration


def diverged(step: int, what: object, where: Callable = str) -> NoReturn:
    """Ends the run with exit code 1, because its numbers are not finite any more; where(): in the model, a sentence."""
    advice = "No checkpoint has such numbers; a smaller --learning_rate, --grad_clip or --dtype=float32 may help"
    say(f"\nstep {step}: {what}: the training has diverged. {advice}", file=sys.stderr)
    say(where(), file=sys.stderr)
    sys.exit(1)


class Log:
    """log.jsonl, the terminal, wandb and TensorBoard. An older run in out_dir is moved to out_dir/previous.

    config: train.py's settings. start: the first step. wandb_id: of a resumed run. flops: per token. peak: FLOP/s.
    where: run.first_not_finite, for a run whose loss or gradient is not finite: it ends here.
    """

    def __init__(self, config: dict, start: int, wandb_id: str | None, flops: int, peak: float | None, where: Callable):
        self.c = c = SimpleNamespace(**config)
        self.start, self.wandb_id, self.flops, self.peak, self.where = start, wandb_id, flops, peak, where
        self.tokens_per_step = c.batch_size * c.gradient_accumulation_steps * c.block_size
        self.path = os.path.join(c.out_dir, checkpoint.LOG)
        self.file, self.wandb, self.board = None, None, None
        if not c.eval_only:
            by_master(self.open)
        self.since, self.since_step = time.perf_counter(), start  # of the last step that was printed

    def open(self) -> None:
        """Opens the logs. A resumed run makes the steps after its checkpoint again, so log.jsonl loses their lines."""
        c, kept = self.c, []
        if c.tensorboard:
            optional("tensorboard", "--tensorboard")
        if c.wandb_log:
            self.wandb = optional("wandb", "--wandb_log")
            names = {"project": c.wandb_project, "name": c.wandb_run_name, "id": self.wandb_id}
            try:
                self.wandb.init(config=vars(c), resume="allow", **names)
            except self.wandb.Error as error:
                raise UserError(f"wandb: {error} (WANDB_MODE=offline needs no account)") from None
            self.wandb_id = self.wandb.run.id
        os.makedirs(c.out_dir, exist_ok=True)
        if c.init_from != "resume":
            checkpoint.set_aside(c.out_dir)
        elif os.path.exists(self.path):
            with open(self.path) as f:
                steps = ((line, re.fullmatch(r'\{"iter": (\d+)[^{]*\}\n', line)) for line in f)  # the last may be cut
                kept = [line for line, step in steps if step and int(step[1]) < self.start]
        with open(self.path + ".tmp", "w") as f:
            f.writelines(kept)
        os.replace(self.path + ".tmp", self.path)
        self.file = open(self.path, "a", buffering=1)
        if c.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(os.path.join(c.out_dir, checkpoint.BOARD), purge_step=self.start)
            self.board.add_text("settings", "".join(f"    {k} = {v!r}\n" for k, v in vars(c).items()))

    def write(self, row: dict, line: str) -> None:
        """Writes a row to the logs, and its line to the terminal."""
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
        say(line)

    def evaluation(self, step: int, losses: dict[str, float]) -> None:
        """The losses after so many steps."""
        if not all(map(math.isfinite, losses.values())):
            diverged(step, f"the losses of the evaluation are {losses}", self.where)
        row = {"iter": step, "train_loss": losses["train"], "val_loss": losses["val"]}
        self.write(row, f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")

    def step(self, step: int, loss: float, norm: float, lr: float, largest: list[float] | None, scaled: bool) -> None:
        """A training step: loss (nats), gradient norm, rate, each layer's largest score; scaled: loss, in float16."""
        if not math.isfinite(loss) or not (math.isfinite(norm) or scaled):
            diverged(step, f"the loss is {loss} and the gradient norm {norm}", self.where)
        seconds = (time.perf_counter() - self.since) / (step + 1 - self.since_step)
        speed = self.tokens_per_step / seconds
        row = {"iter": step, "loss": loss, "lr": lr, "norm": norm, "ms": seconds * 1e3, "tokens_per_s": speed}
        line = f"iter {step}: loss {loss:.4f}, time {seconds * 1e3:.2f}ms, {speed:,.0f} tok/s, norm {norm:.3f}"
        if largest:
            row["max_logit"] = largest
            line += f", largest logit {max(largest):.2f}"
        if step >= self.start + 20:
            line += f", {duration(seconds * (self.c.max_iters - step - 1))} left"
        if self.peak:
            row["mfu"] = self.flops * speed / (self.peak * distributed.world)
            line += f", mfu {row['mfu'] * 100:.2f}%"
        self.write(row, line)
        self.since, self.since_step = time.perf_counter(), step + 1

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
