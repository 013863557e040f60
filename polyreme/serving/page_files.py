"""The chat page, from files of this package; it loads nothing from anywhere else."""

from __future__ import annotations

from importlib.resources import files

from polyreme.serving.refusals import HttpRefusal
from polyreme.serving.web import Response

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "chat.css": "text/css; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    # scripts, styles and answers of this server alone, and no other site may show the page in a frame
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_file(name: str) -> Response:
    """A file of the page. Raises HttpRefusal 404 for what is none."""
    if name not in _TYPES:
        raise HttpRefusal(404, f"no page/{name[:100]} here")
    data = files("polyreme.serving").joinpath("page", name).read_bytes()
    return Response(data, headers={**_HEADERS, "Content-Type": _TYPES[name]})
