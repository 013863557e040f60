"""Pages, from files of a package; they load nothing from anywhere else."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath

from polyreme.serving.refusals import HttpRefusal
from polyreme.serving.web import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # scripts, styles and answers of this server alone, and no other site may show the page in a frame
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_file(name: str, package: str) -> Response:
    """A file of the page of a package. Raises HttpRefusal 404 for what is none."""
    page = files(package).joinpath("page")
    kind = _TYPES.get(PurePath(name).suffix)
    if kind is None or name not in {file.name for file in page.iterdir()}:
        raise HttpRefusal(404, f"no page/{name[:100]} here")
    return Response(page.joinpath(name).read_bytes(), headers={**HEADERS, "Content-Type": kind})
