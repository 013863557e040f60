"""Continuous batching: the same bits in any company, no block lost, requests that come, go and are refused."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from polyreme.core import rng
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation import SamplingParams, Speculation, TextEngine, TextGenerator
from polyreme.generation.block_pool import BlockPool, block_keys
from polyreme.generation.choosing import READS_LATE
from polyreme.mesh import Plan
from polyreme.models import AutoModelForCausalLM
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.files import adapters
from polyreme.nn.layers.lora import LoRA
from polyreme.ops.attention.caches import attend_blocks
from tests.models.parity import FIXTURES

END = (11, 30)
SHARED = [7, 3, 9, 1, 5, 5, 2, 8, 40, 41, 12, 13, 14, 15, 16, 17]
"""Two chunks, with which several prompts begin."""
REQUESTS = [
    ([*SHARED, 4], SamplingParams(temperature=0, max_tokens=9, logprobs=0)),
    ([*SHARED, 6, 20, 21], SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=3, stop_token_ids=[2])),
    (SHARED, SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=1, max_tokens=5, logprobs=1)),
    ([*SHARED[:8], 33], SamplingParams(temperature=1.0, min_p=0.05, seed=5, max_tokens=14, logprobs=0, min_tokens=4)),
    ([9], SamplingParams(temperature=0, repetition_penalty=1.4, max_tokens=20, logprobs=2, ignore_eos=True)),
    ([22, 9], SamplingParams(repetition_penalty=0.8, presence_penalty=0.7, seed=9, max_tokens=7, logprobs=0)),
    (list(range(30)), SamplingParams(temperature=0, max_tokens=100, logprobs=0, ignore_eos=True)),
    ([8, 8, 8], SamplingParams(temperature=0, max_tokens=1)),
]
SIZES = {"max_num_seqs": 3, "block_size": 4, "prefill_chunk": 8}


def nano():
    rng.seed(5)
    return Llama(LlamaConfig.nano(vocab_size=48, seq_len=48))


@pytest.fixture(scope="module", autouse=True)
def _reads_late():
    """As on an accelerator; with grammars and drafts, and in tests of other modules, tokens are read at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(READS_LATE, "cpu", True)
        yield


@pytest.fixture(scope="module")
def model():
    return nano()


@pytest.fixture(scope="module")
def engine(model):
    """It has not blocks for all its rows."""
    return TextEngine(model, END, num_blocks=16, **SIZES)


@pytest.fixture
def _one_device_afterwards():
    yield
    clear_plan()


class Texts(dict):
    """What each request was given so far: ids, log-probabilities, likeliest ones, how it ended."""

    def collect(self, outputs):
        for output in outputs:
            ids, logs, tops, _ = self.get(output.request_id, ([], [], [], None))
            self[output.request_id] = (
                ids + output.token_ids,
                logs + output.logprobs,
                tops + output.top_logprobs,
                output.finish_reason,
            )

    def finish(self, engine):
        while engine.has_unfinished:
            self.collect(engine.step())
        return self


def write(engine, *requests):
    """Texts of requests that come together, by their numbers."""
    for number, request in enumerate(requests):
        engine.add(str(number), *request)
    texts = Texts().finish(engine)
    return [texts[str(number)] for number in range(len(requests))]


@pytest.fixture(scope="module")
def alone(model):
    """Each request by itself, nothing known."""
    engine = TextEngine(model, END, enable_prefix_caching=False, **SIZES)
    return [write(engine, request)[0] for request in REQUESTS]


@pytest.mark.slow
def test_requests_get_what_a_generator_writes(model, alone):
    generator = TextGenerator(model, END)
    for (prompt, params), (ids, logs, tops, reason) in zip(REQUESTS, alone, strict=True):
        (want,) = generator.generate([prompt], params)
        assert (ids, reason) == (want.token_ids, want.finish_reason)
        np.testing.assert_allclose(logs, want.logprobs, rtol=0, atol=1e-5)
        assert [list(top) for top in tops] == [list(top) for top in want.top_logprobs]
    assert {reason for *_, reason in alone} == {"stop", "length"}


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(REQUESTS) - 1)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 12)),
    ),
    max_size=24,
)


