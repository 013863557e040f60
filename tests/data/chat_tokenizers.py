"""Tokenizers of a few hundred tokens that know the special ones of published chat templates."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from polyreme.data.chat_templates import TEMPLATES
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.models.tokenizer import train_byte_level_bpe

WORDS = [
    "In the beginning God created the heaven and the earth.\n",
    "user assistant system [INST] [/INST]\n\n",
    "é 漢 \t",
]
SPECIAL = {
    "chatml": (["<|im_start|>", "<|im_end|>"], None, "<|im_end|>"),
    "llama3": (
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": (["<s>", "</s>"], "<s>", "</s>"),
    "plain": ([], None, "<|endoftext|>"),
    "roles": ([], None, "<|endoftext|>"),
}
"""Of each template its special tokens, the one that begins a text, and the one that ends it."""


def chat_tokenizer(template: str) -> TextTokenizer:
    """A tokenizer for a template by name: byte-level BPE, for mistral one with white space as a letter before words."""
    tokens, bos, end = SPECIAL[template]
    tokenizer = _of_words() if template == "mistral" else train_byte_level_bpe(iter(WORDS), 300)
    if template == "llama3":  # line ends belong together, whatever follows them
        cut = pre_tokenizers.Split(Regex(r" ?[^\s]+|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.add_special_tokens(tokens)
    special = {"eos_token": end} | ({"bos_token": bos} if bos else {})
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    return TextTokenizer(tokenizer, [tokenizer.token_to_id(end)], bos_id, TEMPLATES[template].text, special)


def _of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *fallback], show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer
