"""The GPT step in polyreme: models.GPT, written imperatively and captured as one program, with AdamW."""

import gpt_workload as g
import numpy as np

import polyreme as paddle
from polyreme.models.decoders.gpt import GPT, GPTConfig


def weights_of(model: GPT) -> dict:
    """The workload's weights under the model's names; the model's qkv columns are ordered [head, q k v, head_dim]."""
    arrays = g.weights()
    named = {"tokens.weight": arrays["wte"], "positions.weight": arrays["wpe"], "norm.weight": arrays["ln.w"],
             "norm.bias": arrays["ln.b"]}  # fmt: skip
    parts = {"attention_norm": "ln1", "attention.qkv": "qkv", "attention.out": "proj", "ffn_norm": "ln2",
             "ffn.up": "fc", "ffn.down": "out"}  # fmt: skip
    for i in range(g.LAYERS):
        for ours, theirs in parts.items():
            for ours_kind, kind in (("weight", "w"), ("bias", "b")):
                array = arrays[f"{i}.{theirs}.{kind}"]
                named[f"blocks.{i}.{ours}.{ours_kind}"] = by_head(array) if theirs == "qkv" else array
    assert named.keys() == model.state_dict().keys()
    return named


def by_head(array: np.ndarray) -> np.ndarray:
    """Columns [q k v, head, head_dim] as [head, q k v, head_dim]."""
    split = array.reshape(*array.shape[:-1], 3, g.HEADS, -1)
    return np.swapaxes(split, -3, -2).reshape(array.shape)


def model() -> GPT:
    """The workload's model, with initial values of its own."""
    sizes = {"vocab_size": g.VOCAB, "hidden_size": g.HIDDEN, "num_layers": g.LAYERS, "num_heads": g.HEADS}
    return GPT(GPTConfig(**sizes, ffn_size=g.FFN, seq_len=g.SEQ, layer_norm_epsilon=g.NORM_EPSILON))


def build():
    """-> a function that does one step and returns its loss."""
    network = model()
    network.set_state_dict(weights_of(network))
    constants = {"beta1": g.BETA1, "beta2": g.BETA2, "epsilon": g.EPSILON, "weight_decay": g.WEIGHT_DECAY}
    optimizer = paddle.optimizer.AdamW(g.LEARNING_RATE, parameters=network.parameters(), **constants)

    @paddle.jit.to_static
    def step(ids, labels):
        loss = network(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    ids, labels = (paddle.to_tensor(x) for x in g.batch())
    return lambda: float(step(ids, labels))
