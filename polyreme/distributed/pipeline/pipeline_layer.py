"""PipelineLayer: a model as a sequence of layers, cut into the chunks that pipeline stages run.

Tensors are global, so one process builds every layer, whatever stage will run it: a chunk is a view of the
one model, layers that share a weight hold the very same Parameter, and the whole runs on one device as it stands.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.autograd.recompute import AS_IT_IS, Keep, run_again
from polyreme.core import rng
from polyreme.distributed.pipeline.layer_desc import (
    LayerDesc,
    SharedLayerDesc,
    check_same_arguments,
    check_shared,
    tie,
)
from polyreme.distributed.pipeline.segments import segment
from polyreme.errors import CheckpointError, ConfigError, did_you_mean
from polyreme.io.serialization import load, save
from polyreme.nn.layer import Layer

FIRST_SEED = 1234
"""Layer i is built under the seed FIRST_SEED + i, so that its weights do not depend on how the model is cut."""


@dataclass(frozen=True)
class Item:
    """One step of the sequence: what to call, and the Layer behind it (None for a plain function)."""

    call: Callable[[Any], Any]
    layer: Layer | None


class PipelineChunk(Layer):
    """Items run one after another; a stage holds one of these for each of its virtual stages.

    Its parameters, shared ones included, are those that its stage needs. recompute_interval: items that are run again
    together in backward, 0 for none; keep: how their inputs are kept until then.
    """

    items: list[Item]
    recompute_interval: int
    keep: Keep

    def __init__(self, items: Mapping[int, Item], recompute_interval: int = 0, keep: Keep = AS_IT_IS) -> None:
        super().__init__()
        self.items = list(items.values())
        self.recompute_interval, self.keep = recompute_interval, keep
        for index, item in items.items():
            if item.layer is not None:
                self.add_sublayer(str(index), item.layer)

    def forward(self, x: Any) -> Any:
        if not self.recompute_interval:
            return _run(self.items, x)
        for start in range(0, len(self.items), self.recompute_interval):
            run = functools.partial(_run, self.items[start : start + self.recompute_interval])
            x = run_again(run, (x,), {}, self.keep)
        return x


class PipelineLayer(Layer):
    """A model as a sequence of layers, cut into num_stages x num_virtual_pipeline_stages chunks.

    layers: LayerDescs, Layers and functions; each takes what the one before it gives: a Tensor, a tuple or a dict.
    num_stages: stages of the pipeline, or a topology whose "pipe" axis says it. loss_fn: (outputs, labels) -> loss, or
    a list of those to choose from. seg_method: 'uniform', 'layer:<regular expression>' for as many layers of these
    classes in each chunk, 'parameters' for the most even numbers of parameters (a shared one counts wherever it is
    used), or a list of boundaries. recompute_interval: keep activations only every so many layers of a chunk and run
    those between again in backward, 0 to keep all. recompute_ctx: {"offload": True} keeps them in host memory,
    {"partition": True} splits them over the plan's mp axis, whose group mp_group is in any case. use_dualpipev: two
    chunks a stage, laid out as a V. use_cudagraph makes no difference: a chunk is one compiled program in any case.

    `segment_parts` are the boundaries of the chunks in the order that data flows through them, and `stage_of_chunk` the
    stage of each. Called as a Layer, it runs all of them in that order. Names in the state_dict are the layers' places
    in the sequence, whatever the cut.

    >>> from polyreme.nn import Linear, ReLU
    >>> net = PipelineLayer([LayerDesc(Linear, 2, 4), ReLU(), LayerDesc(Linear, 4, 1)], num_stages=2)
    >>> net.segment_parts, list(net.state_dict())
    ([0, 1, 3], ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    stage_of_chunk: tuple[int, ...]

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Any = None,
        seg_method: str | Sequence[int] = "uniform",
        recompute_interval: int = 0,
        recompute_ctx: Mapping[str, Any] | None = None,
        num_virtual_pipeline_stages: int | None = None,
        use_cudagraph: bool = False,
        use_dualpipev: bool = False,
    ) -> None:
        super().__init__()
        self._num_stages = _stages(num_stages, topology)
        self._num_virtual = _virtual_stages(num_virtual_pipeline_stages, use_dualpipev)
        # in a list, so that a Layer does not become part of the state_dict
        self._losses = [_check_losses(loss_fn)]
        self.stage_of_chunk = _place(self._num_stages, self._num_virtual, use_dualpipev)
        self.shared_layers: dict[str, Layer] = {}
        described = _check_items(layers)
        _check_at_least("recompute_interval", recompute_interval, 0)
        keep = _keep(recompute_ctx)
        names = [_name_of(item) for item in described]
        parts = len(self.stage_of_chunk)
        # before anything is built if it can be, so that a wrong cut is refused at once
        bounds = None if seg_method == "parameters" else segment(seg_method, parts, names)
        items = self._build(described)
        self.segment_parts = bounds or segment(seg_method, parts, names, [_count(item) for item in items])
        self._chunks = [
            PipelineChunk({i: items[i] for i in range(a, b)}, recompute_interval, keep)
            for a, b in itertools.pairwise(self.segment_parts)
        ]

    # building

    def _build(self, described: list[Any]) -> list[Item]:
        items = []
        first_of: dict[str, SharedLayerDesc] = {}
        for i, desc in enumerate(described):
            with rng.default_generator.drawing_from(rng.Generator().manual_seed(FIRST_SEED + i)):
                if isinstance(desc, SharedLayerDesc):
                    layer = self._shared(desc, first_of.setdefault(desc.layer_name, desc))
                else:
                    layer = desc.build_layer() if isinstance(desc, LayerDesc) else desc
            if isinstance(layer, Layer) and all(layer is not known for known in self._sub_layers.values()):
                self.add_sublayer(str(i), layer)
            forward_func = getattr(desc, "forward_func", None) if isinstance(desc, SharedLayerDesc) else None
            call = layer if forward_func is None else functools.partial(forward_func, layer)
            items.append(Item(call, layer if isinstance(layer, Layer) else None))
        return items

    def _shared(self, desc: SharedLayerDesc, first: SharedLayerDesc) -> Layer:
        key = desc.layer_name
        if desc is first:
            self.shared_layers[key] = built = desc.build_layer()
            check_shared(desc, built)
            return built
        origin = self.shared_layers[key]
        if desc.layer_class is first.layer_class:
            check_same_arguments(desc, first)
            return origin
        built = desc.build_layer()
        tie(desc, built, first, origin)
        return built

    # running

    @property
    def loss_fn(self) -> Any:
        """The loss function as it was given: one, a list to choose from, or None."""
        return self._losses[0]

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self._num_stages

    @property
    def num_chunks(self) -> int:
        """Stages times virtual stages."""
        return len(self._chunks)

    def chunk(self, k: int) -> PipelineChunk:
        """The chunk at this place in the order that data flows."""
        return self._chunks[k]

    def by_items(self) -> PipelineLayer:
        """The same layers on one stage in chunks as small as may be: of one item each, or of as many as are run again
        together in backward. Itself where it has several chunks."""
        if self.num_chunks > 1:
            return self
        [whole] = self._chunks
        bounds = [*range(0, len(whole.items), whole.recompute_interval or 1), len(whole.items)]
        cut = copy.copy(self)
        cut._num_virtual, cut.segment_parts = len(bounds) - 1, bounds
        cut.stage_of_chunk = (0,) * cut._num_virtual
        cut._chunks = [
            PipelineChunk(dict(enumerate(whole.items[a:b], a)), whole.recompute_interval, whole.keep)
            for a, b in itertools.pairwise(bounds)
        ]
        return cut

    def chunk_items(self, k: int) -> list[Callable[[Any], Any]]:
        """The layers and functions that a chunk calls, in order."""
        return [item.call for item in self._chunks[k].items]

    def forward(self, input: Any, chunk_id: int | None = None) -> Any:
        """The result of all chunks, or of one on what the chunk before it gave."""
        chunks = self._chunks if chunk_id is None else [self._chunks[chunk_id]]
        for chunk in chunks:
            input = chunk(input)
        return input

    # asking

    def get_stage_from_index(self, layer_idx: int) -> int:
        """The stage that runs the layer at this place in the sequence."""
        if not 0 <= layer_idx < self.segment_parts[-1]:
            raise ConfigError(f"get_stage_from_index({layer_idx}): there are {self.segment_parts[-1]} layers")
        return self.stage_of_chunk[self._chunk_of(layer_idx)]

    def get_num_virtual_stages(self) -> int:
        """Number of chunks of a stage."""
        return self._num_virtual

    def get_model_chunks(self) -> list[PipelineChunk]:
        """The chunks of all stages, in the order that data flows."""
        return list(self._chunks)

    def allreduce_shared_weight_gradients(self) -> None:
        """Does nothing: layers that share a weight hold one Parameter, whose gradient is the sum already."""

    def _chunk_of(self, index: int) -> int:
        return next(k for k, end in enumerate(self.segment_parts[1:]) if index < end)

    # files

    def save_state_dict(self, path: str | Path) -> None:
        """Save each layer's state_dict to a file of its own in the folder `path`; a shared layer is saved once.

        Names: layer_XX[-virtual_pp_stage_YY]-tensor_00-model_states.pdparams. Tensors are global, so a file holds whole
        weights whatever the mesh.
        """
        for name, layer in self._sub_layers.items():
            values = layer.state_dict()
            if not values:
                continue
            chunk = self._chunk_of(int(name))
            of_stage = [k for k, stage in enumerate(self.stage_of_chunk) if stage == self.stage_of_chunk[chunk]]
            virtual = f"-virtual_pp_stage_{of_stage.index(chunk):02d}" if self._num_virtual > 1 else ""
            save(values, Path(path) / f"layer_{int(name):02d}{virtual}{_FILE_END}")

    def set_state_dir(self, path: str | Path) -> None:
        """Load what save_state_dict left in a folder, under whatever cut it was saved.

        Raises CheckpointError, loading nothing, if a layer's file is missing, if there are several for it, or if one
        holds other names than the layer.
        """
        loaded: dict[str, Any] = {}
        for name, layer in self._sub_layers.items():
            want = layer.state_dict()
            if not want:
                continue
            file = _file_of(Path(path), int(name))
            values = load(file)
            if set(values) != set(want):
                raise CheckpointError(
                    f"set_state_dir: {file} holds {sorted(values)}, but layer {name} ({type(layer).__name__}) has "
                    f"{sorted(want)}; give the folder of a model with the same layers"
                )
            loaded.update({f"{name}.{key}": value for key, value in values.items()})
        self.set_state_dict(loaded)


