"""What each kernel of attention/kernels.py needs of a GPU. No GPU is needed: kernels are compiled, binaries are read.

    python tests/resources.py --widths=32,64,128 --target=90     # 90: H100, H200; 80: A100

Registers of a thread, bytes of its stack (registers that did not fit), bytes of shared memory of a block.
"""

import os
import re
import subprocess
import sys
import tempfile
from typing import Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from attention import kernels
from configurator import configure, user_errors
from errors import UserError

widths = "32,64,128"  # of heads: 16, 32, 64 or 128
dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of q, k and v
target = 90  # the GPU's compute capability, times 10

NUMBER = {"c": "fp32", "scale": "fp32", "eps": "fp32"}
FLOAT32 = ("shift", "lse", "extra", "delta", "z", "out", "before", "after", "norm", "divisor")  # tensors, whatever q is
CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


def resources(kernel: object, constants: dict, options: dict, float32: tuple = ()) -> dict[str, int]:
    """Registers, stack and shared memory of a kernel with these constants; options: num_warps, num_stages."""
    mine = {"bfloat16": "*bf16", "float32": "*fp32"}[dtype]
    signature = {}
    aligned = {}
    names = [p.name for p in kernel.params]
    constants = {name: value for name, value in constants.items() if name in names}
    for i, name in enumerate(names):
        scalar = name in ("span", "H", "T", "n") or name.endswith(("_b", "_h", "_t"))
        kind = "i32" if scalar else "*fp32" if name in (*FLOAT32, *float32) else "*i32" if name == "wide" else mine
        signature[name] = "constexpr" if name in constants else NUMBER.get(name, kind)
        if signature[name][0] == "*" or name.endswith(("_b", "_h", "_t")):  # as Triton finds them
            aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    done = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(done.asm["cubin"])
        f.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", said)}
    return found | {"shared": done.metadata.shared}


def main() -> None:
    sizes = [int(width) for width in widths.split(",") if width.isdigit()]
    if not sizes or {*sizes} - {*kernels.WIDTHS} or len(sizes) < len(widths.split(",")):
        raise UserError(f"--widths={widths} must be of {kernels.WIDTHS}, separated by commas")
    if target < 75:
        raise UserError(f"--target={target}: Triton compiles for 75 (Turing) and later")
    kernels.SMALL = target in (75, 86, 89, 120, 121)  # as kernels.py asks the GPU
    kernels.BEFORE_HOPPER = target < 90
    print(f"{'kernel':24}{'width':>6}{'laser':>6}{'registers':>10}{'stack':>7}{'shared':>8}")

    def line(kernel: object, D: int, laser: object, constants: dict, options: dict, float32: tuple = ()) -> None:
        warps = {"num_warps": options.get("num_warps", 4), "num_stages": options.get("num_stages", 3)}
        got = resources(kernel, {"D": D, "E": D} | constants, warps, float32)
        name = kernel.fn.__name__.removesuffix("_kernel")
        print(f"{name:24}{D:6}{laser!s:>6}{got['reg']:10}{got['stack']:7}{got['shared']:8}", flush=True)

    of = getattr(torch, dtype)
    split = dtype == "bfloat16"
    for D in sizes:
        for laser in (False, True):
            forward, backward = kernels.blocks(D, D, laser, of)
            kind = {"SHORT": True, "LASER": laser, "SPLIT": laser and split}
            of_forward = {k: forward[k] for k in "MN"} | kind
            of_backward = {k: backward[k] for k in "MN"} | kind
            float32 = ("x",) if laser else ()
            line(kernels.delta_kernel, D, laser, {"M": 64, "LASER": laser}, {}, float32)
            line(kernels.forward_kernel, D, laser, of_forward, forward, float32)
            line(kernels.dk_dv_kernel, D, laser, of_backward, backward, float32)
            line(kernels.dq_kernel, D, laser, of_backward, backward, float32)
        line(kernels.exp_kernel, D, True, {"N": 64, "SPLIT": split}, {})
        line(kernels.exact_forward_kernel, D, True, {}, {})
        line(kernels.exact_backward_kernel, D, True, {}, {}, ("y",))
        N, options = kernels.chunk(D, D, of)
        for weighted in (False, True):
            line(kernels.sums_kernel, D, "-", {"N": N, "WEIGHTED": weighted}, options)
        line(kernels.before_kernel, D, "-", {"SIZE": 2 * D * D, "STEP": 256, "REVERSE": True}, {}, ("x",))
        line(kernels.beta_rows_kernel, D, "-", {"N": 64}, {})
        line(kernels.beta_forward_kernel, D, "-", {"N": N, "SPLIT": split}, options)
        line(kernels.beta_backward_kernel, D, "-", {"N": N, "SPLIT": split}, options)


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
