"""A Layer or function made into the pure functions that artefacts hold: its state found, its outputs named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from polyreme.call_site import user_line
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError
from polyreme.export.nesting import leaf_names, plain, to_json
from polyreme.export.program import OPEN_SIZE_ERRORS
from polyreme.export.spec import ArraySpec, Sizes, aval, fixed, symbol_plans
from polyreme.jit.capture import Border, Capture, check_known_to_jax, watching
from polyreme.jit.convert import converted
from polyreme.jit.structure import Spec as Nesting
from polyreme.jit.structure import flatten, rebuild, tensors_in
from polyreme.nn.parameter import Parameter


class _Exporting(Capture):
    """A capture in which every Layer that is called is in eval mode, and random numbers are refused."""

    def __init__(self, detach: bool) -> None:
        super().__init__(detach=detach, converted=converted)
        self.modes: list[tuple[Any, bool]] = []

    def entered(self, layer: Any) -> Callable[..., Any]:
        """A Layer was called: it acts as in eval mode until the end of the export."""
        self.modes.append((layer, layer.training))
        layer.training = False
        return super().entered(layer)

    def touch(self, tensor: TensorState) -> None:
        """A Tensor that is about to be read or changed; of a generator, its key."""
        if not isinstance(tensor, Tensor) and id(tensor) not in self.created_ids:
            raise CaptureError(
                f"{user_line()}: a random op runs in eval mode, and what an artefact computes depends on its inputs "
                "alone; make the random numbers an input"
            )
        super().touch(tensor)

    def restore(self) -> None:
        """Put every state Tensor and every Layer's mode back."""
        for layer, training in reversed(self.modes):
            layer.training = training
        super().restore()


class TracedFunction:
    """A function of Tensors as a pure function of arrays.

    fn: the function; where: how messages call it; arguments: names of its positional arguments; nesting, leaves: their
    values, a Spec standing where an input goes. After `discover`: reads, the Tensors of the state that it reads;
    outputs, their names; result, the JSON of what it returns; refusal, why jax cannot differentiate it, if so.
    """

    fn: Callable[..., Any]
    where: str
    arguments: list[str]
    leaves: list[Any]
    inputs: list[ArraySpec]
    refusal: str

    def __init__(
        self, fn: Callable[..., Any], where: str, arguments: Sequence[str], nesting: Nesting, leaves: Sequence[Any],
        differentiable: bool,
    ) -> None:  # fmt: skip
        self.fn, self.where, self.arguments = fn, where, list(arguments)
        self.nesting, self.leaves = nesting, list(leaves)
        self.differentiable = differentiable
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, ArraySpec)]
        self.reads: list[Tensor] = []
        self.outputs: list[str] = []
        self.result: dict[str, Any] = {}
        self.refusal = ""

    def discover(self, combinations: Sequence[Sizes]) -> None:
        """Learns what state it reads and what it returns, by running it on tracers; sizes that cannot be open are left
        for the export to refuse.
        """
        for sizes in combinations:
            for plan in symbol_plans(fixed(self.inputs, sizes)):
                try:
                    jax.eval_shape(self._look, [aval(s) for s in plan])
                except OPEN_SIZE_ERRORS:
                    if not any(s.open_dims for s in plan):
                        raise
                    continue
                break

    def _look(self, arrays: list[Any]) -> None:
        capture = _Exporting(self.differentiable)
        with self._running(capture, arrays) as outs:
            self._name_outputs(outs)
            if self.differentiable:
                try:
                    check_known_to_jax(tensors_in(outs), self.where)
                except CaptureError as error:
                    self.refusal = str(error)
            for before in capture.before.values():
                if before.written or before.regraded:
                    raise CaptureError(
                        f"{self.where} changes a Tensor of shape {list(before.array.shape)} that outlives the call; an "
                        "artefact has no state that changes, so return the new value instead"
                    )
                if all(before.tensor is not t for t in self.reads):
                    self.reads.append(before.tensor)  # type: ignore[arg-type]  (touch lets no other kind pass)

    def _name_outputs(self, outs: Any) -> None:
        leaves: list[Any] = []
        spec = flatten(outs, leaves)
        is_sequence = spec is not None and issubclass(spec[0], (tuple, list)) and not hasattr(spec[0], "_fields")
        top = [f"output_{i}" for i in range(len(spec[2]))] if spec is not None and is_sequence else ()
        names = leaf_names(spec, top, "output_0")
        kinds: list[Any] = []
        for leaf in leaves:
            is_tensor = isinstance(leaf, TensorState)
            kinds.append({"tensor": True} if is_tensor else {"value": plain(leaf, f"{self.where} returns")})
        self.outputs = [n for n, leaf in zip(names, leaves, strict=True) if isinstance(leaf, TensorState)]
        if not self.outputs:
            raise CaptureError(f"{self.where} returns no Tensor, so there is nothing to export")
        self.result = {"structure": to_json(spec, f"{self.where} returns"), "leaves": kinds}

    def call(self, names: Mapping[int, str]) -> Callable[[dict[str, Any], list[Any]], list[Any]]:
        """The pure function; names: id of a state Tensor -> its name."""

        def pure(arrays: dict[str, Any], inputs: list[Any]) -> list[Any]:
            capture = _Exporting(self.differentiable)
            for tensor in self.reads:
                capture.touch(tensor)
            given = [(t, arrays[names[id(t)]]) for t in self.reads]
            with self._running(capture, inputs, given) as outs:
                return [capture.read(t) for t in tensors_in(outs)]

        return pure

    @contextmanager
    def _running(
        self, capture: _Exporting, inputs: Sequence[Any], given: Sequence[tuple[Tensor, Any]] = ()
    ) -> Iterator[Any]:
        """What the function returns for these inputs; given: arrays in the place of state Tensors'."""
        with tape.GradEnabled(self.differentiable), watching(capture):
            for tensor, array in given:
                tensor._array = array
                # a parameter that is frozen now may be trained where it is loaded
                tensor.stop_gradient = tensor.stop_gradient and not isinstance(tensor, Parameter)
            arrays = iter(inputs)
            leaves = [self._input(next(arrays)) if isinstance(x, ArraySpec) else x for x in self.leaves]
            yield converted(self.fn)(*rebuild(self.nesting, iter(leaves)))

    def _input(self, array: Any) -> Tensor:
        tensor = Tensor(array, stop_gradient=not self.differentiable)
        if self.differentiable:
            tensor._node = Border(tuple(array.shape))  # not a leaf: it may be changed in place
        return tensor


@contextmanager
def eval_mode(layers: Sequence[Any]) -> Iterator[None]:
    """These Layers in eval mode inside the block; each one's own mode afterwards."""
    modes = [(layer, layer.training) for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training
