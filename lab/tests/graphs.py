"""How torch.compile sees the Triton kernels. No GPU is needed.

    python lab/tests/graphs.py

A GPT is traced on the device `meta`, which has no data. Each line: an attention, a kernel that a
training step calls, and the tensors that torch.compile believes the kernel to write. torch.compile
may copy these before each call, so no input may be among them. An interrupted graph is an error.

LASER's test of the values' range, which interrupts the graph on a GPU, is left out.
"""

import contextlib
import os
import sys
import types

import torch
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))  # the project's root

# These two lines must come before torch._dynamo is imported.
torch.utils._triton.has_triton = lambda: True  # as with a GPU
torch.autocast = lambda *args, **kwargs: contextlib.nullcontext()  # the device meta has none

from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table  # noqa: E402

from attention import fast  # noqa: E402
from lab import kernels  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

TOKENS = 512
H100 = types.SimpleNamespace(  # what Triton asks a GPU's driver for
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
)


class Traced(BaseException):
    """The graph is known. There is nothing to compute. (torch.compile wraps an Exception.)"""


def trace(name: str) -> None:
    """Trace a GPT's loss and gradients, and print the kernels in the graph.

    Raises an error of torch.compile if the graph is interrupted.
    """

    def show(graph, *args, **kwargs):
        for node in graph.graph.nodes:
            if "triton_kernel" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                written = sorted(node.kwargs["tensors_to_clone"])
                print(name, kernel.fn.__name__, ",".join(written))
        raise Traced

    sizes = {"block_size": TOKENS, "vocab_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 128}
    sizes |= {"heads": "SL", "window": 50}
    gpt = GPT(GPTConfig(attention=f"{name}_triton", **sizes)).bfloat16().to("meta")
    x = torch.empty(1, TOKENS, dtype=torch.long, device="meta")
    # partition_fn gets the forward and the backward pass as one graph.
    backend = aot_autograd(fw_compiler=show, partition_fn=show)
    with contextlib.suppress(Traced):
        torch.compile(lambda x: gpt(x, x)[1], backend=backend, fullgraph=True)(x)


triton.runtime.driver.set_active(H100)
fast.wider_than = lambda v, limit: False  # as where the values' range is small
kernels.why_not = lambda *args: None  # the device meta counts as CUDA
for name in kernels.AROUND:
    trace(name)
