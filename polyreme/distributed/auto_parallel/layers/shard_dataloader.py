"""shard_dataloader: batches of a DataLoader as Tensors that lie over meshes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from polyreme.distributed.auto_parallel.tensors.dist_tensor import shard_tensor
from polyreme.distributed.auto_parallel.tensors.placements import Placement, Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DataError
from polyreme.io.dataloader import DataLoader


class ShardDataloader:
    """A loader of another loader's batches, placed on meshes, as shard_dataloader makes it. Of the same length."""

    input_keys: list[str] | None

    def __init__(
        self,
        dataloader: DataLoader,
        meshes: ProcessMesh | Sequence[Any],
        input_keys: Sequence[str] | None = None,
        shard_dims: Any = None,
        is_dataset_splitted: bool = False,
        dense_tensor_idx: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if not isinstance(dataloader, DataLoader):
            raise ConfigError(f"shard_dataloader takes an io.DataLoader, got {type(dataloader).__name__}")
        if is_dataset_splitted and shard_dims is None:
            raise ConfigError(
                "shard_dataloader: is_dataset_splitted=True needs shard_dims, the mesh dim that splits it"
            )
        self.dataloader = dataloader
        self.input_keys = None if input_keys is None else list(input_keys)
        self.is_dataset_splitted = is_dataset_splitted
        self._meshes = [meshes] if isinstance(meshes, ProcessMesh) else list(meshes)
        for mesh in _innermost(self._meshes):
            if not isinstance(mesh, ProcessMesh):
                raise ConfigError(f"shard_dataloader: meshes holds a {type(mesh).__name__}; give ProcessMeshes")
        self._check_count("input_keys", self.input_keys)
        self._shard_dims = self._dims(shard_dims)
        self._dense = dense_tensor_idx
        _check_dense(dense_tensor_idx)
        if is_dataset_splitted and jax.process_count() > 1:
            raise ConfigError(
                "shard_dataloader: is_dataset_splitted=True with several processes is not available; give every "
                "process the whole dataset: each device is given its part of every batch"
            )
        self._check_batch()

    def _check_count(self, what: str, given: Sequence[Any] | None) -> None:
        if given is not None and len(self._meshes) > 1 and len(given) != len(self._meshes):
            raise ConfigError(
                f"shard_dataloader: {len(given)} {what} {list(given)} for {len(self._meshes)} meshes; give one for each"
            )

    def _dims(self, given: Any) -> list[Any]:
        """The mesh dim that splits the batch, for each mesh."""
        if given is None or isinstance(given, (str, int)):
            return [given] * len(self._meshes)
        dims = list(given)
        self._check_count("shard_dims", dims)
        return dims if len(dims) == len(self._meshes) else dims * len(self._meshes)

    def _check_batch(self) -> None:
        size = self.dataloader.batch_size
        for mesh, dim in zip(self._meshes, self._shard_dims, strict=True):
            for each in _innermost([mesh]):
                ways = 1 if dim is None else each.get_dim_size(dim)
                if size is not None and size % ways:
                    raise ConfigError(
                        f"shard_dataloader: batch_size {size} (of the whole batch) does not divide into {ways} parts "
                        f"along mesh dim {dim!r}; make it a multiple"
                    )

    def __len__(self) -> int:
        return len(self.dataloader)

    def __call__(self) -> Iterator[Any]:
        """The same as iter(loader)."""
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        return map(self._spread, self.dataloader)

    def _spread(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            keys = list(batch) if self.input_keys is None else self.input_keys
            missing = [key for key in keys if key not in batch]
            if missing:
                raise DataError(f"shard_dataloader: input_keys {missing} are not in the batch, which has {list(batch)}")
            self._check_inputs(len(keys))
            return {key: self._input(i, batch[key]) for i, key in enumerate(keys)}
        if self.input_keys is not None:
            raise DataError(
                f"shard_dataloader: input_keys {self.input_keys} are for batches that are dicts, the loader gives a "
                f"{type(batch).__name__}; leave input_keys out"
            )
        if isinstance(batch, (list, tuple)):
            self._check_inputs(len(batch))
            return type(batch)([self._input(i, entry) for i, entry in enumerate(batch)])
        return self._input(0, batch)

    def _check_inputs(self, count: int) -> None:
        if len(self._meshes) not in (1, count):
            raise DataError(
                f"shard_dataloader: a batch has {count} inputs and there are {len(self._meshes)} meshes; give one mesh "
                "for all, or one for each input"
            )

    def _input(self, i: int, value: Any) -> Any:
        """The i-th input of a batch, a Tensor or a list of them, on its mesh; those of dense_tensor_idx as they are."""
        at = i if len(self._meshes) > 1 else 0
        mesh, dim = self._meshes[at], self._shard_dims[at]
        dense = self._dense[i] if self._dense is not None and i < len(self._dense) else ()
        if not isinstance(value, (list, tuple)):
            return value if 0 in dense else _place(value, mesh, dim)
        inner = list(mesh) if isinstance(mesh, (list, tuple)) else [mesh] * len(value)
        if len(inner) != len(value):
            raise DataError(f"shard_dataloader: input {i} has {len(value)} Tensors and {len(inner)} meshes")
        return [v if j in dense else _place(v, m, dim) for j, (v, m) in enumerate(zip(value, inner, strict=True))]


def shard_dataloader(
    dataloader: DataLoader,
    meshes: ProcessMesh | Sequence[Any],
    input_keys: Sequence[str] | None = None,
    shard_dims: Any = None,
    is_dataset_splitted: bool = False,
    dense_tensor_idx: Sequence[Sequence[int]] | None = None,
) -> ShardDataloader:
    """A loader of the same batches, of the same (global) size and order, whose Tensors lie over meshes.

    meshes: one for all inputs, or one for each (as under a pipeline); an entry may be a list where the input is one.
    shard_dims: name or index of the mesh dim that splits dim 0 of a batch, one for all meshes or one for each; without
    it every device has the whole. input_keys: for batches that are dicts, the keys that are wanted, in the order of
    meshes. dense_tensor_idx: for each input, which of its Tensors are left as they are. is_dataset_splitted: the
    dataset holds this process's part only; of one process that is all.

    Raises ConfigError for a batch size that does not divide over the mesh dim, counts that do not match, and
    is_dataset_splitted without shard_dims or with several processes; DataError for a batch of another make.
    """
    return ShardDataloader(dataloader, meshes, input_keys, shard_dims, is_dataset_splitted, dense_tensor_idx)


def _place(value: Any, mesh: ProcessMesh, dim: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if dim is not None and value.ndim:
        at = mesh.dim_names.index(dim) if isinstance(dim, str) else dim
        placements[at] = Shard(0)
    return shard_tensor(value, mesh, placements)


def _innermost(meshes: Sequence[Any]) -> Iterator[Any]:
    for mesh in meshes:
        if isinstance(mesh, (list, tuple)):
            yield from _innermost(mesh)
        else:
            yield mesh


def _check_dense(dims: Any) -> None:
    fits = dims is None or (
        isinstance(dims, (list, tuple))
        and all(isinstance(g, (list, tuple)) and all(type(i) is int for i in g) for g in dims)
    )
    if not fits:
        raise ConfigError(f"shard_dataloader: dense_tensor_idx={dims!r}; give a list of indexes for each input")
