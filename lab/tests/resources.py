"""What each kernel of lab/kernels.py needs of a GPU. No GPU is needed.

    python lab/tests/resources.py --widths=32,64,128 --target=90     # 90: H100, H200; 80: A100

Kernels are compiled for a GPU, and the binaries are read. The columns: registers of a thread, bytes
of its stack (for registers that did not fit), bytes of shared memory of a block.
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

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import configure, user_errors
from errors import UserError
from lab import kernels

widths = "32,64,128"  # of heads: 16, 32, 64 or 128
dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of q, k and v
target = 90  # the GPU's compute capability, times 10

STRIDES = ("_b", "_h", "_t")
SCALARS = {"c": "fp32", "scale": "fp32", "eps": "fp32"}
SCALARS |= {"span": "i32", "H": "i32", "T": "i32", "n": "i32"}
FLOAT32 = ("shift", "lse", "extra", "delta", "z", "out", "before", "after", "norm", "divisor")
CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


def type_of(name: str, float32: tuple[str, ...]) -> str:
    """Triton's type of a kernel's argument. float32: tensors that are in float32 here."""
    if name.endswith(STRIDES):
        return "i32"
    if name in SCALARS:
        return SCALARS[name]
    if name == "wide":
        return "*i32"
    if name in FLOAT32 or name in float32 or dtype == "float32":
        return "*fp32"
    return "*bf16"


def compiled(kernel: object, constants: dict, options: dict, float32: tuple = ()) -> object:
    """A kernel with these constants, compiled. options: num_warps, num_stages."""
    names = [p.name for p in kernel.params]
    signature = {}
    values = {}
    attributes = {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            values[i,] = constants[name]
            continue
        signature[name] = type_of(name, float32)
        if signature[name].startswith("*") or name.endswith(STRIDES):  # as in a real call
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def resources(binary: object) -> dict[str, int]:
    """The registers ("reg"), stack and shared memory of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(binary.asm["cubin"])
        f.flush()
        command = [CUOBJDUMP, "-res-usage", f.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.findall(r"(REG|STACK):(\d+)", report)
    result = {key.lower(): int(value) for key, value in numbers}
    result["shared"] = binary.metadata.shared
    return result


def line(kernel: object, D: int, constants: dict, *, options: dict | None = None, **rest) -> None:
    """Compile a kernel for heads of width D, and print its line of the table.

    options: blocks() or chunk(), which also have sizes. rest: float32, as in type_of.
    """
    options = options or {}
    constants = constants | {"D": D, "E": D}
    constants |= {name: options[name] for name in ("M", "N") if name in options}
    launch = {
        "num_warps": options.get("num_warps", 4),
        "num_stages": options.get("num_stages", 3),
    }
    row = resources(compiled(kernel, constants, launch, **rest))
    name = kernel.fn.__name__.removesuffix("_kernel")
    laser = str(constants.get("LASER", "-"))
    print(
        f"{name:24}{D:6}{laser:>6}{row['reg']:10}{row['stack']:7}{row['shared']:8}",
        flush=True,
    )


def flash_lines(D: int) -> None:
    """The kernels of softmax and LASER."""
    split = dtype == "bfloat16"
    for laser in (False, True):
        forward, backward = kernels.blocks(D, D, laser, getattr(torch, dtype))
        choices = {"SHORT": True, "LASER": laser, "SPLIT": laser and split}
        float32 = ("x",) if laser else ()
        line(kernels.delta_kernel, D, {"M": kernels.ROWS, "LASER": laser}, float32=float32)
        line(kernels.forward_kernel, D, choices, options=forward, float32=float32)
        line(kernels.dk_dv_kernel, D, choices, options=backward)
        line(kernels.dq_kernel, D, choices, options=backward)
    line(kernels.exp_kernel, D, {"N": kernels.ROWS, "SPLIT": split})
    line(kernels.exact_forward_kernel, D, {})
    line(kernels.exact_backward_kernel, D, {}, float32=("y",))


def beta_lines(D: int) -> None:
    """The kernels of beta."""
    options = kernels.chunk(D, D, getattr(torch, dtype))
    choices = {"SPLIT": dtype == "bfloat16"}
    sizes = {"SIZE": 2 * D * D, "STEP": 256, "REVERSE": True}
    line(kernels.sums_kernel, D, {"WEIGHTED": False}, options=options)
    line(kernels.sums_kernel, D, {"WEIGHTED": True}, options=options)
    line(kernels.before_kernel, D, sizes, float32=("x",))
    line(kernels.beta_rows_kernel, D, {"N": kernels.ROWS})
    line(kernels.beta_forward_kernel, D, choices, options=options)
    line(kernels.beta_backward_kernel, D, choices, options=options)


def main() -> None:
    sizes = widths.split(",")
    if not set(sizes) <= {str(width) for width in kernels.WIDTHS}:
        raise UserError(f"--widths={widths} must be of {kernels.WIDTHS}, separated by commas")
    if target < 75:
        raise UserError(f"--target={target}: Triton compiles for 75 (Turing) and later")
    kernels.SMALL = target in (75, 86, 89, 120, 121)  # as kernels.py asks the GPU
    kernels.BEFORE_HOPPER = target < 90
    print(f"{'kernel':24}{'width':>6}{'laser':>6}{'registers':>10}{'stack':>7}{'shared':>8}")
    for D in map(int, sizes):
        flash_lines(D)
        beta_lines(D)


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
