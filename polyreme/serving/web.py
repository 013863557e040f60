"""Starlette and uvicorn: the one place that imports them, as they come with an extra."""

from polyreme.errors import ConfigError

try:
    import h11
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ConfigError(
        f"polyreme serve and polyreme dash need starlette and uvicorn, of the extra serve ({error}): "
        "pip install 'polyreme[serve]'"
    ) from None

__all__ = [
    "H11Protocol",
    "HTTPException",
    "JSONResponse",
    "Request",
    "Response",
    "Route",
    "Starlette",
    "h11",
    "run_in_threadpool",
    "uvicorn",
]
