"""Many requests at once (generation.TextEngine) against one at a time, and prompts that are known against new ones.

    polyreme models fetch smollm2-135m
    python benchmarks/text_engine.py [FOLDER]

Sides run in turns; what is printed are medians and their ratios.
"""

import statistics
import sys
import time

import numpy as np

from polyreme.generation import LLM, SamplingParams, TextEngine

REQUESTS, PROMPT, NEW, ROUNDS = 8, 24, 48, 5
LONG = (512, 1024, 1536)


def write(engine, prompts, new):
    """(seconds until all are written, seconds until the first token)."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    start, first = time.perf_counter(), None
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
    while engine.has_unfinished:
        if engine.step() and first is None:
            first = time.perf_counter() - start
    return time.perf_counter() - start, first


def write_alone(generator, prompts):
    """Seconds until all are written, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    start = time.perf_counter()
    for prompt in prompts:
        generator.generate([prompt], params)
    return time.perf_counter() - start


def throughput(llm, rng):
    """Print tokens per second of each way."""
    engine = TextEngine(llm.model, llm.tokenizer.end, llm.tokenizer.vocab_size, max_num_seqs=REQUESTS)
    sides = {
        "generator, one at a time": lambda prompts: write_alone(llm.generator, prompts),
        "engine, one at a time": lambda prompts: sum(write(engine, [prompt], NEW)[0] for prompt in prompts[:2]) * 4,
        f"engine, {REQUESTS} at once": lambda prompts: write(engine, prompts, NEW)[0],
    }
    seconds = {name: [] for name in sides}
    for turn in range(ROUNDS + 1):
        prompts = rng.integers(100, 40000, (REQUESTS, PROMPT)).tolist()
        for name, side in sides.items():
            spent = side(prompts)
            if turn:  # the first compiles
                seconds[name].append(spent)
    medians = {name: statistics.median(spent) for name, spent in seconds.items()}
    one = medians["generator, one at a time"]
    print(f"{REQUESTS} requests of {PROMPT} tokens and {NEW} new ones")
    for name, spent in medians.items():
        print(f"{name:26} {spent:7.2f} s {REQUESTS * NEW / spent:7.1f} tokens/s {one / spent:6.2f}")


def first_token(llm, rng):
    """Print seconds to the first token of prompts that are new, and of the same again."""
    engine = TextEngine(llm.model, llm.tokenizer.end, llm.tokenizer.vocab_size, max_num_seqs=REQUESTS)
    write(engine, [[1] * 130], 1)
    print("prompt  new s  known s  ratio")
    for length in LONG:
        cold, warm = [], []
        for _ in range(ROUNDS):
            prompt = rng.integers(100, 40000, length).tolist()
            cold.append(write(engine, [prompt], 1)[1])
            warm.append(write(engine, [prompt], 1)[1])
        new, known = statistics.median(cold), statistics.median(warm)
        print(f"{length:6} {new:6.3f} {known:7.3f} {known / new:6.3f}")


def main():
    """Print both tables."""
    folder = sys.argv[1] if sys.argv[1:] else "smollm2-135m"
    llm = LLM(folder, dtype="float32", seq_len=2048)
    rng = np.random.default_rng(0)
    first_token(llm, rng)
    throughput(llm, rng)


if __name__ == "__main__":
    main()
