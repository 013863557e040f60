"""The dashboard's endpoints, which only read: the page, and JSON of runs, curves and what lies in a run's folder."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polyreme.dashboard.pictures import TYPES
from polyreme.dashboard.run import RunFolder, RunList
from polyreme.serving.app import refusal_handlers
from polyreme.serving.page_files import HEADERS, page_file
from polyreme.serving.refusals import HttpRefusal
from polyreme.serving.web import Request, Response, Route, Starlette, run_in_threadpool

_PACKAGE = "polyreme.dashboard"
_MOST_POINTS, _MOST_SERIES = 20_000, 200


class Dashboard:
    """What answers requests, of a list of runs."""

    def __init__(self, runs: RunList) -> None:
        self.runs = runs
        self._lock = threading.Lock()

    def app(self) -> Starlette:
        """The ASGI application, without what keeps others out (serving.guard)."""
        routes = [
            Route("/", self.page),
            Route("/page/{name}", self.page),
            Route("/health", self.health),
            Route("/api/runs", self.list_runs),
            Route("/api/series", self.series),
            Route("/api/runs/{run}", self.details),
            Route("/api/runs/{run}/schedule.svg", self.schedule),
            Route("/api/runs/{run}/picture", self.picture),
        ]
        return Starlette(routes=routes, exception_handlers=refusal_handlers())

    async def page(self, request: Request) -> Response:
        """The page, and what it is made of."""
        return page_file(request.path_params.get("name", "index.html"), _PACKAGE)

    async def health(self, request: Request) -> Response:
        """200 as long as the process answers."""
        return _json({"status": "ready"})

    async def list_runs(self, request: Request) -> Response:
        """Every run with its state and latest values."""
        return _json({"runs": await self._read(lambda: [run.summary() for run in self.runs.runs()])})

    async def series(self, request: Request) -> Response:
        """Curves of several runs. Of the query: run and metric, each once or more; points: the most of a curve; from
        and to: steps."""
        query = request.query_params
        runs, metrics = query.getlist("run"), query.getlist("metric")
        if not runs or not metrics or len(runs) * len(metrics) > _MOST_SERIES:
            raise HttpRefusal(400, f"give run and metric, up to {_MOST_SERIES} pairs of them", code="bad_request")
        points = int(_number(query.get("points", "1000"), "points", 2, _MOST_POINTS))
        first = _number(query.get("from", "-inf"), "from", -math.inf, math.inf)
        last = _number(query.get("to", "inf"), "to", -math.inf, math.inf)

        wanted = [(self._run(run), metric) for run in runs for metric in metrics]

        def sampled() -> list[dict[str, Any]]:
            return [one for run, metric in wanted for one in _sampled(run, metric, points, first, last)]

        return _json({"series": await self._read(sampled)})

    async def details(self, request: Request) -> Response:
        """Samples, faults, checkpoints, pictures and the configuration of a run."""
        run = self._run(request.path_params["run"])
        return _json(await self._read(run.details))

    async def schedule(self, request: Request) -> Response:
        """The pipeline schedule of a run's plan."""
        drawn = await self._read(self._run(request.path_params["run"]).schedule_picture)
        if drawn is None:
            raise HttpRefusal(404, "no pipeline, no checkpoint yet, or no matplotlib here (pip install polyreme[logs])")
        return _picture(drawn, ".svg")

    async def picture(self, request: Request) -> Response:
        """A picture in a run's folder, by its name in details."""
        name = request.query_params.get("name", "")
        path = self._run(request.path_params["run"]).picture(name)
        try:
            data = None if path is None else await run_in_threadpool(Path(path).read_bytes)
        except OSError:
            data = None
        if path is None or data is None:
            raise HttpRefusal(404, f"no picture {name[:100]!r} in this run")
        return _picture(data, path.suffix.lower())

    async def _read(self, what: Callable[[], Any]) -> Any:
        """What a function gives in a thread; one at a time, as each may read on in the logs."""

        def locked() -> Any:
            with self._lock:
                return what()

        return await run_in_threadpool(locked)

    def _run(self, run_id: str) -> RunFolder:
        run = self.runs.get(run_id)
        if run is None:
            raise HttpRefusal(404, f"no run {run_id[:100]!r} here")
        return run


def _sampled(run: RunFolder, metric: str, points: int, first: float, last: float) -> Iterator[dict[str, Any]]:
    curve = run.log.curves.get(metric)
    if curve is not None:
        steps, values = curve.sampled(points, first, last)
        yield {"run": run.id, "metric": metric, "steps": steps, "values": values, "total": len(curve.steps)}


def _json(value: Any) -> Response:
    try:
        text = json.dumps(value, ensure_ascii=True, allow_nan=False, default=str)
    except ValueError:  # NaN or 1e400 in somebody's events or configuration
        finite = json.loads(json.dumps(value, default=str), parse_float=_finite, parse_constant=_finite)
        text = json.dumps(finite, ensure_ascii=True, allow_nan=False)
    return Response(text, headers=HEADERS, media_type="application/json")


def _finite(text: str) -> float | str:
    """A number of JSON, what is not finite as JsonlLog writes it: "nan", "inf", "-inf"."""
    value = float(text)
    return value if math.isfinite(value) else str(value)


def _picture(data: bytes, suffix: str) -> Response:
    # a picture may hold scripts of whoever wrote the folder: shown in an image nothing of them runs, opened by itself
    # the policy keeps them from running
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}
    return Response(data, headers={**HEADERS, **policy, "Content-Type": TYPES[suffix]})


def _number(text: str, name: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise HttpRefusal(400, f"{name}={text[:40]!r}: give a number from {low:g} to {high:g}", code="bad_request")
    return value
