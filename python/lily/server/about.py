"""Routes that say what is served and how it fares."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from lily.server.options import check_model
from lily.server.state import State
from lily.server.usage import sampling_options


def about_routes(state: State) -> APIRouter:
    """Models, health and metrics."""
    router = APIRouter()
    started = int(time.time())

    def described() -> dict[str, Any]:
        info = state.model.info
        return {
            "id": state.settings.name,
            "object": "model",
            "created": started,
            "owned_by": "lily",
            "context": info.context,
            "device": info.device,
            "precision": info.precision,
            "sampling": sampling_options(state.sampling),
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, state.settings.name)
        return described()

    @router.get("/health")
    async def health() -> dict[str, Any]:
        admission = state.crew.admission
        return {"status": "ok", "running": admission.running, "waiting": admission.waiting}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        admission = state.crew.admission
        text = state.metrics.text(admission.running, admission.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    return router
