"""An accelerator for machines that have none: ``pytest -p stand_in_device tests/test_gpu.py``.

What it can do is said in ``stand_in_device.cpp``. It is a process's whole life long the accelerator
that torch speaks of, so what runs on it runs in a process of its own.
"""

import hashlib
import os
import subprocess
import types
from contextlib import nullcontext
from pathlib import Path

import torch

NAME = "stand_in"
LIBRARY = "STAND_IN_DEVICE"
"""The environment variable that names the library."""


def build(folder: Path, compiler: str) -> Path:
    """Compile it, in some 10 seconds, unless the folder has it for this source and torch."""
    source, torch_folder = Path(__file__).with_suffix(".cpp"), Path(torch.__file__).parent
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-DAT_PER_OPERATOR_HEADERS"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-isystem{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    of = repr((compiler, flags, torch.__version__)).encode() + source.read_bytes()
    library = folder / f"{hashlib.sha256(of).hexdigest()[:16]}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")  # another process may compile it too
        command = [compiler, *flags, str(source), "-ltorch_cpu", "-lc10", "-o", str(part)]
        subprocess.run(command, check=True)
        part.rename(library)
    return library


def register(library: str) -> None:
    """Make it this process's accelerator."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(NAME)
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.device = nullcontext
    module.manual_seed_all = lambda seed: None
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        setattr(module, name, getattr(torch.ops.stand_in, name))
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)  # for torch.load


if LIBRARY in os.environ:
    register(os.environ[LIBRARY])
