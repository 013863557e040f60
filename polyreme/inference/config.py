"""Config: which artefact a predictor runs, on which device, and for which batch sizes it is compiled."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme.core.devices import place as places
from polyreme.errors import CheckpointError, ConfigError
from polyreme.export.reading import is_paddle
from polyreme.inference.kinds import PrecisionType
from polyreme.inference.options import OtherEngines

# by what names Paddle and this package call the files of a model; each stands for what comes before it
_SUFFIXES = (".json", ".stablehlo", ".safetensors", ".pdmodel", ".pdiparams")
Path_ = str | os.PathLike[str]


class Config(OtherEngines):
    """Config(PREFIX), Config(PROGRAM_FILE, PARAMS_FILE), Config(FOLDER) with one artefact in it, or Config(another).

    A file's suffix (.json, .pdmodel, .pdiparams, ...) is left out to find the prefix that jit.save was given; the two
    files that PaddlePaddle wrote may have any names. Runs on the CPU unless a device is asked for. A process whose
    first use of jax is a predictor on the CPU runs its programs in the threads that call them. Options of Paddle's
    that choose between engines are in `inference.options`.
    """

    Precision = PrecisionType
    Bfloat16: PrecisionType
    Half: PrecisionType
    Int8: PrecisionType
    Float32: PrecisionType
    Float32, Int8, Half, Bfloat16 = PrecisionType

    def __init__(self, model: Path_ | Config | None = None, params: Path_ | None = None) -> None:
        self._model: str | None = None
        self._params: str | None = None
        self._place: places.Place = places.CPUPlace()
        self._pool_mb = 0
        self._buckets: tuple[int, ...] = ()
        self._cache: str | None = None
        if isinstance(model, Config):
            self.__dict__.update(copy.copy(model.__dict__))
        elif model is not None:
            self.set_model(model, params)

    # the model

    def set_model(self, model: Path_, params: Path_ | None = None) -> None:
        """The artefact: a prefix, a folder that holds one, or its program and weights files."""
        self._model, self._params = os.fspath(model), None if params is None else os.fspath(params)

    def set_prog_file(self, path: Path_) -> None:
        """The program's file."""
        self._model = os.fspath(path)

    def set_params_file(self, path: Path_) -> None:
        """The weights' file, which must have the program's prefix."""
        self._params = os.fspath(path)

    def prog_file(self) -> str:
        """The program's file as it was given; "" if none was."""
        return self._model or ""

    def params_file(self) -> str:
        """The weights' file as it was given; "" if none was."""
        return self._params or ""

    def model_dir(self) -> str:
        """The folder as it was given; "" if files were."""
        return self._model if self._model and Path(self._model).is_dir() else ""

    @property
    def prefix(self) -> Path:
        """The artefact's prefix. Raises ConfigError if none was given, or files of two; CheckpointError for a folder
        that does not hold just one.
        """
        if self._model is None:
            raise ConfigError("Config: no model is set; give Config(prefix), the path that jit.save was given")
        if Path(self._model).is_dir():
            return _only_artefact(Path(self._model))
        prefix = _without_suffix(self._model)
        if self._params is not None and _without_suffix(self._params) != prefix:
            raise ConfigError(
                f"Config: {self._model!r} and {self._params!r} are of two artefacts; the files of one have one prefix"
            )
        return Path(prefix)

    @property
    def files(self) -> tuple[Path, Path | None]:
        """What export.read takes: the artefact's prefix and None, or PaddlePaddle's program and parameters by the
        names of their files. Raises as prefix does.
        """
        if self._model is not None and self._params is not None and is_paddle(Path(self._model)):
            return Path(self._model), Path(self._params)
        return self.prefix, None

    # the device

    def enable_use_gpu(
        self, memory_pool_init_size_mb: int = 0, device_id: int = 0, precision_mode: Any = PrecisionType.Float32
    ) -> None:
        """Run on a GPU. memory_pool_init_size_mb is kept, and unused: XLA takes memory for the whole process at its
        start (XLA_PYTHON_CLIENT_MEM_FRACTION).
        """
        if precision_mode != PrecisionType.Float32:
            raise ConfigError(
                f"Config.enable_use_gpu: precision_mode={precision_mode!r}: an exported program keeps its dtypes; cast "
                "the Layer and save it again"
            )
        self._pool_mb = memory_pool_init_size_mb
        self._place = places.CUDAPlace(device_id)

    def disable_gpu(self) -> None:
        """Run on the CPU."""
        self._place = places.CPUPlace()

    def enable_custom_device(
        self, device_type: str, device_id: int = 0, precision: Any = PrecisionType.Float32
    ) -> None:
        """Run on a device of another PJRT platform, such as "tpu"."""
        if precision != PrecisionType.Float32:
            raise ConfigError(
                f"Config.enable_custom_device: precision={precision!r}: an exported program keeps its dtypes"
            )
        self._place = places.CustomPlace(device_type, device_id)

    def use_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self._place.is_gpu_place()

    def gpu_device_id(self) -> int:
        """Index of the device."""
        return self._place.index

    def memory_pool_init_size_mb(self) -> int:
        """MB as given to enable_use_gpu."""
        return self._pool_mb

    def fraction_of_gpu_memory_for_pool(self) -> float:
        """0: memory is XLA's to take."""
        return 0.0

    def cpu_math_library_num_threads(self) -> int:
        """The cores that this process may use, which XLA uses."""
        return len(os.sched_getaffinity(0))

    @property
    def place(self) -> places.Place:
        """Where it runs."""
        return self._place

    # compiling

    def enable_batch_buckets(self, sizes: Sequence[int]) -> None:
        """Compile for these batch sizes only: a batch is filled up to the next of them with copies of its last sample,
        and the outputs cut back. Without it every new shape is compiled when it comes.

        Samples must not depend on each other. Raises ConfigError for sizes that are no whole numbers from 1.
        """
        if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
            raise ConfigError(f"enable_batch_buckets({sizes!r}): give whole numbers from 1, such as [1, 2, 4, 8]")
        self._buckets = tuple(sorted(set(sizes)))

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """The batch sizes it is compiled for, ascending; () for any."""
        return self._buckets

    def set_optim_cache_dir(self, path: Path_) -> None:
        """Keep compiled programs in this folder, for later processes (jax's compilation cache, process-wide)."""
        self._cache = os.fspath(path)

    @property
    def optim_cache_dir(self) -> str | None:
        """The folder of set_optim_cache_dir."""
        return self._cache

    def summary(self) -> str:
        """The settings, one a line."""
        rows = {
            "model": self._model or "(none)",
            "place": str(self._place),
            "batch buckets": ", ".join(map(str, self._buckets)) or "(every shape)",
            "compiled programs": self._cache or "(not kept)",
        }
        return "\n".join(f"{name:<18} {value}" for name, value in rows.items())


class XpuConfig:
    """Settings of a Kunlun XPU. There is no such device here, so Config.set_xpu_config refuses them."""

    def __init__(self) -> None:
        self.device_id = 0
        self.l3_size = 0
        self.l3_ptr: int | None = None
        self.l3_autotune_size = 0
        self.stream: int | None = None
        self.context: int | None = None
        self.context_gm_size = 0


def _without_suffix(path: str) -> str:
    return next((path.removesuffix(s) for s in _SUFFIXES if path.endswith(s)), path)


def _only_artefact(folder: Path) -> Path:
    # the manifests; a bucket's or method's program has no manifest of its own
    prefixes = sorted(p.with_suffix("") for p in folder.glob("*.json") if p.with_suffix(".safetensors").exists())
    pairs = [p for s in ("pdmodel", "json") for p in folder.glob(f"*.{s}") if p.with_suffix(".pdiparams").exists()]
    prefixes += sorted({p.with_suffix("") for p in pairs if is_paddle(p)})
    if len(prefixes) != 1:
        names = ", ".join(p.name for p in prefixes) or "none"
        raise CheckpointError(
            f"{folder}: holds {len(prefixes)} artefacts ({names}); give the prefix of one: FOLDER/NAME"
        )
    return prefixes[0]
