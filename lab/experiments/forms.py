"""Every form of every attention in a small GPT: does it compute what the definition computes, compiled too?

    python -m lab.experiments.forms                        # on a GPU; compilation takes longest
    python -m lab.experiments.forms --only=beta --no-compile --device=cpu

An attention has up to three forms: `plain` is its definition in model.py, `fast` its fast form, and `triton` its
kernel. Each form runs with long heads, with short and long heads, and with differential heads, in bfloat16 and in
float32, with torch.compile and without. An error is ||g - exact|| / ||exact||: g are the gradients of all weights, and
exact are those of the definition in float64. A form is WRONG if its error is above 1e-5 and above twice that of the
definition in the same precision. The results are written to --out after each attention and each kind of heads. If a
form is wrong, the script ends with exit code 2.
"""

import contextlib
import functools
import gc
import itertools
import time
from collections.abc import Callable
from typing import Literal

import torch

from attention.cache import run_definitions
from bench import tried
from configurator import names, pick_device
from errors import UserError
from lab.experiments.results import check_writable, save, start
from model import ATTENTION, GPT, GPTConfig

# What is measured?
only = ""  # attentions, separated by commas; empty: all
precisions = "bfloat16,float32"  # of autocast, separated by commas
compile = True  # run each form compiled as well
budget = 500.0  # seconds; after this time no new row begins, and the skipped rows are named
out = "forms.json"  # the file of results
tiny = False  # the smallest model: a test of the script
# What does it run on?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
seed = 1337  # decides the random numbers: weights and tokens

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 256, "block_size": 384, "vocab_size": 512}  # from 256 on, beta is linear
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 9}
KINDS = {"long": {}, "short, long": {"heads": "SL", "window": 50}, "differential": {"differential": True}}
FORMS = ("plain", "fast", "triton")
SHARPER = 8.0  # the weights of queries, keys and values are multiplied by this, so that attention is not a plain mean


def model_in(form: Literal[FORMS], core: str, kind: str, dev: str) -> GPT:
    """A GPT whose attention runs in this form, with the same weights in every form.

    Raises UserError if the attention has no such form.
    """
    torch.manual_seed(seed)
    gpt = GPT(GPTConfig(attention=core, **(TINY if tiny else SIZES), **KINDS[kind]))
    with torch.no_grad():
        for block in gpt.transformer.h:
            block.attn.c_attn.weight.mul_(SHARPER)
    if form == "plain":
        run_definitions(gpt)
    elif form == "triton":
        from attention import kernels  # Triton is not everywhere

        kernels.use(gpt, ATTENTION[core])
    return gpt.to(dev)


def gradients(model: GPT, run: Callable, x: torch.Tensor, amp: contextlib.AbstractContextManager) -> torch.Tensor:
    """The gradients of all weights of a model, one after another, in float64. run: the model, or the model compiled."""
    with amp:
        loss = run(x, x)[1]
    return torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, [*model.parameters()])])


def errors(form: str, core: str, kind: str, dev: str, exact: torch.Tensor, *of: object) -> dict[str, float]:
    """{"error": that of the gradients, "compiled": that of the compiled model's}. of: x and amp of `gradients`."""
    model = model_in(form, core, kind, dev)
    found = {"error": gradients(model, model, *of)}
    if compile:
        torch._dynamo.reset()
        found["compiled"] = gradients(model, torch.compile(model), *of)
    return {what: ((g - exact).norm() / exact.norm()).item() for what, g in found.items()}


def rows_of(core: str, kind: str, dev: str, amp: dict, began: float) -> dict[str, dict]:
    """{precision and form: its row} of an attention with these heads; prints a line for each."""
    if time.monotonic() - began > budget:
        print(f"{core}, {kind} left out (--budget)")
        return {}
    torch.manual_seed(seed)
    plain = model_in("plain", core, kind, dev).double()
    x = torch.randint(plain.config.vocab_size, (2, plain.config.block_size)).to(dev)
    exact = gradients(plain, plain, x, contextlib.nullcontext())
    rows = {}
    for precision, form in itertools.product(amp, FORMS):
        name = f"{core}, {kind}, {precision}, {form}"
        if time.monotonic() - began > budget:
            print(f"{name} left out (--budget)")
            continue
        gc.collect()
        run = functools.partial(errors, form, core, kind, dev, exact, x, amp[precision])
        if row := tried(name, run, dev, foreign=form == "triton"):
            most = max(1e-5, 2 * rows.get(f"{core}, {kind}, {precision}, plain", row)["error"])
            found = " ".join(f"{what} {error:.1e}" for what, error in row.items())
            row["wrong"] = not all(error <= most for error in row.values())
            rows[name] = row
            print(f"{name:44}{found}{'  WRONG' if row['wrong'] else ''}", flush=True)
    return rows


def main() -> None:
    cores = names(only, ATTENTION)
    check_writable(out)
    chosen = [pick_device(device, precision) for precision in names(precisions, ["bfloat16", "float32"])]
    dev, amp = chosen[0][0], {name: context for _, name, context in chosen}
    if ":" in dev:
        torch.cuda.set_device(dev)
    torch.set_float32_matmul_precision("highest")  # TF32 would hide what else is rounded
    chip = torch.cuda.get_device_name() if dev.startswith("cuda") else "CPU"
    print(f"{chip}, torch {torch.__version__}")
    results, began = {"about": {"chip": chip, "torch": torch.__version__}, "rows": {}}, time.monotonic()
    for core, kind in itertools.product(cores, KINDS):
        results["rows"] |= rows_of(core, kind, dev, amp, began)
        save(out, results)
    if wrong := [name for name, row in results["rows"].items() if row["wrong"]]:
        raise UserError(f"{len(wrong)} of {len(results['rows'])} rows are WRONG: {'; '.join(wrong)}")


if __name__ == "__main__":
    start(globals())
