"""A wheel holds the Python files of the checkout and each native module once, and the modules import from it.

.venv/bin/python .ci/check_wheel.py dist/xllm-*.whl
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "xllm_cli"
# the import path is the unpacked wheel first; -S leaves out the editable install, so its packages are added by name
CHECK = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
import xllm_cli, xllm_cli._blocks, xllm_cli._vmm, xllm_cli._kernels
for module in (xllm_cli, xllm_cli._blocks, xllm_cli._vmm, xllm_cli._kernels):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
"""


def main(wheel: Path) -> None:
    """Ends with an assertion error that names what is wrong."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        with tempfile.TemporaryDirectory() as folder:
            archive.extractall(folder)
            site_packages = next(path for path in sys.path if path.endswith("site-packages"))
            command = [sys.executable, "-I", "-S", "-c", CHECK, folder, site_packages]
            subprocess.run(command, cwd=folder, check=True, timeout=120)
    native = sorted(name.split(".")[0] for name in names if name.endswith(".so"))
    assert native == ["xllm_cli/_blocks", "xllm_cli/_kernels", "xllm_cli/_vmm"], native
    sources = {f"xllm_cli/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}, sources ^ set(names)
    print(f"{wheel.name}: {len(sources)} Python files, {len(native)} native modules")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
