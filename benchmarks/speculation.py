"""Drafts from the text (Speculation) against none, where a text repeats itself and where it does not.

    python benchmarks/speculation.py PATH    # published weights, such as polyreme convert smollm2-135m PATH writes

Sides run in turns; printed are medians of the process's own processor time and of the clock, and their ratios.
"""

import sys
import time

import numpy as np

from polyreme.generation import LLM, SamplingParams, Speculation, TextEngine, TextGenerator

NEW, ROUNDS = 96, 3
LIST = "".join(
    f"Item {n}: the price of apples is {n} dollars and the price of pears is {n} dollars.\n" for n in range(1, 9)
)
PROSE = "The old lighthouse keeper had not spoken to anyone for eleven years when, one morning in March,"


def write_by_engine(engine, prompt, params):
    """The tokens of one request."""
    engine.add("a", prompt, params)
    tokens = []
    while engine.has_unfinished:
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tokens


def main():
    """Print the table."""
    llm = LLM(sys.argv[1], seq_len=2048)
    model, end = llm.model, llm.tokenizer.end
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    pairs = {
        "generator": [TextGenerator(model, end, speculation=s) for s in (None, Speculation())],
        "engine": [TextEngine(model, end, speculation=s) for s in (None, Speculation())],
    }
    print("| by | text | tokens/s of processor time without | with | ratio | ratio by the clock | met of drafted |")
    print("|---" * 7 + "|")
    for name, sides in pairs.items():
        for text, words in (("repeats", LIST), ("prose", PROSE)):
            prompt, spent, told = llm.tokenizer.encode(words), [[], []], (0, 0)
            for turn in range(ROUNDS + 1):
                written = []
                for side, seconds in zip(sides, spent, strict=True):
                    clock, processor = time.perf_counter(), time.process_time()
                    if name == "engine":
                        written.append(write_by_engine(side, prompt, params))
                        counts = side.statistics.accepted_tokens, side.statistics.draft_tokens
                    else:
                        written.append(side.generate([prompt], params)[0].token_ids)
                        counts = side.num_accepted, side.num_drafted
                    if turn:  # the first compiles
                        seconds.append((time.process_time() - processor, time.perf_counter() - clock))
                if not turn:
                    first = counts
                assert written[0] == written[1]
            told = f"{counts[0] - first[0]} of {counts[1] - first[1]}"
            without, drafted = (np.median(seconds, 0) for seconds in spent)
            rates = f"{NEW / without[0]:.1f} | {NEW / drafted[0]:.1f}"
            ratios = f"{without[0] / drafted[0]:.2f} | {without[1] / drafted[1]:.2f}"
            print(f"| {name} | {text} | {rates} | {ratios} | {told} |", flush=True)


if __name__ == "__main__":
    main()
