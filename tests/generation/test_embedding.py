"""Vectors of texts: by NumPy over the encoder's outputs, alone and beside others, and of real weights."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from polyreme.core import rng
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation import TextTokenizer
from polyreme.generation.embedding import TextEmbedder
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.encoders.bert import Bert, BertConfig
from polyreme.models.encoders.modernbert import ModernBert, ModernBertConfig
from polyreme.models.encoders.mpnet import MPNet, MPNetConfig
from polyreme.models.files.packages import MINILM, cached, is_cached

TEXTS = [[1, 4, 2], [1, 5, 6, 7, 2], [1, *range(4, 10), 2], [1, 2], [1, 6, 2]]


def words():
    """A tokenizer of words, cut and padded by its file, as that of MiniLM is."""
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(40))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.enable_padding(length=24)
    tokenizer.enable_truncation(6)
    return TextTokenizer(tokenizer)


@pytest.fixture(scope="module")
def bert():
    rng.seed(0)
    return Bert(BertConfig.nano(vocab_size=64, seq_len=16))


def reference(bert, ids, pooling, normalize):
    hidden = bert.encode(to_tensor([ids])).numpy()[0].astype(np.float64)
    vector = hidden[0] if pooling == "cls" else hidden.mean(0)
    return vector / np.linalg.norm(vector) if normalize else vector


@pytest.mark.slow_cases("mean-True")
@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False)])
def test_a_vector_is_of_its_own_text(bert, pooling, normalize):
    embedder = TextEmbedder(bert, words(), pooling=pooling, normalize=normalize)
    vectors = embedder.embed(TEXTS)
    assert vectors.shape == (len(TEXTS), embedder.width)
    assert vectors.dtype == np.float32
    for ids, vector in zip(TEXTS, vectors, strict=True):
        # sums of up to hidden_size terms, in two layers, each a few times
        bound = 64 * bert.config.hidden_size * np.finfo(np.float32).eps
        np.testing.assert_allclose(vector, reference(bert, ids, pooling, normalize), atol=bound)
    # the same bits alone
    np.testing.assert_array_equal(embedder.embed([TEXTS[1]])[0], vectors[1])


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(MPNet, MPNetConfig.nano(vocab_size=64)), (ModernBert, ModernBertConfig.nano(vocab_size=64, window=2))],
    ids=["mpnet", "modernbert"],
)
def test_kin_of_a_bert_make_vectors(model_class, config):
    """Whose scores have a bias of distances, and whose places are counted behind the padding's id; and one whose
    padding lies out of sight of the text."""
    rng.seed(1)
    model = model_class(config)
    vectors = TextEmbedder(model, words()).embed(TEXTS)
    bound = 64 * model.config.hidden_size * np.finfo(np.float32).eps
    for ids, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(vector, reference(model, ids, "mean", True), atol=bound)


def test_a_folder_says_how(bert, tmp_path):
    bert.save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    plain = TextEmbedder.from_pretrained(tmp_path)
    assert (plain.pooling, plain.normalize, plain.max_tokens) == ("mean", True, 16)
    # nothing is cut or padded
    assert plain.encode("w1 w2 w3 w4 w5 w6 w7") == [1, *range(5, 12), 2]
    modules = [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    told = TextEmbedder.from_pretrained(tmp_path)
    assert (told.pooling, told.normalize, told.max_tokens) == ("cls", False, 8)
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match="pooling_mode_max_tokens"):
        TextEmbedder.from_pretrained(tmp_path)
    pooling.unlink()
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "x.Dense"}]))
    with pytest.raises(ConfigError, match="'Dense', which is not done"):
        TextEmbedder.from_pretrained(tmp_path)


def test_what_cannot_be_embedded_is_refused(bert):
    with pytest.raises(ConfigError, match="Llama is no BERT"):
        TextEmbedder(Llama(LlamaConfig.nano()), words())
    with pytest.raises(ConfigError, match="give 'mean' or 'cls'"):
        TextEmbedder(bert, words(), pooling="max")
    embedder = TextEmbedder(bert, words(), max_tokens=4)
    for text in ([], [1] * 5):
        with pytest.raises(ConfigError, match=f"text 1 has {len(text)} tokens; give 1 to 4"):
            embedder.embed([[1], text])


@pytest.mark.slow
@pytest.mark.skipif(not is_cached(MINILM), reason="polyreme models fetch minilm-l6 brings the weights")
def test_real_sentences_are_as_near_as_transformers_says():
    embedder = TextEmbedder.from_pretrained(cached(MINILM))
    sentences = ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    vectors = embedder.embed([embedder.encode(sentence) for sentence in sentences])
    np.testing.assert_allclose(vectors @ vectors[0], [1, 0.6946, 0.9429, 0.2569], atol=1e-4)
    np.testing.assert_allclose(vectors[0, :5], [-0.0339, 0.0919, 0.0487, -0.0349, -0.0648], atol=1e-4)
