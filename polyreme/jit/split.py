"""A captured function whose forward and backward are programs of their own, the backward cut in two if wanted.

What a pipeline needs: the forward of a part of a model runs now, its backward later, the gradients of its
weights later still. The forward is traced with the tape on; the arrays that the tape's nodes keep are further outputs.
The backward is the tape's walk over the same nodes, traced with those arrays given back (tape.Node.saved, reload). The
cut between input gradients and weight gradients is a cut of the tape: edges from which an input is reached are followed
first, all others later. Source of the cut: arXiv:2401.10241, section 2.

Over replicas the gradients of parameters are not summed microbatch by microbatch: what a backward adds to is, for each
parameter, an array with one more dim in front, an addend for each replica (jit/unreduced.py), and the last backward of
a step alone gives the sums, whose communication it hides behind its own work.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from polyreme.call_site import where_defined
from polyreme.core import amp_policy, layout, rng, state
from polyreme.core import dtype as dtypes
from polyreme.core.devices.abstract import Abstract, mode
from polyreme.core.engine import backend
from polyreme.core.state import TensorState, Tracer
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.eager.walk import CutWalk, leaf_gradients
from polyreme.errors import CaptureError
from polyreme.jit.called import Called
from polyreme.jit.capture import Capture, nodes_behind, same_parts, stale, watching
from polyreme.jit.convert import converted
from polyreme.jit.fusing import fusing
from polyreme.jit.kept import KeptPlace
from polyreme.jit.liveness import used_arguments
from polyreme.jit.structure import Spec, flatten, rebuild
from polyreme.jit.unreduced import Axes, Replicas, Split, Unreduced, accumulate, named, sum_replicas

_log = logging.getLogger("polyreme.jit")


class Flow(NamedTuple):
    """A structure of values between programs: arrays, and plain Python values as they are.

    wants: per leaf, None for a plain value, else whether gradients flow through the array.
    """

    spec: Spec
    leaves: list[Any]
    wants: tuple[bool | None, ...]

    @classmethod
    def of(cls, value: Any) -> Flow:
        """A structure of Tensors, None and plain values taken apart."""
        leaves: list[Any] = []
        spec = flatten(value, leaves)
        wants = tuple(None if not isinstance(v, TensorState) else not v.stop_gradient for v in leaves)
        return cls(spec, [v._array if isinstance(v, TensorState) else v for v in leaves], wants)

    def tensors(self) -> Any:
        """The structure again, its arrays as Tensors without history."""
        return rebuild(
            self.spec, iter([v if w is None else Tensor(v) for v, w in zip(self.leaves, self.wants, strict=True)])
        )

    @property
    def arrays(self) -> list[Any]:
        """The arrays among the leaves."""
        return [v for v, w in zip(self.leaves, self.wants, strict=True) if w is not None]

    def with_arrays(self, arrays: Sequence[Any]) -> Flow:
        """The same structure around other arrays."""
        given = iter(arrays)
        return self._replace(
            leaves=[v if w is None else next(given) for v, w in zip(self.leaves, self.wants, strict=True)]
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of a program: structure, shapes, dtypes, plain values."""
        told = tuple(
            (v.__class__, v) if w is None else (v.shape, v.dtype, w)
            for v, w in zip(self.leaves, self.wants, strict=True)
        )
        return (self.spec, told)


class Kept(NamedTuple):
    """The state that a forward leaves for its backward: its inputs and what the tape saved; stash: cotangents that the
    first part of a backward cut in two leaves for the second."""

    inputs: list[Any]
    residuals: list[Any]
    stash: list[Any]


_RELEASED = 0
"""Stands where a node's array was; a leaf of a pytree, as an array is."""


@dataclass(frozen=True)
class _Graph:
    """The tape of a traced forward, its saved arrays named by where they come from.

    ends: (position among the outputs, edge). refs: per node, per saved array, ("input" | "state" | "kept", position) or
    ("constant", value) | ("unneeded", shape and dtype).
    """

    ends: tuple[tuple[int, Any], ...]
    nodes: tuple[tape.Node, ...]
    refs: tuple[tuple[tuple[str, Any], ...], ...]
    inputs: tuple[TensorState, ...]
    leaves: tuple[TensorState, ...]
    reaching: frozenset[int]

    def release(self) -> None:
        """Drop the arrays and tracers that the nodes hold, until they are replayed."""
        for node, refs in zip(self.nodes, self.refs, strict=True):
            node.reload([_RELEASED] * len(refs))

    def along(self, edge: Any) -> bool:
        """True for an edge from which an input that wants a gradient is reached."""
        return id(edge[0] if isinstance(edge, tuple) else edge) in self.reaching


