"""A small LLaMA trained on the bytes of the King James text, and rows of it that it has not seen.

Written by `python -m tests.compression.trained`: 2000 steps, float16.
"""

import copy
import gzip
from functools import cache
from pathlib import Path

import numpy as np

import polyreme as paddle
from polyreme.models.decoders.llama import Llama, LlamaConfig

LENGTH = 64
CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, ffn_size=128, seq_len=LENGTH
)
TEXT = Path(__file__).parents[2] / "data" / "kjv.txt.gz"


@cache
def ids():
    with gzip.open(TEXT) as file:
        data = np.frombuffer(file.read(400_000), np.uint8).astype(np.int64)
    return np.minimum(data, 127)


def rows(begin, count):
    return ids()[begin : begin + count * LENGTH].reshape(count, LENGTH)


CALIBRATION, EVALUATION = ([rows(at + n * 16 * LENGTH, 16) for n in range(2)] for at in (300_000, 350_000))


FIXTURE = Path(__file__).parent / "fixtures" / "kjv_llama"


def train(steps=2000):
    """Train the model and write it."""
    paddle.seed(0)
    model = Llama(CONFIG)
    schedule = paddle.optimizer.lr.CosineAnnealingDecay(3e-3, steps)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters())

    @paddle.jit.to_static
    def step(tokens, labels):
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, 290_000, 16)
        batch = np.stack([ids()[s : s + LENGTH + 1] for s in starts])
        step(paddle.to_tensor(batch[:, :-1]), paddle.to_tensor(batch[:, 1:]))
        schedule.step()
    model.save_pretrained(FIXTURE, dtype="float16")


@cache
def _trained():
    return Llama.from_pretrained(FIXTURE)


def trained():
    """A copy of the model."""
    return copy.deepcopy(_trained())


def logprobs(model):
    with paddle.no_grad():
        scores = [model(paddle.to_tensor(ids)) for ids in EVALUATION]
    return np.concatenate([paddle.nn.functional.log_softmax(s).numpy() for s in scores])


@cache
def _before():
    return logprobs(_trained())


def divergence(model):
    """Nats a token that it costs more than the trained model, were the text drawn from that: less noise than of real
    text, where a worse model may guess better."""
    before = _before()
    return float((np.exp(before) * (before - logprobs(model))).sum(-1).mean())


if __name__ == "__main__":
    train()
