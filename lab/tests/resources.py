"""What each kernel of lab/kernels.py needs of a GPU. No GPU is needed.

    python lab/tests/resources.py --widths=32,64,128 --target=90     # 90: H100, H200; 80: A100

Kernels are compiled for a GPU, and the binaries are read. The columns: registers of a thread, bytes
of its stack (for registers that did not fit), bytes of shared memory of a block. split: the values
are the sum of two tensors, as in LASER in bfloat16.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))  # the project's root

from configurator import names, run_script
from lab import kernels

widths = "32,64,128"  # of heads: 16, 32, 64 or 128
dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of q, k and v
target = 90  # the GPU's compute capability, times 10

STRIDES = ("_b", "_h", "_t")
INTEGERS = ("span", "T")
REALS = ("c", "scale")
FLOAT32 = ("lse", "delta")


def type_of(name: str, float32: list[str]) -> str:
    """Triton's type of a kernel's argument. float32: tensors that are in float32 here."""
    if name.endswith(STRIDES) or name in INTEGERS:
        return "i32"
    if name in REALS:
        return "fp32"
    if name in FLOAT32 or name in float32 or dtype == "float32":
        return "*fp32"
    return "*bf16"


def compiled(kernel: object, constants: dict, options: dict, float32: list[str]) -> object:
    """A kernel with these constants, compiled. options: num_warps, num_stages."""
    signature = {}
    attributes = {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else type_of(name, float32)
        if signature[name].startswith("*") or name.endswith(STRIDES):  # as in a real call
            attributes[i,] = [["tt.divisibility", 16]]
    given = {name: x for name, x in constants.items() if name in signature}
    source = ASTSource(kernel, signature, given, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def resources(binary: object) -> dict[str, int]:
    """The registers ("REG") and the stack ("STACK") of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(binary.asm["cubin"])
        f.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", f.name]
        report = subprocess.check_output(command, text=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", report)}


def rows(D: int) -> Iterator[tuple]:
    """(name, constants and options, *tensors in float32) of each kernel, for heads of width D."""
    for split in sorted({False, dtype == "bfloat16"}):  # softmax, LASER
        forward, backward = kernels.blocks(D, D, split, getattr(torch, dtype))
        choices = {"SHORT": True, "SPLIT": split}
        yield "forward", choices | forward, *(["y"] if split else [])
        yield "dk_dv", choices | backward, *(["dv"] if split else [])
        yield "dq", choices | backward


def main() -> None:
    kernels.SMALL = target in (75, 86, 89, 120, 121)  # as kernels.py asks the GPU
    print(f"{'kernel':24}{'width':>6}{'split':>6}{'registers':>10}{'stack':>7}{'shared':>8}")
    for D in map(int, names(widths, list(map(str, kernels.WIDTHS)))):
        for name, settings, *float32 in rows(D):
            constants = settings | {"D": D, "E": D}
            options = {
                "num_warps": constants.pop("num_warps", 4),
                "num_stages": constants.pop("num_stages", 3),
            }
            kernel = getattr(kernels, f"{name}_kernel")
            binary = compiled(kernel, constants, options, float32)
            used = resources(binary)
            print(f"{name:24}{D:6}{constants['SPLIT']!s:>6}{used['REG']:10}", end="")
            print(f"{used['STACK']:7}{binary.metadata.shared:8}")


if __name__ == "__main__":
    run_script(globals())
