"""What the experiments share: a run of train.py that is not repeated once it is done, and a look at its attention."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch

from configurator import UserError
from model import GPT
from text.dataset import ROOT
from text.files import sha256


def finished(name: str, command: list[str], folder: str, threads: int | None = None) -> list[dict]:
    """The log's rows of `train.py command` into folder, which is run if it has not been, with this config file.

    command: the config file first. threads: of the run; None: as many as PyTorch likes.
    Raises ValueError for a run that fails.
    """
    command = ["train.py", *command, f"--out_dir={folder}", "--sample_tokens=0"]
    what = f"{' '.join(command)}\n{sha256(os.path.join(ROOT, command[1]))}\n"
    done = os.path.join(folder, "done")
    if not os.path.exists(done) or open(done).read() != what:
        print(name, flush=True)
        if os.path.exists(done):
            os.remove(done)
        env = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        if subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, cwd=ROOT, env=env).returncode:
            raise UserError(f"this run failed: python {' '.join(command)}")
        with open(done, "w") as f:
            f.write(what)
    with open(os.path.join(folder, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


def watched(model: GPT, batch: torch.Tensor, see: Callable) -> None:
    """Calls see(layer, q, k, v, window=, scale=, bias=) before each call of a core on a batch (B, T)."""

    def watching(layer: int, core: Callable) -> Callable:
        @functools.wraps(core)
        def attend(*qkv, **kwargs):
            see(layer, *qkv, **kwargs)
            return core(*qkv, **kwargs)

        return attend

    attentions = [block.attn for block in model.transformer.h]
    cores = [attention.core for attention in attentions]
    try:
        for layer, attention in enumerate(attentions):
            attention.core = watching(layer, attention.core)
        model(batch)
    finally:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core = core
