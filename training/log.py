"""The log of a run while it trains: log.jsonl, the terminal, Weights & Biases."""

import contextlib
import json
import math
import os
import socket
import sys
from dataclasses import dataclass
from os.path import join
from time import ctime, perf_counter
from types import SimpleNamespace
from typing import NoReturn

from filelock import FileLock, Timeout

from errors import UserError, note, optional
from training import checkpoint
from training.distributed import by_master, say, world
from training.estimate import duration


def diverged(step: int, what: object) -> NoReturn:
    """Ends the run with exit code 1, because its numbers, what, are not finite any more."""
    note(
        f"\nstep {step}: {what}: the training has diverged. No checkpoint has such numbers; "
        "a smaller --learning_rate, --grad_clip or --dtype=float32 may help. On a GPU LASER gives "
        "NaN for values with a range above 80: --plain takes its sums in log space. "
        "docs/training.md says how to see where in the model they begin"
    )
    sys.exit(1)


@dataclass
class Log:
    """log.jsonl, the terminal and wandb. An older run moves to previous/."""

    c: SimpleNamespace  # train.py's settings
    start: int  # the first step
    origin: dict  # what makes the run: the first row of log.jsonl
    mfu: float | None  # the share of a GPU's peak rate that one token per second takes
    file = wandb = None

    def __post_init__(self):
        if not self.c.eval_only:
            by_master(self.open)
        self.restart(self.start)

    def restart(self, step: int) -> None:
        """Begin to measure the times of the steps from `step` on."""
        self.began = perf_counter()
        self.timed_from = step

    def open(self) -> None:
        """Opens the logs. A resumed run makes the steps after its checkpoint again."""
        c = self.c
        os.makedirs(c.out_dir, exist_ok=True)
        self.lock(join(c.out_dir, "lock"))
        if c.wandb_log:
            run = {
                "project": c.wandb_project,
                "name": c.wandb_run_name,
                "config": vars(c),
                "resume": "allow" if c.init_from == "resume" else "never",
            }
            try:
                from wandb import init  # which a folder wandb of an offline run does not have
            except ImportError:  # trackio says where its logs are, and knows runs by name
                self.wandb = optional("trackio", "--wandb_log without wandb").init(**run)
            else:
                self.wandb = init(**run, id=getattr(c, "wandb_id", None))
                c.wandb_id = self.wandb.id  # the checkpoints keep it

        if c.init_from != "resume":
            checkpoint.move_to_previous(c.out_dir)

        # what this run writes again is cut off, and a line that a kill has cut
        self.file = open(join(c.out_dir, checkpoint.LOG), "a+", buffering=1)
        self.file.seek(0)
        end = 0
        for line in iter(self.file.readline, ""):
            if not line.endswith("}\n") or json.loads(line)["iter"] >= self.start:
                break
            end = self.file.tell()
        self.file.truncate(end)
        self.file.write(json.dumps({"iter": self.start} | self.origin) + "\n")

    def lock(self, path: str) -> None:
        """Takes the folder until this process ends, or is killed: the system frees it then.

        lock.txt says by whom it is taken. Raises UserError if that is another process.
        """
        self.taken = FileLock(path, is_singleton=True)
        try:
            self.taken.acquire(0)  # without waiting
            # not into the lock itself, whose text may say whether it is left; in ASCII
            with open(path + ".txt", "w") as f:
                f.write(
                    f", process {os.getpid()} on {socket.gethostname()}, since {ctime()}: "
                    f"{self.origin['command']!a}"
                )
        except Timeout:
            raise UserError(
                f"{self.c.out_dir} is in use by another training{open(path + '.txt').read()}. "
                "Take another --out_dir="
            ) from None
        except (OSError, NotImplementedError):  # a file system without locks
            pass

    def write(self, row: dict, line: str) -> None:
        """Writes a row to the logs, and its line to the terminal."""
        if self.file:
            with contextlib.suppress(OSError):  # a full disk ends no run; it is said at a save
                self.file.write(json.dumps(row) + "\n")
        say(line)
        if self.wandb:
            self.wandb.log(row, step=row["iter"])

    def evaluation(self, step: int, losses: dict[str, float]) -> None:
        """Logs the losses (nats) of the splits after `step` steps."""
        if not all(map(math.isfinite, losses.values())):
            diverged(step, f"the losses of the evaluation are {losses}")
        self.write(
            {"iter": step, "train_loss": losses["train"], "val_loss": losses["val"]},
            f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}",
        )

    def step(self, step: int, loss: float, norm: float, lr: float, scaled: bool) -> None:
        """Logs one step: loss (nats), gradient norm, learning rate, time.

        scaled: the loss of float16 is scaled, so an infinite norm is normal: it halves the scale.
        """
        if not math.isfinite(loss) or not (math.isfinite(norm) or scaled):
            diverged(step, f"the loss is {loss} and the gradient norm {norm}")
        c = self.c
        seconds = (perf_counter() - self.began) / (step + 1 - self.timed_from)
        speed = c.batch_size * c.gradient_accumulation_steps * c.block_size / seconds
        row = {
            "iter": step,
            "loss": loss,
            "lr": lr,
            "norm": norm,
            "ms": seconds * 1e3,
            "tokens_per_s": speed,
        }
        line = (
            f"iter {step}: loss {loss:.4f}, time {row['ms']:.2f}ms, "
            f"{speed:,.0f} tok/s, norm {norm:.3f}"
        )

        if step >= self.start + 20:
            line += f", {duration(seconds * (c.max_iters - step - 1))} left"
        if self.mfu:
            row["mfu"] = self.mfu * speed / world
            line += f", mfu {row['mfu'] * 100:.2f}%"
        self.write(row, line)
        self.restart(step + 1)

    def close(self) -> None:
        """Waits until wandb has everything, and frees the folder."""
        if self.wandb:
            self.wandb.finish()
        if self.file:
            self.taken.release()
