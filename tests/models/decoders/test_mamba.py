"""Mamba and Mamba-2: texts by states of a fixed size, alone, in a batch, in an engine; what states do not allow."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation import SamplingParams, Speculation, TextEngine, TextGenerator
from polyreme.generation.company import check_company
from polyreme.models import AutoModelForCausalLM, Llama, LlamaConfig, Mamba2Config, MambaConfig
from polyreme.models.decoders.mamba import Mamba
from polyreme.models.parts.cache import KVCache
from tests.models.parity import FIXTURES

# transformers 5.24.0, greedily and without its cache
WRITTEN = {
    "mamba": [
        [42, 20, 25, 27, 32, 14, 35, 35],
        [26, 35, 30, 30, 30, 30, 30, 30],
        [46, 41, 20, 15, 15, 14, 27, 37],
    ],
    "mamba2": [
        [27, 3, 22, 43, 38, 4, 47, 4],
        [17, 14, 11, 4, 22, 14, 4, 34],
        [3, 19, 4, 43, 13, 37, 25, 12],
    ],
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0)


def model_and_prompts(name):
    ids = load_file(FIXTURES / "folders" / name / "recorded.safetensors")["ids"]
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "folders" / name)
    return model, [ids[0].tolist(), ids[1, :6].tolist(), ids[1, :2].tolist()]


def written(engine, prompts):
    """Tokens and log-probabilities of prompts that an engine is given at once."""
    texts = [([], []) for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, GREEDY)
    while engine.has_unfinished:
        for output in engine.step():
            for whole, new in zip(texts[int(output.request_id)], (output.token_ids, output.logprobs), strict=True):
                whole.extend(new)
    return texts


@pytest.mark.parametrize("name", WRITTEN)
def test_texts_are_those_of_transformers_in_any_company(name):
    """Prompts of several lengths beside each other; in an engine the same bits alone and after a preemption."""
    model, prompts = model_and_prompts(name)
    texts = TextGenerator(model).generate(prompts, GREEDY)
    assert [text.token_ids for text in texts] == WRITTEN[name]
    engine = TextEngine(model, block_size=2, prefill_chunk=4, max_num_seqs=2, max_model_len=24, num_blocks=12)
    alone = [written(engine, [prompt])[0] for prompt in prompts]
    assert [tokens for tokens, _ in alone] == WRITTEN[name]
    assert written(engine, prompts[:1] * 2) == alone[:1] * 2  # of which neither goes on from what the other has read
    assert engine.statistics.num_preemptions > 0
    assert written(engine, prompts[::-1]) == alone[::-1]
    assert engine.statistics.prefix_tokens_hit == 0


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_of_16_bits_and_a_stream_of_32(name):
    """As near to float32 as transformers comes; a stream of 16 bits, if config.json wants it, loses what is small."""
    recorded = load_file(FIXTURES / "folders" / name / "recorded.safetensors")
    ids, exact = to_tensor(recorded["ids"]), recorded["logits"]
    added = []
    for is_wide in (True, False):
        model = AutoModelForCausalLM.from_pretrained(
            FIXTURES / "folders" / name, dtype="bfloat16", residual_in_fp32=is_wide
        )
        logits = model(ids)
        assert logits.dtype.name == "bfloat16"
        off, theirs = (
            np.abs(a - exact).mean() for a in (logits.astype("float32").numpy(), recorded["bfloat16_logits"])
        )
        assert off < 1.2 * theirs
        stream = model.embed(ids) * 2**14
        added.append((model.run_block(model.blocks[0], stream).astype("float32") - stream.astype("float32")).numpy())
    assert (added[0] != 0).all()
    assert (added[1] == 0).mean() > 0.9


def test_what_states_do_not_allow():
    model, _ = model_and_prompts("mamba")
    with pytest.raises(ConfigError, match="a Mamba keeps states, which are of no beginning; leave enable_prefix_cach"):
        TextEngine(model, enable_prefix_caching=True)
    attentive = Llama(LlamaConfig.nano(vocab_size=48))
    for writer, draft in ((model, "ngram"), (attentive, model)):
        with pytest.raises(
            ConfigError, match="a Mamba keeps states, from which tokens that are not met cannot be taken"
        ):
            TextGenerator(writer, speculation=Speculation(draft))
    with pytest.raises(ConfigError, match="a cache in int8: Mamba keeps no keys and values; leave the dtype out"):
        KVCache(model, 1, 8, "int8")
    assert KVCache(model, 2, 8).nbytes == KVCache(model, 2, 2048).nbytes == 2 * 2 * 48 * (3 + 5) * 4
    with pytest.raises(ConfigError, match="num_heads 4 is not a multiple of num_groups 3"):
        Mamba2Config.nano(num_groups=3)


def test_it_learns_and_recomputes():
    """A sequence that repeats; blocks that are computed again have the same gradients."""
    tokens = to_tensor(np.tile(np.arange(4), (2, 4)))
    losses = {}
    for recompute in ("", "full"):
        model = Mamba(MambaConfig.nano(recompute=recompute))
        source = losses.get("state") or model.state_dict()
        losses["state"] = {name: tensor.clone() for name, tensor in source.items()}
        model.set_state_dict(losses["state"])
        loss = model(tokens[:, :-1], labels=tokens[:, 1:])
        loss.backward()
        losses[recompute] = float(loss), model.blocks[0].mixer.log_decay.grad.numpy()
    assert losses[""][0] == pytest.approx(losses["full"][0], rel=1e-6)
    np.testing.assert_allclose(losses[""][1], losses["full"][1], rtol=1e-4, atol=1e-9)
    assert np.abs(losses[""][1]).max() > 0


@pytest.mark.slow
def test_bits_are_a_requests_own_in_every_company():
    checks = list(check_company(Mamba(MambaConfig.nano(seq_len=64))))
    assert len(checks) == 4  # without those with drafts
    assert [check.difference for check in checks] == [None] * 4
    assert sum(check.num_preemptions for check in checks) > 0
