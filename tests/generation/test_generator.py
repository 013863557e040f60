"""Generation over a cache: what the model itself would write, alone and in a batch; settings; refusals."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from polyreme.core import rng
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, NumericsError
from polyreme.generation import SamplingParams, TextGenerator, blockwise
from polyreme.generation.choosing import READS_LATE
from polyreme.models import AutoModelForCausalLM
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.files.adapters import add_adapters
from polyreme.models.parts.cache import KVCache
from polyreme.nn.layers.lora import LoRA
from polyreme.nn.parameter import Parameter
from tests.compilations import counted_compilations
from tests.models import parity

FOLDERS = parity.FIXTURES / "folders"
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [3]]


def nano(**changes):
    rng.seed(5)
    return Llama(LlamaConfig.nano(**{"vocab_size": 48, "seq_len": 32, **changes}))


@pytest.fixture(scope="module")
def model():
    return nano()


@pytest.fixture(scope="module")
def generator(model):
    return TextGenerator(model)


def likeliest_after(model, prompt, count):
    """What the model's forward over the whole text makes likeliest, a token at a time; and its log-probabilities."""
    ids, logs = list(prompt), []
    with no_grad():
        for _ in range(count):
            padded = np.array([ids + [0] * (16 - len(ids))])  # one shape; causal, so that what follows does not count
            scores = model(to_tensor(padded)).numpy()[0, len(ids) - 1].astype(np.float64)
            logs.append(scores - scores.max() - np.log(np.exp(scores - scores.max()).sum()))
            ids.append(int(scores.argmax()))
    return ids[len(prompt) :], logs


@pytest.mark.slow_cases("mixtral", "llama_llama3")
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", ["llama_llama3", "mistral", "gemma2", "gemma3", "phi3_long", "gpt_neox", "mixtral", "deepseek_v3", "gpt2"]
)
def test_a_cache_gives_the_hidden_states_of_the_whole_text(name):
    """Of rows that begin with 7 tokens, then grow by 6, windows and all."""
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / name)
    ids = np.random.default_rng(0).integers(0, 48, (2, 13))
    with no_grad():
        want = model(to_tensor(ids)).numpy()
        cache = KVCache(model, 2, 16)
        got = []
        for begin, end in ((0, 7), (7, 13)):
            got.append(model.project(model.extend(to_tensor(ids[:, begin:end]), cache)).numpy())
            cache.is_empty = False
    config = model.config
    sizes = {key: getattr(config, key) for key in ("hidden_size", "ffn_size", "num_heads", "num_layers")}
    atol = parity.tolerance(parity.forward_terms(sizes, 13), want)
    np.testing.assert_allclose(np.concatenate(got, 1), want, rtol=0, atol=atol)
    assert cache.lengths.tolist() == [13, 13]
    assert cache.nbytes == 2 * 16 * 4 * config.num_layers * sum(model.cache_dims[1:]) * model.cache_dims[0]


def test_texts_are_the_same_where_tokens_are_read_late(generator, monkeypatch):
    """Texts end at a token, at another's length, and at on_token."""
    settings = [SamplingParams(seed=seed, max_tokens=12, logprobs=1, stop_token_ids=range(8)) for seed in range(3)]
    settings[2] = SamplingParams(temperature=0, max_tokens=5)
    asked = []

    def write():
        asked.append([])
        return generator.generate(PROMPTS, settings, lambda row, token: asked[-1].append((row, token)) or token == 40)

    soon = write()
    monkeypatch.setitem(READS_LATE, "cpu", True)
    assert write() == soon
    assert asked[0] == asked[1]
    assert {text.finish_reason for text in soon} == {"stop", "length"}


