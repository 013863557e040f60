"""A run's trained model as an artefact, and any artefact run on arrays from files, described and timed."""

from __future__ import annotations

import re
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from polyreme.errors import CaptureError, ConfigError, DataError, DTypeError, NumericsError, ShapeError, did_you_mean
from polyreme.export import Artifact, PaddleArtifact, iree, read
from polyreme.export.manifest import MAIN
from polyreme.export.save import save
from polyreme.hapi.input_spec import InputSpec
from polyreme.inference import Config, Predictor, create_predictor
from polyreme.recipes.corpus import TOKENIZER
from polyreme.recipes.weights.trained import load_decoder
from polyreme.units import bytes_text

_TOKENS = "tokens"


def export(
    folder: Path, prefix: Path, lengths: Sequence[int], platforms: Sequence[str], batch: int | None = None
) -> list[str]:
    """Writes the model of a run's newest checkpoint: token ids [batch, length] -> logits [batch, length, vocab].

    lengths: of a row of tokens, a program for each; () for the length it was trained with. batch: its size, open if
    None. The run's tokenizer is copied beside the artefact. Returns what was written, in lines. Raises CheckpointError
    for a folder of no run, ConfigError for a length the model has no positions for.
    """
    model, meta = load_decoder(folder)
    longest = model.config.seq_len
    wrong = [n for n in lengths if not 1 <= n <= longest]
    if wrong:
        raise ConfigError(f"--length {wrong[0]}: the model has positions for 1 to {longest} tokens")
    sizes = sorted(set(lengths)) or [longest]
    spec = InputSpec([batch, None if len(sizes) > 1 else sizes[0]], "int64", _TOKENS)
    buckets = {_TOKENS: {1: sizes}} if len(sizes) > 1 else {}
    try:
        save(model, prefix, [spec], platforms=platforms, buckets=buckets, differentiable=False)
    except CaptureError as error:
        raise ConfigError(f"{folder}: the model cannot be exported: {error}") from error
    written = [f"{prefix}.json", *(str(prefix.parent / f.name) for f in read(prefix).manifest.files)]
    if (folder / TOKENIZER).is_file():
        written.append(f"{prefix}.{TOKENIZER}")
        shutil.copyfile(folder / TOKENIZER, written[-1])
    sizes_of = {path: Path(path).stat().st_size for path in written}
    head = f"step {meta['step']} of {folder}, {sum(p.size for p in model.parameters()):,} parameters, is now"
    return [head, *(f"  {path}  {bytes_text(size)}" for path, size in sizes_of.items())]


def export_iree(folder: Path, prefix: Path, lengths: Sequence[int], batch: int, repeat: int = 20) -> list[str]:
    """export for one batch size on this processor, compiled by IREE too, and both programs run on the same tokens.

    Returns lines: what was written, how far the outputs lie apart, how long each takes. Raises as export and
    compile_artifact do, and NumericsError for outputs further apart than rounding explains.
    """
    iree.check_installed()
    lines = export(folder, prefix, lengths, ("cpu",), batch)
    artifact = read(prefix)
    start = time.perf_counter()
    files = iree.compile_artifact(artifact)
    lines += [f"  {path}  {bytes_text(path.stat().st_size)}" for path in files]
    lines.append(f"IREE {iree.version()} for {iree.TARGET}: compiled in {time.perf_counter() - start:.1f} s")
    model, _ = load_decoder(folder)
    other, own = iree.IreeModel(prefix), _predictor(prefix, "cpu")
    for program in artifact.function(MAIN).programs:
        shape = [int(size or 0) for size in program.record.inputs[0].shape]
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, shape)
        lines.append(_compared(own, other, tokens, _rounding(model.config, shape[1]), repeat))
    return lines


def _rounding(config: Any, length: int) -> float:
    """The largest difference between two orders of the model's float32 sums, as a share of the largest output."""
    terms = config.num_layers * (length + config.hidden_size + config.ffn_size) + config.hidden_size
    return terms * float(np.finfo(np.float32).eps)


def _compared(own: Predictor, other: iree.IreeModel, tokens: np.ndarray, rounding: float, repeat: int) -> str:
    want, (got,) = own.run([tokens])[0].numpy(), other([tokens])
    largest = float(np.abs(want).max())
    apart = float(np.abs(got - want).max())
    if not apart <= rounding * largest:
        raise NumericsError(
            f"tokens{list(tokens.shape)}: IREE's outputs lie {apart:.3g} from XLA's, whose largest is {largest:.3g}; "
            f"rounding explains {rounding * largest:.3g}"
        )
    # by turns, so that what else the machine does falls on both
    times = [(_time(own.run, [tokens]), _time(other, [tokens])) for _ in range(max(repeat, 1))]
    xla, second = (statistics.median(column) for column in zip(*times, strict=True))
    return (
        f"tokens{list(tokens.shape)}: outputs {apart:.2g} apart, of at most {largest:.3g} (rounding explains "
        f"{rounding * largest:.2g}); XLA {xla * 1e3:.3f} ms, IREE {second * 1e3:.3f} ms a call, medians of {len(times)}"
    )