@settings(max_examples=30)
@given(EVENTS)
def test_any_company_leaves_the_bits_of_a_request_and_no_block_in_use(engine, alone, events):
    """Also after prefixes that were known, blocks that were taken away, and neighbours that left."""
    texts, added, aborted = Texts(), [], set()
    for what, number in events:
        if what == "add":
            engine.add(str(len(added)), *REQUESTS[number])
            added.append(number)
        elif what == "abort":
            engine.abort(str(number))
            aborted.add(str(number))
        else:
            for _ in range(number):
                texts.collect(engine.step())
    texts.finish(engine)
    for name, number in ((str(place), number) for place, number in enumerate(added)):
        if name in texts and texts[name][-1] is not None:
            assert texts[name] == alone[number]
        else:
            assert name in aborted
    counts = engine.statistics
    assert (counts.num_blocks_used, counts.num_running, counts.num_waiting) == (0, 0, 0)


def test_requests_give_way_when_blocks_run_out(engine, alone):
    before = engine.statistics
    assert write(engine, *REQUESTS) == alone
    after = engine.statistics
    assert after.num_preemptions > before.num_preemptions
    assert after.generated_tokens - before.generated_tokens == sum(len(text[0]) for text in alone)
    assert sum(after.finished.values()) - sum(before.finished.values()) == len(REQUESTS)


@pytest.mark.slow
def test_two_thousand_requests_come_and_go(model):
    """Of random lengths and settings, with refusals and aborts; each gets what it gets alone, and memory is flat."""
    rows = np.random.default_rng(0)
    requests = [
        (
            [*SHARED[: rows.integers(0, 17)], *rows.integers(0, 48, rows.integers(1, 24)).tolist()],
            SamplingParams(
                temperature=rows.choice([0.0, 0.9]), seed=number, max_tokens=int(rows.integers(1, 24)), logprobs=0
            ),
        )
        for number in range(60)
    ]
    alone_engine = TextEngine(model, END, enable_prefix_caching=False, **SIZES)
    expected = [write(alone_engine, request)[0] for request in requests]
    engine = TextEngine(model, END, num_blocks=24, **SIZES)
    texts, numbers, arrays = Texts(), {}, []
    while len(numbers) < 2000 or engine.has_unfinished:
        for _ in range(rows.poisson(0.25) if len(numbers) < 2000 else 0):
            numbers[str(len(numbers))] = number = int(rows.integers(60))
            engine.add(str(len(numbers) - 1), *requests[number])
        if rows.random() < 0.02 and numbers:
            engine.abort(str(rows.integers(len(numbers))))
        if rows.random() < 0.02:
            with pytest.raises(ConfigError):
                engine.add("bad", [99], SamplingParams())
        texts.collect(engine.step())
        if len(numbers) % 500 == 250:
            arrays.append(len(jax.live_arrays()))
    counts = engine.statistics
    ended = [name for name, text in texts.items() if text[-1] is not None]
    assert len(ended) + counts.finished["abort"] == len(numbers)
    assert all(texts[name] == expected[numbers[name]] for name in ended)
    assert (counts.num_blocks_used, counts.num_running, counts.num_waiting) == (0, 0, 0)
    assert counts.num_preemptions > 20
    assert counts.prefix_tokens_hit > 1000
    assert max(arrays) - min(arrays) < 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "mistral", "deepseek_v3", "qwen3_moe")]
    + ["mixtral"],
)
def test_families_write_the_same_in_company(name):
    """Learned positions, windows, keys wider than values, experts whose rows are sorted among all rows."""
    model, rows = AutoModelForCausalLM.from_pretrained(FIXTURES / "folders" / name), np.random.default_rng(1)
    vocab = model.config.vocab_size
    requests = [
        (rows.integers(0, vocab, length).tolist(), SamplingParams(temperature=0, max_tokens=6, logprobs=0))
        for length in (5, 13, 1, 9)
    ]
    engine, generator = TextEngine(model, **SIZES), TextGenerator(model)
    together = write(engine, *requests)
    assert together == [write(engine, request)[0] for request in requests]
    wanted = generator.generate([prompt for prompt, _ in requests], requests[0][1])
    assert [text[0] for text in together] == [completion.token_ids for completion in wanted]


class Spelling:
    """A grammar of texts whose tokens go up by one or two, as TokenGrammar."""

    group_start = None

    def __init__(self, last=5):
        self.last = last

    is_done = property(lambda self: self.last > 40)

    def allowed(self):
        return np.isin(np.arange(48), [self.last + 1, self.last + 2])

    def take(self, token):
        assert self.allowed()[token]
        self.last = token

    def copy(self):
        return Spelling(self.last)


