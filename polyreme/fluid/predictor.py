"""fluid.core's predictor: what fluid.io.save_inference_model wrote, served by 1.x's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyreme.core.devices.place import CPUPlace, CUDAPlace
from polyreme.errors import ConfigError, ShapeError, did_you_mean
from polyreme.fluid import io
from polyreme.fluid.executor import Executor
from polyreme.program.scope import Scope, scope_guard
from polyreme.sequences.lod_tensor import LoDTensor, create_lod_tensor

_NOTHING = (
    "switch_use_feed_fetch_ops", "switch_specify_input_names", "switch_ir_optim", "switch_ir_debug",
    "enable_memory_optim", "set_cpu_math_library_num_threads", "enable_mkldnn", "disable_glog_info", "enable_profile",
    "delete_pass", "set_mkldnn_cache_capacity", "set_optim_cache_dir",
)  # fmt: skip
"""Settings of 1.x's engine: XLA compiles, and values are the same."""


class AnalysisConfig:
    """Which model, and where it runs: model_dir, or its Program's file and that of its parameters.

    Settings of 1.x's own engine (switch_ir_optim, enable_mkldnn, ...) change no value. Raises ConfigError for TensorRT.
    """

    def __init__(self, model_dir: str = "", params_file: str = "") -> None:
        self._path, self._place = "", CPUPlace()
        if model_dir:
            self.set_model(model_dir, params_file)

    def set_model(self, model_dir: str, params_file: str = "") -> None:
        """model_dir, or with params_file the file of the Program."""
        self._path = model_dir
        self._is_file = bool(params_file) or os.path.isfile(model_dir)
        self._params = params_file

    def model_dir(self) -> str:
        """What set_model was given."""
        return self._path

    def enable_use_gpu(self, memory_pool_init_size_mb: int = 0, device_id: int = 0) -> None:
        """Run on this GPU. memory_pool_init_size_mb changes nothing."""
        self._place = CUDAPlace(device_id)

    def disable_gpu(self) -> None:
        """Run on the CPU."""
        self._place = CPUPlace()

    def use_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return not isinstance(self._place, CPUPlace)

    def pass_builder(self) -> AnalysisConfig:
        """What delete_pass is called on."""
        return self

    def enable_tensorrt_engine(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError."""
        raise ConfigError("AnalysisConfig.enable_tensorrt_engine cannot be honoured: XLA compiles; leave it out")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in _NOTHING:
            return lambda *args, **kwargs: None
        raise AttributeError(f"AnalysisConfig has no {name!r}{did_you_mean(name, [*_NOTHING, *dir(type(self))])}")


class PaddleBuf:
    """The numbers of a PaddleTensor in one row."""

    def __init__(self, values: Any = ()) -> None:
        self.reset(values)

    def reset(self, values: Any) -> None:
        """Hold these."""
        self._values = np.asarray(values)

    def tolist(self) -> list[Any]:
        """As Python's numbers."""
        return self._values.reshape(-1).tolist()

    float_data = int32_data = int64_data = tolist

    def length(self) -> int:
        """How many bytes there are."""
        return self._values.nbytes


class PaddleTensor:
    """An array, its name, and its lod: what PaddlePredictor.run takes and gives."""

    def __init__(self, data: Any = None, name: str = "", lod: Sequence[Sequence[int]] = ()) -> None:
        self.name, self.lod = name, [list(level) for level in lod]
        values = np.asarray(data) if data is not None else np.zeros(0, np.float32)
        self.data, self.shape, self.dtype = PaddleBuf(values), list(values.shape), values.dtype

    def as_ndarray(self) -> np.ndarray:
        """The array in its shape."""
        return self.data._values.reshape(self.shape)


class ZeroCopyTensor:
    """One input or output of a predictor."""

    def __init__(self, name: str) -> None:
        self.name, self._value, self._lod = name, np.zeros(0, np.float32), []

    def copy_from_cpu(self, data: np.ndarray) -> None:
        """Hold this array."""
        self._value = np.asarray(data)

    def reshape(self, shape: Sequence[int]) -> None:
        """Nothing: an array brings its shape."""

    def set_lod(self, lod: Sequence[Sequence[int]]) -> None:
        """Divide the rows by offsets."""
        self._lod = [list(level) for level in lod]

    def copy_to_cpu(self) -> np.ndarray:
        """The array."""
        return np.array(self._value)

    def lod(self) -> list[list[int]]:
        """The offsets of each level."""
        return self._lod

    def shape(self) -> list[int]:
        """Size of each dim."""
        return list(self._value.shape)


class PaddlePredictor:
    """A model for inference, in a scope of its own; made by create_paddle_predictor."""

    def __init__(self, config: AnalysisConfig) -> None:
        folder, file = os.path.split(config._path) if config._is_file else (config._path, None)
        params = os.path.basename(config._params) or None
        self._exe, self._scope = Executor(config._place), Scope()
        with scope_guard(self._scope):
            self._program, names, self._fetches = io.load_inference_model(folder, self._exe, file, params)
        self._inputs = {name: ZeroCopyTensor(name) for name in names}
        self._outputs = {name: ZeroCopyTensor(name) for name in (getattr(v, "name", v) for v in self._fetches)}

    def run(self, inputs: Sequence[PaddleTensor]) -> list[PaddleTensor]:
        """The outputs for inputs in the order of get_input_names(), or by their names where all have one.

        Raises ShapeError for another number of inputs.
        """
        if len(inputs) != len(self._inputs):
            raise ShapeError(f"PaddlePredictor.run: {len(inputs)} inputs, the model has {list(self._inputs)}")
        named = all(x.name in self._inputs for x in inputs)
        values = {
            x.name if named else n: _fed(x.as_ndarray(), x.lod) for n, x in zip(self._inputs, inputs, strict=True)
        }
        found = self._call(values)
        return [PaddleTensor(np.asarray(t), n, t.lod()) for n, t in zip(self._outputs, found, strict=True)]

    def _call(self, feed: dict[str, Any]) -> list[LoDTensor]:
        values = self._exe.run(self._program, feed, self._fetches, scope=self._scope, return_numpy=False)
        # a model that PaddlePaddle wrote gives Tensors, without sequences
        return [v if isinstance(v, LoDTensor) else create_lod_tensor(np.asarray(v), [], "cpu") for v in values]

    def get_input_names(self) -> list[str]:
        """Names of what is fed."""
        return list(self._inputs)

    def get_output_names(self) -> list[str]:
        """Names of what comes out."""
        return list(self._outputs)

    def get_input_tensor(self, name: str) -> ZeroCopyTensor:
        """What an input is copied into. Raises ConfigError for a name that is no input's."""
        return _named(self._inputs, name, "input")

    def get_output_tensor(self, name: str) -> ZeroCopyTensor:
        """What an output is read from, after zero_copy_run(). Raises ConfigError for a name that is no output's."""
        return _named(self._outputs, name, "output")

    def zero_copy_run(self) -> None:
        """Run on what the input tensors hold."""
        found = self._call({n: _fed(t._value, t._lod) for n, t in self._inputs.items()})
        for tensor, value in zip(self._outputs.values(), found, strict=True):
            tensor._value, tensor._lod = np.asarray(value), value.lod()


def _named(tensors: dict[str, ZeroCopyTensor], name: str, what: str) -> ZeroCopyTensor:
    if name not in tensors:
        raise ConfigError(f"the model has no {what} {name!r}{did_you_mean(name, tensors)}")
    return tensors[name]


def _fed(value: np.ndarray, lod: Sequence[Sequence[int]]) -> Any:
    return create_lod_tensor(value, [np.diff(level).tolist() for level in lod], "cpu") if lod else value


def create_paddle_predictor(config: AnalysisConfig) -> PaddlePredictor:
    """A predictor of a model. Raises ConfigError where config names none."""
    if not config.model_dir():
        raise ConfigError("create_paddle_predictor: the AnalysisConfig names no model; give AnalysisConfig(model_dir)")
    return PaddlePredictor(config)


__all__ = [
    "AnalysisConfig", "PaddleBuf", "PaddlePredictor", "PaddleTensor", "ZeroCopyTensor", "create_paddle_predictor",
]  # fmt: skip
