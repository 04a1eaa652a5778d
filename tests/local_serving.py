"""The whole way of a request in one process: the ASGI application, real sockets, and a real engine in a thread."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
from checkpoints import tiny_checkpoint
from local_app import SNAPSHOT, app_of, local_state
from scripted_engine import ScriptedEngine
from scripted_models import EOS, VOCAB

from xllm_cli.config import make_config
from xllm_cli.core import Ready
from xllm_cli.engine.host import Host
from xllm_cli.engine.loop import Loop
from xllm_cli.engine.parent import Parent
from xllm_cli.engine.start import build_first
from xllm_cli.server.state import ServerState
from xllm_cli.server.tokenizer import Tokenizer

Result = TypeVar("Result")


class LocalServing:
    """Requests to an application, over `state`, whose engine runs in a thread."""

    def __init__(self, folder: Path, model: Path, state: ServerState) -> None:
        self._folder = folder
        self.state = state
        self._app = app_of(state)
        self._death = os.pipe()
        self._ready = self._build(model)
        state.models.first.tokenizer, state.models.first.ready = Tokenizer.from_folder(model), self._ready
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        asyncio.run(self._hear(self._until_ready()))

    def _build(self, model: Path) -> Ready:
        """A tiny Llama in float32."""
        config = make_config(
            model=str(model), dtype="float32", block_size=16, enable_vmm_kvcache=True, vmm_elastic=True,
            max_cache_size=16 << 20,
        )  # fmt: skip
        self._host = Host(*build_first(config, lambda phase: None))
        return self._host.ready

    def _run(self) -> None:
        parent = Parent(self._folder, self._death[0])
        parent.send(self._ready)
        Loop(self._host, parent).run()
        parent.close()
        assert self._host.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        """The whole answer; a stream is read to its end."""
        return self.request("POST", path, **body)

    def request(self, method: str, path: str, **body: Any) -> httpx.Response:
        """As post()."""

        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, client=("127.0.0.1", 50000))
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as http:
                return await http.request(method, path, json=body)

        return asyncio.run(self._hear(once()))

    async def _hear(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do something while the engine's messages are read."""
        receiving = asyncio.create_task(self.state.client.receive())
        try:
            return await asyncio.wait_for(work, 60)
        finally:
            receiving.cancel()
            await asyncio.wait({receiving})

    async def _until_ready(self) -> None:
        while self.state.client.ready is None:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        os.close(self._death[1])  # as when the server dies: heard even by an engine that has not connected yet
        self._thread.join(20)
        assert not self._thread.is_alive()
        os.close(self._death[0])


class ScriptedServing(LocalServing):
    """The engine does what a prompt tells it."""

    def _build(self, model: Path) -> Ready:
        (self._folder / "config.json").write_text(json.dumps({"model": {"model": str(model), "model_id": "tiny"}}))
        return Ready(
            model_id="tiny", architecture="Tiny", dtype="float32", max_model_len=4096, vocab_size=VOCAB,
            eos_token_ids=(EOS,), capacity_tokens=4096, snapshot=SNAPSHOT,
        )  # fmt: skip

    def _run(self) -> None:
        engine = ScriptedEngine(self._folder, self._death[0])
        engine.send(self._ready)
        with suppress(SystemExit):  # its answer to Shutdown
            engine.serve()
        engine.inbox.context.destroy(linger=500)


@contextmanager
def local_serving(
    folder: Path, model: Path | None = None, kind: type[LocalServing] = LocalServing, **flags: Any
) -> Iterator[LocalServing]:
    """An application, as if started with `flags`, and its engine; `folder` holds their sockets."""
    with local_state(folder, **flags) as state:
        serving = kind(folder, model or tiny_checkpoint("llama"), state)
        try:
            yield serving
        finally:
            serving.close()
