"""Writing with a decoder: sampling, generation over a cache of keys and values, tokenizers, LLM."""

from polyreme.generation.generator import Completion, TextGenerator
from polyreme.generation.llm import LLM, RequestOutput
from polyreme.generation.sampling import SamplingParams
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer

__all__ = ["LLM", "AutoTokenizer", "Completion", "RequestOutput", "SamplingParams", "TextGenerator", "TextTokenizer"]
