"""Learns to remove noise: a UNet with time embeddings and attention, low-rank updates on linear layers, DDIM steps."""

import copy
import math

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.layer.layers import HookRemoveHelper


def get_timestep_embedding(timesteps, embedding_dim, max_period=10000, flip_sin_to_cos=True):
    half = embedding_dim // 2
    exponent = -math.log(max_period) * paddle.arange(start=0, end=half, dtype="float32") / half
    angles = timesteps[:, None].cast("float32") * paddle.exp(exponent)[None, :]
    parts = [paddle.cos(angles), paddle.sin(angles)] if flip_sin_to_cos else [paddle.sin(angles), paddle.cos(angles)]
    return paddle.concat(parts, axis=-1)


class LoRACompatibleLinear(nn.Linear):
    """Callers ask for sizes as they do in other frameworks."""

    def __init__(self, in_features, out_features, rank=0):
        super().__init__(in_features, out_features)
        self.rank = rank
        if rank:
            self.lora_down = nn.Linear(in_features, rank, bias_attr=False)
            self.lora_up = nn.Linear(rank, out_features, bias_attr=False)

    @property
    def in_features(self):
        return self.weight.shape[0]

    @property
    def out_features(self):
        return self.weight.shape[1]

    def forward(self, x):
        y = super().forward(x)
        return y + self.lora_up(self.lora_down(x)) if self.rank else y


