"""How torch.compile sees the Triton kernels. No GPU is needed: a GPT is traced on the device `meta`, which has no data.

    python tests/graphs.py

Each line: an attention, a kernel that a training step calls, and the tensors that torch.compile believes the kernel
to write. It may copy them before each call, so no input may be among them. An interrupted graph is an error.
"""

import contextlib
import os
import sys
from unittest import mock

import torch
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

torch.utils._triton.has_triton = lambda: True  # as with a GPU; before torch._dynamo is imported
torch.autocast = lambda *args, **kwargs: contextlib.nullcontext()  # there is none on the device meta

from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table  # noqa: E402

from attention import kernels  # noqa: E402
from model import ATTENTION, GPT, GPTConfig  # noqa: E402


class H100:
    """What Triton asks a GPU's driver for."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)


class Traced(Exception):
    """The graph is known. There is nothing to compute."""


def traced(core: str) -> None:
    """Traces a GPT's loss and gradients, and prints the kernels in the graph. Raises if the graph is interrupted."""

    def show(graph: torch.fx.GraphModule, *args: object, **kwargs: object) -> None:
        for node in (node for node in graph.graph.nodes if "triton_kernel" in str(node.target)):
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            print(core, kernel.fn.__name__, ",".join(sorted(node.kwargs["tensors_to_clone"])))
        raise Traced

    heads = {} if core == "beta" else {"heads": "SL", "window": 50}  # beta's short heads have no kernel
    gpt = GPT(GPTConfig(attention=core, block_size=512, vocab_size=64, n_layer=1, n_head=2, n_embd=128, **heads))
    gpt = gpt.bfloat16().to("meta")
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        kernels.use(gpt, ATTENTION[core])
    x = torch.empty(1, 512, dtype=torch.long, device="meta")
    backend = aot_autograd(fw_compiler=show, partition_fn=show)  # the latter gets forward and backward pass as one
    try:
        torch.compile(lambda x: gpt(x, x)[1], backend=backend, fullgraph=True)(x)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, Traced):
            raise


triton.runtime.driver.set_active(H100())
kernels.fits = lambda *args: True
for name in kernels.KERNEL:
    traced(name)