_FILE_END = "-tensor_00-model_states.pdparams"


def _file_of(folder: Path, index: int) -> Path:
    # a longer index begins with other digits, so the dash ends the number
    files = sorted([*folder.glob(f"layer_{index:02d}-*.pdparams")])
    if len(files) != 1 or not files[0].name.endswith(_FILE_END):
        raise CheckpointError(
            f"set_state_dir: layer {index} needs one file layer_{index:02d}[-virtual_pp_stage_YY]{_FILE_END} in "
            f"{folder}, found {[f.name for f in files]}; give a folder that one save_state_dict has written"
        )
    return files[0]


def _run(items: Sequence[Item], x: Any) -> Any:
    for item in items:
        x = item.call(x)
    return x


def _count(item: Item) -> int:
    return sum(p.size for p in item.layer.parameters()) if item.layer is not None else 0


# checks of what is given


def _stages(num_stages: Any, topology: Any) -> int:
    if num_stages is None and topology is None:
        raise ConfigError("PipelineLayer: give num_stages, or a topology with an axis 'pipe'")
    if topology is not None:
        if not callable(getattr(topology, "get_dim", None)):
            raise TypeError(f"PipelineLayer: topology is a CommunicateTopology, got {type(topology).__name__}")
        found = int(topology.get_dim("pipe"))
        if num_stages not in (None, found):
            raise ConfigError(f"PipelineLayer: num_stages={num_stages}, but the topology has {found}; give one of them")
        return found
    return _check_at_least("num_stages", num_stages, 1)


