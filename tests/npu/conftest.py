"""The tests in this folder run torch_npu: only `make npu` can, elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch_npu") else ["test_*.py"]
