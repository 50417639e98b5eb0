"""Runs train.py for the experiments. A run that is finished is not repeated."""

import json
import os
import subprocess
import sys

from configurator import UserError
from text.dataset import ROOT
from text.files import sha256


def finished(name: str, command: list[str], folder: str, threads: int | None = None) -> list[dict]:
    """The rows of the log of `train.py command --out_dir=folder`. Runs it, unless folder has this run, finished.

    command: the config file, then flags; if the config file has changed, it runs again. threads: of the run; None: as
    PyTorch chooses. Raises UserError for a run that fails.
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
