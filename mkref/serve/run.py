"""Run an app with uvicorn until somebody says stop.

SIGTERM or SIGINT: no new connections, running requests go on for `Settings.drain_timeout_s`, then
what is left ends with an error that says so, and the service is closed. A second signal does not
wait.

What it does not do: several processes or hosts. A front of many engines runs one app for each.
"""

from __future__ import annotations

import asyncio
import math
import socket
from typing import TYPE_CHECKING, Any

from mkref.errors import MkrefError
from mkref.serve.app import require

if TYPE_CHECKING:
    from fastapi import FastAPI

    from mkref.serve.settings import Settings

__all__ = ["make_server", "open_socket", "serve"]

BACKLOG = 2048
GRACE_S = 5
"""After the time of `Settings.drain_timeout_s`, for the last words to go out."""


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a port of 0 is known before the server runs.

    Raises:
        MkrefError: the address cannot be had; says why.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except socket.gaierror as error:
        bound.close()
        raise MkrefError(
            f"host: {host!r} is no address of this computer: {error.strerror}"
        ) from error
    except (OSError, OverflowError) as error:
        bound.close()
        raise MkrefError(f"port: cannot listen at {host}:{port}: {error}") from error
    return bound


def make_server(app: FastAPI, settings: Settings, **options: Any) -> Any:
    """A uvicorn server for the app; `options` of uvicorn's configuration go before ours.

    Raises:
        MkrefError: uvicorn is not installed.
    """
    require("uvicorn")
    import uvicorn

    from mkref.serve.protocol import protocol_for

    class Server(uvicorn.Server):
        """Ends answers itself, rather than have uvicorn cut them off in the middle."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            draining = asyncio.create_task(app.state.drain())
            await super().shutdown(sockets)
            if self.force_exit:
                draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)

    config = {
        "http": protocol_for(settings),
        "access_log": False,  # the app writes a line of its own
        "log_config": None,
        "server_header": False,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": GRACE_S + math.ceil(settings.drain_timeout_s),
        "lifespan": "on",
        "ws": "none",
    }
    return Server(uvicorn.Config(app, **{**config, **options}))


def serve(app: FastAPI, settings: Settings, listening: socket.socket) -> None:
    """Serve until a signal comes."""
    make_server(app, settings).run(sockets=[listening])