def _virtual_stages(number: int | None, use_dualpipev: bool) -> int:
    _check_bool("use_dualpipev", use_dualpipev)
    if number is not None:
        _check_at_least("num_virtual_pipeline_stages", number, 1)
    if use_dualpipev and number not in (None, 2):
        raise ConfigError(
            f"PipelineLayer: use_dualpipev puts 2 chunks on each stage, num_virtual_pipeline_stages is {number}; leave "
            "it out"
        )
    return 2 if use_dualpipev else number or 1


def _place(stages: int, virtual: int, is_v: bool) -> tuple[int, ...]:
    """Stage of each chunk: round after round, or down and up again as a V."""
    if is_v:
        return (*range(stages), *reversed(range(stages)))
    return tuple(range(stages)) * virtual


def _check_at_least(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"PipelineLayer: {name} is a whole number of at least {least}, got {value!r}")
    return value


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"PipelineLayer: {name} is True or False, got {value!r}")


def _check_losses(loss_fn: Any) -> Any:
    for fn in loss_fn if isinstance(loss_fn, (list, tuple)) else [loss_fn]:
        if fn is not None and not callable(fn):
            raise TypeError(f"PipelineLayer: loss_fn is a function (outputs, labels) or a list of them, got {fn!r}")
        if isinstance(fn, Layer) and fn.parameters():
            raise ConfigError(
                f"PipelineLayer: loss_fn {type(fn).__name__} has parameters, which no stage would hold; put the layer "
                "at the end of `layers` and leave the loss without parameters"
            )
    return loss_fn