class SplitProgram:
    """fn for inputs of one structure: forward, backward and, with cut, weights, each one compiled call.

    State that fn reads (parameters) is given to each call, so that it may live on other devices in between; state it
    writes (running statistics) is read and written by `forward` itself. Random numbers come from the key given to
    `forward`, which returns the key that follows. backward=False: forward alone, nothing is kept.
    """

    example: Flow
    wants_backward: bool
    cut: bool
    read: list[TensorState]
    written: list[TensorState]

    def __init__(
        self, fn: Callable[[Any], Any], example: Flow, place: layout.Layout | None, *, backward: bool, cut: bool
    ) -> None:
        self.fn = fn
        self.example = example.with_arrays([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in example.arrays])
        self.place = place
        self.wants_backward, self.cut = backward, cut
        self._modes = self._modes_now()
        # the patterns that calls of the forward were fused by
        self.fusions: tuple[str, ...] = ()
        # whether random numbers are drawn: if not, the key given is the key returned
        self.draws = False
        # parameters that belong to another stage: how they are laid out on this one
        self.moved: list[tuple[Any, dict[str, Any]]] = []
        self.layers: tuple[tuple[Any, bool, tuple], ...] = ()
        self.read, self.written = self._discover()
        self._hooks, self._hooks_seen = self._hooks_now(), state.leaf_hooks.version
        self._outs: Flow | None = None
        self._graph: _Graph | None = None
        self._put_off: list[tuple[tape.Node, tuple[int, ...]]] = []
        self._input_layouts: list[Any] = []
        self._zeros: dict[tuple, Any] = {}
        self._replicas = None if place is None else Replicas(place.mesh, place.token_axes)
        # of the program that adds to gradients: how rows split the arrays it takes beside parameters; of each leaf,
        # the axes over which its gradient stays unreduced, and the Layers that it comes from
        self._splits: list[list[Split | None]] | None = None
        self._unreduced: tuple[Axes, ...] = ()
        self._scopes: list[str] = []
        # of the arrays that the tape keeps, in order, which ones a backward depends on; None before that is known
        self._needed: list[bool] | None = None
        self._forward = _compile(self._trace_forward, fn, "forward")
        self._backward = _compile(self._trace_backward, fn, "backward", donate_argnums=4)
        self._last_backward = _compile(self._trace_last_backward, fn, "backward", donate_argnums=4)
        self._inputs = _compile(self._trace_inputs, fn, "backward")
        self._weights = _compile(self._trace_weights, fn, "weights", donate_argnums=4)
        self._last_weights = _compile(self._trace_last_weights, fn, "weights", donate_argnums=4)

    def serves(self) -> bool:
        """True while the Layers called are in the mode they were captured in and put together from the same parts,
        hooks included, the same state wants gradients, and what the code reads around it is as it was."""
        return (
            self._modes == self._modes_now()
            and all(layer.training is training and same_parts(layer, parts) for layer, training, parts in self.layers)
            and all(t.stop_gradient is s for t, s in self._stopped)
            and self._same_hooks()
            and self._surroundings.change() is None
        )

    def _same_hooks(self) -> bool:
        """True if the parameters have the gradient hooks they were captured with."""
        if self._hooks_seen != state.leaf_hooks.version:
            if self._hooks_now() != self._hooks:
                return False
            self._hooks_seen = state.leaf_hooks.version
        return True

    @staticmethod
    def _modes_now() -> tuple[Any, Any, bool]:
        return amp_policy.active.policy, dtypes.default_dtype(), fusing.is_on

    def _hooks_now(self) -> list[tuple]:
        return [tuple(getattr(t, "_hooks", {}).values()) for t in (*self.read, *self.written)]

    # running

    def forward(self, read: list[Any], key: Any, inputs: list[Any]) -> tuple[Flow, Any, Kept]:
        """read: the arrays of self.read, in order. -> outputs, the key that follows, what backward needs."""
        if self._outs is None:
            self._input_layouts = [a.sharding for a in inputs]
            self._needed = self._find_needed(read, key, inputs) if self.wants_backward else None
        outs, written, key, residuals = self._forward([t._array for t in self.written], read, key, inputs)
        for tensor, array in zip(self.written, written, strict=True):
            tensor._array = array
        assert self._outs is not None
        return self._outs.with_arrays(outs), key, Kept(inputs if self.wants_backward else [], residuals, [])

    @property
    def leaves(self) -> tuple[TensorState, ...]:
        """The parameters that get gradients; known after the first forward."""
        assert self._graph is not None
        return self._graph.leaves

    def zeros(
        self, read: list[Any], saved: Kept, cotangents: list[Any] | None, *, last: bool = False
    ) -> list[jax.Array]:
        """Zeros to add the gradients of `leaves` to, each laid out as its gradient, or as its addends unless last.

        Takes what the call that first adds to them takes: weights, with cut, else backward.
        """
        missing = (last, () if self.cut else tuple(c is None for c in cotangents or ()))
        make = self._zeros.get(missing)
        if make is None:
            args = (read, saved.inputs, saved.residuals, saved.stash if self.cut else cotangents)
            shapes = self._shapes_of_sums(args, last)
            with self._as_captured():
                made = [
                    (s.shape, s.dtype, _gradient_layout(leaf) if last else self._sum_layout(leaf, axes))
                    for s, leaf, axes in zip(shapes, self.leaves, self._unreduced, strict=True)
                ]
            make = self._zeros[missing] = _nothing(made) if mode.is_on else _zeros(tuple(made))
        return make()

    def backward(
        self, read: list[Any], saved: Kept, cotangents: list[Any], grads: list[Any], *, last: bool = False
    ) -> tuple[list[Any], list[Any], Kept]:
        """cotangents: one per output array, None where absent. grads: what `leaves` have so far, donated.

        -> gradients of the input arrays (None where absent), the sums, what `weights` needs (with cut, when the sums
        are grads unchanged). last: of the step, which leaves nothing unreduced.
        """
        if self.cut:
            gradients, stash = self._inputs(read, saved.inputs, saved.residuals, cotangents)
            return gradients, grads, saved._replace(stash=stash)
        args = (read, saved.inputs, saved.residuals, cotangents)
        run = self._last_backward if self._leaves_any_unreduced(args) and last else self._backward
        gradients, grads = run(*args, grads)
        return gradients, grads, Kept([], [], [])

    def weights(self, read: list[Any], kept: Kept, grads: list[Any], *, last: bool = False) -> list[Any]:
        """The second part of a backward cut in two: grads, donated, plus the gradients of `leaves`."""
        args = (read, kept.inputs, kept.residuals, kept.stash)
        run = self._last_weights if self._leaves_any_unreduced(args) and last else self._weights
        return run(*args, grads)

    def _leaves_any_unreduced(self, args: tuple) -> bool:
        """Whether the program that adds to gradients, called with these, leaves one of them unreduced."""
        if self._splits is None:
            self._shapes_of_sums(args, False)
        return any(self._unreduced)

    def _shapes_of_sums(self, args: tuple, last: bool) -> list[Any]:
        """The gradients of leaves as the program that adds to them gives them."""
        if self._splits is None:
            # now, while they are arrays: tracers do not say where they lie
            split_of = self._replicas.split_of if self._replicas is not None else _not_split
            self._splits = [[None if a is None else split_of(a) for a in arrays] for arrays in args[1:]]
        # arrays as arguments, so that tracers stand for them: what is traced must not keep a microbatch alive
        if self.cut:
            return jax.eval_shape(self._trace_last_weights if last else self._trace_weights, *args, None)
        return jax.eval_shape(self._trace_last_backward if last else self._trace_backward, *args, None)[1]

    @property
    def programs(self) -> list[tuple[str, Called]]:
        """The programs called so far: ("forward" | "backward" | "weights", or those of a step's last, call)."""
        every = [
            ("forward", self._forward),
            ("backward", self._inputs),
            ("backward", self._backward),
            ("last backward", self._last_backward),
            ("weights", self._weights),
            ("last weights", self._last_weights),
        ]
        return [(name, call) for name, call in every if call.calls]

    # tracing

    def _discover(self) -> tuple[list[TensorState], list[TensorState]]:
        capture = Capture(fuses=self._modes[2], converted=converted)

        def abstract(arrays: list) -> None:
            with self._as_captured(), watching(capture):
                start = jnp.zeros((2,), jnp.uint32)
                self.draws = self._run(capture, rng.default_generator.key_state(), start, arrays)[2] is not start
                met.extend((b.tensor, b.written) for b in capture.before.values())
                changed.extend(capture.surroundings.changes())

        met: list[tuple[TensorState, bool]] = []
        changed: list[KeptPlace] = []
        jax.eval_shape(abstract, self.example.arrays)
        # a place that the code itself changes tells nothing
        self._surroundings = replace(capture.surroundings.guards(frozenset(capture.before), changed), changing=[])
        key = rng.default_generator.key_state()
        self.layers, self.fusions = tuple(capture.layers.values()), tuple(capture.calls.fused)
        self._stopped = tuple((t, t.stop_gradient) for t, _ in met)
        return [t for t, w in met if not w and t is not key], [t for t, w in met if w and t is not key]

    def _run(self, capture: Capture, holder: TensorState, key: Any, arrays: Sequence[Any]) -> tuple[Any, list, Any]:
        """Run fn: (its outputs, the Tensors made of the input arrays, the next random key)."""
        capture.touch(holder)
        holder._array = key
        flow = self.example.with_arrays(list(arrays))
        inputs = [
            v if w is None else Tensor(v, stop_gradient=not w) for v, w in zip(flow.leaves, flow.wants, strict=True)
        ]
        with rng.default_generator.bound():
            outs = self.fn(rebuild(flow.spec, iter(inputs)))
        capture.settle_buffers()
        return outs, [t for t, w in zip(inputs, flow.wants, strict=True) if w is not None], holder._array

    def _trace_forward(self, written: list, read: list, key: Any, arrays: list) -> tuple[list, list, Any, list]:
        capture = Capture(fuses=self._modes[2], converted=converted)
        known = [*self.written, *self.read]
        holder = rng.default_generator.key_state()
        for tensor in (*known, holder):
            capture.touch(tensor)
        ours = {id(t) for t in (*known, holder)}
        with self._as_captured(), watching(capture):
            for tensor, array in zip(known, [*written, *read], strict=True):
                tensor._array = array
            outs, inputs, key = self._run(capture, holder, key, arrays)
            if any(b.written for k, b in capture.before.items() if k not in ours):
                raise CaptureError(
                    f"{where_defined(self.fn)} changed a Tensor on its second run that it had not met on its first; a "
                    "captured function must do the same each time it runs"
                )
            flow = Flow.of(outs)
            self._check_made(outs, capture)
            residuals: list[Any] = []
            if self.wants_backward:
                self._graph = self._harvest(outs, inputs, arrays, read, residuals)
                self._graph.release()
            self._outs = flow.with_arrays([None] * len(flow.arrays))
            return flow.arrays, [t._array for t in self.written], key, residuals

    def _find_needed(self, read: list[Any], key: Any, inputs: list[Any]) -> list[bool]:
        """Traces forward and backward; an operation's saved operands are often more than its derivative reads."""
        outs, _, _, residuals = jax.eval_shape(self._trace_forward, [t._array for t in self.written], read, key, inputs)
        assert self._graph is not None
        ends = {i for i, _ in self._graph.ends}
        cotangents = [out if i in ends else None for i, out in enumerate(outs)]
        jaxpr = jax.make_jaxpr(self._trace_whole_backward)(read, inputs, residuals, cotangents).jaxpr
        used = used_arguments(jaxpr, [True] * len(jaxpr.outvars))
        first = len(read) + len(inputs)
        return used[first : first + len(residuals)]

    def _trace_whole_backward(self, read: list, inputs: list, residuals: list, cotangents: list) -> tuple[list, list]:
        if not self.cut:
            return self._gradients(read, inputs, residuals, cotangents)
        found, stash = self._trace_inputs(read, inputs, residuals, cotangents)
        return found, self._weight_gradients(read, inputs, residuals, stash)[1]

    def _check_made(self, outs: Any, capture: Capture) -> None:
        leaves: list[Any] = []
        flatten(outs, leaves)
        for leaf in leaves:
            known = id(leaf) in capture.created_ids or id(leaf) in capture.before
            if isinstance(leaf, TensorState) and isinstance(leaf._array, Tracer) and not known:
                raise stale(leaf)

    def _harvest(self, outs: Any, inputs: list, arrays: list, read: list, residuals: list) -> _Graph:
        """The tape behind outs; arrays it keeps that are neither inputs nor state are appended to residuals."""
        leaves: list[Any] = []
        flatten(outs, leaves)
        tensors = [t for t in leaves if isinstance(t, TensorState)]
        ends = tuple((i, tape.edge_of(t)) for i, t in enumerate(tensors) if tape.edge_of(t) is not None)
        last = [e[0] for _, e in ends if isinstance(e, tuple)]
        tape.settle(last)
        nodes = sorted(nodes_behind(last), key=lambda n: n.seq)
        where: dict[int, tuple[str, Any]] = {id(a): ("state", i) for i, a in enumerate(read)}
        where.update({id(a): ("input", i) for i, a in enumerate(arrays)})

        number = itertools.count()

        def ref(array: Any) -> tuple[str, Any]:
            if not isinstance(array, Tracer):
                return ("constant", array)
            if id(array) not in where:
                if self._needed is None or self._needed[next(number)]:
                    where[id(array)] = ("kept", len(residuals))
                    residuals.append(array)
                else:
                    where[id(array)] = ("unneeded", jax.ShapeDtypeStruct(array.shape, array.dtype))
            return where[id(array)]

        refs = tuple(tuple(ref(a) for a in node.saved()) for node in nodes)
        edges = [e for node in nodes for e in node.edges] + [e for _, e in ends]
        ours = {id(t) for t in inputs}
        known = {id(t) for t in (*self.read, *self.written)}
        targets = {id(e): e for e in edges if e is not None and not isinstance(e, tuple)}
        reaching = {id(t) for t in inputs if id(t) in targets}
        for node in nodes:
            if any(id(e[0] if isinstance(e, tuple) else e) in reaching for e in node.edges if e is not None):
                reaching.add(id(node))
        params = tuple(t for key, t in targets.items() if key not in ours and key in known)
        return _Graph(ends, tuple(nodes), refs, tuple(inputs), params, frozenset(reaching))

    @contextmanager
    def _replayed(self, read: list, inputs: list, residuals: list) -> Iterator[_Graph]:
        """The tape of the forward, holding these arrays."""
        graph = self._graph
        assert graph is not None  # a backward follows a forward
        tables = {"state": read, "input": inputs, "kept": residuals}
        capture = Capture(converted=converted)
        for tensor in self.read:
            capture.touch(tensor)
        with self._as_captured(), watching(capture), tape.GradEnabled(False):
            for tensor, array in zip(self.read, read, strict=True):
                tensor._array = array
            for node, refs in zip(graph.nodes, graph.refs, strict=True):
                node.reload([_array_of(kind, at, tables) for kind, at in refs])
            try:
                yield graph
            finally:
                graph.release()

    def _trace_backward(
        self, read: list, inputs: list, residuals: list, cotangents: list, grads: list | None, last: bool = False
    ) -> tuple[list, list]:
        ours, fresh = self._left_unreduced(self._gradients, read, inputs, residuals, cotangents)
        return ours, self._sums(grads, fresh, last)

    def _trace_last_backward(self, *args: Any) -> tuple[list, list]:
        return self._trace_backward(*args, last=True)

    def _gradients(self, read: list, inputs: list, residuals: list, cotangents: list) -> tuple[list, list]:
        with self._replayed(read, inputs, residuals) as graph:
            walk = CutWalk(_every)
            self._seed(walk, graph, cotangents)
            walk.run()
            return self._split(graph, walk)

    def _trace_inputs(self, read: list, inputs: list, residuals: list, cotangents: list) -> tuple[list, list]:
        with self._replayed(read, inputs, residuals) as graph:
            walk = CutWalk(graph.along)
            self._seed(walk, graph, cotangents)
            walk.run()
            self._put_off = [(node, tuple(slots)) for node, slots in walk.put_off]
            stash = [slot._array for _, slots in walk.put_off for slot in slots.values()]
            return self._split(graph, walk)[0], stash

    def _trace_weights(
        self, read: list, inputs: list, residuals: list, stash: list, grads: list | None, last: bool = False
    ) -> list:
        _, fresh = self._left_unreduced(self._weight_gradients, read, inputs, residuals, stash)
        return self._sums(grads, fresh, last)

    def _trace_last_weights(self, *args: Any) -> list:
        return self._trace_weights(*args, last=True)

    def _weight_gradients(self, read: list, inputs: list, residuals: list, stash: list) -> tuple[list, list]:
        with self._replayed(read, inputs, residuals) as graph:
            given = iter(stash)
            walk = CutWalk(graph.along)
            walk.resume([(node, {i: Tensor(next(given)) for i in at}) for node, at in self._put_off])
            return [], self._split(graph, walk)[1]

    # gradients over replicas

    def _left_unreduced(self, gradients: Callable[..., tuple[list, list]], *args: Any) -> tuple[list, list]:
        """gradients(*args), those of leaves as addends where they can be: self._unreduced says over which axes."""
        if self._replicas is None or not self._replicas.axes or self._splits is None:
            self._unreduced, self._scopes = ((),) * len(self.leaves), [""] * len(self.leaves)
            return gradients(*args)
        closed, shapes = jax.make_jaxpr(gradients, return_shape=True)(*args)
        splits: list[Split] = [((),) * a.ndim for a in args[0]]  # parameters have no rows
        for arrays, known in zip(args[1:], self._splits, strict=True):
            splits += [((),) * a.ndim if s is None else s for a, s in zip(arrays, known, strict=True) if a is not None]
        program = Unreduced(closed, self._replicas, splits)
        inputs = len(jax.tree.leaves(shapes[0]))
        place = itertools.count(inputs)
        where = [None if fresh is None else next(place) for fresh in shapes[1]]
        with self._as_captured():
            unreduced = [
                () if i is None else tuple(a for a in program.axes[i] if a in self._replicated_over(leaf))
                for leaf, i in zip(self.leaves, where, strict=True)
            ]
            reduced = [
                leaf for leaf, axes in zip(self.leaves, unreduced, strict=True) if self._replicated_over(leaf) != axes
            ]
        if reduced and self._unreduced != tuple(unreduced):
            names = [getattr(leaf, "name", "a Tensor") for leaf in reduced]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            _log.info(
                "gradients of %d of %d parameters are summed over devices by every microbatch of %s, not once a step; "
                "they are no plain sums over rows: %s%s", len(names), len(unreduced), where_defined(self.fn),
                ", ".join(names[:3]), more,
            )  # fmt: skip
        self._unreduced = tuple(unreduced)
        self._scopes = ["" if i is None else program.scope(i) for i in where]
        wanted = [*[()] * inputs, *(axes for axes, i in zip(unreduced, where, strict=True) if i is not None)]
        return jax.tree.unflatten(jax.tree.structure(shapes), program(jax.tree.leaves(args), wanted))

    def _replicated_over(self, leaf: Any) -> tuple[str, ...]:
        """The axes over which devices have different rows and the same part of a parameter."""
        home = leaf.sharding_of("param") if hasattr(leaf, "sharding_of") else None
        if self._replicas is None or not isinstance(home, NamedSharding):
            return ()
        if not set(self._replicas.axes) <= set(home.mesh.axis_names):
            return ()
        split = {n for entry in home.spec for n in ((entry,) if isinstance(entry, str) else entry or ())}
        return tuple(axis for axis in self._replicas.axes if axis not in split)

    def _sum_layout(self, leaf: Any, axes: Axes) -> Any:
        """The layout of the sum so far of a leaf's gradients, with addends over these axes."""
        place = _gradient_layout(leaf)
        return self._replicas.layout(axes, place) if axes and self._replicas is not None else place

    def _sums(self, grads: list | None, fresh: list, last: bool) -> list:
        """grads + fresh of each leaf: as addends where they are such, unless last."""
        totals = []
        olds = grads if grads is not None else [None] * len(fresh)
        rows = zip(self.leaves, olds, fresh, self._unreduced, self._scopes, strict=True)
        with self._as_captured():
            for leaf, old, new, axes, scope in rows:
                with named(scope):
                    total = _add(leaf, old, new, axes)
                    is_open = total.ndim > leaf._array.ndim
                    if is_open and last:
                        total, is_open = sum_replicas(total), False
                    wants = self._replicas.ways(axes) if axes and self._replicas is not None else 0
                    fits = not is_open or total.shape[0] == wants
                    totals.append(_laid_out(total, self._sum_layout(leaf, axes if is_open else ())) if fits else total)
        return totals

    @staticmethod
    def _seed(walk: CutWalk, graph: _Graph, cotangents: list) -> None:
        for at, edge in graph.ends:
            if cotangents[at] is not None:
                walk.seed(edge, Tensor(cotangents[at]))

    def _split(self, graph: _Graph, walk: CutWalk) -> tuple[list, list]:
        """(gradients of the inputs, those of the leaves), None where there is none."""
        found = {id(leaf): array for leaf, array in leaf_gradients(walk)}
        ours = [_laid_out(found.get(id(t)), place) for t, place in zip(graph.inputs, self._input_layouts, strict=True)]
        return ours, [found.get(id(p)) for p in graph.leaves]

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """The modes and the layout this was made for."""
        now = (amp_policy.active.policy, dtypes.default_dtype())
        layouts = [tensor.layouts for tensor, _ in self.moved]
        amp_policy.active.policy = self._modes[0]
        dtypes.set_default_dtype(self._modes[1])
        for tensor, here in self.moved:
            tensor.layouts = here
        try:
            with layout.using(self.place), tape.GradEnabled(self.wants_backward):
                yield
        finally:
            for (tensor, _), home in zip(self.moved, layouts, strict=True):
                tensor.layouts = home
            amp_policy.active.policy = now[0]
            dtypes.set_default_dtype(now[1])


