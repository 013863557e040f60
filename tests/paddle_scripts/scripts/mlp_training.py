"""Trains a small network in dynamic mode, with weight decay, a schedule and clipping."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

rng = np.random.RandomState(0)
xs = rng.randn(64, 8).astype("float32")
ys = (xs[:, :1] * 2 - xs[:, 1:2] ** 2).astype("float32")


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(F.gelu(self.norm(self.hidden(x))))


net = Net()
for _, parameter in sorted(net.named_parameters()):
    parameter.set_value(rng.uniform(-0.5, 0.5, parameter.shape).astype("float32"))
schedule = paddle.optimizer.lr.CosineAnnealingDecay(learning_rate=0.05, T_max=20)
optimizer = paddle.optimizer.AdamW(
    learning_rate=schedule,
    parameters=net.parameters(),
    weight_decay=0.01,
    grad_clip=nn.ClipGradByGlobalNorm(1.0),
)
for step in range(20):
    loss = F.mse_loss(net(paddle.to_tensor(xs)), paddle.to_tensor(ys))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    schedule.step()
    if step % 5 == 0:
        print(f"step {step} loss {float(loss):.4f} lr {optimizer.get_lr():.5f}")
print("total", sum(p.numel().item() for p in net.parameters()), "parameters")