def _check_items(layers: Any) -> list[Any]:
    if isinstance(layers, (str, Mapping)) or not isinstance(layers, Sequence):
        raise TypeError(
            f"PipelineLayer: layers is a list of LayerDescs, Layers and functions, got {type(layers).__name__}"
        )
    for i, item in enumerate(layers):
        if not isinstance(item, LayerDesc) and (isinstance(item, type) or not callable(item)):
            raise TypeError(
                f"PipelineLayer: item {i} is {item!r}; give a LayerDesc, a Layer or a function, such as "
                "LayerDesc(Linear, 8, 8)"
            )
    return list(layers)


def _name_of(item: Any) -> str:
    """The name that 'layer:' patterns are matched against: the class's, or the function's."""
    if isinstance(item, LayerDesc):
        return item.layer_class.__name__
    return getattr(item, "__name__", type(item).__name__) if not isinstance(item, Layer) else type(item).__name__


def _keep(ctx: Any) -> Keep:
    known = ("mp_group", "offload", "partition")
    if ctx is not None and not isinstance(ctx, Mapping):
        raise TypeError(f"PipelineLayer: recompute_ctx is a dict with any of {', '.join(known)}, got {ctx!r}")
    for key in ctx or {}:
        if key not in known:
            raise ConfigError(f"PipelineLayer: unknown key {key!r} in recompute_ctx{did_you_mean(key, known)}")
    given = {"offload": False, "partition": False, **(ctx or {})}
    for key in ("offload", "partition"):
        _check_bool(f"recompute_ctx[{key!r}]", given[key])
    return Keep(given["offload"], "mp" if given["partition"] else None)


__all__ = ["FIRST_SEED", "PipelineChunk", "PipelineLayer"]
