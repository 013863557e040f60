"""From a configuration to a model: the one place that knows the families by name."""

from polyreme.models.gpt import GPT, GPTConfig
from polyreme.models.llama import Llama, LlamaConfig
from polyreme.recipes.config import ModelConfig


def build_model(config: ModelConfig) -> GPT | Llama:
    """A fresh model of the configured family, initial values from the default generator."""
    dims = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "seq_len": config.seq_len,
        "ffn_size": config.ffn_size,
        "tie_embeddings": config.tie_embeddings,
    }
    if config.family == "llama":
        return Llama(LlamaConfig(num_kv_heads=config.num_kv_heads, **dims))
    return GPT(GPTConfig(dropout=config.dropout, **dims))