def _array_of(kind: str, at: Any, tables: dict[str, list]) -> Any:
    if kind == "unneeded":
        return jnp.zeros(at.shape, at.dtype)
    return at if kind == "constant" else tables[kind][at]


def _every(edge: Any) -> bool:
    return True


def _compile(fn: Callable[..., Any], of: Callable[..., Any], what: str, **options: Any) -> Called:
    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        return fn(*args)

    run.__name__ = run.__qualname__ = f"{getattr(of, '__name__', 'part')}_{what}"
    return Called(run, compiler_options=backend.step_options(), **options)


def _gradient_layout(leaf: Any) -> Any:
    return leaf.sharding_of("grad") if hasattr(leaf, "sharding_of") else None


def _laid_out(array: Any, place: Any) -> Any:
    if array is None or not isinstance(place, NamedSharding):
        return array
    return jax.lax.with_sharding_constraint(array, place)


def _not_split(array: Any) -> Split:
    return ((),) * array.ndim


def _add(leaf: TensorState, old: Any, new: Any, axes: Axes) -> Any:
    """old + new, the gradient of a leaf; either may have one more dim in front, of addends, or be None. axes: of new.

    Where the two are not cut alike (microbatches of other sizes can lie on devices in other ways) new is summed first.
    """
    if new is None:
        return jnp.zeros(leaf._array.shape, leaf._array.dtype) if old is None else old
    if old is None or old.shape == new.shape:
        return new if old is None else accumulate(old, new)
    new = sum_replicas(new) if axes else new
    return accumulate(old, new) if old.ndim == new.ndim else old.at[0].add(new)


def _nothing(made: list[tuple]) -> Any:
    """The result of _zeros as abstract arrays."""
    return lambda: [Abstract.of(*each) for each in made]


@functools.lru_cache(maxsize=256)
def _zeros(made: tuple) -> Any:
    """A program that makes zeros of these (shape, dtype, layout)."""
    places = [place for _, _, place in made]
    return jax.jit(lambda: [jnp.zeros(shape, dtype) for shape, dtype, _ in made], out_shardings=places)
