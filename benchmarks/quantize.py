"""What compression costs and saves: perplexity, bytes and tokens/s of a decoder, whole and in few bits, in one go.

    python -m benchmarks.quantize [FOLDER --data TEXT]

Without a folder: the small LLaMA of the tests on the King James text. Each way is measured beside the whole model, by
turns, and told as ratios of medians of processor time: of scoring rows, and of choosing one token after the other.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

import numpy as np

import polyreme as paddle
from polyreme.compression import (
    PruningOptions,
    QuantizationOptions,
    Sparsity,
    nats_per_token,
    prune_decoder,
    quantize_decoder,
)
from polyreme.generation.generator import TextGenerator
from polyreme.generation.sampling import SamplingParams
from polyreme.models.pretrained import named_tensors
from polyreme.recipes.inference.compress import DataOptions, token_rows
from polyreme.recipes.weights.trained import load_writer

TURNS = 5
NEW_TOKENS = 32


def ways(group):
    """Name and options of each way."""
    yield "wint8", QuantizationOptions(type="wint8")
    for method in ("rtn", "gptq", "awq"):
        yield f"wint4 {method}", QuantizationOptions(method, "wint4", group)
    for method in ("rtn", "smooth"):
        yield f"a8w8 {method}", QuantizationOptions(method, "a8w8")
    yield "wfp8", QuantizationOptions("fp8", "wfp8")
    for method in ("magnitude", "wanda", "sparsegpt"):
        yield f"50% {method}", PruningOptions(method, Sparsity(0.5))
    for method in ("magnitude", "wanda", "sparsegpt"):
        yield f"2:4 {method}", PruningOptions(method, Sparsity.parse("2:4"))


def nbytes(model):
    """Bytes of all tensors."""
    return sum(t.size * t.element_size() for t in named_tensors(model).values())


def seconds_of_scoring(model, rows):
    """Of computing the logits of rows."""
    begin = time.process_time()
    nats_per_token(model, rows)
    return time.process_time() - begin


def seconds_of_writing(generator):
    """Of NEW_TOKENS after a prompt of three."""
    begin = time.process_time()
    generator.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    return time.process_time() - begin


def ratios(whole, smaller, rows):
    """How many times as fast the smaller model scores and writes."""
    sides = [(model, TextGenerator(model, [], model.config.vocab_size)) for model in (whole, smaller)]
    taken = {(side, what): [] for side in range(2) for what in ("scores", "writes")}
    for turn in range(TURNS + 1):
        for side, (model, generator) in enumerate(sides):
            scored, written = seconds_of_scoring(model, rows[:1]), seconds_of_writing(generator)
            if turn:  # the first one compiles
                taken[side, "scores"].append(scored)
                taken[side, "writes"].append(written)
    medians = {key: statistics.median(values) for key, values in taken.items()}
    return [medians[0, what] / medians[1, what] for what in ("scores", "writes")]


def own_model():
    """The small model of the tests, its rows and groups."""
    from tests.compression import trained

    # all that it has not seen: 49,152 bytes
    evaluation = [trained.rows(350_000 + n * 64 * trained.LENGTH, 64) for n in range(12)]
    return trained.trained(), trained.CALIBRATION, evaluation, 32


def main():
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--data", type=Path, action="append", default=[])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="ways whose name begins so")
    arguments = parser.parse_args()
    if arguments.folder is None:
        whole, calibration, evaluation, group = own_model()
    else:
        whole, tokenizer = load_writer(arguments.folder)
        options = DataOptions(tuple(arguments.data), arguments.samples, arguments.length)
        calibration, evaluation = token_rows(whole, tokenizer, options)
        group = arguments.group_size
    whole.eval()
    before, size = nats_per_token(whole, evaluation), nbytes(whole)
    maps = sum(t.size * t.element_size() for n, t in named_tensors(whole).items() if n.startswith("blocks."))
    print(f"{type(whole).__name__}: {size:,} bytes, {maps / size:.2f} of them in blocks, jax on {paddle.get_device()}")
    print(f"perplexity {np.exp(before):.4f} of {sum(ids.size for ids in evaluation):,} tokens")
    print()
    print("| way | perplexity | bytes of blocks | scoring | writing |")
    print("|---|---|---|---|---|")
    for name, options in ways(group):
        if arguments.only and not name.startswith(tuple(arguments.only)):
            continue
        model = copy.deepcopy(whole)
        change = quantize_decoder if isinstance(options, QuantizationOptions) else prune_decoder
        change(model, options, calibration)
        after = nats_per_token(model, evaluation)
        left = sum(t.size * t.element_size() for n, t in named_tensors(model).items() if n.startswith("blocks."))
        scores, writes = ratios(whole, model, evaluation)
        print(f"| {name} | {np.exp(after):.4f} | {left / maps:.3f} | {scores:.2f}x | {writes:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
