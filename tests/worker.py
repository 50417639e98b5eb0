"""One of several processes that run scripts together: it imports torch once, for many jobs.

A job is a line of JSON on stdin: RANK and the like as env, argv, and Python to run before. The
answer is a line of JSON on stdout: exit code, stdout, stderr.
"""

import contextlib
import faulthandler
import gc
import io
import json
import os
import runpy
import signal
import sys
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import importlib  # noqa: E402

import torch  # noqa: E402

from training import distributed  # noqa: E402

torch.set_num_threads(1)
faulthandler.enable()  # an abort in C says where
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what libraries print
for line in sys.stdin:
    job = json.loads(line)
    os.environ.update(job["env"])
    importlib.reload(distributed)
    sys.argv = job["argv"]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            undo = {}
            exec(job["before"], undo)
            if sys.argv[0] == "-m":
                del sys.argv[0]
                runpy.run_module(sys.argv[0], run_name="__main__")
            else:
                runpy.run_path(os.path.join(ROOT, sys.argv[0]), run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            code = traceback.format_exc()
        finally:
            undo.get("after", lambda: None)()
    sys.modules.pop("lab.experiments.identity", None)  # it notes files at the start of a process
    gc.collect()  # it frees DDP, and so DDP's group of processes: in a later job this may hang
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=answers)
