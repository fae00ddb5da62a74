"""The app: a plain ASGI object over one service, with no state outside of itself.

    app = create_app(Service(Engine.load("nano")), Settings())

Any ASGI server runs it; `mkref.serve.run` does with uvicorn. When the server shuts down, the app
lets running requests finish (`Settings.drain_timeout_s`) and closes the service.

What it does not do: load an engine, open a port, or span several processes: an app is one engine,
and whoever wants more runs more of them behind a router.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mkref.errors import MkrefError
from mkref.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from mkref.serve.service import Service

__all__ = ["create_app", "require"]

PACKAGES = ("fastapi", "pydantic", "llguidance", "cohere_melody", "uvicorn")


def require(*packages: str) -> None:
    """Check that the packages of the extra are there.

    Raises:
        MkrefError: names the missing ones and the extra.
    """
    missing = []
    for package in packages or PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:
            missing.append(package)
    if missing:
        raise MkrefError(f'serve: not installed: {", ".join(missing)}; pip install "mkref[serve]"')


def create_app(service: Service, settings: Settings | None = None) -> FastAPI:
    """An app that serves one model.

    Args:
        service: the engine with its queue; the app closes it when it shuts down.
        settings: of the endpoint.

    Raises:
        MkrefError: a package is missing.
        RequestError: the model cannot chat in the format that the settings name.
    """
    require(*PACKAGES[:-1])
    from fastapi import FastAPI
    from starlette.middleware.cors import CORSMiddleware

    import mkref
    from mkref.serve.endpoints import Endpoints
    from mkref.serve.errors import install_handlers
    from mkref.serve.metrics import HttpMetrics
    from mkref.serve.observe import Observer
    from mkref.serve.running import Slots
    from mkref.serve.served import ServedModel

    settings = settings or Settings()
    model = ServedModel(service, settings)
    metrics, slots = HttpMetrics(), Slots(settings.max_concurrency)
    endpoints = Endpoints(service, model, settings, slots)

    ended: list[bool] = []

    async def drain() -> None:
        ended.append(await service.drain(settings.drain_timeout_s))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        from mkref.serve.logs import log_event

        await asyncio.to_thread(model.prepare)
        log_event(logging.INFO, "ready", model=settings.model, max_context=model.max_context)
        yield
        await drain()  # of no effect if the server has begun it with its own going down
        await asyncio.to_thread(service.close)
        log_event(logging.INFO, "closed", all_answers_ended=all(ended))

    app = FastAPI(
        title="mkref", version=mkref.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.drain = drain
    _add_routes(app, endpoints, metrics)
    install_handlers(app)
    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(Observer, settings=settings, metrics=metrics, paths=paths)
    return app


def _add_routes(app: FastAPI, endpoints: Any, metrics: Any) -> None:
    from mkref.serve.info import Info
    from mkref.serve.openapi import describe

    info = Info(endpoints, metrics)
    routes = (
        ("/v1/chat/completions", "POST", endpoints.chat),
        ("/v1/completions", "POST", endpoints.completions),
        ("/v1/models", "GET", info.models),
        ("/v1/models/{model_id:path}", "GET", info.model),
        ("/health", "GET", info.health),
        ("/metrics", "GET", info.metrics),
    )
    for path, method, endpoint in routes:
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            name=endpoint.__name__,
            openapi_extra=describe(path),
        )
