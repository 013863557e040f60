"""Many requests at once (generation.TextEngine) against one at a time, and prompts that are known against new ones.

    polyreme models fetch smollm2-135m
    python benchmarks/text_engine.py PATH

Sides run in turns; what is printed are medians and their ratios, of the clock and of the process's own processor time,
which says more where other processes take the cores.
"""

import sys
import time

import numpy as np

from polyreme.generation import LLM, SamplingParams, TextEngine

REQUESTS, PROMPT, NEW, ROUNDS = 8, 24, 64, 3
LONG = (256, 512, 1024)


def timed(run, *args):
    """Seconds of the clock and of the processors."""
    clock, processors = time.perf_counter(), time.process_time()
    run(*args)
    return np.array([time.perf_counter() - clock, time.process_time() - processors])


def write(engine, prompts, new=NEW):
    """Write after all prompts at once."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
    while engine.has_unfinished:
        engine.step()


def write_in_turn(write_one, prompts):
    """Write after one prompt, then after the next."""
    for prompt in prompts:
        write_one([prompt])


def throughput(llm, rng):
    """Print tokens per second of each way."""
    engine = TextEngine(llm.model, llm.tokenizer.end, llm.tokenizer.vocab_size, max_num_seqs=REQUESTS)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    sides = {
        "generator, one at a time": lambda p: write_in_turn(lambda one: llm.generator.generate(one, params), p),
        "engine, one at a time": lambda p: write_in_turn(lambda one: write(engine, one), p),
        f"generator, {REQUESTS} at once": lambda p: llm.generator.generate(p, params),
        f"engine, {REQUESTS} at once": lambda p: write(engine, p),
    }
    seconds = {name: [] for name in sides}
    for turn in range(ROUNDS + 1):
        prompts = rng.integers(100, 40000, (REQUESTS, PROMPT)).tolist()
        for name, side in sides.items():
            spent = timed(side, prompts)
            if turn:  # the first compiles
                seconds[name].append(spent)
    medians = {name: np.median(spent, 0) for name, spent in seconds.items()}
    one = medians["generator, one at a time"]
    print(f"{REQUESTS} requests of {PROMPT} tokens and {NEW} new ones")
    print("                           clock s  tokens/s  times  processor s  tokens/s  times")
    for name, (clock, processors) in medians.items():
        rates = REQUESTS * NEW / clock, REQUESTS * NEW / processors
        times = one / medians[name]
        print(
            f"{name:26} {clock:7.2f} {rates[0]:9.1f} {times[0]:6.2f} {processors:12.2f} {rates[1]:9.1f} {times[1]:6.2f}"
        )


def first_token(llm, rng):
    """Print seconds to the first token of prompts that are new, and of the same again."""
    engine = TextEngine(llm.model, llm.tokenizer.end, llm.tokenizer.vocab_size, max_num_seqs=REQUESTS)
    for length in (16, 60, 250):
        write(engine, [[1] * length], 1)
    print("prompt  clock: new s  known s  ratio  processors: new s  known s  ratio")
    for length in LONG:
        seconds = []
        for _ in range(ROUNDS):
            prompt = rng.integers(100, 40000, length).tolist()
            seconds.append([timed(write, engine, [prompt], 1) for _ in ("new", "known")])
        new, known = np.median(seconds, 0)
        row = f"{new[0]:14.3f} {known[0]:8.3f} {known[0] / new[0]:6.3f}"
        print(f"{length:6} {row} {new[1]:18.3f} {known[1]:8.3f} {known[1] / new[1]:6.3f}")


def main():
    """Print both tables."""
    folder = sys.argv[1]
    llm = LLM(folder, dtype="float32", seq_len=2048)
    rng = np.random.default_rng(0)
    first_token(llm, rng)
    throughput(llm, rng)


if __name__ == "__main__":
    main()
