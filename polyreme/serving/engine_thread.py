"""The thread that owns an engine, and its bridge to the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from polyreme.generation.choosing import TokenGrammar
from polyreme.generation.prompt_vectors import PromptVectors
from polyreme.generation.sampling import SamplingParams

Deliver = Callable[[Any], None]
_IDLE_SECONDS = 1.0
"""After which the engine does a chore: who asks as soon as the server answers does not wait for one."""
_log = logging.getLogger("polyreme.serving")


class EngineRequest(NamedTuple):
    """One text that the engine is to write. prompt_logprobs: so many of the likeliest tokens are told of at each place
    of the prompt, with its own; None for nothing of it. grammar: of the text. adapter: that writes it, if any. vectors:
    what stands in the prompt in place of embeddings."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    prompt_logprobs: int | None = None
    grammar: TokenGrammar | None = None
    adapter: str | None = None
    vectors: PromptVectors | None = None


class EngineThread:
    """Steps an engine while it has requests; everything that is asked of it happens between two steps.

    Methods are called from the event loop. What a step gives is handed over there, to the function that came with the
    request: StepOutputs, or the exception that a step raised, which ends every request that was in the engine.
    chores: what the engine is to do besides, one after another, each when no request has come for a second.
    """

    def __init__(
        self,
        engine: Any,
        loop: asyncio.AbstractEventLoop,
        on_step: Callable[[Any], None],
        chores: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._engine, self._loop, self._on_step = engine, loop, on_step
        self._chores = deque(chores)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deliver: dict[str, Deliver] = {}
        self._is_closing = False
        self._may_begin = threading.Lock()  # held while a chore begins, and while the thread is told to end
        self._is_busy = False
        self._thread = threading.Thread(target=self._run, name="polyreme-engine", daemon=True)
        self._thread.start()

    async def add(self, requests: Sequence[EngineRequest], deliver: Deliver) -> None:
        """Hand requests to the engine: all, or none. Raises ConfigError for what it refuses."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._deliver |= {request.request_id: deliver for request in requests}

        def order() -> None:
            try:
                for request in requests:
                    self._engine.add(*request)
            except Exception as error:  # noqa: BLE001  (whoever asked gets it)
                self._tell(_set, done, error)
            else:
                self._tell(_set, done, None)

        self._orders.put(order)
        try:
            await done
        except BaseException:
            self.abort([request.request_id for request in requests])
            raise

    def abort(self, request_ids: Collection[str]) -> None:
        """Take requests out before the next step; nothing more of them is delivered. Those that have ended may be
        among them."""
        live = [request_id for request_id in request_ids if self._deliver.pop(request_id, None)]
        if live:
            self._orders.put(lambda: self._abort(live))

    def close(self) -> None:
        """End the thread after the step or the chore that it is in; returns when the step has ended. A chore is not
        waited for, as it may compile for long."""
        with self._may_begin:
            self._is_closing = True
            is_busy = self._is_busy
        self._orders.put(lambda: None)  # wakes it
        if not is_busy:
            self._thread.join()

    # in the thread

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
        # no step may follow that would tell
        self._tell(self._on_step, self._engine.statistics)

    def _run(self) -> None:
        while not self._is_closing:
            self._take_orders()
            if self._is_closing:
                continue
            if not self._engine.has_unfinished:
                if self._chores:
                    self._do(self._chores.popleft())
                continue
            try:
                outputs = self._engine.step()
            except Exception as error:  # noqa: BLE001  (told to everyone who waits for the step)
                self._tell(self._fail, error)
                continue
            self._tell(self._hand_over, outputs, self._engine.statistics)

    def _do(self, chore: Callable[[], None]) -> None:
        with self._may_begin:
            if self._is_closing:
                return
            self._is_busy = True
        try:
            chore()
        except Exception:  # noqa: BLE001  (a request that needs the same will be told)
            _log.exception("a chore of the engine failed")
        self._is_busy = False

    def _take_orders(self) -> None:
        wait = not self._engine.has_unfinished
        while True:
            try:
                order = self._orders.get(block=wait, timeout=_IDLE_SECONDS if self._chores else None)
            except queue.Empty:
                return
            order()
            wait = False

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # in the loop

    def _hand_over(self, outputs: Sequence[Any], statistics: Any) -> None:
        for output in outputs:
            deliver = self._deliver.get(output.request_id)
            if deliver is None:
                continue
            if output.finish_reason is not None:
                del self._deliver[output.request_id]
            deliver(output)
        self._on_step(statistics)

    def _fail(self, error: Exception) -> None:
        """Nobody knows what state the step left: all that was in the engine leaves it."""
        waiting = dict(self._deliver)
        self.abort(list(waiting))
        for deliver in {id(deliver): deliver for deliver in waiting.values()}.values():
            deliver(error)


def _set(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
