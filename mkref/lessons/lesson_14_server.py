"""The server of lesson 14: nano behind the real endpoint, in a thread of the notebook's process.

A thread of its own with an event loop of its own, because JupyterLab's is busy while a cell runs.
It listens at 127.0.0.1 only, at a port that was free. Starting again stops the one before, so a
cell can be run twice. Its threads are daemons: they end with the notebook's kernel at the latest.

What it does not do: anything that `mkref serve` does not do, which calls the same functions.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from mkref.errors import MkrefError
from mkref.lessons.lesson_14_session import load_nano
from mkref.serve import Service, Settings, create_app
from mkref.serve.app import require
from mkref.serve.run import make_server, open_socket

if TYPE_CHECKING:
    from mkref.engine import Engine
    from mkref.serve.service import Stats

__all__ = ["LessonServer", "start_server"]

PATIENCE_S = 60.0
_running: list[LessonServer] = []


class LessonServer:
    """A server that runs; made by `start_server`.

    Attributes:
        root: its address, below which lie /health and /metrics.
        url: of its /v1, what clients call `base_url`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._service = Service(engine)
        settings = Settings(model="nano", drain_timeout_s=5.0)
        self._socket = open_socket("127.0.0.1", 0)
        self._server = make_server(create_app(self._service, settings), settings)
        self._thread = threading.Thread(target=self._run, name="lesson-server", daemon=True)
        self.root = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"{self.root}/v1"
        self._thread.start()
        end = time.monotonic() + PATIENCE_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                self.stop()
                raise MkrefError("server: it did not start")
            time.sleep(0.01)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    @property
    def stats(self) -> Stats:
        """What the service behind it has done."""
        return self._service.stats()

    def stop(self) -> None:
        """Let answers that run come to their end, close everything. Can be called again."""
        if self in _running:
            _running.remove(self)
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self._socket.close()
        if not self._thread.is_alive():
            self._engine.close()

    def __repr__(self) -> str:
        state = "listening at 127.0.0.1" if self._thread.is_alive() else "stopped"
        return f"nano, {state}"


def start_server(max_context: int = 512) -> LessonServer:
    """Serve nano at a free port of this computer; an earlier one is stopped.

    Raises:
        MkrefError: a package is missing (says which), or the server did not start.
    """
    require()
    stop_all()
    server = LessonServer(load_nano(max_context=max_context))
    _running.append(server)
    return server


def stop_all() -> None:
    """Stop what runs, if anything does."""
    for server in [*_running]:
        server.stop()
