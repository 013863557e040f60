"""Tokens per second of writing with a LLaMA of 1.1 billion parameters on one GPU, bfloat16, random weights.

    python benchmarks/gpu_decode.py [--rows 1,8] [--new 128]

Sides, in processes of their own that take turns: polyreme's generator and TextEngine, and LlamaForCausalLM of
transformers, eager with a dynamic cache and compiled with a static one. Every text has a prompt of 128 tokens and goes
on for --new tokens, the likeliest each time. Prints one JSON line a number of rows.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import sides as s

SETTINGS = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
SIZES = {"vocab_size": 32000, "hidden_size": 2048, "num_layers": 22, "num_heads": 32, "num_kv_heads": 4}
FFN, SEQ, PROMPT = 5632, 2048, 128


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default="generator,engine,torch-static,torch")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def build_polyreme(o: argparse.Namespace, side: str) -> dict:
    """-> a function for each number of rows, which writes once."""
    import numpy as np

    import polyreme as paddle
    from polyreme.generation import SamplingParams, TextEngine
    from polyreme.generation.generator import TextGenerator
    from polyreme.models.decoders.llama import Llama, LlamaConfig

    paddle.set_default_dtype("bfloat16")
    model = Llama(LlamaConfig(**SIZES, ffn_size=FFN, seq_len=SEQ))
    params = SamplingParams(temperature=0, max_tokens=o.new, ignore_eos=True)

    def case(rows: int):
        prompts = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (rows, PROMPT)).tolist()
        if side == "generator":
            generator = TextGenerator(model)
            return lambda: len(generator.generate(prompts, params))
        engine = TextEngine(model, max_num_seqs=rows, max_model_len=PROMPT + o.new + 1, enable_prefix_caching=False)

        def run() -> int:
            for number, prompt in enumerate(prompts):
                engine.add(str(number), prompt, params)
            while engine.has_unfinished:
                engine.step()
            return rows

        return run

    return {str(rows): case(rows) for rows in map(int, o.rows.split(","))}


def build_torch(o: argparse.Namespace, side: str) -> dict:
    """-> a function for each number of rows, which writes once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": SIZES["num_layers"], "num_attention_heads": SIZES["num_heads"]}
    sizes |= {"num_key_value_heads": SIZES["num_kv_heads"], "intermediate_size": FFN, "max_position_embeddings": SEQ}
    sizes |= {"vocab_size": SIZES["vocab_size"], "hidden_size": SIZES["hidden_size"]}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).to(torch.bfloat16).eval()
    options = {"do_sample": False, "max_new_tokens": o.new, "min_new_tokens": o.new, "pad_token_id": 0}
    if side == "torch-static":
        options["cache_implementation"] = "static"  # transformers compiles the decoding step then

    def case(rows: int):
        ids = torch.randint(SIZES["vocab_size"], (rows, PROMPT), device="cuda")
        mask = torch.ones_like(ids)

        def run() -> int:
            with torch.no_grad():
                model.generate(ids, attention_mask=mask, **options)
            torch.cuda.synchronize()
            return rows

        return run

    return {str(rows): case(rows) for rows in map(int, o.rows.split(","))}


def warmed(side: s.Side, rows: str) -> str:
    """Run a side twice, which compiles -> what went wrong, if anything."""
    try:
        side.ask(rows, 2)
    except (RuntimeError, OSError) as problem:
        return str(problem)
    return ""


def main() -> None:
    """Works as a side, or measures all."""
    o = parsed()
    if o.worker:
        s.work(lambda side: (build_torch if side.startswith("torch") else build_polyreme)(o, side), o.worker)
        return
    options = [f"--rows={o.rows}", f"--new={o.new}"]
    sides = [s.Side(__file__, name, sys.executable, SETTINGS, options) for name in o.sides.split(",")]
    for rows in o.rows.split(","):
        line: dict = {"part": "decode", "rows": int(rows), "new": o.new, "prompt": PROMPT}
        with ThreadPoolExecutor() as pool:  # all compile at once
            faults = list(pool.map(lambda side, rows=rows: warmed(side, rows), sides))
        alive = [side for side, fault in zip(sides, faults, strict=True) if not fault]
        line |= {side.name: fault for side, fault in zip(sides, faults, strict=True) if fault}
        for _ in range(o.rounds):
            for side in alive:
                side.measure(rows, 1)
        line["tokens_per_s"] = {side.name: round(int(rows) * o.new / side.median(rows), 1) for side in alive}
        print(json.dumps(line), flush=True)
    for side in sides:
        side.process.kill()


if __name__ == "__main__":
    main()
