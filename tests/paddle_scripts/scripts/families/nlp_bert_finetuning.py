"""Finetunes a small BERT-like classifier: weights loaded by name, warm-up, no decay on some, autocast, a checkpoint."""

import functools
import os
import tempfile

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import BatchSampler, DataLoader, Dataset
from paddle.nn.layer.transformer import _convert_attention_mask
from paddle.optimizer.lr import LambdaDecay

PAD, VOCABULARY, WIDTH, HEADS, LAYERS = 0, 24, 16, 2, 2


class LinearDecayWithWarmup(LambdaDecay):
    def __init__(self, learning_rate, total_steps, warmup, last_epoch=-1):
        def factor(step):
            if step < warmup:
                return step / max(1, warmup)
            return max(0.0, (total_steps - step) / max(1, total_steps - warmup))

        super().__init__(learning_rate, factor, last_epoch)


class BertEmbeddings(nn.Layer):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(12, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH, epsilon=1e-12)
        self.dropout = nn.Dropout(0.0)

    def forward(self, input_ids, token_type_ids):
        ones = paddle.ones_like(input_ids, dtype="int64")
        position_ids = paddle.cumsum(ones, axis=-1) - ones
        position_ids.stop_gradient = True
        total = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.layer_norm(total + self.token_type_embeddings(token_type_ids)))


class BertModel(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embeddings = BertEmbeddings()
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, activation="gelu", act_dropout=0)
        self.encoder = nn.TransformerEncoder(block, LAYERS)
        self.pooler = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, input_ids, token_type_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = (input_ids != PAD).astype("int64")
        mask = _convert_attention_mask(attention_mask.unsqueeze([1, 2]) > 0, paddle.get_default_dtype())
        hidden = self.embeddings(input_ids, token_type_ids)
        for layer in self.encoder.layers:
            hidden = layer(hidden, src_mask=mask)
        return hidden, self.pooler(hidden[:, 0])


class BertForSequenceClassification(nn.Layer):
    def __init__(self, num_classes=3):
        super().__init__()
        self.bert = BertModel()
        self.classifier = nn.Linear(WIDTH, num_classes)

    def forward(self, input_ids, token_type_ids=None):
        return self.classifier(self.bert(input_ids, token_type_ids)[1])

    def load_pretrained(self, weights, prefix="bert."):
        state = {}
        for name, parameter in self.named_parameters():
            value = weights.get(name.removeprefix(prefix))
            if value is not None:  # torch keeps the weight of a linear layer the other way round
                swap = value.ndim == 2 and list(value.shape) != list(parameter.shape)
                state[name] = value.T.copy() if swap else value
        return self.set_state_dict(state)


class Sentences(Dataset):
    def __init__(self, size=10):
        rng = np.random.RandomState(7)
        self.samples = [(rng.randint(1, VOCABULARY, rng.randint(4, 9)).tolist(), i % 3) for i in range(size)]

    def __getitem__(self, index):
        return self.samples[index]

    def __len__(self):
        return len(self.samples)


def collate(samples, length):
    ids = np.full([len(samples), length], PAD, "int64")
    for row, (tokens, _) in enumerate(samples):
        ids[row, : len(tokens)] = tokens
    return ids, (np.arange(length) > 4).astype("int64") * np.ones_like(ids), np.array([label for _, label in samples])


model = BertForSequenceClassification()
rng = np.random.RandomState(0)
pretrained = {}
for name, parameter in model.bert.named_parameters():
    shape = parameter.shape[::-1] if "linear1" in name or "linear2" in name else parameter.shape
    base = 1.0 if name.endswith(("norm1.weight", "norm2.weight", "layer_norm.weight")) else 0.0
    pretrained[name] = (base + 0.2 * rng.randn(*shape)).astype("float32")
missing, unexpected = model.load_pretrained(pretrained)
print("missing", sorted(missing), "unexpected", unexpected)
model.classifier.weight.set_value(np.linspace(-0.4, 0.4, WIDTH * 3).reshape(WIDTH, 3).astype("float32"))
model.classifier.bias.set_value(paddle.zeros([3]))

decayed = [p.name for n, p in model.named_parameters() if not any(word in n for word in ("bias", "norm"))]
print("decayed", len(decayed), "of", len(list(model.parameters())))
loader_of = functools.partial(DataLoader, collate_fn=functools.partial(collate, length=8), return_list=True)
loader = loader_of(Sentences(), batch_sampler=BatchSampler(Sentences(), batch_size=5, shuffle=False))
schedule = LinearDecayWithWarmup(2e-2, total_steps=6, warmup=2)
optimizer = paddle.optimizer.AdamW(
    learning_rate=schedule,
    parameters=model.parameters(),
    weight_decay=0.1,
    apply_decay_param_fun=lambda name: name in decayed,
    grad_clip=nn.ClipGradByGlobalNorm(1.0),
)
criterion = nn.CrossEntropyLoss()
model.train()
for epoch in range(2):
    for step, (input_ids, token_type_ids, labels) in enumerate(loader):
        loss = criterion(model(input_ids, token_type_ids), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.clear_grad()
        print(f"epoch {epoch} step {step} loss {loss.item():.3f} lr {optimizer.get_lr():.4f}")
moments = optimizer._accumulators["moment1"][model.classifier.weight.name]
print("clipped by", type(optimizer._grad_clip).__name__, "moments", moments.shape, f"{moments.abs().mean().item():.4f}")

with tempfile.TemporaryDirectory() as folder:
    paddle.save(model.state_dict(), os.path.join(folder, "model_state.pdparams"))
    paddle.save(optimizer.state_dict(), os.path.join(folder, "model_state.pdopt"))
    again = BertForSequenceClassification()
    again.set_state_dict(paddle.load(os.path.join(folder, "model_state.pdparams")))
    print("optimizer keeps", "LR_Scheduler" in paddle.load(os.path.join(folder, "model_state.pdopt")))
again.eval()
metric = paddle.metric.Accuracy()
with (
    paddle.no_grad(),
    paddle.amp.auto_cast(level="O1", dtype="bfloat16", custom_black_list=["reduce_sum", "elementwise_div"]),
):
    for input_ids, token_type_ids, labels in loader:
        logits = again(input_ids, token_type_ids)
        metric.update(metric.compute(F.softmax(logits.astype("float32")), labels.unsqueeze(-1)))
print("logits", logits.shape, "accuracy", f"{metric.accumulate():.1f}")
