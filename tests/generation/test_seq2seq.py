"""Writing with an encoder and a decoder: what they compute at once, what transformers writes, alone and in a batch."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from polyreme.audio.backends import save as save_sound
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.generation import LLM, SamplingParams, Seq2SeqGenerator, TextTokenizer, Transcriber
from polyreme.generation.transcriber import SpeechText
from polyreme.models import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
from polyreme.models.encoder_decoders.whisper import log_mel
from tests.models.parity import FIXTURES

PROMPTS = [[5, 6, 7, 9], [3, 2, 8, 4, 11, 12]]
# transformers 4.57.6: generate(max_new_tokens=12, do_sample=False, eos_token_id=None), of rows padded with a mask
WRITTEN = [
    [25, 23, 37, 14, 1, 37, 0, 37, 14, 28, 23, 0],
    [25, 26, 23, 35, 41, 13, 15, 4, 12, 26, 23, 7],
]


@pytest.fixture(scope="module")
def model():
    return AutoModelForSeq2SeqLM.from_pretrained(FIXTURES / "encoders" / "t5_gated")


def test_a_text_is_the_one_of_transformers_and_its_logits_are_those_of_the_whole(model):
    writer = Seq2SeqGenerator(model)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    texts = writer.generate(PROMPTS, params)
    assert [text.token_ids for text in texts] == WRITTEN
    for prompt, text in zip(PROMPTS, texts, strict=True):
        decoder_ids = [model.config.start, *text.token_ids[:-1]]
        logits = model(to_tensor([prompt]), decoder_input_ids=to_tensor([decoder_ids])).numpy()[0].astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        # float32 sums of up to 64 terms, in another order
        np.testing.assert_allclose(text.logprobs, logs[np.arange(12), text.token_ids], rtol=0, atol=2e-5)
    (alone,) = writer.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=3))
    assert alone.token_ids == WRITTEN[0][:3]


def test_paddles_names(model):
    padded, mask = [[*PROMPTS[0], 0, 0], PROMPTS[1]], [[1, 1, 1, 1, 0, 0], [1] * 6]
    ids, scores = model.generate(padded, mask, max_length=12, eos_token_id=13, pad_token_id=0)
    assert ids.numpy().tolist() == [WRITTEN[0], [*WRITTEN[1][:6], *[0] * 6]]
    assert scores.shape == [2, 1]
    settings = {"decode_strategy": "sampling", "max_length": 5, "seed": 3, "num_return_sequences": 2}
    drawn, _ = model.generate(PROMPTS[:1], **settings)
    again, _ = model.generate(PROMPTS[:1], **settings)
    assert drawn.numpy().tolist() == again.numpy().tolist()
    assert len({*map(tuple, drawn.numpy().tolist())}) == 2
    with pytest.raises(ConfigError, match="beam_search is of decoders; take greedy_search or sampling for a T5For"):
        model.generate(PROMPTS[:1], decode_strategy="beam_search", num_beams=2)
    with pytest.raises(ShapeError, match="rows of several lengths; pad them"):
        model.generate(PROMPTS)
    with pytest.raises(ConfigError, match="prompt 0 has no tokens"):
        Seq2SeqGenerator(model).generate([[]], SamplingParams())


def test_an_llm_writes_texts_of_texts(model, tmp_path):
    shutil.copytree(FIXTURES / "encoders" / "t5_gated", tmp_path / "t5")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(model.config.vocab_size)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    TextTokenizer(words).save_pretrained(tmp_path / "t5")
    llm = LLM(tmp_path / "t5")
    (output,) = llm.generate("w5 w6 w7 w9", SamplingParams(temperature=0, max_tokens=12, stop="w14"))
    assert output.outputs[0].text.split() == [f"w{number}" for number in WRITTEN[0][:3]]
    assert output.outputs[0].finish_reason == "stop"
    with pytest.raises(ConfigError, match="beam_search is of decoders, not of an encoder"):
        llm.beam_search("w5")
    with pytest.raises(ConfigError, match="speculative, adapter and kv_cache_dtype are of decoders"):
        LLM(tmp_path / "t5", speculative="ngram")


# transformers 4.57.6: generate(max_new_tokens=10, do_sample=False, eos_token_id=None, forced_bos_token_id=7)
FORCED = {
    "bart": [[7] * 10, [7] + [43] * 9],
    "mbart": [[7] + [22] * 9, [7] + [10] * 9],
    "marian": [[7] + [44] * 9] * 2,
    "pegasus": [[7, 1, 1, 1] + [33] * 6, [7, 1, 1] + [25] * 7],
    "m2m_100": [[7] * 10] * 2,
}


@pytest.mark.slow_cases("bart", "marian", "m2m_100")
@pytest.mark.parametrize("name", FORCED)
def test_kin_of_bart_write_as_transformers(name):
    """Rows of two lengths, after a token that the first must be, as the language of a translation."""
    changes = {"start": 5} if name == "mbart" else {}
    model = AutoModelForSeq2SeqLM.from_pretrained(FIXTURES / "encoders" / name, **changes)
    model.generation_config = {}
    padded = [[5, 6, 7, 9, model.config.pad, model.config.pad], [3, 4, 8, 4, 11, 12]]
    mask = [[1, 1, 1, 1, 0, 0], [1] * 6]
    ids, _ = model.generate(padded, mask, max_new_tokens=10, forced_bos_token_id=7)
    assert ids.numpy().tolist() == FORCED[name]
    with pytest.raises(ConfigError, match="prompt 0 has 17 tokens, and the model positions for 16"):
        model.generate([[5] * 17])


def test_what_is_said_in_a_sound():
    """Greedily as transformers 4.57.6, after language and task, without tokens that are suppressed."""
    folder = FIXTURES / "encoders" / "whisper"
    model, features = AutoModelForSpeechSeq2Seq.from_pretrained(folder), load_file(folder / "recorded.safetensors")
    features = features["input_features"]
    assert model.generation_config["begin_suppress_tokens"] == [0, 2]
    model.generation_config = {
        "lang_to_id": {"<|en|>": 10, "<|de|>": 11},
        "task_to_id": {"transcribe": 12, "translate": 13},
        "no_timestamps_token_id": 14,
        "suppress_tokens": [5, 6],
        "begin_suppress_tokens": [0, 2],
    }
    ids, _ = model.generate(features, language="de", task="translate", max_new_tokens=8)
    assert ids.numpy().tolist() == [[7, 7, 7, 7, 7, 13, 13, 13], [13] * 8]
    ids, _ = model.generate(to_tensor(features), language="<|en|>", max_new_tokens=8)
    assert ids.numpy().tolist() == [[35, 7, 7, 7, 19, 13, 13, 13], [19, 19, 19, 47, 47, 47, 47, 47]]
    assert model.beginnings(features, None, None) == [[11, 12, 14]] * 2  # the likeliest language
    with pytest.raises(ConfigError, match=r"language='fr' is not among those of generation_config\.json: <\|en\|>"):
        model.generate(features, language="fr")
    with pytest.raises(ConfigError, match=r"prompt 0 has shape \[6, 8\]; give a spectrum \[6, 16\]"):
        Seq2SeqGenerator(model).generate([features[0, :, :8]], SamplingParams())
    with pytest.raises(ShapeError, match=r"input_features have shape \[2, 6, 8\]; give \[batch, 6, 16\]"):
        model(to_tensor(features[..., :8]), decoder_input_ids=to_tensor([[3]] * 2))


def test_what_is_said_when(tmp_path):
    """The times and words that transformers 4.57.6 writes greedily, of one window and of a sound of several."""
    folder = FIXTURES / "encoders" / "whisper"
    model, features = AutoModelForSpeechSeq2Seq.from_pretrained(folder), load_file(folder / "recorded.safetensors")
    features = features["input_features"]
    ids = {"lang_to_id": {"<|en|>": 10, "<|de|>": 11}, "task_to_id": {"transcribe": 12, "translate": 13}}
    ids |= {"suppress_tokens": [5, 6], "begin_suppress_tokens": [0, 2]}
    model.generation_config = ids
    with pytest.raises(ConfigError, match="has no no_timestamps_token_id, behind which times come; leave times out"):
        model.generate(features, return_timestamps=True)
    model.generation_config = {**ids, "no_timestamps_token_id": 24, "max_initial_timestamp_index": 4}
    timed, _ = model.generate(features, language="de", return_timestamps=True, max_new_tokens=12)
    assert timed.numpy().tolist() == [
        [29, 13, 36, 43, 13, 13, 13, 13, 13, 13, 13, 13],
        [29, 13, 35, 35, 7, 37, 37, 13, 13, 13, 47, 47],
    ]
    long = np.concatenate([features[0], features[1], features[0, ::-1], features[1, :, ::-1]], 1)[:, :60]
    segments = model.transcribe(long, max_new_tokens=12)  # German is heard
    # of a segment that is the last whole one of a window transformers lists the time at which the next begins too
    assert [(round(s.start, 6), round(s.end, 6), s.token_ids) for s in segments] == [
        (0.08, 0.22, [29, 13, 36]),
        (0.3, 0.42, [29, 13, 35]),
        (0.42, 0.46, [35, 7, 37]),
        (0.5, 0.9, [27, 19, 47]),
    ]
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(25)}, "w0"))
    transcriber = Transcriber(model, TextTokenizer(words))
    sound = np.random.default_rng(0).standard_normal(6400)
    said = transcriber.transcribe(sound, "en", max_new_tokens=12)
    heard = model.transcribe(log_mel(sound, 6, 56), 40, "en", max_new_tokens=12)
    assert [(s.start, s.end) for s in said.segments] == [(s.start, s.end) for s in heard]
    assert said.text == " ".join(f"w{token}" for segment in heard for token in segment.token_ids if token < 25)
    save_sound(tmp_path / "fast.wav", to_tensor(sound[None].astype(np.float32)), 8000)
    twice = transcriber.transcribe(tmp_path / "fast.wav", "en", max_new_tokens=12)
    assert (said.duration, twice.duration, twice.language) == (0.4, 0.8, "en")
    parts = [SpeechText(0, 1.5, " One.", (), -0.1), SpeechText(3661.0604, 36000, "Two.", (), -0.1)]
    assert replace(said, segments=tuple(parts)).srt == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n01:01:01,060 --> 10:00:00,000\nTwo.\n\n"
    )
    with pytest.raises(ConfigError, match="a model without a path needs a tokenizer"):
        Transcriber(model)


def test_a_spectrum_of_a_tone():
    """Bright where the tone is, silent after its end; levels are within 8 powers of ten of the loudest, over 4."""
    seconds = np.arange(16_000) / 16_000
    mel = log_mel(np.sin(2 * np.pi * 1000 * seconds), columns=200)
    assert mel.shape == (80, 200)
    assert {int(row) for row in mel[:, 10:90].argmax(0)} <= {24, 25, 26}
    assert mel.max() - mel[:, 110:].max() == pytest.approx(2, abs=1e-6)
    with pytest.raises(ShapeError, match="of one channel"):
        log_mel(np.zeros((2, 5)))