@pytest.mark.slow_cases("ngram")
@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_drafts_leave_the_bits_of_a_request(model, alone, kind):
    """Of every kind of settings, in any company, with a grammar, and after a preemption."""
    draft = model if kind == "model" else "ngram"
    engine = TextEngine(model, END, num_blocks=16, speculation=Speculation(draft, 3, max_loss=np.inf), **SIZES)
    assert [write(engine, request)[0] for request in REQUESTS] == alone
    counts = engine.statistics
    assert 0 < counts.accepted_tokens < counts.draft_tokens
    assert counts.generated_tokens == sum(len(text[0]) for text in alone)
    if kind == "model":  # the same model drafts what it would write
        assert counts.accepted_tokens > counts.draft_tokens // 2
    assert write(engine, *REQUESTS) == alone
    assert engine.statistics.num_preemptions > 0
    spelled = []
    for drafter in (None, engine.drafter):
        engine.drafter = drafter
        engine.add("spelled", [1, 2, 3, 4, 5], REQUESTS[1][1], grammar=Spelling())
        spelled.append(Texts().finish(engine))
    assert spelled[0] == spelled[1]
    assert engine.statistics.num_blocks_used == 0


def test_known_chunks_are_not_computed_again(engine, alone):
    for start in range(0, 48, 6):  # all blocks have other tokens
        write(engine, ([start] * 47, SamplingParams(max_tokens=1)))
    before, cached = engine.statistics, []
    for number in (0, 0, 1, 3, 2):
        engine.add("a", *REQUESTS[number])
        texts, outputs = Texts(), []
        while engine.has_unfinished:
            outputs += engine.step()
        texts.collect(outputs)
        assert texts["a"] == alone[number]
        cached.append({output.num_cached for output in outputs})
    # the last token of a prompt is computed, and with it its chunk
    assert cached == [{0}, {16}, {16}, {8}, {8}]
    after = engine.statistics
    assert after.prefix_tokens_hit - before.prefix_tokens_hit == 48
    assert after.prefix_tokens_queried - before.prefix_tokens_queried == 17 + 17 + 19 + 9 + 16


def test_requests_with_one_prompt_take_it_in_once(model):
    """Whether they have rows at first or wait for them; each gets the bits that it gets alone."""
    prompt = [*SHARED, 4, 20, 21]  # its last block is not full
    requests = [(prompt, SamplingParams(seed=seed, max_tokens=3 + seed, logprobs=0)) for seed in range(7)]
    engine = TextEngine(model, END, enable_prefix_caching=False, **SIZES)
    engine.add("leaves", *requests[0])
    together = write(engine, *requests[1:])
    counts = engine.statistics
    assert counts.prefix_tokens_hit == counts.prefix_tokens_queried == 6 * len(prompt)
    assert counts.num_blocks_used == 0
    assert together == [write(engine, request)[0] for request in requests[1:]]
    assert engine.statistics.prefix_tokens_hit == counts.prefix_tokens_hit


def test_an_aborted_request_frees_its_row_and_blocks_at_once(engine):
    for name in "abcd":
        engine.add(name, *REQUESTS[6])
    engine.step()
    assert (engine.statistics.num_running, engine.statistics.num_waiting) == (3, 1)
    for name in "abcd":
        engine.abort(name)
    assert (engine.statistics.num_blocks_used, engine.has_unfinished, engine.step()) == (0, False, [])
    assert engine.statistics.finished["abort"] >= 4
    engine.abort("nobody")


def test_numbers_that_are_not_finite_end_their_request():
    broken = Llama(LlamaConfig.nano(vocab_size=48, seq_len=48))
    broken.norm.weight.set_value(np.full(32, np.inf, np.float32))
    ((ids, *_, reason),) = write(TextEngine(broken, **SIZES), REQUESTS[0])
    assert (ids, reason) == ([], "error")


def test_what_others_left_in_a_block_is_not_read():
    rows = np.random.default_rng(0)
    keys, values = rows.standard_normal((2, 3, 1, 4, 2)).astype(np.float32)
    query, table = rows.standard_normal((1, 1, 2, 2)).astype(np.float32), np.array([[2, 1, -1]], np.int32)

    def attend():
        return attend_blocks(*map(to_tensor, (query, keys, values, table, np.array([5], np.int32)))).numpy()

    clean = attend()
    for cache in (keys, values):
        cache[0], cache[1, :, 2:] = np.nan, np.inf
    np.testing.assert_array_equal(attend(), clean)


