"""The ASGI application without sockets: a state whose engine the test plays, and one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from scripted_server import write_model
from starlette.types import ASGIApp

from xllm_cli.core import Counters, Ready, Snapshot, VmmReport
from xllm_cli.flags import Config
from xllm_cli.server.app import create_app
from xllm_cli.server.engine_client import EngineClient
from xllm_cli.server.instruments import Instruments
from xllm_cli.server.keys import ApiKeys
from xllm_cli.server.served import Models, ServedModel
from xllm_cli.server.state import ServerState
from xllm_cli.server.tokenizer import Tokenizer

SNAPSHOT = Snapshot(memory=VmmReport(), counters=Counters())


@contextmanager
def local_state(folder: Path, vmm: dict[str, Any] | None = None, **service: Any) -> Iterator[ServerState]:
    """A state that is loading."""
    config = Config.model_validate({"service": service, "vmm": vmm or {}})
    client = EngineClient(folder)
    instruments = Instruments("tiny")
    client.on_snapshot = instruments.step
    client.on_map = instruments.mapped
    first = ServedModel("tiny", "/tiny", instruments.first)
    try:
        yield ServerState(client, Models(first), config.service, instruments, config.model_dump(mode="json"))
    finally:
        client.close()


def make_ready(state: ServerState, folder: Path) -> None:
    """The engine is up and the tokenizer read."""
    state.models.first.tokenizer = Tokenizer.from_folder(write_model(folder / "tiny"))
    state.models.first.ready = state.client.ready = Ready(
        model_id="tiny", architecture="Tiny", dtype="float32", max_model_len=64, vocab_size=320, eos_token_ids=(257,),
        capacity_tokens=256, snapshot=SNAPSHOT,
    )  # fmt: skip


def app_of(state: ServerState, *keys: str, **security: Any) -> ASGIApp:
    """The whole application."""
    return create_app(state, ApiKeys(keys), Config.model_validate({"security": security}).security)


def call(app: ASGIApp, path: str, method: str = "GET", *, host: str = "127.0.0.1", **request: Any) -> httpx.Response:
    """One request from `host`."""

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(host, 50000), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.request(method, path, **request)

    return asyncio.run(once())
