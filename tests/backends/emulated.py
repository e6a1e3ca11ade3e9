"""A plugin of pytest that has `kernels.cc` compiled for ARM and its calls run by an emulator.

Nothing of JAX runs there: `xla_calls.cc` hands the kernels what XLA would. Set `JAX_DISABLE_JIT`.
"""

import contextlib
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.backends.cpu import kernels

COMPILER, EMULATOR = TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
LIBRARIES = "/usr/aarch64-linux-gnu"  # Where Debian has those of ARM.
CPU = "-mcpu=neoverse-n1"
TYPES = {"int8": 2, "int32": 4, "int64": 5, "float32": 11}
"""The numbers of `XLA_FFI_DataType`."""


def pytest_configure(config: pytest.Config) -> None:
    """Compiles, starts the emulator, and puts its calls in the place of XLA's."""
    kernels.FLAGS = tuple(CPU if flag == kernels.NATIVE else flag for flag in kernels.FLAGS)
    stack = contextlib.ExitStack()
    config.add_cleanup(stack.close)
    caller = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "xla_calls"
    source = pathlib.Path(__file__).with_name("xla_calls.cc")
    include = f"-I{jax.ffi.include_dir()}"
    subprocess.run([COMPILER, "-std=c++17", include, source, "-o", caller], check=True)
    library = kernels._compiled(COMPILER)
    command = [EMULATOR, "-L", LIBRARIES, str(caller), str(library)]
    emulator = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )

    def ffi_call(
        target: str, results: Any, input_output_aliases: dict[int, int] | None = None
    ) -> Callable[..., Any]:
        """As `jax.ffi.ffi_call`, at once."""
        shapes = results if isinstance(results, Sequence) else [results]
        argument_of = {i: argument for argument, i in (input_output_aliases or {}).items()}

        def call(*arguments: Any, **attributes: np.generic) -> Any:
            assert emulator.stdin and emulator.stdout
            arrays = [np.asarray(argument) for argument in arguments]
            words = [target, len(arrays)]
            for array in arrays:
                words += [TYPES[str(array.dtype)], array.ndim, *array.shape]
            words += [len(shapes)]
            for i, result in enumerate(shapes):
                words += [argument_of.get(i, -1), len(result.shape), *result.shape]
            words += [len(attributes)]
            for name, value in sorted(attributes.items()):
                bits = int.from_bytes(value.tobytes(), "little")
                words += [name, TYPES[str(value.dtype)], bits]
            emulator.stdin.write(" ".join(map(str, words)).encode() + b"\n")
            for array in arrays:
                emulator.stdin.write(array.tobytes())
            emulator.stdin.flush()
            found = []
            for result in shapes:
                size = 4 * int(np.prod(result.shape))
                data = np.frombuffer(emulator.stdout.read(size), np.float32)
                found.append(jnp.asarray(data.reshape(result.shape)))
            return found if isinstance(results, Sequence) else found[0]

        return call

    jax.ffi.ffi_call = ffi_call
    kernels.native = lambda: True
