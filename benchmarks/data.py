"""What preparing, mixing, packing and loading data cost, on this machine.

    prepare   documents of JSON lines tokenized by 0 (threads), 1 and 2 processes, tokens/s; duplicates, documents/s
    blend     three pairs of a million samples: seconds to open and give the first, microseconds to find one
    pack      a million documents by best fit: seconds, the part of places with a label
    train     a GPT's tokens/s on documents of 8 to 256 tokens, packed and padded, and all of 256; programs compiled
    loader    the time of a step of 20 ms with 4 workers, one of them ten times as slow, over that with equal ones
    image     Resize, ToTensor and Normalize one after another, and in one pass

    python benchmarks/data.py [PART ...] [--rounds 5]

Rounds alternate between the sides; medians are printed.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from polyreme.data.blend import Mixture
from polyreme.data.documents import DocumentForm
from polyreme.data.duplicates import NearText, SameText
from polyreme.data.packing import PackedDataset, best_fit
from polyreme.data.preparation import Preparation, prepare
from polyreme.data.token_pair import PairWriter, TokenPair
from polyreme.data.windows import TokenDataset
from polyreme.io import DataLoader
from polyreme.io.worker_info import get_worker_info
from polyreme.models.tokenizer import train_byte_level_bpe

SEQ = 256


def medians(sides, rounds: int, clock=time.perf_counter) -> dict[str, float]:
    """Median seconds of each side, a function, the sides taking turns."""
    seconds = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            began = clock()
            run()
            seconds[name].append(clock() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def words(rng: np.random.Generator, count: int) -> str:
    """Text of so many made-up words, the common ones most often."""
    return " ".join(f"w{n}" for n in np.minimum(rng.zipf(1.3, count), 20_000))


def measure_prepare(folder: Path, rounds: int) -> None:
    """Tokens/s by number of processes; documents/s of marks of duplicates."""
    rng = np.random.default_rng(0)
    texts = [words(rng, int(n)) for n in rng.integers(20, 800, 10_000)]
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_byte_level_bpe(iter(texts[:1000]), 8000).to_str()
    tokens = 0

    def run(workers: int) -> None:
        nonlocal tokens
        for path in folder.glob("out*"):
            path.unlink()
        how = Preparation(tokenizer, form=DocumentForm(), workers=workers)
        tokens = prepare([source], folder / "out", how).pairs[folder / "out"][1]

    times = medians({f"{n} workers": lambda n=n: run(n) for n in (0, 1, 2)}, rounds)
    for name, seconds in times.items():
        print(f"prepare  {name}: {tokens / seconds:,.0f} tokens/s ({tokens:,} tokens, {len(texts):,} documents)")
    for way in (SameText, NearText):
        began, seen = time.perf_counter(), way()
        kept = sum(seen.is_new(seen.mark(text)) for text in texts)
        rate = len(texts) / (time.perf_counter() - began)
        print(f"prepare  {way.__name__}: {rate:,.0f} documents/s of 410 words on average, {kept:,} kept")


def measure_blend(folder: Path, rounds: int) -> None:
    """Opening three pairs of a million samples of 32 tokens."""
    rng = np.random.default_rng(0)
    for name, samples in (("a", 600_000), ("b", 300_000), ("c", 100_000)):
        with PairWriter(folder / name, "uint16") as writer:
            lengths = rng.integers(100, 900, samples * 32 // 500)
            for begin in range(0, len(lengths), 1000):
                part = lengths[begin : begin + 1000]
                writer.add(rng.integers(0, 50_000, part.sum()), part)

    def open_all() -> Mixture:
        pairs = [TokenPair(folder / name) for name in "abc"]
        sets = [TokenDataset(pair.tokens, 0, pair.num_tokens, 32) for pair in pairs]
        mixture = Mixture(sets, [0.5, 0.3, 0.2], seed=0)
        assert mixture[0][0].shape == (32,)
        return mixture

    seconds = medians({"open": open_all}, rounds)["open"]
    mixture = open_all()
    numbers = rng.integers(0, 10**12, 20_000).tolist()
    find = medians({"find": lambda: [mixture.locate(number) for number in numbers]}, rounds)["find"]
    print(f"blend    {len(mixture):,} samples of 3 sources: open and first sample {seconds * 1e3:.1f} ms")
    print(f"blend    find one of 10^12: {find / len(numbers) * 1e6:.1f} us")


def measure_pack(folder: Path, rounds: int) -> None:
    """A million log-normal lengths in rows of 2048."""
    sizes = np.minimum(np.random.default_rng(0).lognormal(5.5, 1.2, 1_000_000).astype(np.int64) + 1, 2048)
    bounds = best_fit(sizes, 2048)[1]
    seconds = medians({"pack": lambda: best_fit(sizes, 2048)}, rounds)["pack"]
    fill = sizes.sum() / (2048 * (len(bounds) - 1))
    print(f"pack     {len(sizes):,} documents of {sizes.mean():.0f} tokens: {seconds:.2f} s, {100 * fill:.3f}% full")


def measure_train(folder: Path, rounds: int) -> None:
    """Tokens with a label a second, of one captured step."""
    import jax

    import polyreme as paddle
    from polyreme.models.decoders.gpt import GPT, GPTConfig
    from polyreme.models.parts.decoder import Documents

    rng, rows = np.random.default_rng(0), 8
    for name, lengths in (("varied", rng.integers(8, SEQ + 1, 3000)), ("equal", np.full(400, SEQ + 1))):
        with PairWriter(folder / name, "uint16") as writer:
            for length in lengths:
                writer.add(rng.integers(0, 2000, int(length)))
    paddle.seed(0)
    config = GPTConfig(vocab_size=2048, hidden_size=256, num_layers=4, num_heads=8, seq_len=SEQ)
    model = GPT(config)
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters())

    def step_of(loss):
        @paddle.jit.to_static
        def step(inputs, labels):
            value = loss(inputs, labels)
            value.backward()
            optimizer.step()
            optimizer.clear_grad()
            return value

        return step

    def packed(inputs, labels):
        tokens, ends, places = inputs.unbind(1)
        return model(tokens, labels, Documents(ends, places))

    varied, equal = TokenPair(folder / "varied"), TokenPair(folder / "equal")
    data = {
        "varied, packed": (PackedDataset(varied, 0, varied.num_documents, SEQ), step_of(packed)),
        "varied, padded": (PackedDataset(varied, 0, varied.num_documents, SEQ, False), step_of(model)),
        "equal": (PackedDataset(equal, 0, equal.num_documents, SEQ, False), step_of(model)),
    }
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    counts = {}

    def run(name: str) -> None:
        samples, step = data[name]
        counts[name] = 0
        for begin in range(0, 6 * rows, rows):
            inputs, labels = (
                np.stack(part) for part in zip(*(samples[i] for i in range(begin, begin + rows)), strict=True)
            )
            counts[name] += int((labels != -100).sum())
            value = step(paddle.to_tensor(inputs), paddle.to_tensor(labels))
        float(value)

    programs = {}
    for name in data:
        before = len(compiled)
        run(name)
        programs[name] = len(compiled) - before
    before = len(compiled)
    times = medians({name: lambda name=name: run(name) for name in data}, rounds)
    rates = {name: counts[name] / seconds for name, seconds in times.items()}
    for name, rate in rates.items():
        print(f"train    {name}: {rate:,.0f} tokens/s, {rate / rates['equal']:.2f} of equal lengths")
    print(f"train    programs compiled after the first batches: {len(compiled) - before}")
    samples, step = data["varied, packed"]
    for begin in range(0, len(samples) - rows, rows):  # the rest of an epoch
        inputs, labels = (
            np.stack(part) for part in zip(*(samples[i] for i in range(begin, begin + rows)), strict=True)
        )
        if begin % (8 * rows) == 0:
            step(paddle.to_tensor(inputs), paddle.to_tensor(labels))
    print(
        f"train    and in an epoch of {len(samples) // rows} packed batches, every eighth run: {len(compiled) - before}"
    )


class Loads:
    """Samples that take `seconds`, ten times as long in worker 0 if slow."""

    def __init__(self, seconds: float, slow: bool) -> None:
        self.seconds, self.slow = seconds, slow

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> np.ndarray:
        info = get_worker_info()
        time.sleep(self.seconds * (10 if self.slow and info is not None and info.id == 0 else 1))
        return np.full(1000, index, np.float32)


def measure_loader(folder: Path, rounds: int) -> None:
    """The mean time of 100 steps of 20 ms."""

    def run(seconds: float, slow: bool) -> None:
        batches = iter(DataLoader(Loads(seconds, slow), batch_size=1, num_workers=4, prefetch_factor=2))
        for _ in range(10):
            next(batches)
        began = time.perf_counter()
        for _ in range(100):
            next(batches)
            time.sleep(0.02)
        times[slow].append((time.perf_counter() - began) / 100)

    for seconds in (0.01, 0.02, 0.03):
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            run(seconds, False)
            run(seconds, True)
        equal, slow = (statistics.median(times[key]) for key in (False, True))
        print(
            f"loader   a batch in {seconds * 1e3:.0f} ms: step {equal * 1e3:.2f} ms, with a slow worker "
            f"{slow * 1e3:.2f} ms, {100 * (slow / equal - 1):+.1f}%"
        )


def measure_image(folder: Path, rounds: int) -> None:
    """Images to 224 x 224 by the public classes; processor time."""
    from PIL import Image

    from polyreme.vision import transforms as T

    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    steps = T.Compose([T.Resize((224, 224)), T.ToTensor(), T.Normalize(mean, std)])
    one = T.ResizeNormalize((224, 224), mean, std)
    for shape in ((256, 256, 3), (375, 500, 3), (480, 640, 3)):
        array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        for name, image in (("ndarray", array), ("Pillow", Image.fromarray(array))):
            assert np.array_equal(one(image), steps(image).numpy())
            sides = {
                "separate": lambda image=image: [steps(image).numpy() for _ in range(20)],
                "one pass": lambda image=image: [one(image) for _ in range(20)],
            }
            times = medians(sides, rounds, time.process_time)  # of this process alone: other load counts less
            apart, fused = times["separate"] / 20, times["one pass"] / 20
            print(
                f"image    {shape[1]} x {shape[0]} {name}: separate {apart * 1e3:.2f} ms, one pass {fused * 1e3:.2f} "
                f"ms, {fused / apart:.2f}"
            )


PARTS = {
    "prepare": measure_prepare,
    "blend": measure_blend,
    "pack": measure_pack,
    "train": measure_train,
    "loader": measure_loader,
    "image": measure_image,
}


def main() -> None:
    """Measure the parts that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in options.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](Path(folder), options.rounds)


if __name__ == "__main__":
    main()
