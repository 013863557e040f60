"""Prompts with images: what transformers writes, alone, in an engine and behind a server; images in URLs."""

import base64
import io
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from polyreme.cli.main import app  # noqa: E402
from polyreme.eager.tensor import to_tensor  # noqa: E402
from polyreme.errors import CheckpointError, ConfigError, DataError, ShapeError  # noqa: E402
from polyreme.generation import LLM, SamplingParams, TextEngine, TextGenerator, TextTokenizer  # noqa: E402
from polyreme.generation.images import ImageProcessor, parts_of_messages, read_url  # noqa: E402
from polyreme.generation.prompt_vectors import PromptVectors  # noqa: E402
from polyreme.models import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402
from polyreme.serving import loading  # noqa: E402
from tests.models.parity import FIXTURES  # noqa: E402
from tests.serving.scripted import ServedThread  # noqa: E402

FOLDER = FIXTURES / "encoders" / "llava"
RECORDED = load_file(FOLDER / "recorded.safetensors")
# transformers 4.57.6: generate(max_new_tokens=6, do_sample=False, eos_token_id=None)
WRITTEN = [[0, 37, 37, 37, 0, 5], [1, 24, 25, 4, 27, 13]]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PREPROCESSOR = {"size": {"shortest_edge": 10}, "do_center_crop": True, "crop_size": {"height": 8, "width": 8}}
PREPROCESSOR |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
TEMPLATE = (
    "{% for m in messages %}w1 {% for part in m['content'] %}"
    "{{ 'w40 ' if part['type'] == 'image' else part['text'] + ' ' }}{% endfor %}{% endfor %}w2"
)
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 14, 11, 3), dtype=np.uint8)


def url_of(pixels):
    file = io.BytesIO()
    PIL.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def about(*urls, text="w7 w9"):
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llava"
    shutil.copytree(FOLDER, folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(48)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    TextTokenizer(words, template=TEMPLATE).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder)


def test_texts_after_images_are_those_of_transformers(llm):
    """By generate, and by an engine that takes prompts in by parts, beside others, with known beginnings."""
    ids, pixels = RECORDED["input_ids"], RECORDED["pixel_values"]
    model = llm.model
    written, _ = model.generate(ids, to_tensor(pixels), max_new_tokens=6)
    assert written.numpy().tolist() == WRITTEN
    vectors = model.image_vectors(to_tensor(pixels)).numpy().reshape(-1, 24)
    places = [np.flatnonzero(row == 40) for row in ids]
    rows = [PromptVectors(places[0], vectors[:8]), PromptVectors(places[1], vectors[8:])]
    engine = TextEngine(model.language, block_size=2, prefill_chunk=4, max_num_seqs=2, num_blocks=20)
    swapped = PromptVectors(places[0], np.concatenate([vectors[4:8], vectors[:4]]))
    texts = {}
    for name, row, seen in (("a", 0, rows[0]), ("b", 1, rows[1]), ("c", 0, rows[0]), ("d", 0, swapped)):
        engine.add(name, ids[row].tolist(), GREEDY, vectors=seen)
        if name not in "ac":  # b comes beside a, d beside c
            while engine.has_unfinished:
                for output in engine.step():
                    texts.setdefault(output.request_id, []).extend(output.token_ids)
    assert [texts["a"], texts["b"], texts["c"]] == [*WRITTEN, WRITTEN[0]]
    assert (
        texts["d"] == TextGenerator(model.language).generate([ids[0].tolist()], GREEDY, vectors=[swapped])[0].token_ids
    )
    # of c both whole parts are known, of d none; nor while both are there
    assert engine.statistics.prefix_tokens_hit == 8
    for name, seen in (("same", rows[0]), ("again", rows[0]), ("other", swapped)):  # at once
        engine.add(name, ids[0].tolist(), GREEDY, vectors=seen)
    while engine.has_unfinished:
        for output in engine.step():
            texts.setdefault(output.request_id, []).extend(output.token_ids)
    assert [texts["same"], texts["again"], texts["other"]] == [WRITTEN[0], WRITTEN[0], texts["d"]]
    assert texts["d"] != WRITTEN[0]
    with pytest.raises(ConfigError, match="request 0: vectors at places 0 to 3 of a prompt of 2 tokens"):
        TextGenerator(model.language).generate([[1, 2]], GREEDY, vectors=[PromptVectors(np.arange(4), vectors[:4])])
    with pytest.raises(ShapeError, match="12 ids are the image token, 40, and the images are 8 vectors; give 4 ids"):
        model(to_tensor(ids), to_tensor(pixels[:2]))
    with pytest.raises(ConfigError, match="beam_search reads text alone"):
        model.generate(ids, to_tensor(pixels), num_beams=2)