def describe(artifact: Artifact) -> list[str]:
    """An artefact in lines a person reads: what it takes and gives, what it was made with, and its files."""
    manifest = artifact.manifest
    weights = sum(np.asarray(a).nbytes for a in artifact.stored.values())
    is_paddle = isinstance(artifact, PaddleArtifact)
    maker = "PaddlePaddle" if is_paddle else f"polyreme {manifest.polyreme}, jax {manifest.jax}"
    lines = [
        f"artefact     {artifact.prefix}",
        f"made with    {maker}",
        f"platforms    {', '.join(artifact.platforms)}",
        f"gradients    {'yes' if manifest.differentiable is True else manifest.differentiable or 'no'}",
        f"weights      {len(artifact.stored)} arrays, {bytes_text(weights)}",
    ]
    for name, function in artifact.functions.items():
        lines += ["", f"function {name}"]
        lines += [f"  takes  {spec}" for spec in function.inputs]
        lines += [f"  gives  {spec}" for spec in function.outputs]
        for program in function.programs:
            sizes = [f"{n} dim {d} = {size}" for n, dims in program.record.sizes.items() for d, size in dims.items()]
            lines.append(f"  program {program.record.file.name}{f'  ({chr(44).join(sizes)})' if sizes else ''}")
    width = max(len(f.name) for f in manifest.files)
    lines += ["", "files, with the digest (xxh3_128) that each has"]
    return lines + [f"  {f.name:<{width}}  {bytes_text(f.nbytes):>10}  {f.digest}" for f in manifest.files]


def infer(prefix: Path, inputs: Mapping[str, Path], output: Path | None, device: str, repeat: int) -> list[str]:
    """Runs an artefact on arrays from .npy files and writes the outputs to OUTPUT/NAME.npy; returns lines that say what
    came out and how long it took.

    Raises ConfigError for inputs that are not its own, DataError for a file that is no array or does not fit.
    """
    predictor = _predictor(prefix, device)
    arrays = _read_inputs(predictor, inputs)
    start = time.perf_counter()
    try:
        outputs = predictor.run(arrays)
    except (ShapeError, DTypeError) as error:
        raise DataError(f"{prefix}: {error}") from error
    jax.block_until_ready([out._array for out in outputs])
    first = time.perf_counter() - start
    lines = []
    for name, out in zip(predictor.get_output_names(), outputs, strict=True):
        text = f"{name}  {out.dtype.name}{list(out.shape)}"
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            path = output / f"{_file_name(name)}.npy"
            np.save(path, out.numpy())
            text += f"  -> {path}"
        lines.append(text)
    times = [_time(predictor.run, arrays) for _ in range(repeat)]
    lines.append(f"first run {first * 1e3:.1f} ms, compilation included")
    if times:
        median, least = statistics.median(times), min(times)
        lines.append(f"then      {median * 1e3:.3f} ms, median of {repeat} runs; least {least * 1e3:.3f} ms")
    return lines


def _predictor(prefix: Path, device: str) -> Predictor:
    config = Config(prefix)
    kind, _, index = device.partition(":")
    if not kind or (index and not index.isdigit()):
        raise ConfigError(f"--device {device}: give cpu, gpu, gpu:1 or the name of another platform")
    if kind in ("gpu", "cuda"):
        config.enable_use_gpu(0, int(index or 0))
    elif kind != "cpu":
        config.enable_custom_device(kind, int(index or 0))
    return create_predictor(config)


def _read_inputs(predictor: Predictor, files: Mapping[str, Path]) -> list[np.ndarray]:
    names = predictor.get_input_names()
    for name in files:
        if name not in names:
            raise ConfigError(f"--input {name}=...: there is no such input{did_you_mean(name, names)}")
    missing = [name for name in names if name not in files]
    if missing:
        raise ConfigError(f"no value for input {', '.join(missing)}; add --input {missing[0]}=FILE.npy")
    return [_array(files[name], name) for name in names]


def _array(path: Path, name: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"--input {name}={path}: no such file") from error
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"--input {name}={path}: not a .npy file of numbers; write it with numpy.save") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"--input {name}={path}: an archive of several arrays; give a .npy file with one")
    return array


def _file_name(name: str) -> str:
    """An output's name as a file's: a name in a manifest does not choose the folder.

    >>> _file_name("../list.0")
    '_list.0'
    """
    return re.sub(r"[^\w.-]", "_", name).lstrip(".") or "output"


def _time(run: Callable[[Sequence[np.ndarray]], Sequence[Any]], arrays: Sequence[np.ndarray]) -> float:
    start = time.perf_counter()
    for out in run(arrays):
        np.asarray(out)
    return time.perf_counter() - start