@pytest.mark.slow
def test_greedy_texts_of_a_batch_are_those_of_the_model(model, generator):
    settings = [SamplingParams(temperature=0, max_tokens=6, logprobs=3) for _ in PROMPTS]
    for prompt, completion in zip(PROMPTS, generator.generate(PROMPTS, settings), strict=True):
        ids, logs = likeliest_after(model, prompt, 6)
        assert completion.token_ids == ids
        assert completion.finish_reason == "length"
        np.testing.assert_allclose(completion.logprobs, [log.max() for log in logs], rtol=0, atol=1e-5)
        for top, log in zip(completion.top_logprobs, logs, strict=True):
            assert list(top) == np.argsort(-log)[:3].tolist()


@pytest.mark.slow
def test_programs_do_not_grow_with_blocks():
    """A window of the last block alone makes it another kind of block; all others share one."""
    counts = []
    for layers in (2, 3, 5):
        generator = TextGenerator(
            nano(num_layers=layers, hidden_size=40, full_blocks=tuple(range(layers - 1)), sliding_window=4)
        )
        with counted_compilations() as seconds:
            (completion,) = generator.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=4))
        counts.append(len(seconds))
    assert completion.token_ids == likeliest_after(generator.model, PROMPTS[1], 4)[0]
    assert counts[1] == counts[2]  # the first compiled single ops for all


CHANGES = {
    "a hook": lambda model, block: block.ffn.register_forward_post_hook(lambda layer, x, y: 2 * y),
    "a setting in place": lambda model, block: block.attention.score_options.update(scale=1000.0),
    "a parameter": lambda model, block: setattr(
        block.ffn.up, "weight", Parameter(np.flip(block.ffn.up.weight.numpy(), 0))
    ),
    "an adapter": lambda model, block: randomize(
        add_adapters(model, LoRA(2), ["blocks.1.attention.out"])["blocks.1.attention.out"]
    ),
    "the block": lambda model, block: model.blocks.__setitem__(1, model.make_block(model.config, 1)),
}


def randomize(layer):
    for parameter in layer.parameters():
        parameter.set_value(np.random.default_rng(0).standard_normal(parameter.shape, np.float32))


def test_a_block_that_changes_does_so_alone():
    """The blocks shared their programs until then; each change stays for those that follow."""
    model = nano(num_layers=3, hidden_size=16)
    generator = TextGenerator(model)

    def logprobs(count):
        settings = SamplingParams(temperature=0, max_tokens=count, logprobs=0)
        return generator.generate([PROMPTS[1]], settings)[0].logprobs

    before = logprobs(2)
    for name, change in CHANGES.items():
        change(model, model.blocks[1])
        (now,) = logprobs(1)
        assert abs(now - before[0]) > 1e-4, name
        before = [now]
    model.eval()
    want = [log.max() for log in likeliest_after(model, PROMPTS[1], 2)[1]]
    np.testing.assert_allclose(logprobs(2), want, rtol=0, atol=1e-5)


def test_spans_of_blocks_share_programs_as_blocks_do(monkeypatch):
    """Two spans of two blocks are alike, the last block is a span of its own; then the same block comes twice."""
    monkeypatch.setitem(blockwise.SPAN_BLOCKS, "cpu", 2)
    model = nano(num_layers=5, hidden_size=16)
    generator = TextGenerator(model)
    for _ in range(2):
        settings = SamplingParams(temperature=0, max_tokens=3, logprobs=0)
        (completion,) = generator.generate([PROMPTS[1]], settings)
        ids, logs = likeliest_after(model, PROMPTS[1], 3)
        assert completion.token_ids == ids
        np.testing.assert_allclose(completion.logprobs, [log.max() for log in logs], rtol=0, atol=1e-5)
        model.blocks[3] = model.blocks[2]


def test_a_request_draws_the_same_alone_and_beside_others(generator):
    drawn = SamplingParams(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=7, max_tokens=8)
    (alone,) = generator.generate([PROMPTS[0]], drawn)
    others = [SamplingParams(temperature=0, max_tokens=4), SamplingParams(seed=3, max_tokens=8)]
    beside = generator.generate(PROMPTS, [drawn, *others])
    assert beside[0].token_ids == alone.token_ids
    assert len(beside[1].token_ids) == 4
    (other,) = generator.generate([PROMPTS[0]], SamplingParams(temperature=0.9, seed=8, max_tokens=8))
    assert other.token_ids != alone.token_ids