def test_a_conversation_about_images(llm, folder):
    """The same text by parts of a message and as vLLM says it; images in another order are another prompt."""
    urls = [url_of(pixels) for pixels in PIXELS]
    chatted, swapped = llm.chat([about(*urls), about(*urls[::-1])], GREEDY)
    assert chatted.prompt_token_ids == [1, *[40] * 8, 7, 9, 2]
    assert chatted.outputs[0].token_ids != swapped.outputs[0].token_ids
    prompt = {"prompt": "w1 w40 w40 w7 w9 w2", "multi_modal_data": {"image": list(PIXELS)}}
    (prompted,) = llm.generate(prompt, GREEDY)
    assert prompted.outputs[0].token_ids == chatted.outputs[0].token_ids
    (without,) = llm.chat([{"role": "user", "content": "w7"}], GREEDY)
    assert without.prompt_token_ids == [1, 7, 2]
    with pytest.raises(ConfigError, match="1 images, and the prompt has the image token 0 times; give one for each"):
        llm.generate({"prompt": "w1", "multi_modal_data": {"image": PIXELS[0]}}, GREEDY)
    with pytest.raises(ConfigError, match=r"an image at 'https://example\.com/a\.png'; give data:.* nothing is"):
        llm.chat(about("https://example.com/a.png"), GREEDY)
    with pytest.raises(ConfigError, match="17 images in one prompt; give at most 16"):
        llm.chat(about(*urls[:1] * 17), GREEDY)
    with pytest.raises(ConfigError, match=r"a part of content with \['audio', 'type'\]"):
        parts_of_messages([{"role": "user", "content": [{"type": "audio", "audio": "x"}]}])
    with pytest.raises(ConfigError, match="reads images needs image_processor"):
        LLM(llm.model, llm.tokenizer)


def test_images_in_urls():
    np.testing.assert_array_equal(np.asarray(read_url(url_of(PIXELS[0]))), PIXELS[0])
    with pytest.raises(DataError, match="cannot be read as an image"):
        read_url("data:image/png;base64," + base64.b64encode(b"no image").decode())
    with pytest.raises(DataError, match="is not base64"):
        read_url("data:image/png;base64,!!")
    wide = io.BytesIO()
    PIL.new("1", (8192, 4096)).save(wide, "PNG")
    with pytest.raises(DataError, match="8192 x 4096 pixels; at most 16777216 are read"):
        read_url("data:image/png;base64," + base64.b64encode(wide.getvalue()).decode())
    with pytest.raises(ConfigError, match="give data:image/png;base64"):
        read_url("file:///etc/passwd")


