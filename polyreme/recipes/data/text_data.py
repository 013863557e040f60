"""Text to training samples: a tokenizer trained on the text, tokens in one file, windows of it.

What was prepared is kept in a folder named by the digest of everything it came from, written aside and renamed, so
that any number of runs may share it.
"""

import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import xxhash
from tokenizers import Tokenizer

from polyreme.data import preparation
from polyreme.data.documents import DocumentForm
from polyreme.data.preparation import Preparation
from polyreme.data.text_files import BadLines, read_chunks
from polyreme.data.token_file import TokenFile
from polyreme.data.token_pair import TokenPair
from polyreme.errors import ConfigError, DataError
from polyreme.models.families import BYTE_LEVEL, FAMILIES, TokenizerTrainer
from polyreme.models.tokenizer import END_OF_TEXT
from polyreme.recipes.config import DataConfig, PretrainConfig, RunConfig
from polyreme.recipes.corpus import NEXT_TOKENS, Corpus, RowForm
from polyreme.recipes.data.pair_data import load_pairs, split_documents
from polyreme.recipes.data.paths import resolve
from polyreme.registry import Reference

_FORMAT = 2  # raised when the files below change meaning, so that old folders are not read
_PAIR = "tokens"  # .bin and .idx, where a text has documents
_STALE_SECONDS = 3600  # a folder half written this long ago belongs to a process that died


