"""Folds features of a protein: attention along rows with a bias of pairs, outer product, triangles, recompute."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.fleet.utils import recompute

CONFIG = {"msa_channel": 8, "pair_channel": 6, "num_head": 2, "bins": 5, "blocks": 2}


def init_gate_linear(linear):
    nn.initializer.Constant(value=0.0)(linear.weight)
    nn.initializer.Constant(value=1.0)(linear.bias)


def mask_mean(mask, value, axis=None, eps=1e-10):
    axis = list(range(len(mask.shape))) if axis is None else [axis]
    factor = 1.0
    for size, masked in ((value.shape[i], mask.shape[i]) for i in axis):
        factor *= size if masked == 1 else 1
    return paddle.sum(mask * value, axis=axis) / (paddle.sum(mask, axis=axis) * factor + eps)


class GatedAttention(nn.Layer):
    def __init__(self, q_dim, kv_dim, num_head):
        super().__init__()
        key_dim = q_dim // num_head
        self.num_head, self.key_dim = num_head, key_dim
        self.query_w = paddle.create_parameter([q_dim, num_head, key_dim], "float32")
        self.key_w = paddle.create_parameter([kv_dim, num_head, key_dim], "float32")
        self.value_w = paddle.create_parameter([kv_dim, num_head, key_dim], "float32")
        self.gating_w = paddle.create_parameter([q_dim, num_head, key_dim], "float32")
        self.gating_b = paddle.create_parameter([num_head, key_dim], "float32")
        self.output_w = paddle.create_parameter([num_head, key_dim, q_dim], "float32")
        self.output_b = paddle.create_parameter([q_dim], "float32", is_bias=True)

    def forward(self, q_data, m_data, bias, nonbatched_bias=None):
        q = paddle.einsum("nbqa,ahc->nbqhc", q_data, self.query_w) * self.key_dim**-0.5
        k = paddle.einsum("nbka,ahc->nbkhc", m_data, self.key_w)
        v = paddle.einsum("nbka,ahc->nbkhc", m_data, self.value_w)
        logits = paddle.einsum("nbqhc,nbkhc->nbhqk", q, k) + bias
        if nonbatched_bias is not None:
            logits += paddle.unsqueeze(nonbatched_bias, axis=1)
        average = paddle.einsum("nbhqk,nbkhc->nbqhc", F.softmax(logits), v)
        gate = F.sigmoid(paddle.einsum("nbqc,chv->nbqhv", q_data, self.gating_w) + self.gating_b)
        return paddle.einsum("nbqhc,hco->nbqo", average * gate, self.output_w) + self.output_b


class MSARowAttentionWithPairBias(nn.Layer):
    def __init__(self, config):
        super().__init__()
        self.query_norm = nn.LayerNorm(config["msa_channel"])
        self.feat_2d_norm = nn.LayerNorm(config["pair_channel"])
        weight = nn.initializer.Normal(std=1.0 / np.sqrt(config["pair_channel"]))
        self.feat_2d_weights = paddle.create_parameter(
            [config["pair_channel"], config["num_head"]], "float32", default_initializer=weight
        )
        self.attention = GatedAttention(config["msa_channel"], config["msa_channel"], config["num_head"])

    def forward(self, msa_act, msa_mask, pair_act):
        bias = paddle.unsqueeze(1e9 * (msa_mask - 1.0), axis=[2, 3])
        pair_bias = paddle.einsum("nqkc,ch->nhqk", self.feat_2d_norm(pair_act), self.feat_2d_weights)
        msa_act = self.query_norm(msa_act)
        return self.attention(msa_act, msa_act, bias, pair_bias)


class OuterProductMean(nn.Layer):
    def __init__(self, config, outer=3):
        super().__init__()
        self.layer_norm_input = nn.LayerNorm(config["msa_channel"])
        self.left_projection = nn.Linear(config["msa_channel"], outer)
        self.right_projection = nn.Linear(config["msa_channel"], outer)
        self.output_w = paddle.create_parameter([outer, outer, config["pair_channel"]], "float32")

    def forward(self, act, mask):
        mask, act = paddle.unsqueeze(mask, axis=-1), self.layer_norm_input(act)
        left, right = mask * self.left_projection(act), mask * self.right_projection(act)
        act = paddle.einsum("nacb,nade,cef->ndbf", left.transpose([0, 1, 3, 2]), right, self.output_w)
        return act.transpose([0, 2, 1, 3]) / (1e-3 + paddle.einsum("nabc,nadc->nbdc", mask, mask))


class TriangleMultiplication(nn.Layer):
    def __init__(self, config):
        super().__init__()
        channel = config["pair_channel"]
        self.layer_norm_input, self.center_layer_norm = nn.LayerNorm(channel), nn.LayerNorm(channel)
        self.projection = nn.Linear(channel, 2 * channel)
        self.gate = nn.Linear(channel, 2 * channel)
        self.output_projection = nn.Linear(channel, channel)

    def forward(self, act, mask):
        act = self.layer_norm_input(act)
        act = self.projection(act) * paddle.unsqueeze(mask, -1) * F.sigmoid(self.gate(act))
        left, right = paddle.chunk(act, 2, axis=-1)
        return self.output_projection(self.center_layer_norm(paddle.einsum("bikc,bjkc->bijc", left, right)))


class EvoformerIteration(nn.Layer):
    def __init__(self, config):
        super().__init__()
        self.msa_row_attention_with_pair_bias = MSARowAttentionWithPairBias(config)
        self.outer_product_mean = OuterProductMean(config)
        self.triangle_multiplication_outgoing = TriangleMultiplication(config)
        self.dropout = nn.Dropout(0.0, axis=[0, 1])

    def forward(self, msa_act, pair_act, msa_mask, pair_mask):
        msa_act = msa_act + self.dropout(self.msa_row_attention_with_pair_bias(msa_act, msa_mask, pair_act))
        pair_act = pair_act + self.outer_product_mean(msa_act, msa_mask)
        return msa_act, pair_act + self.triangle_multiplication_outgoing(pair_act, pair_mask)


class Folding(nn.Layer):
    def __init__(self, config, recomputed=True):
        super().__init__()
        self.preprocess_msa = nn.Linear(23, config["msa_channel"])
        self.left_single, self.right_single = (nn.Linear(23, config["pair_channel"]) for _ in range(2))
        self.evoformer_iteration = nn.LayerList([EvoformerIteration(config) for _ in range(config["blocks"])])
        self.masked_msa_head = nn.Linear(config["msa_channel"], 23)
        self.half_logits = nn.Linear(config["pair_channel"], config["bins"])
        self.recomputed = recomputed

    def forward(self, batch):
        msa = F.one_hot(batch["msa"], 23)
        msa_act = self.preprocess_msa(msa)
        pair_act = self.left_single(msa[:, 0]).unsqueeze(2) + self.right_single(msa[:, 0]).unsqueeze(1)
        pair_mask = batch["msa_mask"][:, 0, :, None] * batch["msa_mask"][:, 0, None, :]
        for block in self.evoformer_iteration:
            inputs = (msa_act, pair_act, batch["msa_mask"], pair_mask)
            msa_act, pair_act = recompute(block, *inputs) if self.recomputed and self.training else block(*inputs)
        half = self.half_logits(pair_act)
        return self.masked_msa_head(msa_act), half + half.transpose([0, 2, 1, 3]), pair_mask


def compute_loss(model, batch):
    msa_logits, distance_logits, pair_mask = model(batch)
    errors = F.softmax_with_cross_entropy(msa_logits, batch["true_msa"].unsqueeze(-1)).squeeze(-1)
    masked = mask_mean(batch["bert_mask"], errors)
    squared = paddle.sum((batch["atoms"].unsqueeze(-2) - batch["atoms"].unsqueeze(-3)) ** 2, axis=-1, keepdim=True)
    breaks = paddle.linspace(0.5, 2.5, CONFIG["bins"] - 1)
    bins = paddle.sum((squared > breaks**2).astype("int64"), axis=-1)
    errors = -paddle.sum(F.one_hot(bins, CONFIG["bins"]) * F.log_softmax(distance_logits), axis=-1)
    return masked, mask_mean(pair_mask, errors)


model = Folding(CONFIG)
rng = np.random.RandomState(13)
for name, parameter in model.named_parameters():
    base = 1.0 if "norm" in name and name.endswith("weight") else 0.0
    parameter.set_value((base + 0.3 * rng.randn(*parameter.shape)).astype("float32"))
for layer in model.sublayers():
    if isinstance(layer, TriangleMultiplication):
        init_gate_linear(layer.gate)
true_msa = rng.randint(0, 21, [1, 3, 5])
bert_mask = (rng.rand(1, 3, 5) < 0.4).astype("float32")
batch = {
    "true_msa": true_msa, "msa": np.where(bert_mask > 0, 22, true_msa), "bert_mask": bert_mask,
    "msa_mask": np.ones([1, 3, 5], "float32"), "atoms": rng.randn(1, 5, 3).astype("float32"),
}  # fmt: skip
batch["msa_mask"][:, 2, 3:] = 0.0
batch = {key: paddle.to_tensor(value) for key, value in batch.items()}
optimizer = paddle.optimizer.Adam(
    0.01, epsilon=1e-6, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.5)
)
for step in range(3):
    masked, distogram = compute_loss(model, batch)
    (2.0 * masked + 0.3 * distogram).backward()
    optimizer.step()
    optimizer.clear_grad()
    print(f"step {step} masked {masked.item():.3f} distogram {distogram.item():.3f}")
losses = {}
for recomputed in (True, False):
    model.recomputed = recomputed
    sum(compute_loss(model, batch)).backward()
    losses[recomputed] = [p.grad.numpy() for p in model.parameters() if p.grad is not None]
    model.clear_gradients()
print("gradients", len(losses[True]), all(np.allclose(a, b, atol=1e-5) for a, b in zip(losses[True], losses[False])))
model.eval()
print("pairs", model(batch)[1].shape, f"{F.softmax(model(batch)[1]).max(-1).mean().item():.3f}")
