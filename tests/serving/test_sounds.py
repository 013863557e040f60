"""Sounds over HTTP, by OpenAI's own client: a Whisper writes down what it hears, and says what it does not take."""

import json

import numpy as np
import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from tokenizers import Tokenizer, models  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from polyreme.audio import wave_file  # noqa: E402
from polyreme.cli.main import app  # noqa: E402
from polyreme.errors import ConfigError  # noqa: E402
from polyreme.generation import TextTokenizer  # noqa: E402
from polyreme.models.auto import AutoModelForSpeechSeq2Seq  # noqa: E402
from polyreme.serving import loading  # noqa: E402
from polyreme.serving.service import ServiceLimits  # noqa: E402
from tests.models.parity import FIXTURES  # noqa: E402
from tests.serving.scripted import ServedThread, scripted_model  # noqa: E402

SOUND = np.random.default_rng(0).standard_normal(6400).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    model = AutoModelForSpeechSeq2Seq.from_pretrained(FIXTURES / "encoders" / "whisper")
    model.generation_config = {
        "lang_to_id": {"<|en|>": 10, "<|de|>": 11},
        "task_to_id": {"transcribe": 12, "translate": 13},
        "no_timestamps_token_id": 24,
    }
    model.save_pretrained(folder)
    TextTokenizer(Tokenizer(models.WordLevel({f"w{n}": n for n in range(25)}, "w0"))).save_pretrained(folder)
    wave_file.write(folder / "sound.wav", SOUND[:, None], 16_000, "PCM_F", 32)
    wave_file.write(folder / "stereo.wav", np.repeat(SOUND[:, None], 2, 1), 32_000, "PCM_F", 32)
    return folder


@pytest.fixture(scope="module")
def served(folder):
    limits = ServiceLimits(sound_bytes=100_000)
    with ServedThread(loading.load_served(folder, loading.EngineOptions()), limits=limits) as served:
        yield served


