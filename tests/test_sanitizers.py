"""The suites of native code once more, on modules built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUITES = {
    "_vmm": (
        "test_drivers.py",
        "test_driver_faults.py",
        "test_host_memory.py",
        "test_acl_driver.py",
        "test_acl_faults.py",
    ),
    "_blocks": ("test_blocks.py", "test_residency.py", "test_compaction.py", "test_cache_manager.py"),
}
# At the kernel's limit of mappings the sanitizer's own allocator gives up first.
LEFT_OUT = "not kernels_own_limit"

# Every Python of the run, children too, finds the instrumented module before it looks for the ordinary one.
SITECUSTOMIZE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("xllm_cli.{name}", {path!r})
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def find_runtime(name: str) -> str | None:
    """The compiler's library `name`, absolute; None if it has none."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    answer = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = answer.stdout.strip()
    return path if os.path.isabs(path) else None


def build(folder: Path, name: str) -> Path:
    """The module `name` with sanitizers, alone."""
    parts = {"_vmm": "VMM", "_blocks": "BLOCKS", "_kernels": "KERNELS"}
    options = [
        *(f"-DXLLM_BUILD_{part}=OFF" for module, part in parts.items() if module != name),
        "-DXLLM_SANITIZE=ON",
        "-DCMAKE_BUILD_TYPE=Debug",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    environment = {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    for command in (
        ["cmake", "-S", str(ROOT / "native"), "-B", str(folder), *options],
        ["cmake", "--build", str(folder)],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (module,) = folder.glob(f"*/{name}*.so")
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SUITES)
def test_native_code_is_clean_under_sanitizers(tmp_path: Path, name: str) -> None:
    runtimes = [find_runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    if None in runtimes:
        pytest.skip("the compiler has no sanitizer runtime")
    module = build(tmp_path / "build", name)
    assert b"__asan_init" in module.read_bytes()
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(name=name, path=str(module)))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
        "LD_PRELOAD": " ".join(map(str, runtimes)),
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:handle_sigbus=0",  # the interpreter leaks; faults are tested for
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT]
    command += [str(ROOT / "tests" / name) for name in SUITES[name]]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
