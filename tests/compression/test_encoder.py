"""Sentence vectors of an encoder with weights of 8 bits, and what the weights take of memory."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.generation.embedding import TextEmbedder
from polyreme.models.encoders.bert import Bert, BertConfig
from polyreme.models.files.low_bit_folder import linear_maps, replace_layer
from polyreme.models.files.packages import MINILM, cached, is_cached
from polyreme.nn.quant import QuantizedLinear

SENTENCES = [
    "That is a happy person",
    "That is a happy dog",
    "That is a very happy person",
    "Today is a sunny day",
    "The stock market fell sharply on Tuesday",
    "How do I bake bread at home?",
]


def test_int8_takes_at_most_0_30_of_the_memory():
    model = Bert(BertConfig.nano(hidden_size=128, ffn_size=512))
    maps = linear_maps(model)
    before = sum(layer.weight.size * 4 + layer.bias.size * 4 for layer in maps.values())
    for name, layer in maps.items():
        replace_layer(model, name, QuantizedLinear.of(layer, "int8"))
    layers = [layer for layer in model.sublayers() if isinstance(layer, QuantizedLinear)]
    assert len(layers) == len(maps)
    after = sum(t.size * t.element_size() for layer in layers for t in layer.parameters())
    assert after <= 0.30 * before


@pytest.mark.slow
@pytest.mark.skipif(not is_cached(MINILM), reason="polyreme models fetch minilm-l6 brings the weights")
def test_real_sentences_stay_as_near_in_int8():
    embedder = TextEmbedder.from_pretrained(cached(MINILM))
    ids = [embedder.encode(sentence) for sentence in SENTENCES]
    whole = embedder.embed(ids)
    model = embedder.model
    for name, layer in linear_maps(model).items():
        replace_layer(model, name, QuantizedLinear.of(layer, "int8"))
    low_bit = TextEmbedder(model, embedder.tokenizer).embed(ids)
    with paddle.no_grad():
        np.testing.assert_allclose(low_bit @ low_bit.T, whole @ whole.T, atol=0.01)