def test_prompts_are_scored_as_the_model_scores_them(model, engine, alone):
    """Known or not, with enough blocks or not; and what is written after them is what would be."""
    prompt, params = REQUESTS[1]
    with no_grad():
        scores = model(to_tensor([prompt])).numpy()[0, :-1].astype(np.float64)
    logs = log_softmax(scores, -1)
    for beside in ((), REQUESTS):
        for number, request in enumerate(beside):
            engine.add(str(number), *request)
        engine.add("scored", prompt, params, prompt_logprobs=2)
        outputs = []
        while engine.has_unfinished:
            outputs += [output for output in engine.step() if output.request_id == "scored"]
        np.testing.assert_allclose(outputs[0].prompt_logprobs, logs[range(len(logs)), prompt[1:]], rtol=0, atol=1e-5)
        assert [list(top) for top in outputs[0].prompt_top_logprobs] == np.argsort(-logs, -1)[:, :2].tolist()
        assert not any(output.prompt_logprobs for output in outputs[1:])
        texts = Texts()
        texts.collect(outputs)
        assert texts["scored"] == alone[1]


@pytest.mark.slow
@pytest.mark.usefixtures("_one_device_afterwards")
def test_a_plan_that_splits_heads_writes_the_same(alone):
    split = nano()
    apply_plan(Plan.from_degrees(mp=2, dp=4), split)
    engine = TextEngine(split, END, **SIZES)
    texts = write(engine, *REQUESTS[:2])
    assert [text[0] for text in texts] == [text[0] for text in alone[:2]]
    keys = engine.cache.layers[0][0]._array
    assert keys.addressable_shards[0].data.shape[1] == keys.shape[1] // 2


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["take", "name", "share", "give"]), st.integers(0, 5)), max_size=40))
def test_a_pool_counts_its_blocks(actions):
    """What users hold and what is available are all blocks; a shared block holds what its key says."""
    pool, users, contents = BlockPool(4), [], {}
    for what, number in actions:
        if what == "take" and pool.num_available:
            block = pool.take()
            assert all(block not in blocks for blocks in users)
            contents.pop(block, None)
            users.append([block])
        elif what == "name" and users:
            block = users[number % len(users)][0]
            if block not in contents and number not in contents.values():
                contents[block] = number
                pool.name(block, bytes([number]))
        elif what == "share":
            blocks = pool.share([bytes([number])])
            assert (blocks is None) == (number not in contents.values())
            if blocks is not None:
                assert contents[blocks[0]] == number
                users.append(blocks)
        elif what == "give" and users:
            pool.give_back(users.pop(number % len(users)))
        assert pool.num_used == len({block for blocks in users for block in blocks})


def test_the_block_that_was_used_longest_ago_goes_first():
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for block, key in zip(blocks, b"abc", strict=True):
        pool.name(block, bytes([key]))
    pool.give_back(blocks)
    assert pool.share([b"c"]) == blocks[2:]  # the tail would have gone first
    pool.give_back(blocks[2:])
    assert [pool.take(), pool.take()] == blocks[1::-1]
    assert pool.share([b"a"]) is None
    assert pool.share([b"c"]) == blocks[2:]


def test_keys_depend_on_all_tokens_before():
    assert block_keys([1, 2, 3, 4], 2)[1] != block_keys([5, 2, 3, 4], 2)[1]
    assert block_keys([1, 2, 3, 4], 2)[:1] == block_keys([1, 2, 9], 2)


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "request 'a': the prompt has no tokens"),
        ([1, 48], {}, "token 48 is not of the vocabulary, 0 to 47"),
        ([1, -1], {}, "the prompt: token -1 is not of the vocabulary"),
        ([1], {"logit_bias": {48: 1.0}}, "logit_bias: token 48 is not of the vocabulary"),
        ([1, 2.5], {}, "the prompt is no list of token ids: 'float'"),
        (["a"], {}, "the prompt is no list of token ids: 'str'"),
        ([1] * 48, {}, "the prompt has 48 tokens, and there are places for 48, the text included"),
        ([1] * 40, {"max_tokens": 9}, "40 tokens and 9 new ones need 12 blocks of 4, and there are 11"),
    ],
)
def test_prompts_that_cannot_be_written_after_are_refused(model, prompt, changes, message):
    engine = TextEngine(model, num_blocks=11, **SIZES)
    with pytest.raises(ConfigError, match=message):
        engine.add("a", prompt, SamplingParams(**changes))
    with pytest.raises(ConfigError, match="request 'a': prompt_logprobs=-1; give at least 0"):
        engine.add("a", [1], SamplingParams(), prompt_logprobs=-1)
    assert not engine.has_unfinished


def test_a_step_beside_another_is_refused(engine, monkeypatch):
    monkeypatch.setattr(engine, "_admit", lambda: ThreadPoolExecutor(1).submit(engine.step).result())
    with pytest.raises(ConfigError, match="another thread is taking a step of this engine"):
        engine.step()
    monkeypatch.undo()
    assert engine.step() == []


