"""Pages for people: `/` to try the server, `/docs` to read about it. Nothing on them comes from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles

from mktts.server.document import text_page
from mktts.server.reference_page import reference_page
from mktts.server.studio import Studio

PAGE = Path(__file__).parent / "page"
# What a page may load, and where it may go: this server alone. blob: is sound that the page has made itself.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; media-src 'self' blob:; "
    "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_pages(app: FastAPI, studio: Studio, document: Callable[[], dict[str, Any]], anyone: dict[Any, Any]) -> None:
    """document: the OpenAPI document. anyone: documented refusals without a key."""

    @app.head("/", include_in_schema=False)
    @app.get(
        "/",
        response_class=PlainTextResponse,
        responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}, **anyone},
    )
    async def root(request: Request) -> Response:
        """Where things are; for a browser, a page to try them."""
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse((PAGE / "index.html").read_text(encoding="utf-8"), headers=_HEADERS | _BY_ACCEPT)
        return PlainTextResponse(text_page(studio.limits, studio.carries), headers=_BY_ACCEPT)

    @app.head("/docs", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference_page(document()), headers=_HEADERS)

    app.mount("/page", _Files(directory=PAGE))


_BY_ACCEPT = {"Vary": "Accept"}


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response
