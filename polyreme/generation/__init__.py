"""Writing with a decoder: sampling, generation over a cache, many requests at once, tokenizers, LLM."""

from polyreme.generation.beams import BeamSearch, BeamSearchParams, BeamText
from polyreme.generation.choosing import Completion
from polyreme.generation.engine import EngineStatistics, StepOutput, TextEngine
from polyreme.generation.generator import TextGenerator
from polyreme.generation.llm import LLM, RequestOutput
from polyreme.generation.sampling import SamplingParams
from polyreme.generation.seq2seq import Seq2SeqGenerator
from polyreme.generation.speculation import Speculation
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer
from polyreme.generation.transcriber import Transcriber, Transcription
from polyreme.module_names import suggest_names

__all__ = [
    "LLM",
    "AutoTokenizer",
    "BeamSearch",
    "BeamSearchParams",
    "BeamText",
    "Completion",
    "EngineStatistics",
    "RequestOutput",
    "SamplingParams",
    "Seq2SeqGenerator",
    "Speculation",
    "StepOutput",
    "TextEngine",
    "TextGenerator",
    "TextTokenizer",
    "Transcriber",
    "Transcription",
]

suggest_names(__name__)
