"""Documents that share a row: losses, logits and gradients are those of each document alone."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.data.packing import NO_LABEL, PackedDataset
from polyreme.data.token_pair import PairWriter, TokenPair
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.encoders.bert import BertConfig, BertForPretraining
from polyreme.models.experts.deepseek_v3 import DeepseekV3, DeepseekV3Config
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.models.parts.decoder import Documents

SEQ = 24
MODELS = {
    "gpt": lambda **more: GPT(GPTConfig.nano(seq_len=SEQ, num_layers=1, **more)),
    "llama": lambda **more: Llama(LlamaConfig.nano(seq_len=SEQ, num_layers=1, **more)),
    "windows": lambda **more: Llama(LlamaConfig.nano(seq_len=SEQ, num_layers=1, sliding_window=5, **more)),
    "mixtral": lambda **more: Mixtral(MixtralConfig.nano(seq_len=SEQ, num_layers=1, **more)),
}
# float32 sums of at most 2 * 4 * 32 + SEQ terms in another order, and of 32 for the logits; values are of order 1
LOGITS = (9 * 32 + SEQ) * np.finfo(np.float32).eps
# of a mean of up to 4 * SEQ such losses, with what follows them in the backward
GRADIENT = 8 * LOGITS


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """(inputs [rows, 3, SEQ], labels [rows, SEQ], the documents) of documents of 3 to 14 tokens."""
    prefix = tmp_path_factory.mktemp("pair") / "p"
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 128, size) for size in (3, 8, 8, 3, 14, 8, 14, 3)]  # of few shapes, to compile few
    with PairWriter(prefix, "uint16") as writer:
        for document in documents:
            writer.add(document)
    data = PackedDataset(TokenPair(prefix), 0, len(documents), SEQ)
    inputs, labels = (np.stack(column) for column in zip(*(data[i] for i in range(len(data))), strict=True))
    return inputs, labels, documents


def model_of(name, **more):
    paddle.seed(0)
    return MODELS[name](**more)


def packed_of(inputs):
    return to_tensor(inputs[:, 0]), Documents(to_tensor(inputs[:, 1]), to_tensor(inputs[:, 2]))


def gradients(model):
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.one_in(2)
@pytest.mark.slow_cases("windows", "mixtral")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_each_document_alone(name, rows):
    inputs, _, documents = rows
    model = model_of(name)
    model.eval()
    tokens, bounds = packed_of(inputs)
    packed = model(tokens, documents=bounds).numpy()
    alone = {document[:-1].tobytes(): model(to_tensor(document[None, :-1])).numpy()[0] for document in documents}
    seen = 0
    for row, (ids, ends, places) in enumerate(inputs):
        for begin in np.flatnonzero((places == 0) & (ends > np.arange(SEQ) + 1)):
            stop = ends[begin]
            expected = alone[ids[begin:stop].astype(np.int64).tobytes()]
            np.testing.assert_allclose(packed[row, begin:stop], expected, rtol=0, atol=LOGITS)
            seen += 1
    assert seen == len(documents)
    assert model.documents is None


@pytest.mark.slow
@pytest.mark.slow_cases("gpt-", "llama-core_attn")
@pytest.mark.parametrize(("name", "recompute"), [("gpt", ""), ("gpt", "full"), ("llama", "core_attn")])
def test_loss_and_gradients_are_those_of_documents_apart(name, recompute, rows):
    inputs, labels, documents = rows
    total = sum(len(document) - 1 for document in documents)
    apart = model_of(name)
    loss = sum(
        apart(to_tensor(document[None, :-1]), to_tensor(document[None, 1:])) * ((len(document) - 1) / total)
        for document in documents
    )
    loss.backward()
    model = model_of(name, recompute=recompute)
    tokens, bounds = packed_of(inputs)
    packed = model(tokens, to_tensor(labels), bounds)
    packed.backward()
    assert (labels != NO_LABEL).sum() == total
    assert abs(float(packed) - float(loss)) <= LOGITS
    expected = gradients(apart)
    for parameter, grad in gradients(model).items():
        np.testing.assert_allclose(grad, expected[parameter], rtol=0, atol=GRADIENT, err_msg=parameter)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [{"dp": 2, "mp": 4}, {"dp": 2, "sep": 4}, {"sep": 4, "dp": 2, "sep_attention": "ring", "sep_order": "zigzag"}],
)
@pytest.mark.slow_cases("degrees0", "degrees2")
def test_a_plan_changes_nothing(degrees, rows):
    inputs, labels, _ = rows
    expected = float(model_of("gpt")(packed_of(inputs)[0], to_tensor(labels), packed_of(inputs)[1]))
    model = model_of("gpt")
    try:
        apply_plan(Plan.from_degrees(**degrees), model)
        tokens, bounds = packed_of(inputs)
        assert abs(float(model(tokens, to_tensor(labels), bounds)) - expected) <= LOGITS
    finally:
        clear_plan()


def test_a_family_that_takes_one_document_a_row_says_so(rows):
    tokens, bounds = packed_of(rows[0])
    with pytest.raises(ConfigError, match="deepseek_v3 takes one document a row; leave documents out"):
        DeepseekV3(DeepseekV3Config.nano(seq_len=SEQ))(tokens, documents=bounds)


def test_masked_words_of_packed_rows_are_those_of_each_document_alone(rows):
    inputs, _, documents = rows
    paddle.seed(0)
    model = BertForPretraining(BertConfig.nano(seq_len=SEQ, num_layers=1))
    model.eval()
    places = np.where(inputs[:, 1] - inputs[:, 2] - np.arange(SEQ) > 0, np.arange(SEQ), SEQ)  # ends past their place
    asked = np.sort(places, 1)[:, ::3]
    ids = np.where(asked < SEQ, 7, -100)
    asked = np.where(asked < SEQ, asked, -100)
    loss = float(model(to_tensor(inputs), to_tensor(np.stack([asked, ids], 1))))
    losses = []
    for row, (tokens, ends, within) in enumerate(inputs):
        for place in asked[row][asked[row] >= 0]:
            begin = place - within[place]
            logits = model(to_tensor(tokens[None, begin : ends[place]])).numpy()[0, within[place]].astype(np.float64)
            losses.append(np.log(np.exp(logits).sum()) - logits[7])
    assert len(losses) > len(documents)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=0, atol=LOGITS)