def random_rows(config: RunConfig, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random tokens and the tokens that follow them for each step, int64 `[batch, seq]` each, drawn from the train
    seed.

    Where documents share rows, what PackedDataset gives: inputs `[batch, 3, seq]`, of documents of 4 tokens on average.
    """
    shape = (steps, config.train.global_batch, config.dimensions.seq_len + 1)
    rng = np.random.default_rng(config.train.seed)
    rows = rng.integers(0, config.dimensions.vocab_size, shape)
    batches = [(tokens[:, :-1], tokens[:, 1:]) for tokens in rows]
    if not config.is_packed:
        return batches
    return [(random_documents(tokens, rng), labels) for tokens, labels in batches]


def random_documents(tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rows of tokens with where their documents lie, of 4 tokens on average: `[batch, 3, seq]`."""
    is_first = rng.random(tokens.shape) < 0.25
    places = np.arange(tokens.shape[1])
    starts = np.maximum.accumulate(np.where(is_first, places, 0), 1)
    ends = np.where(is_first, places, len(places))[:, ::-1]
    after = np.minimum.accumulate(ends, 1)[:, ::-1]  # the first document that begins here or later
    after = np.concatenate([after[:, 1:], np.full((len(tokens), 1), len(places))], 1)
    return np.stack([tokens, after, places - starts], 1)


def load_corpus(config: PretrainConfig, base: Path | None = None, form: RowForm = NEXT_TOKENS) -> Corpus:
    """Prepare the data of a run, kept under data.cache or else in OUTPUT/data; see prepare. Pairs of token files, which
    data.train names, are read as they are.

    Raises DataError also if a split does not fill one batch, so that no run ends well having trained on nothing.
    """
    if config.data.train:
        return load_pairs(config, base, form)
    cache = Path(config.data.cache or Path(config.output) / "data")
    size, seq_len, batch = config.tokenizer_vocab_size, config.dimensions.seq_len, config.train.global_batch
    tokenizer = FAMILIES[config.dimensions.family].tokenizer
    corpus = prepare(
        config.data, vocab_size=size, seq_len=seq_len, cache=cache, base=base, tokenizer=tokenizer, form=form
    )
    if len(corpus.train) < batch:
        raise DataError(
            f"data.text: {len(corpus.train)} training samples are fewer than train.global_batch={batch}; "
            "give more text, a smaller batch or a shorter model.seq_len"
        )
    if config.log.validation_interval and len(corpus.validation) < batch:
        raise DataError(
            f"data.text: {len(corpus.validation)} validation samples are fewer than train.global_batch={batch}; "
            "raise data.validation_fraction, or set log.validation_interval=0"
        )
    return corpus


def prepare(
    data: DataConfig,
    *,
    vocab_size: int,
    seq_len: int,
    cache: Path,
    base: Path | None = None,
    tokenizer: Reference[TokenizerTrainer] = BYTE_LEVEL,
    form: RowForm = NEXT_TOKENS,
) -> Corpus:
    """Find or make the token file for a data configuration.

    vocab_size is the tokenizer's. cache is the folder that keeps prepared data; base is where relative paths are looked
    for first, then the current folder, then the repository. tokenizer: what trains one on the text. Raises DataError
    naming file and line for text that is missing, empty, not UTF-8 (of more than data.skip_bad lines) or too short for
    one window in each split; ConfigError if the cache cannot be written or the tokenizer is not what was asked for.
    """
    paths = [] if data.is_synthetic else [resolve(text, base) for text in data.text]
    key = _key(data, paths, vocab_size, tokenizer)
    folder = cache / key
    facts = _read_facts(folder)
    if facts is None:
        facts = _build(folder, data, paths, vocab_size, tokenizer)
    return _split_corpus(data, folder, facts, seq_len, form)


def synthetic_tokens(count: int, vocab_size: int, seed: int) -> np.ndarray:
    """Made-up tokens a model can learn, `[count]`: each follows from the last by a fixed rule, one in ten at random.

    The best possible loss is about 0.1 ln(vocab_size) + 0.33 nats per token: the entropy of the random tenth.
    """
    rng = np.random.default_rng(seed)
    follows = rng.permutation(vocab_size)
    # columns advance together: a Python loop over rows of a few thousand instead of over every token
    rows = min(count, 64)
    columns = -(-count // rows)
    grid = np.empty((columns, rows), np.int64)
    random = rng.integers(0, vocab_size, (rows, columns))
    is_random = rng.random((rows, columns)) < 0.1
    current = random[0]
    for row in range(rows):
        current = np.where(is_random[row], random[row], follows[current])
        grid[:, row] = current
    return grid.reshape(-1)[:count]


def _key(data: DataConfig, paths: Sequence[Path], vocab_size: int, tokenizer: Reference[TokenizerTrainer]) -> str:
    """Digest of everything the token file depends on."""
    state = xxhash.xxh3_128(json.dumps([_FORMAT, vocab_size]).encode())
    if data.is_synthetic:
        state.update(json.dumps(["synthetic", data.synthetic_tokens, data.seed]).encode())
        return state.hexdigest()
    state.update(json.dumps([tokenizers.__version__, str(tokenizer)]).encode())
    if data.documents != "file":
        state.update(json.dumps(["documents", data.documents]).encode())
    if data.skip_bad:  # a folder that was prepared without lines is not for a run that leaves out none
        state.update(json.dumps(["skip_bad", data.skip_bad]).encode())
    for path in paths:
        try:
            with path.open("rb") as file:
                contents = xxhash.xxh3_128()
                while piece := file.read(1 << 22):
                    contents.update(piece)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        state.update(contents.digest())
    return state.hexdigest()


def _read_facts(folder: Path) -> dict[str, object] | None:
    """Facts of a prepared folder whose files still match their digests, else None."""
    path = folder / "facts.json"
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        is_whole = all(_file_digest(folder / name) == value for name, value in facts["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{folder}: prepared data cannot be read ({error}); preparing it again", stacklevel=3)
        return None
    if not is_whole:
        warnings.warn(f"{folder}: prepared data does not match its digest; preparing it again", stacklevel=3)
        return None
    return facts


def _build(
    folder: Path, data: DataConfig, paths: Sequence[Path], vocab_size: int, trainer: Reference[TokenizerTrainer]
) -> dict[str, object]:
    """Prepare into a folder of our own, then rename it; whoever is first wins and the others use theirs."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        temporary.mkdir()
        try:
            facts = _write(temporary, data, paths, vocab_size, trainer)
            return _publish(temporary, folder, facts)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{folder.parent}: cannot keep prepared data there: {error.strerror or error}; "
            "set output= or data.cache= to a folder that can be written"
        ) from None


def _write(
    folder: Path, data: DataConfig, paths: Sequence[Path], vocab_size: int, trainer: Reference[TokenizerTrainer]
) -> dict[str, object]:
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    tokens_path = folder / "tokens.bin"
    if data.is_synthetic:
        tokens = synthetic_tokens(data.synthetic_tokens, vocab_size, data.seed)
        tokens.astype(dtype).tofile(tokens_path)
        count, used = len(tokens), vocab_size
    else:
        bad = BadLines(data.skip_bad)
        tokenizer = _train_tokenizer(trainer, paths, vocab_size, bad)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        used = tokenizer.get_vocab_size()
        if data.documents == "file":
            count = _encode(tokenizer, paths, tokens_path, dtype, bad)
        else:
            end = tokenizer.token_to_id(END_OF_TEXT)
            form = DocumentForm(data.documents)
            how = Preparation(tokenizer.to_str(), end=end, form=form, skip_bad=data.skip_bad)
            ((_, count),) = preparation.prepare(paths, folder / _PAIR, how).pairs.values()
            dtype = TokenPair(folder / _PAIR).dtype
    digests = {path.name: _file_digest(path) for path in sorted(folder.iterdir())}
    facts: dict[str, object] = {"files": digests, "dtype": dtype, "num_tokens": count, "vocab_size": used}
    for path in folder.iterdir():
        _sync(path)
    (folder / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    _sync(folder / "facts.json")
    return facts


def _train_tokenizer(
    trainer: Reference[TokenizerTrainer], paths: Sequence[Path], vocab_size: int, bad: BadLines
) -> Tokenizer:
    for path in paths:
        if not any(chunk.strip() for chunk in read_chunks(path, bad)):
            raise DataError(f"{path}: the file has no text")
    tokenizer = trainer.load()((chunk for path in paths for chunk in read_chunks(path, bad)), vocab_size)
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ConfigError(f"{trainer}: its tokenizer has no token {END_OF_TEXT}; train it with that one as special")
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError(
            f"{trainer}: its tokenizer has {tokenizer.get_vocab_size()} tokens, more than "
            f"data.tokenizer_vocab_size={vocab_size}; raise that, or train it to fewer"
        )
    return tokenizer


def _encode(tokenizer: Tokenizer, paths: Sequence[Path], out: Path, dtype: str, bad: BadLines) -> int:
    """Write the tokens of every file, each file closed by END_OF_TEXT; returns how many."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.encode_special_tokens = True  # a text that spells out the marker gets its letters, not the marker
    count = 0
    with out.open("wb") as file:
        for path in paths:
            for batch in _batches(read_chunks(path, bad), 16):
                for encoding in tokenizer.encode_batch_fast(batch):
                    count += len(encoding.ids)
                    file.write(np.asarray(encoding.ids, dtype=dtype).tobytes())
            file.write(np.asarray([end], dtype=dtype).tobytes())
            count += 1
    return count


def _batches(chunks: Iterator[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for chunk in chunks:
        batch.append(chunk)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _publish(temporary: Path, folder: Path, facts: dict[str, object]) -> dict[str, object]:
    for _ in range(3):
        try:
            os.rename(temporary, folder)
            return facts
        except OSError:
            if not folder.exists():
                raise
        other = _read_facts(folder)
        if other is not None:
            return other
        # damaged: out of the way under a name that the sweep removes, never deleted under a reader
        os.rename(folder, folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}"))
    raise ConfigError(
        f"{folder}: another process keeps replacing this folder; give the runs separate data.cache folders"
    )


def _sweep(cache: Path) -> None:
    for path in cache.glob(".*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _split_corpus(data: DataConfig, folder: Path, facts: dict, seq_len: int, form: RowForm) -> Corpus:
    count, name = facts["num_tokens"], "tokens.bin"
    boundary = count - max(round(count * data.validation_fraction), 1)
    cuts: list[object] = [facts["files"], boundary, seq_len]
    if data.documents == "file":
        tokens = TokenFile(folder / name, facts["dtype"], facts["files"][name])
        tokenizer = folder / "tokenizer.json"
        bounds = {"training": (0, boundary), "validation": (boundary, count)}
        for name, (begin, end) in bounds.items():
            if not len(form.windows(tokens, begin, end, seq_len)):
                raise DataError(
                    f"data.text: {end - begin} tokens for {name} do not fill one window of model.seq_len={seq_len} + "
                    "1; give more text, a shorter seq_len or another data.validation_fraction"
                )
        train, validation = (
            form.wrap(form.windows(tokens, begin, end, seq_len), tokenizer) for begin, end in bounds.values()
        )
    else:
        pair = TokenPair(folder / _PAIR)
        train, validation = split_documents(pair, data.validation_fraction, seq_len, data.packing, form)
        cuts.append(data.packing)
    digest = xxhash.xxh3_128_hexdigest(json.dumps(cuts).encode())
    return Corpus(train, validation, digest, count, facts["vocab_size"], folder)


def _file_digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            state.update(piece)
    return state.hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
