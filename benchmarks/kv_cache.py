"""What keys and values of 8 bits cost and save: SmolLM2's nats a token, bytes of the cache, and seconds a token.

    python benchmarks/kv_cache.py [--rows 8] [--length 256] [--new 24]

Both sides in one process, alternating; of seconds the median. polyreme models fetch smollm2-135m comes first.
"""

import argparse
import gzip
import statistics
import time
from pathlib import Path

import numpy as np

from polyreme.compression import nats_per_token
from polyreme.generation import LLM, SamplingParams, TextGenerator
from polyreme.models.parts.cache import KVCache

TEXT = Path(__file__).parents[1] / "data/kjv.txt.gz"
KINDS = ("float32", "bfloat16", "int8")
REPEATS = 3


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--new", type=int, default=24)
    options = parser.parse_args()
    llm = LLM("smollm2-135m")
    with gzip.open(TEXT, "rt") as file:
        text = file.read(12 * options.rows * options.length)
    ids = np.array(llm.tokenizer.encode(text)[: options.rows * options.length], np.int64)
    rows = [row[None] for row in ids.reshape(options.rows, options.length)]
    params = SamplingParams(temperature=0, max_tokens=options.new, ignore_eos=True)
    writers = {kind: TextGenerator(llm.model, kv_cache_dtype=kind) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repeat in range(REPEATS + 1):
        for kind, writer in writers.items():
            began = time.perf_counter()
            writer.generate([rows[0][0].tolist()], params)
            if repeat:  # the first one compiles
                seconds[kind].append((time.perf_counter() - began) / options.new)
    print("| keys and values | nats a token | bytes of 1,024 places | s a token, prompt included |")
    print("|---|---|---|---|")
    for kind in KINDS:
        llm.model.kv_cache_dtype = kind
        nats = nats_per_token(llm.model, rows)
        nbytes = KVCache(llm.model, 1, 1024).nbytes
        print(f"| {kind} | {nats:.5f} | {nbytes:,} | {statistics.median(seconds[kind]):.4f} |", flush=True)


if __name__ == "__main__":
    main()
