"""A real `polyreme serve`: from the command to the first token, what HTTP adds to a token, and a soak of bad company.

    python benchmarks/server.py smollm2-135m --parts start overhead --save server_2_cores_DATE
    python benchmarks/server.py tiny --parts start overhead soak

MODEL is a folder, a GGUF file or a name that `polyreme models fetch` brought; `tiny` is a LLaMA of two blocks with
random weights, which is made here and whose step costs next to nothing, so that what remains is the server.
"""

import argparse
import compileall
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("start", "overhead", "soak")
PROMPT = "In the beginning God created the heaven and the earth. And the earth was"
BAD_BODIES = (
    b"", b"{", b"[1, 2]", b'{"prompt": 7}', b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "n": 1000000}',
    b'{"prompt": "a", "top_p": 2}', b'{"prompt": "a", "model": "another"}',
    b'{"prompt": [1, 2, 999999999]}', b'{"prompt": "a", "logit_bias": {"x": 1}}', b'{"prompt": "a", "stop": [1]}',
    json.dumps({"prompt": "a " * 20000}).encode(), b"\xff\xfe\x00", b'{"prompt": "a", "guided_regex": "("}',
    b'{"prompt": "a", "max_tokens": 4000}',
)  # fmt: skip
KINDS = (
    {}, {"logprobs": 3}, {"n": 3, "logprobs": 1}, {"stop": ["th", "é"]}, {"guided_regex": "[a-z ]{4,30}"},
    {"response_format": {"type": "json_object"}}, {"guided_choice": ["in the beginning", "in the end"], "n": 2},
    {"echo": True, "logprobs": 1}, {"min_tokens": 1, "frequency_penalty": 0.5}, {"top_p": 0.8, "min_p": 0.01},
    {"repetition_penalty": 1.2},
)  # fmt: skip
"""What requests of a soak ask for besides."""


class ServedProcess:
    """`polyreme serve` in a process of its own, on a free port."""

    def __init__(self, model: str, cache: Path, *options: str) -> None:
        self.started = time.perf_counter()
        command = [sys.executable, "-m", "polyreme", "serve", model, "--port", "0", *options]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "POLYREME_COMPILE_CACHE": str(cache)}
        root = Path(__file__).resolve().parent.parent
        self.process = subprocess.Popen(
            command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.port, self.lines = 0, []
        listening = threading.Event()

        def read() -> None:
            for line in self.process.stdout:
                self.lines.append(line.rstrip())
                if "listening on" in line:
                    self.port = int(line.split("http://")[1].split(",")[0].rsplit(":", 1)[1])
                    listening.set()
            listening.set()

        threading.Thread(target=read, daemon=True).start()
        listening.wait(120)
        if not self.port:
            raise SystemExit("\n".join(["the server does not listen:", *self.lines]))

    def wait(self) -> None:
        """Until it is ready."""
        while self.status("GET", "/health")[0] != 200:
            if self.process.poll() is not None:
                raise SystemExit("\n".join(["the server ended:", *self.lines]))
            time.sleep(0.02)

    def status(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """(status, body) of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(self, **fields) -> list[dict]:
        """The choices of a completion."""
        status, text = self.status("POST", "/v1/completions", json.dumps({"prompt": PROMPT} | fields).encode())
        if status != 200:
            raise RuntimeError(f"{status}: {text[:300]!r}")
        return json.loads(text)["choices"]

    def stream(self, most: int | None = None, **fields) -> tuple[list[str], list[float]]:
        """(texts, times of their parts); the client leaves after `most` parts."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = json.dumps({"prompt": PROMPT, "stream": True} | fields).encode()
        texts, times = Counter(), []
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                times.append(time.perf_counter())
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] = (texts[choice["index"]] or "") + choice["text"]
                if most is not None and len(times) >= most:
                    break
        finally:
            connection.close()
        return [texts[index] for index in sorted(texts)], times

    def gauge(self, name: str) -> float:
        """A number of /metrics."""
        text = self.status("GET", "/metrics")[1].decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"polyreme:{name}{{"))

    def resident(self) -> int:
        """Bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))

    def processor_seconds(self) -> float:
        """Of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> int:
        """Its exit status after SIGTERM."""
        self.process.terminate()
        return self.process.wait(60)