def test_a_processor_of_a_folder(folder, tmp_path):
    """A grey picture is its grey wherever it is cut, black around it where it is too small, normed by each channel."""
    processor = ImageProcessor.from_pretrained(folder)
    grey = np.full((20, 30, 3), 51, np.uint8)
    pixels = processor(grey)
    np.testing.assert_allclose(pixels[:, 0, 0], [(0.2 - m) / s for m, s in ((0.5, 0.2), (0.4, 0.3), (0.3, 0.4))], 1e-6)
    assert pixels.shape == (3, 8, 8)
    assert np.ptp(pixels[0]) == 0
    small = ImageProcessor(size=None, crop=(8, 8), mean=(0, 0, 0), std=(1, 1, 1))(grey[:5, :4])
    np.testing.assert_array_equal((small[0] > 0).sum((0, 1)), 20)
    assert small[0, 1, 2] == 0 < small[0, 2, 2]
    with pytest.raises(CheckpointError, match=r"no preprocessor_config\.json"):
        ImageProcessor.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="do_image_splitting=True is not done here"):
        ImageProcessor.from_dict({**PREPROCESSOR, "do_image_splitting": True})
    with pytest.raises(ConfigError, match="pixels in float64; give uint8"):
        processor(grey / 255)


def test_a_server_answers_about_images(llm, folder):
    urls = [url_of(pixels) for pixels in PIXELS]
    (wanted,) = llm.chat(about(*urls), GREEDY)
    options = loading.EngineOptions(max_num_seqs=2, block_size=4, prefill_chunk=8)
    with ServedThread(loading.load_served(folder, options)) as served:

        def ask(messages, path="/v1/chat/completions", **more):
            return httpx.post(f"{served.url}{path}", json={"messages": messages, **more}, timeout=60)

        answer = ask(about(*urls), temperature=0, max_tokens=6).json()
        assert answer["choices"][0]["message"]["content"] == wanted.outputs[0].text
        assert answer["usage"]["prompt_tokens"] == 12
        assert ask(about(*urls), path="/tokenize").json()["count"] == 12
        refused = ask(about("http://example.com/a.png"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
        assert "nothing is fetched" in refused.json()["error"]["message"]
        refused = ask([{**about(*urls)[0], "role": "assistant"}])
        assert refused.status_code == 400
        assert "images are of a user's message" in refused.json()["error"]["message"]
    with pytest.raises(ConfigError, match="reads images, on one device; leave out --plan"):
        loading.load_served(folder, loading.EngineOptions(plan="mp=2"))


def test_weights_are_loaded_for_their_task(folder):
    with pytest.raises(ConfigError, match="load them with AutoModelForImageTextToText"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert AutoModelForImageTextToText.from_pretrained(folder).vectors_per_image == 4


def test_a_command_writes_about_images(llm, folder, tmp_path):
    """The text that an LLM answers with, and after a prompt that has the image token."""
    files, urls = [tmp_path / "a.png", tmp_path / "b.png"], [url_of(pixels) for pixels in PIXELS]
    for file, pixels in zip(files, PIXELS, strict=True):
        PIL.fromarray(pixels).save(file)
    options = ["--temperature", "0", "--max-new-tokens", "6"]
    options += [option for file in files for option in ("--image", str(file))]
    (chatted,) = llm.chat(about(*urls), GREEDY)
    run = CliRunner().invoke(app, ["generate", str(folder), "--chat", "--prompt", "w7 w9", *options])
    assert (run.exit_code, run.output) == (0, chatted.outputs[0].text + "\n")
    prompt = {"prompt": "w40 w7 w40", "multi_modal_data": {"image": urls}}
    (written,) = llm.generate(prompt, GREEDY)
    run = CliRunner().invoke(app, ["generate", str(folder), "--prompt", "w40 w7 w40", *options])
    assert (run.exit_code, run.output.split()) == (0, [*["w40", "w7", "w40"], *written.outputs[0].text.split()])
    with pytest.raises(ConfigError, match="2 images, and the prompt has the image token 0 times"):
        app(["generate", str(folder), "--prompt", "w7", *options], standalone_mode=False)
    with pytest.raises(ConfigError, match=r"none\.png: cannot be read"):
        app(["generate", str(folder), "--image", str(tmp_path / "none.png")], standalone_mode=False)