class ResnetBlock2D(nn.Layer):
    def __init__(self, in_channels, out_channels, temb_channels):
        super().__init__()
        self.norm1 = nn.GroupNorm(num_groups=2, num_channels=in_channels, epsilon=1e-6)
        self.conv1 = nn.Conv2D(in_channels, out_channels, kernel_size=3, padding=1)
        self.time_emb_proj = nn.Linear(temb_channels, out_channels)
        self.norm2 = nn.GroupNorm(num_groups=2, num_channels=out_channels, epsilon=1e-6)
        self.conv2 = nn.Conv2D(out_channels, out_channels, kernel_size=3, padding=1)
        self.conv_shortcut = nn.Conv2D(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x, temb):
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = hidden + self.time_emb_proj(F.silu(temb))[:, :, None, None]
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return hidden + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nn.Layer):
    def __init__(self, channels, cross_dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.to_q = LoRACompatibleLinear(channels, channels, rank=2)
        self.to_k = LoRACompatibleLinear(cross_dim, channels)
        self.to_v = LoRACompatibleLinear(cross_dim, channels)
        self.to_out = nn.LayerList([nn.Linear(channels, channels), nn.Dropout(0.0)])

    def forward(self, x, context=None):
        batch, channels, height, width = x.shape
        hidden = self.norm(x.flatten(2).transpose([0, 2, 1]))
        context = hidden if context is None else context
        q, k, v = (
            layer(part).reshape([batch, -1, self.heads, channels // self.heads])
            for layer, part in ((self.to_q, hidden), (self.to_k, context), (self.to_v, context))
        )
        hidden = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False)
        hidden = self.to_out[1](self.to_out[0](hidden.reshape([batch, -1, channels])))
        return x + hidden.transpose([0, 2, 1]).reshape([batch, channels, height, width])


class UNet(nn.Layer):
    def __init__(self, channels=8, cross_dim=6):
        super().__init__()
        self.time_embedding = nn.Sequential(nn.Linear(channels, 16), nn.Silu(), nn.Linear(16, 16))
        self.conv_in = nn.Conv2D(2, channels, 3, padding=1)
        self.down = ResnetBlock2D(channels, channels, 16)
        self.downsample = nn.Conv2D(channels, channels, 3, stride=2, padding=1)
        self.attention = Attention(channels, cross_dim)
        self.up = ResnetBlock2D(2 * channels, channels, 16)
        self.conv_out = nn.Conv2D(channels, 2, 3, padding=1)

    def forward(self, sample, timestep, encoder_hidden_states):
        temb = self.time_embedding(get_timestep_embedding(timestep, self.conv_in._out_channels))
        skip = self.down(self.conv_in(sample), temb)
        hidden = self.attention(self.downsample(skip), encoder_hidden_states)
        hidden = F.interpolate(hidden, scale_factor=2.0, mode="nearest")
        return self.conv_out(F.silu(self.up(paddle.concat([hidden, skip], axis=1), temb)))


class DDIMScheduler:
    def __init__(self, steps=100, beta_start=0.00085, beta_end=0.012):
        self.betas = paddle.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=paddle.float32) ** 2
        self.alphas_cumprod = paddle.cumprod(1.0 - self.betas, 0)

    def factors(self, timesteps):
        kept = self.alphas_cumprod[timesteps].reshape([-1, 1, 1, 1])
        return kept.sqrt(), (1 - kept).sqrt()

    def add_noise(self, samples, noise, timesteps):
        signal, spread = self.factors(timesteps)
        return signal * samples + spread * noise

    def step(self, velocity, timestep, sample, previous):
        signal, spread = self.factors(timestep)
        clean, noise = signal * sample - spread * velocity, signal * velocity + spread * sample
        return self.add_noise(clean, noise, previous)


unet, scheduler = UNet(), DDIMScheduler()
rng = np.random.RandomState(2)
for name, parameter in unet.named_parameters():
    base = 1.0 if "norm" in name and name.endswith("weight") else 0.0
    parameter.set_value((base + 0.2 * rng.randn(*parameter.shape)).astype("float32"))
linears = [layer for layer in unet.sublayers() if isinstance(layer, LoRACompatibleLinear)]
print("sizes", [(layer.in_features, layer.out_features) for layer in linears])
ema = copy.deepcopy(unet)
seen = []
hook = unet.attention.register_forward_post_hook(lambda layer, inputs, output: seen.append(output.shape))
lora = [p for name, p in unet.named_parameters() if "lora" in name]
rest = [p for name, p in unet.named_parameters() if "lora" not in name]
optimizer = paddle.optimizer.AdamW(
    0.01,
    parameters=[{"params": lora, "learning_rate": 2.0}, {"params": rest, "weight_decay": 0.0}],
    weight_decay=0.01,
    grad_clip=nn.ClipGradByGlobalNorm(1.0),
)
images = paddle.to_tensor(rng.randn(2, 2, 8, 8).astype("float32"))
text = paddle.to_tensor(rng.randn(2, 3, 6).astype("float32"))
for step in range(4):
    noise = paddle.to_tensor(rng.randn(2, 2, 8, 8).astype("float32"))
    timesteps = paddle.to_tensor(rng.randint(0, 100, [2]))
    signal, spread = scheduler.factors(timesteps)
    predicted = unet(scheduler.add_noise(images, noise, timesteps), timesteps, text)
    loss = F.mse_loss(predicted, signal * noise - spread * images, reduction="none").mean([1, 2, 3]).mean()
    (loss / 2).backward()
    print(f"step {step} loss {loss.item():.4f}")
    if step % 2:
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        with paddle.no_grad():
            for average, parameter in zip(ema.parameters(), unet.parameters()):
                average.copy_(average * 0.5 + parameter * 0.5, True)
hook.remove()
print("hook", isinstance(hook, HookRemoveHelper), len(seen), seen[0])
print("groups", [len(group["params"]) for group in optimizer._param_groups])

unet.eval()
latents = paddle.to_tensor(rng.randn(1, 2, 8, 8).astype("float32"))
with paddle.no_grad():
    for now, previous in ((80, 40), (40, 0)):
        both = ema(paddle.concat([latents] * 2), paddle.full([2], now, dtype="int64"), text)
        unguided, guided = both.chunk(2)
        pair = [paddle.to_tensor([t]) for t in (now, previous)]
        latents = scheduler.step(unguided + 1.5 * (guided - unguided), pair[0], latents, pair[1])
picture = (latents / 2 + 0.5).clip(0, 1).transpose([0, 2, 3, 1]).cast("float32").numpy()
print("picture", picture.shape, f"{picture.mean():.3f}", f"latents {latents.std().item():.3f}")
