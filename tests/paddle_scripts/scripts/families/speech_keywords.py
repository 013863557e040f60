"""Spots words in sound: STFT and mel features, normalization over time, a GRU over lengths, additive margin softmax."""

import math

import numpy as np
import paddle
import paddle.audio
import paddle.nn.functional as F
from paddle import nn
from paddle.audio.features import MFCC, LogMelSpectrogram
from paddle.audio.functional import compute_fbank_matrix, get_window, hz_to_mel
from paddle.nn.layer.conv import _ConvNd

RATE, N_FFT, HOP, MELS = 4000, 128, 64, 10


class GlobalCMVN(nn.Layer):
    def __init__(self, mean, istd, norm_var=True):
        super().__init__()
        self.norm_var = norm_var
        self.register_buffer("mean", paddle.to_tensor(mean))
        self.register_buffer("istd", paddle.to_tensor(istd))

    def forward(self, x):
        x = x - self.mean
        return x * self.istd if self.norm_var else x


class AttentiveStatisticsPooling(nn.Layer):
    def __init__(self, channels, attention_channels):
        super().__init__()
        self.tdnn = nn.Conv1D(channels, attention_channels, kernel_size=3, padding="SAME")
        self.conv = nn.Conv1D(attention_channels, channels, kernel_size=1)
        self.eps = 1e-6

    def forward(self, x, mask):
        scores = self.conv(paddle.tanh(self.tdnn(x)))
        scores = paddle.where(mask.tile((1, x.shape[1], 1)) > 0, scores, paddle.full_like(scores, -1e9))
        weights = F.softmax(scores, axis=2)
        mean = (weights * x).sum(2)
        spread = paddle.sqrt((weights * (x - mean.unsqueeze(2)).pow(2)).sum(2).clip(self.eps))
        return paddle.concat([mean, spread], axis=1)


class Spotter(nn.Layer):
    def __init__(self, cmvn, hidden=8, classes=3):
        super().__init__()
        self.cmvn = cmvn
        self.subsample = nn.Conv1D(MELS, hidden, 3, stride=2, padding=1)
        self.gru = nn.GRU(hidden, hidden, direction="forward", time_major=False)
        self.pool = AttentiveStatisticsPooling(hidden, 4)
        self.weight = paddle.create_parameter(
            shape=(2 * hidden, classes), dtype=paddle.get_default_dtype(), attr=nn.initializer.XavierUniform()
        )

    def forward(self, features, lengths):
        x = self.cmvn(features.transpose([0, 2, 1])).transpose([0, 2, 1])
        x = F.glu(paddle.concat([self.subsample(x)] * 2, axis=1), axis=1).transpose([0, 2, 1])
        lengths = (lengths + 1) // 2
        x, _ = self.gru(x, sequence_length=lengths)
        steps = paddle.arange(x.shape[1]).unsqueeze(0)
        mask = (steps < lengths.unsqueeze(1)).astype("float32").unsqueeze(1)
        pooled = self.pool(x.transpose([0, 2, 1]), mask)
        return F.linear(F.normalize(pooled, axis=1), F.normalize(self.weight, axis=0))


class AdditiveMarginSoftmax(nn.Layer):
    def __init__(self, margin=0.2, scale=10.0):
        super().__init__()
        self.margin, self.scale = margin, scale

    def forward(self, cosine, label):
        margin = F.one_hot(label, cosine.shape[1]) * self.margin
        return F.cross_entropy(self.scale * (cosine - margin), label, reduction="mean")


class WarmupLR(paddle.optimizer.lr.LRScheduler):
    def __init__(self, warmup_steps, learning_rate):
        self.warmup_steps = warmup_steps
        super().__init__(learning_rate)

    def get_lr(self):
        step = self.last_epoch + 1
        return self.base_lr * self.warmup_steps**0.5 * min(step**-0.5, step * self.warmup_steps**-1.5)


time = np.arange(1024) / RATE
waves = np.stack([np.sin(2 * np.pi * pitch * time * (1 + 0.2 * time)) for pitch in (200, 500, 900, 1300)])
waves = paddle.to_tensor((waves + 0.05 * np.random.RandomState(8).randn(4, 1024)).astype("float32"))
spectrum = paddle.signal.stft(waves, N_FFT, HOP, window=get_window("hann", N_FFT).astype("float32"), center=True)
phase = paddle.angle(spectrum[0, 5, 3])
print("stft", spectrum.shape, f"{spectrum.abs().mean().item():.3f} phase {phase.item():.3f}")
back = paddle.signal.istft(spectrum, N_FFT, HOP, window=get_window("hann", N_FFT).astype("float32"), length=1024)
print("back", back.shape, bool(paddle.allclose(back, waves, atol=1e-4)))
extract = LogMelSpectrogram(sr=RATE, n_fft=N_FFT, hop_length=HOP, n_mels=MELS, f_min=50.0, top_db=80.0)
features = extract(waves)
cepstrum = MFCC(sr=RATE, n_mfcc=6, n_fft=N_FFT, hop_length=HOP, n_mels=MELS, f_min=50.0, top_db=None)(waves)
print("mel", features.shape, f"{features.mean().item():.2f}", "mfcc", cepstrum.shape, f"{cepstrum.std().item():.2f}")
banks = compute_fbank_matrix(sr=RATE, n_fft=N_FFT, n_mels=MELS, f_min=50.0)
print("banks", banks.shape, f"{banks.sum().item():.4f}", f"{hz_to_mel(1000.0):.3f}")

values = features.numpy()
model = Spotter(GlobalCMVN(values.mean((0, 2)), 1 / values.std((0, 2))))
rng = np.random.RandomState(6)
for parameter in model.parameters():
    parameter.set_value(rng.normal(0, 0.4, parameter.shape).astype("float32"))
convolutions = [layer for layer in model.sublayers() if isinstance(layer, _ConvNd)]
print("kernels", [(conv._in_channels, conv._kernel_size, conv._padding) for conv in convolutions])
print("buffers", [name for name, _ in model.cmvn.named_buffers()])
masked = paddle.clone(features)
masked[:, 2:4, :] = 0.0  # as SpecAugment does
masked[1, :, 5:7] = masked.mean()
lengths, labels = paddle.to_tensor([17, 17, 12, 9]), paddle.to_tensor([0, 1, 2, 2])
schedule = WarmupLR(warmup_steps=3, learning_rate=0.05)
optimizer = paddle.optimizer.Adam(
    learning_rate=schedule, parameters=model.parameters(), grad_clip=nn.ClipGradByNorm(5.0), weight_decay=1e-6
)
criterion = AdditiveMarginSoftmax()
for step in range(4):
    cosine = model(masked if step % 2 else features, lengths)
    loss = criterion(cosine, labels)
    assert math.isfinite(loss.item())
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    schedule.step()
    print(f"step {step} loss {loss.item():.3f} lr {schedule():.4f}")
model.eval()
scores = model(features, lengths)
print("scores", scores.shape, *(f"{value:.3f}" for value in scores[0].tolist()), scores.argmax(1).tolist())