def test_an_id_is_of_one_request(engine):
    engine.add("a", [1], SamplingParams())
    with pytest.raises(ConfigError, match="request 'a' is on its way already"):
        engine.add("a", [1], SamplingParams())
    engine.abort("a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 49}, "max_model_len=49; the model has positions for 2 to 48"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"prefill_chunk": 10}, "prefill_chunk=10; give at least 1 of each, and whole blocks to a chunk"),
        ({"num_blocks": 0}, "num_blocks=0; give at least 1, 12 for the longest text"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        TextEngine(model, **{**SIZES, **changes})


@pytest.mark.slow
def test_a_cache_of_8_bits_leaves_the_bits_alone_and_is_near(model, alone):
    """Alone and in company, after known prefixes and preemptions; log-probabilities move by what 8 bits lose."""
    engine = TextEngine(model, END, num_blocks=16, kv_cache_dtype="int8", **SIZES)
    together = write(engine, *REQUESTS)
    assert engine.statistics.num_preemptions > 0
    plain = TextEngine(model, END, num_blocks=16, **SIZES)
    width = model.config.hidden_size // model.config.num_heads
    assert engine.cache.nbytes / plain.cache.nbytes == (width + 4) / (4 * width)
    for request, text, want in zip(REQUESTS, together, alone, strict=True):
        engine.forget_prefixes()
        assert write(engine, request) == [text]
        # of the first token, before choices can part: half a step of 127 in 2 blocks, far below what logits differ by
        assert abs(text[1][0] - want[1][0]) < 0.01 if want[1] else True
    assert [text[1] for text in together] != [text[1] for text in alone]
    with pytest.raises(ConfigError, match="a cache of keys and values in int32; give int8 or a floating dtype"):
        TextEngine(model, kv_cache_dtype="int32", **SIZES)


def adapted(kind, folder, name="gpt2"):
    """The folder of an adapter of a published model, and the model merged with it."""
    rng.seed(len(kind))
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "folders" / name)
    targets = ["c_attn", "mlp.c_fc"] if kind == "lora" else "all"
    adapters.add_adapters(model, LoRA(rank=2 if kind == "lora" else 3, use_dora=kind == "dora"), targets)
    values = np.random.default_rng(len(kind))
    for p in model.parameters():
        if p.trainable:
            p.set_value(p.numpy() + 0.2 * values.standard_normal(p.shape).astype(np.float32))
    adapters.write_adapter(model, folder)
    adapters.merge_adapters(model)
    return model


def test_adapters_share_the_steps_of_an_engine(tmp_path):
    """Each request writes what its merged model writes, the same bits alone and in company, after prefixes that others
    wrote and with drafts; without an adapter the bits of the model. The maps have biases, one adapter is DoRA."""
    kinds = {"lora": tmp_path / "lora", "dora": tmp_path / "dora"}
    merged = {kind: adapted(kind, folder) for kind, folder in kinds.items()}
    merged[None] = AutoModelForCausalLM.from_pretrained(FIXTURES / "folders" / "gpt2")
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "folders" / "gpt2")
    rows = adapters.place_adapters(model, {kind: adapters.open_adapter(folder) for kind, folder in kinds.items()})
    prompts = [SHARED, [*SHARED[:9], 33], [9] * 5]
    requests = [
        (prompt, SamplingParams(temperature=number % 2, seed=number, max_tokens=6, logprobs=1), None, None, kind)
        for kind in merged
        for number, prompt in enumerate(prompts)
    ]
    engine = TextEngine(model, speculation=Speculation(max_loss=np.inf), adapters=rows, **SIZES)
    together = write(engine, *requests)
    assert engine.statistics.prefix_tokens_hit > 0
    plain = TextEngine(merged[None], enable_prefix_caching=False, **SIZES)
    generators = {kind: TextGenerator(whole) for kind, whole in merged.items()}
    for (prompt, params, _, _, kind), text in zip(requests, together, strict=True):
        engine.forget_prefixes()
        assert write(engine, (prompt, params, None, None, kind)) == [text]
        if kind is None:
            assert write(plain, (prompt, params)) == [text]
        (want,) = generators[kind].generate([prompt], params)
        assert text[0] == want.token_ids
        # float32 sums of at most 4 width terms in 3 blocks, merged and beside
        np.testing.assert_allclose(text[1], want.logprobs, rtol=0, atol=1e-4)
    assert len({tuple(text[0]) for text in together}) > len(prompts)
    assert engine.statistics.accepted_tokens > 0
    with pytest.raises(ConfigError, match=r"no adapter 'lara'; did you mean 'lora'\?"):
        engine.add("x", [1], SamplingParams(), adapter="lara")
