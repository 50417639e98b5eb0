"""Every form of every attention in a small GPT: is it the definition, is it one graph, does the host wait for the GPU?

    python -m lab.experiments.forms                        # on a GPU; compilation takes longest
    python -m lab.experiments.forms --only=beta --no-compile --device=cpu

An attention has up to three forms: `plain` is its definition in model.py, `fast` its fast form, and `triton` its
kernel. Each form runs with long heads, with short and long heads, and with differential heads, in bfloat16 and in
float32, with torch.compile and without. An error is ||g - exact|| / ||exact||: g are the gradients of all weights, and
exact are those of the definition in float64. A form is WRONG if its error is above 1e-5 and above twice that of the
definition in the same precision. On a GPU, the host's waits and the peak memory are measured as well. The results are
written to --out after each attention and each kind of heads. If a form is wrong, the script ends with exit code 2.
"""

import functools
import gc
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Literal

import torch

from attention.cache import run_definitions
from bench import tried
from configurator import at_least_one, check_writable, configure, names, pick_device, user_errors
from errors import UserError
from lab.experiments.results import save
from model import ATTENTION, GPT, GPTConfig

# What is measured?
only = ""  # attentions, separated by commas; empty: all
precisions = "bfloat16,float32"  # of autocast, separated by commas
compile = True  # run each form compiled as well
budget = 500.0  # seconds; after this time no new row begins, and the skipped rows are named
out = "forms.json"  # the file of results
# How large is the model?
n_layer = 2  # number of blocks
n_head = 4  # attention heads per layer
n_embd = 256  # width of the residual stream
block_size = 384  # tokens per sequence; from 256 on, beta runs in linear time
batch_size = 2  # sequences
vocab_size = 512  # number of different tokens
# What does it run on?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
seed = 1337  # decides the random numbers: weights and tokens

KINDS = {"long": {}, "short, long": {"heads": "SL", "window": 50}, "differential": {"differential": True}}
FORMS = ("plain", "fast", "triton")
COLUMNS = {"error": ".1e", "compiled": ".1e", "breaks": "", "waits": "", "MiB": ".0f"}  # of the table; their formats
SHARPER = 8.0  # the weights of queries, keys and values are multiplied by this, so that attention is not a plain mean


def model_in(form: Literal[FORMS], core: str, kind: str, dev: str) -> GPT:
    """A GPT whose attention runs in this form, with the same weights in every form.

    Raises UserError if the attention has no such form.
    """
    torch.manual_seed(seed)
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size, "vocab_size": vocab_size}
    gpt = GPT(GPTConfig(attention=core, **sizes, **KINDS[kind]))
    with torch.no_grad():
        for block in gpt.transformer.h:
            block.attn.c_attn.weight.mul_(SHARPER)
    if form == "plain":
        run_definitions(gpt)
    elif form == "triton":
        from attention import kernels  # Triton is not everywhere

        kernels.use(gpt, ATTENTION[core])
    return gpt.to(dev)


def gradients(model: GPT, loss_of: Callable) -> torch.Tensor:
    """The gradients of all weights of loss_of(model), one after another, in float64."""
    found = torch.autograd.grad(loss_of(model), [*model.parameters()])
    return torch.cat([g.flatten().double() for g in found])


def waits(f: Callable) -> int:
    """How often the host waits for the GPU during f()."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            f()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in found)


def breaks(model: GPT, x: torch.Tensor) -> int:
    """How often torch.compile would interrupt the graph of the model's loss."""
    torch._dynamo.reset()
    return torch._dynamo.explain(lambda x: model(x, x)[1])(x).graph_break_count


def measured(form: str, core: str, kind: str, dev: str, amp: object, x: torch.Tensor, exact: torch.Tensor) -> dict:
    """A row: the errors, the interruptions of the graph, the waits, and the peak memory."""

    def loss_of(model: Callable) -> torch.Tensor:
        with amp:
            return model(x, x)[1]

    def error(run: Callable) -> float:
        return ((gradients(model, run) - exact).norm() / exact.norm()).item()

    model = model_in(form, core, kind, dev)
    row = {"error": error(loss_of)}
    if dev.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        row["waits"] = waits(lambda: loss_of(model).backward())
        row["MiB"] = torch.cuda.max_memory_allocated() / 2**20
    if compile:
        row["breaks"] = breaks(model, x)
        torch._dynamo.reset()
        fast = torch.compile(model)
        row["compiled"] = error(lambda _: loss_of(fast))
    return row


def rows_of(core: str, kind: str, dev: str, amp: dict, began: float) -> dict[str, dict]:
    """{precision and form: its row} of an attention with these heads; prints a line for each."""
    if time.monotonic() - began > budget:
        print(f"{core}, {kind} left out (--budget)")
        return {}
    torch.manual_seed(seed)
    x = torch.randint(vocab_size, (batch_size, block_size)).to(dev)
    exact = gradients(model_in("plain", core, kind, dev).double(), lambda model: model(x, x)[1])
    rows = {}
    for precision, form in itertools.product(amp, FORMS):
        name = f"{core}, {kind}, {precision}, {form}"
        if time.monotonic() - began > budget:
            print(f"{name} left out (--budget)")
            continue
        gc.collect()
        run = functools.partial(measured, form, core, kind, dev, amp[precision], x, exact)
        if row := tried(name, run, dev, foreign=form == "triton"):
            most = max(1e-5, 2 * rows.get(f"{core}, {kind}, {precision}, plain", row)["error"])
            row["wrong"] = not max(row["error"], row.get("compiled", 0.0)) <= most
            rows[name] = row
            cells = [f"{row[column]:{style}}" if column in row else "-" for column, style in COLUMNS.items()]
            print(f"{name:44}" + "".join(f"{x:>10}" for x in cells) + ("  WRONG" if row["wrong"] else ""), flush=True)
    return rows


def main() -> None:
    cores = names(only, ATTENTION)
    at_least_one(n_layer=n_layer, n_head=n_head, n_embd=n_embd, batch_size=batch_size, vocab_size=vocab_size)
    check_writable(out)
    chosen = [pick_device(device, precision) for precision in names(precisions, ["bfloat16", "float32"])]
    dev, amp = chosen[0][0], {name: context for _, name, context in chosen}
    if ":" in dev:
        torch.cuda.set_device(dev)
    torch.set_float32_matmul_precision("highest")  # TF32 would hide what else is rounded
    chip = torch.cuda.get_device_name() if dev.startswith("cuda") else "CPU"
    print(f"{chip}, torch {torch.__version__}")
    print(f"{'':44}" + "".join(f"{column:>10}" for column in COLUMNS))
    results, began = {"about": {"chip": chip, "torch": torch.__version__}, "rows": {}}, time.monotonic()
    for core, kind in itertools.product(cores, KINDS):
        results["rows"] |= rows_of(core, kind, dev, amp, began)
        save(out, results)
    if wrong := [name for name, row in results["rows"].items() if row["wrong"]]:
        raise UserError(f"{len(wrong)} of {len(results['rows'])} rows are WRONG: {'; '.join(wrong)}")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
