"""The endpoints that tell: models, health, metrics.

What it does not do: generate (`mkref.serve.endpoints`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request  # noqa: TC002  FastAPI reads the annotation
from starlette.responses import JSONResponse, Response

from mkref.serve.metrics import CONTENT_TYPE, HttpMetrics, render

if TYPE_CHECKING:
    from mkref.serve.endpoints import Endpoints

__all__ = ["Info"]


@dataclass(frozen=True)
class Info:
    """The endpoints of one app."""

    endpoints: Endpoints
    counted: HttpMetrics

    def _card(self) -> dict[str, Any]:
        model = self.endpoints.model
        return {
            "id": model.name,
            "object": "model",
            "created": self.endpoints.settings.created,
            "owned_by": "mkref",
            "max_model_len": model.max_context,
        }

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self.endpoints.model.check_name(request.path_params["model_id"])
        return JSONResponse(self._card())

    async def health(self) -> Response:
        """GET /health: 200, or 503 if requests would be refused."""
        service = self.endpoints.service
        state = "ok" if service.healthy else "broken"
        if service.healthy and not service.accepting:
            state = "going down"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def metrics(self) -> Response:
        """GET /metrics."""
        stats = self.endpoints.service.stats()
        text = render(self.counted, self.endpoints.slots, stats)
        return Response(text, media_type=CONTENT_TYPE)