def test_threads_write_one_after_the_other(generator):
    settings = SamplingParams(temperature=0, max_tokens=8)
    alone = [generator.generate([prompt], settings)[0].token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda prompt: generator.generate([prompt], settings)[0].token_ids, PROMPTS * 4)
        assert list(texts) == alone * 4


def test_where_texts_end(model):
    ids, _ = likeliest_after(model, PROMPTS[0], 6)
    generator = TextGenerator(model, end=[ids[2]])
    first = ids.index(ids[2])

    def write(**settings):
        return generator.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=6, **settings))[0]

    assert (write().token_ids, write().finish_reason) == (ids[:first], "stop")
    assert write(ignore_eos=True).token_ids == ids
    assert write(ignore_eos=True, stop_token_ids=[ids[0]]).token_ids == []
    assert len(write(min_tokens=6).token_ids) == 6
    seen = []
    (stopped,) = generator.generate(
        [PROMPTS[0]],
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        lambda row, token: seen.append(token) or len(seen) == 2,
    )
    assert (stopped.token_ids, stopped.finish_reason) == (ids[:2], "stop")


def test_a_text_ends_with_the_models_positions():
    generator = TextGenerator(nano(seq_len=8))
    (completion,) = generator.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=100))
    # the last token needs no place
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
    with pytest.raises(ConfigError, match="prompt 1 has 8 tokens, and the model positions for 8"):
        generator.generate([[1], [1] * 8], SamplingParams())


def test_only_tokens_that_the_tokenizer_knows(model):
    ids, _ = likeliest_after(model, PROMPTS[0], 1)
    (completion,) = TextGenerator(model, num_known=ids[0]).generate([PROMPTS[0]], SamplingParams(max_tokens=8))
    assert max(completion.token_ids) < ids[0]


def test_numbers_that_are_not_finite_are_an_error():
    broken = nano()
    broken.norm.weight.set_value(np.full(32, np.inf, np.float32))
    with pytest.raises(NumericsError, match="logits of row 0 are not finite at token 0"):
        TextGenerator(broken).generate([[1]], SamplingParams())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 is out of range; give a finite number of at least 0"),
        ({"top_p": 0.0}, "top_p=0.0 is out of range"),
        ({"logit_bias": {"7": 1}}, "logit_bias={'7': 1} is out of range; give finite numbers by token ids"),
        ({"bad_words": [5]}, r"bad_words=\(5,\) is out of range; give strings"),
        ({"bad_words": "God"}, "bad_words='God' is one text; give a list of them"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"min_tokens": 17}, "min_tokens=17 .* give 0 to max_tokens"),
        ({"n": 0}, "n=0"),
        ({"stop": ["a", ""]}, "strings that are not empty"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**settings)


def test_prompts_that_cannot_be_written_after_are_refused(generator, model):
    with pytest.raises(ConfigError, match="prompt 0 has no tokens"):
        generator.generate([[]], SamplingParams())
    with pytest.raises(ConfigError, match="generate: request 1: the prompt: token -1 is not of the vocabulary"):
        generator.generate([[1], [-1]], SamplingParams())
    with pytest.raises(ConfigError, match="request 0: logit_bias: token 99999 is not of the vocabulary"):
        generator.generate([[1]], SamplingParams(logit_bias={99999: 1.0}))
    with pytest.raises(ConfigError, match="1 prompts and settings for 2"):
        generator.generate([[1]], [SamplingParams()] * 2)
    with pytest.raises(ConfigError, match="1 to 32 places, as the model has positions"):
        KVCache(model, 1, 33)
