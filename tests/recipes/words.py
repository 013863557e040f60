"""A tokenizer of whole words, for families and data of tests."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordLevelTrainer

from polyreme.models.tokenizer import END_OF_TEXT


def train_words(pieces, vocab_size):
    """One of at most vocab_size tokens: END_OF_TEXT, ? for a word it has not seen, and words."""
    words = Tokenizer(WordLevel(unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    words.train_from_iterator(pieces, WordLevelTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT, "?"]))
    return words
