"""`polyreme quantize` and `polyreme prune`: a decoder on disk made smaller, measured, written and read back."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.compression import (
    LayerError,
    PruningOptions,
    QuantizationOptions,
    Sparsity,
    narrowed,
    nats_per_token,
    prune_decoder,
    quantize_decoder,
)
from polyreme.data.documents import DocumentForm, read_blocks
from polyreme.data.text_files import BadLines
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, CompressionError, ConfigError, DataError
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.models.auto import AutoModelForCausalLM
from polyreme.models.files.low_bit_folder import low_bit_layers
from polyreme.models.files.published import kept_keys
from polyreme.models.pretrained import named_tensors, write_folder
from polyreme.recipes.weights.base import is_run
from polyreme.recipes.weights.published import check_new_folder, copy_beside, new_folder
from polyreme.recipes.weights.trained import load_writer

REPORT = "compression.json"
"""What was measured, beside the weights."""
_ROWS = 4
"""Rows of tokens that are computed at once."""
_MOST_SENSITIVE = 3


@dataclass(frozen=True)
class DataOptions:
    """The texts that a model is calibrated and measured on.

    files: text. samples: rows of tokens that it is calibrated on, the first ones; on those after them, as many and 16
    at most, it is measured. length: tokens of a row; the model's positions, 512 at most, if 0. Raises ConfigError for
    less than one row or two tokens.
    """

    files: tuple[Path, ...]
    samples: int = 32
    length: int = 0

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("--data: give a text file that the model is calibrated and measured on")
        if self.samples < 1 or self.length == 1 or self.length < 0:
            raise ConfigError(f"--samples {self.samples}, --length {self.length}: at least 1 row of 2 tokens")


@dataclass
class CompressionReport:
    """Results of a compression: perplexities, bytes of all tensors, tokens scored a second, and the error of each
    linear map, the largest first."""

    method: str
    perplexity_before: float
    perplexity_after: float
    bytes_before: int
    bytes_after: int
    tokens_per_second_before: float
    tokens_per_second_after: float
    zeros: float
    errors: list[LayerError]

    @property
    def rise(self) -> float:
        """The perplexity after over that before."""
        return self.perplexity_after / self.perplexity_before

    def lines(self, every_map: bool = False) -> Iterator[str]:
        """The report as lines of text; every_map: with the error of each linear map."""
        yield f"perplexity   {self.perplexity_before:.4f} -> {self.perplexity_after:.4f} ({self.rise - 1:+.2%})"
        share = self.bytes_after / self.bytes_before
        yield f"bytes        {self.bytes_before:,} -> {self.bytes_after:,} ({share:.3f} of them)"
        yield f"tokens/s     {self.tokens_per_second_before:,.0f} -> {self.tokens_per_second_after:,.0f} (scored)"
        if self.zeros:
            yield f"zeros        {self.zeros:.1%} of the weights of linear maps"
        if not self.errors:
            return
        yield "error of outputs, the largest first"
        shown = self.errors if every_map else self.errors[:_MOST_SENSITIVE]
        for error in shown:
            yield f"  {error.error:8.4f}  {error.name}"
        names = " ".join(f"--skip {error.name}" for error in self.errors[:_MOST_SENSITIVE])
        yield f"most sensitive: {names} keeps them as they are"


def quantize(
    source: Path,
    target: Path,
    options: QuantizationOptions,
    data: DataOptions,
    *,
    bound: float = 1.25,
    force: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> CompressionReport:
    """Write a decoder with linear maps of few bits as a folder, which from_pretrained, generate and serve take.

    source: a run, a folder or a GGUF file. bound: perplexity after over before that is written at most, unless force.
    Raises CompressionError for more, ConfigError for a target that holds anything and for weights of few bits,
    DataError for data that are too short, CheckpointError where what is read back is not what was written.
    """
    job = _Job.open(source, target, data, say)

    def change(model: Any) -> tuple[Any, list[LayerError]]:
        return model, quantize_decoder(model, options, job.calibration, say)

    return job.run(f"{options.method} {options.type}", change, bound, force)


def prune(
    source: Path,
    target: Path,
    method: str,
    sparsity: Sparsity,
    data: DataOptions,
    *,
    skip: Sequence[str] = (),
    bound: float = 1.25,
    force: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> CompressionReport:
    """Write a decoder with some weights set to zero, or, by the method `structured`, with channels removed.

    Else as quantize. Raises ConfigError too for n of m or skip with `structured`.
    """
    if method == "structured" and (sparsity.m or skip):
        raise ConfigError("--method structured takes channels of all blocks: give --sparsity a share, and no --skip")
    options = None if method == "structured" else PruningOptions(method, sparsity, tuple(skip))
    job = _Job.open(source, target, data, say)

    def change(model: Any) -> tuple[Any, list[LayerError]]:
        if options is None:
            return narrowed(model, sparsity.share, job.calibration, say), []
        return model, prune_decoder(model, options, job.calibration, say)

    return job.run(f"{method} {sparsity.share:.2f}", change, bound, force)


@dataclass
class _Job:
    """A decoder that is made smaller: from where to where, on which rows of tokens."""

    source: Path
    target: Path
    model: Any
    tokenizer: TextTokenizer
    calibration: list[np.ndarray]
    evaluation: list[np.ndarray]
    say: Callable[[str], None]

    @classmethod
    def open(cls, source: Path, target: Path, data: DataOptions, say: Callable[[str], None]) -> _Job:
        """Read model and data, all checks before anything is computed."""
        check_new_folder(target)
        model, tokenizer = load_writer(source)
        if low_bit_layers(model):
            raise ConfigError(f"{source}: its weights are of few bits already; start from the model before that")
        if model.family.published is None:
            raise ConfigError(
                f"{source}: a {model.family.name} has no published format, so that no folder of weights can be written"
            )
        model.eval()
        return cls(source, target, model, tokenizer, *token_rows(model, tokenizer, data), say)

    def run(
        self,
        method: str,
        change: Callable[[Any], tuple[Any, list[LayerError]]],
        bound: float,
        force: bool,
    ) -> CompressionReport:
        """Measure, change, measure, and write unless perplexity rose beyond the bound."""
        if not bound > 0:
            raise ConfigError(f"--bound {bound}: give how many times the perplexity may be, as 1.25")
        before, speed_before = self._measure(self.model)
        nbytes = _nbytes(self.model)
        smaller, errors = change(self.model)
        after, speed_after = self._measure(smaller)
        report = CompressionReport(
            method,
            math.exp(min(before, 700)),
            math.exp(min(after, 700)),
            nbytes,
            _nbytes(smaller),
            speed_before,
            speed_after,
            _zeros(smaller),
            sorted(errors, key=lambda error: -error.error),
        )
        if not report.rise <= bound and not force:
            self._refuse(report, bound)
        self._write(smaller, report)
        return report

    def _refuse(self, report: CompressionReport, bound: float) -> None:
        worst = ", ".join(error.name for error in report.errors[:_MOST_SENSITIVE])
        skip = f"; --skip the most sensitive ({worst})" if worst else ""
        raise CompressionError(
            f"{self.target}: not written: perplexity rose from {report.perplexity_before:.4f} to "
            f"{report.perplexity_after:.4f}, {report.rise:.2f} times as much, and {bound:.2f} times are allowed{skip}, "
            "take more bits or smaller groups, raise --bound, or write it all the same with --force"
        )

    def _measure(self, model: Any) -> tuple[float, float]:
        nats_per_token(model, self.evaluation[:1])  # compiled
        begin = time.perf_counter()
        nats = nats_per_token(model, self.evaluation)
        return nats, sum(ids.size for ids in self.evaluation) / (time.perf_counter() - begin)

    def _write(self, model: Any, report: CompressionReport) -> None:
        tensors = named_tensors(model)
        config = self.source / "config.json"
        more = kept_keys(json.loads(config.read_text())) if config.is_file() else {}
        with new_folder(self.target) as partial:
            write_folder(partial, model.family.published.load(), model, lambda name: tensors[name].numpy(), more=more)
            if is_run(self.source):
                self.tokenizer.save_pretrained(partial)
            else:
                copy_beside(self.source, partial, self.say)
            (partial / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
            self._check(model, partial)

    def _check(self, model: Any, folder: Path) -> None:
        """Check that the model read back computes the same numbers."""
        back = AutoModelForCausalLM.from_pretrained(folder)
        ids = to_tensor(self.evaluation[0])
        with no_grad():
            want, got = model(ids).numpy(), back(ids).numpy()
        if not np.array_equal(want, got):
            apart = float(np.abs(want - got).max())
            raise CheckpointError(f"{folder}: read back its logits are up to {apart:.3g} from what was written")
        self.say("read back: the same logits, bit for bit")


def token_rows(model: Any, tokenizer: TextTokenizer, data: DataOptions) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows [_ROWS, length] to calibrate on and to measure on. Raises ConfigError for more tokens than the model has
    positions for, DataError for too little text."""
    positions = model.config.seq_len
    if data.length > positions:
        raise ConfigError(
            f"--length {data.length}: the model has positions for {positions} tokens; give at most so many"
        )
    length = data.length or min(512, positions)
    wanted = (data.samples + min(data.samples, 16)) * length
    ids: list[int] = []
    for path in data.files:
        for block in read_blocks(path, DocumentForm("paragraph"), BadLines()):
            if len(ids) >= wanted:
                break
            for text in block.texts()[0]:
                ids += tokenizer.encode(text)
    ids = ids[:wanted]
    count = len(ids) // length
    measured = min(data.samples, 16, count // 2)
    if measured < 1:
        files = ", ".join(map(str, data.files))
        raise DataError(
            f"{files}: {len(ids):,} tokens, and a row to calibrate on and one to measure on take {2 * length:,}; give "
            "more text, or a smaller --length"
        )
    table = np.asarray(ids[: count * length], np.int64).reshape(count, length)
    calibration = table[: min(data.samples, count - measured)]
    parts = (calibration, table[count - measured :])
    return tuple([part[at : at + _ROWS] for at in range(0, len(part), _ROWS)] for part in parts)  # type: ignore[return-value]


def _nbytes(model: Any) -> int:
    return sum(tensor.size * tensor.element_size() for tensor in named_tensors(model).values())


def _zeros(model: Any) -> float:
    """The share of zeros among the weights of linear maps in blocks that are stored in full."""
    weights = [t.numpy() for n, t in named_tensors(model).items() if n.startswith("blocks.") and t.ndim == 2]
    floating = [w for w in weights if w.dtype.kind == "f"]
    total = sum(w.size for w in floating)
    return sum(int((w == 0).sum()) for w in floating) / total if total else 0.0