def write_tiny(folder: Path) -> str:
    """A LLaMA with random weights, and a tokenizer of bytes and common pairs."""
    from polyreme.generation import TextTokenizer
    from polyreme.models.decoders.llama import Llama, LlamaConfig
    from polyreme.models.tokenizer import END_OF_TEXT, train_byte_level_bpe

    bpe = train_byte_level_bpe(iter([PROMPT, "é 漢 ✓\n"]), 300)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_len": 512}
    Llama(LlamaConfig(vocab_size=bpe.get_vocab_size(), **sizes)).save_pretrained(folder)
    TextTokenizer(bpe, [bpe.token_to_id(END_OF_TEXT)], special={"eos_token": END_OF_TEXT}).save_pretrained(folder)
    return str(folder)


def start(model: str, cache: Path) -> list[str]:
    """Seconds from the command to the first token, without compiled programs and with them; of polyreme bytecode is
    there, as pip makes it where it installs."""
    compileall.compile_dir(Path(__file__).resolve().parent.parent / "polyreme", quiet=1)
    rows = ["| start | first token, s | processor s until then | its request, ms | a tenth request's, ms |"]
    rows += ["|---|---|---|---|---|"]
    for name in ("nothing compiled", "programs of an earlier start"):
        server = ServedProcess(model, cache)
        server.wait()
        waits = []
        for number in range(10):
            sent = time.perf_counter()
            _, times = server.stream(max_tokens=1, temperature=0, seed=number)
            waits.append(times[0] - sent)
            if number == 0:
                first, processors = times[0] - server.started, server.processor_seconds()
        code = server.end()
        rows.append(f"| {name} | {first:.1f} | {processors:.1f} | {1000 * waits[0]:.0f} | {1000 * waits[-1]:.0f} |")
        assert code == 0, "\n".join(server.lines)
    return rows


def overhead(model: str, cache: Path, rounds: int, tokens: int) -> list[str]:
    """Milliseconds a token of one text over HTTP, and of the same engine in this process, in turns."""
    from polyreme.generation import LLM, SamplingParams, TextEngine

    llm = LLM(model)
    engine = TextEngine(llm.model, llm.tokenizer.end, llm.tokenizer.vocab_size)
    ids = llm.tokenizer.encode(PROMPT)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    server = ServedProcess(model, cache)
    server.wait()

    def by_engine() -> tuple[float, float]:
        engine.add("text", ids, params)
        engine.step()
        clock, processors, steps = time.perf_counter(), time.process_time(), 0
        while engine.has_unfinished:
            steps += sum(len(output.token_ids) for output in engine.step())
        return (time.perf_counter() - clock) / steps, (time.process_time() - processors) / steps

    def by_server() -> tuple[float, float]:
        before = server.processor_seconds()
        _, times = server.stream(max_tokens=tokens, temperature=0, ignore_eos=True)
        return (times[-1] - times[0]) / (tokens - 1), (server.processor_seconds() - before) / tokens

    sides = {"engine in the process": by_engine, "over HTTP, streamed": by_server}
    spent = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            seconds = side()
            if turn:  # the first compiles
                spent[name].append(seconds)
    server.end()
    medians = {
        name: [1000 * statistics.median(column) for column in zip(*times, strict=True)] for name, times in spent.items()
    }
    rows = ["| a token of one text | ms | processor ms |", "|---|---|---|"]
    rows += [f"| {name} | {clock:.2f} | {processor:.2f} |" for name, (clock, processor) in medians.items()]
    more = [b - a for a, b in zip(*medians.values(), strict=True)]
    return [*rows, f"| what the server adds | {more[0]:.2f} | {more[1]:.2f} |"]


