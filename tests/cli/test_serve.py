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
    ],
)
def test_options_that_cannot_be_are_refused(words, message, capsys):
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_options_reach_the_server_and_the_engine(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(server, "serve", lambda options, load, say: calls.append((options, load())))
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
    assert main(["serve", str(tmp_path), "--adapter=kjv=runs/lora/adapter"]) == 0
    assert calls[1][0].names == ("kjv",)
    assert calls[1][1][1] == loading.EngineOptions(adapter=Path("runs/lora/adapter"))
