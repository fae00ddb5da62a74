"""A real server on a free port: uvicorn in a thread, nano behind it. No tests here.

The environment variable MKREF_LIVE_MACHINE names another machine than torch, for instance cuda.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkref.engine import Engine
from mkref.serve import Service, Settings, create_app
from mkref.serve.run import make_server, open_socket

if TYPE_CHECKING:
    from mkref.serve.service import Service as ServiceType

__all__ = ["Live", "live"]


@dataclass
class Live:
    """A server that runs.

    Attributes:
        url: of its /v1.
        service: behind it.
        server: uvicorn's; `should_exit` asks it to go down.
        thread: in which it runs.
    """

    url: str
    service: ServiceType
    server: Any
    thread: threading.Thread

    def stop(self) -> None:
        """Go down as on a signal, and wait for it."""
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def live(machine: str = "", max_context: int = 512, **settings: Any) -> Iterator[Live]:
    """Serve nano."""
    machine = machine or os.environ.get("MKREF_LIVE_MACHINE", "torch")
    with Engine.load("nano", machine, max_context=max_context) as engine:
        service = Service(engine)
        chosen = Settings(**settings)
        listening = open_socket("127.0.0.1", 0)
        server = make_server(create_app(service, chosen), chosen)

        def run() -> None:
            asyncio.run(server.serve(sockets=[listening]))

        thread = threading.Thread(target=run, name="server")
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        running = Live(url, service, server, thread)
        try:
            yield running
        finally:
            running.stop()
            listening.close()
