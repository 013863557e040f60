"""A fine-tuning run small enough for tests: its base, conversations, configuration, and running it here."""

import json

from polyreme.core import rng
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.recipes import config_file
from polyreme.recipes.training import run
from tests.data.chat_tokenizers import chat_tokenizer

CONFIG = """
model: {base}
lora_rank: 4
max_seq_len: 48
data: {{train: {chats}, validation_fraction: 0.2}}
train: {{steps: 6, global_batch: 4, learning_rate: 1e-2, warmup_steps: 2}}
plan: {{dp: 2, sharding: 2, mp: 2, sharding_stage: 3}}
log: {{interval: 1, validation_interval: 0, sample_tokens: 0, plot: false, tensorboard: false}}
checkpoint: {{interval: 3, keep: 3}}
device: cpu
"""


def write_base(folder, model=Llama, config=LlamaConfig, **more):
    """A LLaMA, or another decoder, of two blocks with random weights, and a tokenizer with a chat template."""
    rng.seed(1)
    tokenizer = chat_tokenizer("chatml")
    sizes = config(
        vocab_size=tokenizer.vocab_size + 4,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=64,
        seq_len=96,
        tie_embeddings=True,
        **more,
    )
    model(sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(path, count=60):
    """Conversations of one or two turns, of different lengths."""
    words = ["God", "heaven", "earth", "and", "the", "beginning"]

    def turn(number):
        answer = " ".join(words[: number % 5 + 1])
        return [{"role": "user", "content": words[number % 6]}, {"role": "assistant", "content": answer}]

    rows = [{"messages": [*turn(i), *(turn(i + 1) if i % 3 == 0 else [])]} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def load(output, base, *overrides):
    """The tiny configuration, read as the command line reads it."""
    chats = output.parent / "chats.jsonl"
    if not chats.exists():
        write_chats(chats)
    path = output.parent / f"{output.name}.yaml"
    path.write_text(CONFIG.format(base=base, chats=chats), encoding="utf-8")
    return config_file.load(path, [*overrides, f"output={json.dumps(str(output))}"])


def train(output, base, *overrides, resume="auto"):
    """Run it in this process."""
    loaded = load(output, base, *overrides)
    source = {"folder": loaded.folder, "resume_command": ["polyreme"]}
    run.run(loaded.config, resume=resume, overrides_source=source)