def test_a_sound_is_written_down_in_each_form(served, folder, openai):
    transcriber = served.model
    want = transcriber.transcribe(SOUND, "en")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        def ask(**more):
            return client.audio.transcriptions.create(model="nano", file=folder / "sound.wav", language="en", **more)

        assert ask().text == want.text
        assert ask(response_format="text") == want.text + "\n"
        verbose = ask(response_format="verbose_json", timestamp_granularities=["segment"])
        assert (verbose.text, verbose.duration, verbose.language) == (want.text, 0.4, "en")
        segments = [(s.start, s.end, s.text, tuple(s.tokens), s.avg_logprob) for s in verbose.segments]
        assert segments == [(s.start, s.end, s.text, s.token_ids, s.logprob) for s in want.segments]
        assert all(s.avg_logprob < 0 < s.compression_ratio for s in verbose.segments)
        lines = ask(response_format="srt").split("\n")
        start, end = (f"00:00:{time:06.3f}" for time in segments[0][:2])
        assert lines[:2] == ["1", f"{start} --> {end}".replace(".", ",")]
        assert ask(response_format="vtt").split("\n")[:3] == ["WEBVTT", "", f"{start} --> {end}"]
        drawn = [ask(temperature=1.0, extra_body={"seed": seed}).text for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        translated = client.audio.translations.create(model="nano", file=folder / "sound.wav")
        assert translated.text == transcriber.transcribe(SOUND, task="translate").text
        # two channels at twice the rate: half the sound
        stereo = client.audio.transcriptions.create(
            model="nano", file=folder / "stereo.wav", response_format="verbose_json"
        )
        assert (stereo.duration, stereo.language) == (0.2, transcriber.transcribe(folder / "stereo.wav").language)


def wav(samples=None, rate=16_000, tmp=None):
    path = tmp / "made.wav"
    wave_file.write(path, np.zeros((1600, 1), np.float32) if samples is None else samples, rate)
    return path.read_bytes()


BAD = {
    "no file": ({"model": "nano"}, None, 400, "file", "is missing"),
    "a text for a file": ({"file": "RIFF"}, None, 400, "file", "valid bytes"),
    "no sound": ({}, b"ID3\x04", 400, "file", "only WAVE files are read"),
    "an empty file": ({}, b"", 400, "file", "only WAVE files are read"),
    "a torn file": ({}, b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0", 400, "file", "torn"),
    "too long": ({}, b"\0" * 200_000, 413, None, "the server's limit"),
    "unknown field": ({"langage": "en"}, b"RIFF", 400, "langage", "did you mean 'language'"),
    "unknown model": ({"model": "whisper-1"}, b"RIFF", 404, "model", "no model"),
    "unknown form": ({"response_format": "xml"}, b"RIFF", 400, "response_format", "'json'"),
    "times of words": (
        {"timestamp_granularities[]": "word", "response_format": "verbose_json"}, b"RIFF", 400,
        "timestamp_granularities[]", "give segment",
    ),
    "times in text": ({"timestamp_granularities[]": "segment"}, b"RIFF", 400, "timestamp_granularities[]", "only with"),
    "hot": ({"temperature": "1.5"}, b"RIFF", 400, "temperature", "less than or equal to 1"),
    "no number": ({"temperature": "nan"}, b"RIFF", 400, "temperature", "finite"),
    "a long seed": ({"seed": str(2**63)}, b"RIFF", 400, "seed", "less than"),
    "a stream": ({"stream": "true"}, b"RIFF", 400, "stream", "not supported"),
    "a prompt": ({"prompt": "Paddle"}, b"RIFF", 400, "prompt", "not supported"),
    "twice": ({"language": ["en", "de"]}, b"RIFF", 400, "language", "comes twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_refused_by_name(served, name):
    fields, file, status, param, message = BAD[name]
    parts = [
        (key, (None, one)) for key, value in fields.items() for one in ([value] if isinstance(value, str) else value)
    ]
    parts += [] if file is None else [("file", ("a.wav", file))]
    answer = httpx.post(f"{served.url}/v1/audio/transcriptions", files=parts)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("samples", "rate", "fields", "param", "message"),
    [
        (None, 16_000, {"language": "fr"}, "language", "is not among those"),
        (None, 3_000, {}, "file", "3000 samples a second"),
        (np.zeros((0, 1), np.float32), 16_000, {}, "file", "has no samples"),
        # before it is made one of 16,000 samples a second
        (np.zeros((2000, 1), np.float32), 1, {}, "file", "give up to 1800 seconds"),
    ],
)
def test_sounds_that_the_model_does_not_take(served, tmp_path, samples, rate, fields, param, message):
    files = {"file": ("a.wav", wav(samples, rate, tmp_path))}
    answer = httpx.post(f"{served.url}/v1/audio/transcriptions", data=fields, files=files)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"--x--", 415),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nabc", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nabc" * 1000 + b"--x--", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"A: b\r\n" * 9000 + b"\r\n\r\n--x--", 400),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="language"\r\n\r\n\xff\r\n--x--',
            400,
        ),
    ],
)
def test_torn_forms_are_refused(served, kind, body, status):
    answer = httpx.post(f"{served.url}/v1/audio/translations", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("name", "kind"), [("vit", "ViTModel"), ("clip", "CLIPModel"), ("t5", "T5ForConditional")])
def test_what_is_not_served_is_refused_by_name(name, kind):
    with pytest.raises(ConfigError, match=f"{name}: weights of a {kind}.* are not served; those of decoders are"):
        loading.load_served(FIXTURES / "encoders" / name, loading.EngineOptions())


def test_options_of_decoders_are_refused(folder):
    with pytest.raises(ConfigError, match="is a model that hears, and --speculative is of decoders; leave it out"):
        loading.load_served(folder, loading.EngineOptions(speculative="ngram"))


def test_a_model_does_its_own_work_alone(served, folder):
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "w1"})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message.partition(" ")[2]) == (
        400,
        "writes down sounds and writes no text; ask /v1/audio/transcriptions",
    )
    with ServedThread(scripted_model()) as writes:
        files = {"file": (folder / "sound.wav").read_bytes()}
        answer = httpx.post(f"{writes.url}/v1/audio/transcriptions", files=files)
    assert (answer.status_code, "writes text and hears no sounds" in answer.text) == (400, True)


def test_a_command_writes_down_sounds(served, folder):
    sound = str(folder / "sound.wav")
    want = served.model.transcribe(SOUND, "en")
    run = CliRunner().invoke(app, ["transcribe", str(folder), sound, sound, "--language", "en"])
    assert (run.exit_code, run.output) == (0, 2 * f"{want.text}\n")
    line = CliRunner().invoke(app, ["transcribe", str(folder), sound, "--language", "en", "--format", "json"]).output
    assert json.loads(line)["segments"][0]["token_ids"] == list(want.segments[0].token_ids)
