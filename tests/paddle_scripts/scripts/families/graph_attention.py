"""Learns on graphs: normalized convolution, attention over edges by segments, pooling of whole graphs, sampling."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.base.data_feeder import check_variable_and_dtype
from paddle.geometric import (
    reindex_graph,
    segment_max,
    segment_mean,
    segment_sum,
    send_u_recv,
    send_ue_recv,
    send_uv,
)


class Graph:
    """Edges from src to dst, sorted by dst, and for each node the graph of the batch that it is in."""

    def __init__(self, edges, sizes):
        edges = np.asarray(edges)
        order = np.argsort(edges[:, 1], kind="stable")
        self.src, self.dst = (paddle.to_tensor(edges[order, i]) for i in (0, 1))
        self.num_nodes = sum(sizes)
        self.graph_node_id = paddle.to_tensor(np.repeat(np.arange(len(sizes)), sizes))

    def indegree(self):
        ones = paddle.ones([len(self.dst)], dtype="float32")
        return paddle.zeros([self.num_nodes]).scatter(self.dst, ones, overwrite=False)


def segment_softmax(score, segment_ids):
    check_variable_and_dtype(score, "score", ("float32", "float64"), "segment_softmax")
    score = paddle.exp(score - paddle.gather(segment_max(score, segment_ids), segment_ids))
    return score / paddle.gather(segment_sum(score, segment_ids), segment_ids)


class GCNConv(nn.Layer):
    def __init__(self, input_size, output_size, activation=None):
        super().__init__()
        self.linear = nn.Linear(input_size, output_size, bias_attr=False)
        self.bias = self.create_parameter(shape=[output_size], is_bias=True)
        self.activation = getattr(F, activation) if isinstance(activation, str) else activation

    def forward(self, graph, feature):
        norm = paddle.pow(graph.indegree().clip(min=1.0), -0.5).unsqueeze(-1)
        output = send_u_recv(self.linear(feature) * norm, graph.src, graph.dst, "sum") * norm + self.bias
        return output if self.activation is None else self.activation(output)


class GATConv(nn.Layer):
    def __init__(self, input_size, hidden_size, num_heads=2):
        super().__init__()
        self.linear = nn.Linear(input_size, num_heads * hidden_size)
        self.weight_src = self.create_parameter([num_heads, hidden_size])
        self.weight_dst = self.create_parameter([num_heads, hidden_size])
        self.shape = [-1, num_heads, hidden_size]

    def forward(self, graph, feature):
        feature = self.linear(feature).reshape(self.shape)
        source, target = (paddle.sum(feature * w, axis=-1) for w in (self.weight_src, self.weight_dst))
        alpha = F.leaky_relu(send_uv(source, target, graph.src, graph.dst, message_op="add"), 0.2)
        alpha = segment_softmax(alpha, graph.dst).unsqueeze(-1)
        return send_ue_recv(feature, alpha, graph.src, graph.dst, message_op="mul", reduce_op="sum").flatten(1)


class GIN(nn.Layer):
    def __init__(self, size):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size), nn.ReLU(), nn.Linear(size, size))
        self.epsilon = self.create_parameter([1, 1], default_initializer=nn.initializer.Constant(0.1))

    def forward(self, graph, feature):
        neighbours = send_u_recv(feature, graph.src, graph.dst, reduce_op="mean", out_size=graph.num_nodes)
        return self.mlp(neighbours + feature * (self.epsilon + 1.0))


class Network(nn.Layer):
    def __init__(self, size=8):
        super().__init__()
        self.atoms = nn.LayerList([nn.Embedding(5, size), nn.Embedding(3, size)])
        self.layers = nn.LayerList([GCNConv(size, size, "relu"), GATConv(size, size // 2), GIN(size)])
        self.head = nn.Linear(2 * size, 1)

    def forward(self, graph, atoms):
        feature = sum(embedding(atoms[:, i]) for i, embedding in enumerate(self.atoms))
        for layer in self.layers:
            feature = layer(graph, feature) + feature
        pooled = [pool(feature, graph.graph_node_id) for pool in (segment_mean, segment_max)]
        return self.head(paddle.concat(pooled, axis=-1)).squeeze(-1), feature


edges = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (3, 4), (4, 3), (4, 5), (5, 6), (6, 3), (3, 6), (0, 0), (5, 5)]
graph = Graph(edges, sizes=[3, 4])
model = Network()
rng = np.random.RandomState(4)
for name, parameter in model.named_parameters():
    if "epsilon" not in name:
        base = 1.0 if name.endswith("mlp.1.weight") else 0.0
        parameter.set_value((base + 0.4 * rng.randn(*parameter.shape)).astype("float32"))
atoms = paddle.to_tensor(np.stack([rng.randint(0, 5, 7), rng.randint(0, 3, 7)], 1))
target = paddle.to_tensor([0.5, -1.0])
print("degrees", graph.indegree().numpy().tolist())
optimizer = paddle.optimizer.Adam(learning_rate=0.02, parameters=model.parameters(), weight_decay=1e-3)
for epoch in range(4):
    model.train()
    guess, feature = model(graph, atoms)
    loss = F.smooth_l1_loss(guess, target) + F.binary_cross_entropy_with_logits(guess, (target > 0).astype("float32"))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    print(f"epoch {epoch} loss {loss.item():.4f} guess", *(f"{value:.3f}" for value in guess.tolist()))

similarity = F.cosine_similarity(feature[:-1], feature[1:], axis=-1)
print("similarity", *(f"{value:.3f}" for value in similarity.tolist()))
attention = segment_softmax(paddle.arange(len(graph.dst), dtype="float32"), graph.dst)
print("attention sums", segment_sum(attention, graph.dst).numpy().round(3).tolist())
nodes, neighbours = paddle.to_tensor([0, 6]), paddle.to_tensor([1, 2, 0, 5, 3])
count = paddle.to_tensor([3, 2], dtype="int32")
src, dst, out_nodes = reindex_graph(nodes, neighbours, count)
print("reindexed", src.numpy().tolist(), dst.numpy().tolist(), out_nodes.numpy().tolist())
