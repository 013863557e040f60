"""What a configuration will cost, from its dimensions alone: parameters and FLOP; memory is the planner's."""

from polyreme.recipes.config import ModelConfig


def num_parameters(model: ModelConfig) -> int:
    """Trained numbers of the model, embeddings included.

    gpt: two LayerNorms with bias, biased linears, learned positions; llama: two RMSNorms, no biases, rotary positions.
    """
    hidden, ffn, vocab = model.hidden_size, model.ffn_size, model.vocab_size
    head = 0 if model.tie_embeddings else vocab * hidden
    if model.family == "llama":
        kv = model.num_kv_heads * (hidden // model.num_heads)
        block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn + 2 * hidden
        return vocab * hidden + model.num_layers * block + hidden + head
    attention = 4 * hidden * hidden + 4 * hidden
    block = attention + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    return (vocab + model.seq_len) * hidden + model.num_layers * block + 2 * hidden + head


def flops_per_token(model: ModelConfig) -> int:
    """FLOP to train on one token, forward and backward: 6 per matmul parameter + 12 layers hidden seq for attention.

    Source: PaLM, arXiv:2204.02311, appendix B. Table look-ups do no arithmetic; the output projection
    does, tied or not.
    """
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    positions = model.seq_len * model.hidden_size if model.family == "gpt" else 0
    matmul = num_parameters(model) - tables - positions + model.vocab_size * model.hidden_size
    return 6 * matmul + 12 * model.num_layers * model.hidden_size * model.seq_len


def bytes_text(nbytes: float) -> str:
    """Bytes as a person reads them.

    >>> bytes_text(1536), bytes_text(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
