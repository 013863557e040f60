"""What the tests of each model family share: reading a recording, the tolerance of a comparison, placement checks."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from polyreme.core import layout
from polyreme.eager.tensor import to_tensor
from polyreme.jit import to_static
from polyreme.models.files.published import match

FIXTURES = Path(__file__).parent / "fixtures"
EPS = float(np.finfo(np.float32).eps)
SPLIT_BY_MP = {"heads", "kv_heads", "ffn", "expert_ffn", "vocab"}
"""Logical dims that tensor parallelism splits (arXiv:1909.08053); everything else stays whole on each device."""


@dataclass(frozen=True)
class Recording:
    """One file of fixtures/: the sizes of the model and what the reference made of them. Arrays by name."""

    config: dict
    arrays: dict

    @property
    def weights(self):
        return self._under("weight/")

    @property
    def grads(self):
        return self._under("grad/")

    @property
    def tokens(self):
        return self.arrays["ids"]

    @property
    def next_tokens(self):
        """The recorded labels moved one place to the left: at t what follows token t; -100 after the last."""
        labels = self.arrays["labels"]
        return np.concatenate([labels[:, 1:], np.full((len(labels), 1), -100)], axis=1)

    def _under(self, prefix):
        return {name.removeprefix(prefix): a for name, a in self.arrays.items() if name.startswith(prefix)}


def read(name):
    with safe_open(FIXTURES / f"{name}.safetensors", framework="numpy") as file:
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no dict)
        return Recording(json.loads(file.metadata()["config"]), arrays)


def load(model, state):
    """Give model exactly the weights in state: none missing, none left over."""
    assert model.set_state_dict(state) == ([], [])
    return model


class Whole(np.ndarray):
    """An array as a WeightSource."""

    def read(self, index):
        return np.asarray(self[index])


def as_ours(model, state):
    """Weights (or gradients) of a published model under our names, as reading a folder makes them: by the family's
    record. None is missing, none left over."""
    published, config = model.family.published.load(), model.config
    sources = {name: array.view(Whole) for name, array in state.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = [w for w in match(published, config, shapes) if state.keys() >= {*w.theirs}]
    used = {name for weight in weights for name in weight.theirs}
    assert used | ({"lm_head.weight"} if config.tie_embeddings else set()) >= state.keys()
    made = {w.ours: w.change.load([sources[name] for name in w.theirs], config) for w in weights}
    return {name: source.read(tuple(slice(None) for _ in source.shape)) for name, source in made.items()}


def load_published(model, state):
    """Give model exactly the published weights in state: none missing, none left over."""
    return load(model, as_ours(model, state))


def forward_terms(config, seq):
    """Numbers summed one after another on the way from a token to a logit.

    A block: two norms, q k v, scores over head_dim, softmax and mix over seq, out, up (and gate), down. Then the last
    norm and the head.
    """
    width, ffn = config["hidden_size"], config["ffn_size"]
    block = 2 * width + width + width // config["num_heads"] + 2 * seq + width + width + ffn
    return config["num_layers"] * block + 2 * width


def tolerance(terms, want):
    """Absolute. Each of n roundings is off by at most eps of the largest number in the sum, and they add up at random:
    sqrt(n) eps; twice, as the reference rounds too; want's largest element stands for the largest number.
    """
    return 2 * np.sqrt(terms) * EPS * np.abs(want).max()


def assert_same_function(model, recording, expected_grads):
    """Logits, loss and the gradient of every parameter are those of the recording."""
    tokens, labels = to_tensor(recording.tokens), to_tensor(recording.next_tokens)
    batch, seq = recording.tokens.shape
    terms = forward_terms(recording.config, seq)
    want = recording.arrays["logits"]
    np.testing.assert_allclose(model(tokens).numpy(), want, rtol=0, atol=tolerance(terms, want))

    loss = model(tokens, labels)
    want = recording.arrays["loss"]
    # logits, log-sum-exp over the vocabulary, mean over the tokens
    loss_terms = terms + recording.config["vocab_size"] + batch * seq
    np.testing.assert_allclose(loss.numpy(), want, rtol=0, atol=tolerance(loss_terms, want))

    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert gradients.keys() == expected_grads.keys()
    for name, want in expected_grads.items():
        # forward, back through the same sums for inputs and values saved on the way, then over all tokens
        atol = tolerance(3 * loss_terms + batch * seq, want)
        np.testing.assert_allclose(gradients[name], want, rtol=0, atol=atol, err_msg=name)


def assert_captured_equals_eager(model, tokens, labels):
    """Loss and gradients of a captured step against eager ones; a fused program may round differently."""
    tokens, labels = to_tensor(tokens), to_tensor(labels)
    config = model.config
    sizes = {name: getattr(config, name) for name in ("hidden_size", "ffn_size", "num_heads", "num_layers")}
    batch, seq = tokens.shape
    terms = forward_terms(sizes, seq) + config.vocab_size + batch * seq

    def step(tokens, labels):
        loss = model(tokens, labels)
        loss.backward()
        return loss

    def results(run):
        for p in model.parameters():
            p.clear_grad()
        loss = run(tokens, labels).numpy()
        return {"loss": loss} | {name: p.grad.numpy() for name, p in model.named_parameters()}

    eager, captured = results(step), results(to_static(step))
    assert eager.keys() == captured.keys()
    for name, want in eager.items():
        atol = tolerance(3 * terms + batch * seq, want)
        np.testing.assert_allclose(captured[name], want, rtol=0, atol=atol, err_msg=name)


def assert_mp_halves_named_dims(model, expected_dims):
    """Under a plan with mp=2 a parameter lies in halves along its dims in SPLIT_BY_MP and whole along the others.

    expected_dims: end of a parameter's name -> its logical dims; exactly one must fit.
    """
    assert layout.active.layout is not None, "put the plan in force first"
    for name, p in model.named_parameters():
        (dims,) = [dims for end, dims in expected_dims.items() if f".{name}".endswith(f".{end}")]
        assert p.dims == dims, name
        local = p._array.addressable_shards[0].data.shape
        assert list(local) == [n // 2 if d in SPLIT_BY_MP else n for n, d in zip(p.shape, dims, strict=True)], name
