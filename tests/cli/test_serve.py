"""`polyreme serve`: what its options refuse, and what it hands to the server."""

from pathlib import Path

import pytest

pytest.importorskip("starlette")

from polyreme.cli.main import main
from polyreme.serving import loading, server


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no such folder or file"),
        ([".", "--host", "0.0.0.0"], "give --api-key-file, or --insecure"),
        ([".", "--api-key-file", "nowhere"], "not a readable file"),
        ([".", "--allow-origin", "*"], "give a scheme and a host"),
        ([".", "--port", "70000"], "less than or equal to 65535"),
        ([".", "--prot", "1"], "--port"),
        ([".", "--dtype", "float23"], "did you mean 'float32'"),
        ([".", "--plan", "dp=2"], "--plan dp=2: a model is served split by tensors alone; give mp=N"),
        ([".", "--plan", "mp=2", "--speculative", "."], "--speculative .: under --plan drafts come from the text"),
        ([".", "--served-model-name", ""], "--served-model-name is empty"),
        ([".", "--kv-cache-dtype", "int7"], "--kv-cache-dtype int7: unknown; did you mean 'int8'?"),
        ([".", "--adapter", "a=x", "--adapter", "a=y"], "--adapter a=y: give each adapter a name of its own"),
        ([".", "--adapter", "a=x", "--adapter", "y"], "--adapter y: without a name it becomes one with the weights"),
        ([".", "--adapter", "a=x", "--plan", "mp=2"], "--adapter x: is served on one device"),
        ([".", "--served-model-name", "a", "--adapter", "a=x"], "two models are to be served as a"),
    ],
)
def test_options_that_cannot_be_are_refused(words, message, capsys):
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_options_reach_the_server_and_the_engine(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(server, "serve", lambda options, load, say: calls.append((options, load())))
    monkeypatch.setattr(server, "leave", lambda: None)
    monkeypatch.setattr(loading, "load_served", lambda path, engine, say: (path, engine))
    words = "--port=0 --served-model-name=a --served-model-name=b --max-num-seqs=3 --no-enable-prefix-caching"
    words += " --max-waiting=5 --request-timeout=7 --max-body-bytes=9 --drain-timeout=4 --dtype=bfloat16"
    assert main(["serve", str(tmp_path), *words.split()]) == 0
    options, (path, engine) = calls[0]
    assert path == tmp_path
    assert engine == loading.EngineOptions("bfloat16", max_num_seqs=3, enable_prefix_caching=False)
    assert (options.names, options.port, options.drain_seconds) == (("a", "b"), 0, 4)
    limits = options.limits
    assert (limits.max_num_seqs, limits.max_waiting, limits.request_seconds, limits.body_bytes) == (3, 5, 7, 9)
    assert main(["serve", str(tmp_path), "--adapter=kjv=runs/lora/adapter", "--adapter=b=c=d"]) == 0
    assert (calls[1][0].names, calls[1][0].adapters) == ((tmp_path.name,), ("kjv", "b=c"))
    assert calls[1][1][1] == loading.EngineOptions(adapters={"kjv": Path("runs/lora/adapter"), "b=c": Path("d")})
    assert main(["serve", str(tmp_path), "--adapter=runs/lora/adapter"]) == 0
    assert calls[2][1][1] == loading.EngineOptions(adapter=Path("runs/lora/adapter"))
