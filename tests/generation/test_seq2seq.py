"""Writing with a T5 token by token: what it computes at once, what transformers writes, alone and in a batch."""

import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.generation import LLM, SamplingParams, Seq2SeqGenerator, TextTokenizer
from polyreme.models import AutoModelForSeq2SeqLM
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
