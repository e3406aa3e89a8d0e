"""Compile the kernels for GPUs that aren't there, as the engine launches them, and say what each
takes: ``_attend sm_90 qwen3: 203 registers, 0 bytes of stack``. Stack is where registers spill to.

It is run as a program, with names of :data:`SHAPES`: Triton compiles nothing in a process whose
kernels it interprets.
"""

import re
import subprocess
import sys
import tempfile

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ia_mech.engine import attend_kernel, draw_kernel
from ia_mech.engine.attend_kernel import Prefixes, Tiling

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.int32: "*i32", float: "fp32", int: "i32",
}  # fmt: skip
# dtype, heads, key-value heads, dim, and options, of the attention of some models.
SHAPES = {
    "qwen3": (torch.bfloat16, 16, 8, 128, {}),
    "smollm2": (torch.bfloat16, 9, 3, 64, {}),
    "gpt_oss": (torch.float16, 64, 8, 64, {"window": 128, "sinks": torch.ones(64).half()}),
    "gemma2": (torch.bfloat16, 8, 4, 256, {"softcap": 50.0, "window": 4096}),
    "gemma4": (torch.bfloat16, 8, 4, 512, {}),
    "float32 64": (torch.float32, 9, 3, 64, {}),
    "float32 128": (torch.float32, 16, 8, 128, {}),
    "float32 256": (torch.float32, 8, 4, 256, {"softcap": 50.0}),
}
VOCAB = 151_936


class Compiled:
    """Stands in for a kernel: what would launch it compiles it."""

    def __init__(self, kernel, architecture: int, name: str) -> None:
        self.kernel, self.architecture, self.name = kernel, architecture, name

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *given, num_warps: int, num_stages: int = 3, **constants) -> None:
        names = self.kernel.arg_names
        types = [one.dtype if isinstance(one, torch.Tensor) else type(one) for one in given]
        signature = dict(zip(names, map(TYPES.get, types), strict=False))
        signature |= dict.fromkeys(constants, "constexpr")
        attributes = {
            (at,): [["tt.divisibility", 16]]
            for at, one in enumerate(given)
            if isinstance(one, torch.Tensor) or (isinstance(one, int) and one % 16 == 0)
        }
        made = triton.compile(
            ASTSource(
                self.kernel,
                {name: signature[name] for name in names},
                {(names.index(name),): value for name, value in constants.items()},
                attributes,
            ),
            target=GPUTarget("cuda", self.architecture, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        print(
            f"{self.kernel.__name__} sm_{self.architecture} {self.name}: "
            f"{registers} registers, {stack} bytes of stack"
        )


def compile_for(architecture: int, name: str) -> None:
    dtype, heads, kv_heads, dim, options = SHAPES[name]

    def long(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long)

    query, own = torch.zeros(2, heads, dim), torch.zeros(2, kv_heads, 64, dim)
    query, own = query.to(dtype), own.to(dtype)
    new, ints = query[:, :kv_heads], torch.zeros(2, dtype=torch.int32)
    tile_rows = ints.new_zeros(2, Tiling.of(dtype, dim).rows(heads // kv_heads))
    prefix = Prefixes(long(2), long(2), long(2), ints, ints)
    with pytest.MonkeyPatch.context() as patch:
        for module, kernel in (
            (draw_kernel, "_reduce_blocks"), (draw_kernel, "_draw"), (attend_kernel, "_attend"),
        ):  # fmt: skip
            one = Compiled(getattr(module, kernel), architecture, name)
            patch.setattr(module, kernel, one)
        logits = torch.zeros(2, VOCAB, dtype=dtype)
        draw_kernel.draw(logits, torch.zeros(2), long(2), long(2, 2), long(2))
        attend_kernel.attend(
            *(query, new, new, own, own, prefix, ints, tile_rows, ints, ints),
            scaling=0.1,
            **options,
        )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for architecture in (80, 90):
            compile_for(architecture, name)
