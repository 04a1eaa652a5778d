"""The whole way of a request in one process: the ASGI application, real sockets, and a real engine in a thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from checkpoints import tiny_checkpoint
from local_app import app_of, local_state

from xllm_cli.config import make_config
from xllm_cli.engine.host import build_engine
from xllm_cli.engine.process import Parent, serve
from xllm_cli.server.tokenizer import Tokenizer


class LocalServing:
    """POST to an application whose engine runs a tiny Llama in float32."""

    def __init__(self, folder: Path, checkpoint: Path, state: Any) -> None:
        self._state = state
        self._app = app_of(state)
        config = make_config(
            model=str(checkpoint), dtype="float32", block_size=16, enable_vmm_kvcache=True, vmm_elastic=True,
            max_cache_size=16 << 20,
        )  # fmt: skip
        self.engine, self._state.client.ready = build_engine(config, lambda phase: None)
        self._state.tokenizer = Tokenizer.from_folder(checkpoint)
        self._death = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(folder,))
        self._thread.start()

    def _run(self, folder: Path) -> None:
        parent = Parent(folder, self._death[0])
        serve(self.engine, parent)
        parent.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        """The whole answer; a stream is read to its end."""

        async def once() -> httpx.Response:
            receiving = asyncio.create_task(self._state.client.receive())
            transport = httpx.ASGITransport(self._app, client=("127.0.0.1", 50000))
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as http:
                answer = await http.post(path, json=body)
            receiving.cancel()
            await asyncio.wait({receiving})
            return answer

        return asyncio.run(once())

    def close(self) -> None:
        self._state.client.shutdown()
        self._thread.join(20)
        assert not self._thread.is_alive() and self.engine.close()
        for end in self._death:
            os.close(end)


@contextmanager
def local_serving(folder: Path, checkpoint: Path | None = None) -> Iterator[LocalServing]:
    """An application and its engine; `folder` holds their sockets."""
    with local_state(folder) as state:
        serving = LocalServing(folder, checkpoint or tiny_checkpoint("llama"), state)
        try:
            yield serving
        finally:
            serving.close()