def soak(model: str, cache: Path, requests: int, clients: int) -> list[str]:
    """Requests of random lengths and of all KINDS, clients that leave, bodies that are wrong: what is left, what was
    answered, and whether it is the same when it is asked for alone."""
    server = ServedProcess(model, cache)
    server.wait()
    numbers, counts, wrong, lock = iter(range(requests)), Counter(), [], threading.Lock()
    memory: list[tuple[int, int]] = []
    answers: dict[int, tuple[dict, list[dict]]] = {}

    def ask(number: int) -> str:
        draw = random.Random(number)
        kind = draw.choices(("streamed", "whole", "left", "bad"), (4, 2, 2, 2))[0]
        if kind == "bad":
            status, body = server.status("POST", "/v1/completions", draw.choice(BAD_BODIES))
            if not 400 <= status < 500 or "error" not in json.loads(body):
                wrong.append(f"a bad body: {status} {body[:200]!r}")
            return kind
        words = PROMPT.split()
        fields = {
            "prompt": " ".join(draw.choices(words, k=draw.randint(1, 60))),
            "max_tokens": draw.randint(1, 60),
            "temperature": draw.choice((0, 1)),
            "seed": number,
        } | draw.choice(KINDS)
        if kind == "left":
            server.stream(draw.randint(1, 5), **fields | {"max_tokens": 200})
            return kind
        choices = server.complete(**fields)
        texts = [choice["text"] for choice in choices]
        if kind == "streamed":
            parts, _ = server.stream(**fields)
            if parts != texts:
                wrong.append(f"request {number}: streamed {parts!r:.80} is not {texts!r:.80}")
        "".join(texts).encode()  # lone surrogates would be no text
        answers[number] = fields, choices
        return kind

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
                if number is not None and number % max(1, requests // 10) == 0:
                    memory.append((number, server.resident()))
            if number is None:
                return
            try:
                kind = ask(number)
            except Exception as error:  # noqa: BLE001  (what a soak looks for)
                wrong.append(f"request {number}: {error!r}")
                continue
            with lock:
                counts[kind] += 1

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    memory.append((requests, server.resident()))
    alone = random.Random(0).sample(sorted(answers), min(len(answers), max(20, requests // 20)))
    others = [number for number in alone if server.complete(**answers[number][0]) != answers[number][1]]
    wrong += [f"request {number} is another one alone: {answers[number][0]}" for number in others]
    deadline = time.perf_counter() + 10
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(left := {name: server.gauge(name) for name in names}.values()) and time.perf_counter() < deadline:
        time.sleep(0.1)
    left = {name: server.gauge(name) for name in names}
    late = [nbytes for number, nbytes in memory if number >= requests // 5]
    code = server.end()
    lines = [
        f"{requests} requests of {clients} clients in {seconds:.0f} s: {dict(counts)}; {len(wrong)} wrong.",
        f"{len(alone)} asked for once more, alone: {len(alone) - len(others)} the same again.",
        f"Left: {left}. Exit status after SIGTERM: {code}.",
        "Resident MiB after requests: " + ", ".join(f"{number}: {nbytes / 2**20:.0f}" for number, nbytes in memory)
        + f"; from a fifth on it grew by {(late[-1] - late[0]) / 2**20:.1f}.",
        *wrong[:10],
    ]  # fmt: skip
    return [part for line in lines for part in (line, "")]


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--save", help="name of a file in benchmarks/results, without .md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        model = write_tiny(Path(folder) / "tiny") if options.model == "tiny" else options.model
        sections = []
        for part in options.parts:
            if part == "start":
                rows = start(model, cache)
            elif part == "overhead":
                rows = overhead(model, cache, options.rounds, options.tokens)
            else:
                rows = soak(model, cache, options.requests, options.clients)
            sections += [f"## {part}, {options.model}", "", *rows, ""]
            print("\n".join(sections[-len(rows) - 3 :]), flush=True)
    if options.save:
        path = RESULTS / f"{options.save}.md"
        head = [] if path.exists() else [f"# A served model, {date.today()}", ""]
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n".join([*head, *sections]))


if __name__ == "__main__":
    main()
