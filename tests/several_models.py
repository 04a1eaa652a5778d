"""A scripted server that may serve several models, and how to get them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from scripted_server import error_of, write_model

FLAGS = {"enable_vmm_weights": True, "enable_vmm_kvcache": True, "vmm_elastic": True}
SHOUTING = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}"
WEIGHTS = 4 << 20  # bytes that each model holds while awake


def folder(base: Path, name: str, *, template: str | None = SHOUTING, **scripted: Any) -> str:
    """A model folder; what a fork from it comes to is in `scripted`."""
    made = write_model(base / name, template)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "script": scripted}))
    return str(made)


def fork(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    """The answer to a fork that succeeds."""
    answer = http.post("/fork_master", json={"model_path": path, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of an error."""
    return answer.status_code, error_of(answer)["code"]


def listed(http: httpx.Client) -> dict[str, dict[str, Any]]:
    """The models' cards by id."""
    return {card["id"]: card for card in http.get("/v1/models").json()["data"]}
