"""Build the extension with the compiler of this machine, once for each torch, Python and source."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["NAME", "NotPossible", "built_extension"]

NAME = "_simulated_gpus"
SOURCES = Path(__file__).parent / "native"
# Without optimization: the kernels are those of torch, and -O1 builds in half the time of -O2.
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-w"]


class NotPossible(Exception):
    """GPUs cannot be simulated here. The message is one sentence that says why."""


def built_extension() -> Path:
    """Return the extension that fits this torch, this Python and these sources; build it if there is none."""
    torch = _folder_of_torch()
    version = importlib.metadata.version("torch")
    if (torch / "lib" / "libtorch_cuda.so").exists() or (torch / "lib" / "libtorch_hip.so").exists():
        raise NotPossible(
            f"torch {version} is built for GPUs, and GPUs can only be simulated with a build of torch for the CPU"
        )
    path = _cache() / _key(version) / f"{NAME}.so"
    if not path.exists():
        _build(path, torch, version)
    return path


def _folder_of_torch() -> Path:
    spec = importlib.util.find_spec("torch")  # which does not import it
    if spec is None or spec.origin is None:
        raise NotPossible("GPUs can only be simulated with torch, which is not installed")
    return Path(spec.origin).parent


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sync_batchnorm" / "simulated_gpus"


def _key(version: str) -> str:
    """Return a key that differs between extensions that cannot replace each other."""
    content = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        content.update(source.name.encode())
        content.update(source.read_bytes())
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    return f"torch-{version}-{python}-{content.hexdigest()[:16]}"


def _build(path: Path, torch: Path, version: str) -> None:
    """Compile the sources into `path`."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not compiler:
        raise NotPossible("GPUs can only be simulated with a C++ compiler, and neither g++ nor clang++ is on the PATH")
    include = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = torch / "lib"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may build at once, each into its own file. The last to finish replaces the same by the same.
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    command = [*compiler.split(), *FLAGS, f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command += [f"-I{folder}" for folder in include]
    command += [str(SOURCES / "module.cpp"), "-o", temporary, f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    print(f"Building the simulated GPUs for torch {version}, which takes about a minute ...", file=sys.stderr)
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        os.unlink(temporary)
        log = path.parent / "build.log"
        log.write_text(" ".join(command) + "\n" + result.stdout + result.stderr)
        raise NotPossible(
            f"the simulated GPUs could not be built for torch {version} with {compiler}, as {log} says in full"
        )
    os.replace(temporary, path)
