"""Writing with SmolLM2 of 135 M parameters in float32: polyreme, transformers on PyTorch, and llama.cpp, in turns.

    polyreme models fetch smollm2-135m
    polyreme convert smollm2-135m FOLDER && polyreme convert FOLDER FILE.gguf
    python benchmarks/generation.py --weights FOLDER --gguf FILE.gguf --python-torch PY --python-llamacpp PY --save NAME

FOLDER is what polyreme and transformers read, the file, in float32 too, is llama.cpp's. PY are interpreters of
environments with torch and transformers, and with xllamacpp. Timed are 64 tokens after 16, greedily, and the first
token after 512, of a new prompt each time. All are alive during the whole run and take turns. Where others take the
cores, read processor time, with --threads 1: waiting threads of several use it up.
"""

import os
import random
import statistics
import sys
from itertools import count

import sides

NAMES = ("polyreme", "torch", "llamacpp")
DECODE, PREFILL, NEW = 16, 512, 64
CASES = {"decode": (DECODE, NEW), "prefill": (PREFILL, 1)}


def prompts(length):
    """Token ids, another prompt each time, the same for all sides."""
    return (random.Random(number).choices(range(100, 40_000), k=length) for number in count())


def build(side):
    """The cases of a side: each writes after the next prompt, and gives the last token, or the length of the text."""
    os.environ["CPU_NUM"] = "1"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: int(os.environ["GENERATION_THREADS"])])
    write = {"polyreme": polyreme_writer, "torch": torch_writer, "llamacpp": llamacpp_writer}[side]()
    cases = {}
    for name, (length, new) in CASES.items():
        coming = prompts(length)
        cases[name] = lambda new=new, coming=coming: write(next(coming), new)
    return cases


def polyreme_writer():
    """By TextGenerator."""
    from polyreme.generation import LLM, SamplingParams

    generator = LLM(os.environ["GENERATION_WEIGHTS"], seq_len=2048).generator

    def write(prompt, new):
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        return generator.generate([prompt], params)[0].token_ids[-1]

    return write


def torch_writer():
    """By transformers' generate, with its cache."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(os.environ["GENERATION_WEIGHTS"], dtype=torch.float32).eval()

    def write(prompt, new):
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, -1].item()

    return write


def llamacpp_writer():
    """By llama.cpp's server, called in the process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = os.environ["GENERATION_GGUF"]
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.cache_prompt = False
    server = xllamacpp.Server(params)

    def write(prompt, new):
        asked = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions(asked)
        assert answer["usage"]["completion_tokens"] == new, answer
        return len(answer["choices"][0]["text"])

    return write


def main():
    """Measure, print, and save if asked."""
    parser = sides.parser(__doc__, NAMES, 9)
    parser.add_argument("--weights", help="folder of the published weights")
    parser.add_argument("--gguf", help="the same as a GGUF file in float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side")
    parser.add_argument("--python-llamacpp", help="interpreter of an environment with xllamacpp; likewise")
    options = sides.options_of(parser, NAMES)
    if options.worker:
        sides.work(build, options.worker)
        return
    os.environ["GENERATION_WEIGHTS"], os.environ["GENERATION_GGUF"] = options.weights, options.gguf or ""
    os.environ["GENERATION_THREADS"] = str(options.threads)
    running = sides.start(__file__, options)
    try:
        for case in CASES:
            print(case, {side.name: side.ask(case, 2)["values"] for side in running}, file=sys.stderr)  # compiles
        for turn in range(options.rounds):
            for case in CASES:
                for side in running[turn % len(running) :] + running[: turn % len(running)]:
                    side.measure(case, 1)
    finally:
        for side in running:
            side.close()
    first = running[0]
    rows = ["| what | side | tokens/s | time, ratio | tokens/s of processor time | ratio |", "|---" * 6 + "|"]
    for case, (length, new) in CASES.items():
        tokens = new if case == "decode" else length
        own = statistics.median(first.cpu_seconds[case])
        for side in running:
            median, cpu = side.median(case), statistics.median(side.cpu_seconds[case])
            clock = f"{tokens / median:.1f} | {median / first.median(case):.2f}"
            rows.append(f"| {case} | {side.name} | {clock} | {tokens / cpu:.1f} | {cpu / own:.2f} |")
    text = "\n".join(rows) + "\n\nRatios are of a side's time to polyreme's: above 1 polyreme is faster."
    print(text)
    if options.save:
        load = f"medians of {options.rounds} rounds in turns, {options.threads} threads; load of the machine "
        load += f"{os.getloadavg()[0]:.0f}."
        print(sides.save(options.save, "Generation on a CPU", f"benchmarks/generation.py: {load}", text, running))


if __name__ == "__main__":
    main()
