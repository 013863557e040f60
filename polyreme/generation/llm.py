"""LLM: text in, text out, with published weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError
from polyreme.generation.beams import BeamSearch, BeamSearchParams
from polyreme.generation.choosing import Completion
from polyreme.generation.generator import TextGenerator
from polyreme.generation.grammar import without_words
from polyreme.generation.sampling import SamplingParams, settings_of
from polyreme.generation.seq2seq import Seq2SeqGenerator
from polyreme.generation.speculation import Speculation
from polyreme.generation.text_stream import TextStream
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer
from polyreme.mesh import Plan
from polyreme.models.auto import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from polyreme.models.files.adapters import apply_adapter, check_base, merge_adapters, open_adapter
from polyreme.models.files.folder import weights_digest
from polyreme.models.files.gguf_file import is_gguf
from polyreme.models.files.loader_words import LoaderWord, anything, one_of, without_met
from polyreme.models.files.packages import resolve
from polyreme.models.parts.encoder_decoder import EncoderDecoder
from polyreme.models.pretrained import open_published


def speculation_of(draft: Any, num_draft_tokens: int, tokenizer: TextTokenizer) -> Speculation:
    """A Speculation for texts of a tokenizer; draft: "ngram", a Decoder, or the path of published weights.
    Raises ConfigError for weights whose tokenizer is another one."""
    if draft == "ngram" or not isinstance(draft, (str, Path)):
        return Speculation(draft, num_draft_tokens)
    AutoTokenizer.from_pretrained(draft).check_same_tokens(tokenizer, draft)
    return Speculation(AutoModelForCausalLM.from_pretrained(draft), num_draft_tokens)


_WORDS: dict[str, LoaderWord] = {
    "tensor_parallel_size": LoaderWord(one_of(1), "give plan=, as Plan.from_degrees(mp=2)"),
    "quantization": LoaderWord(one_of(), "the folder says it"),
    "tokenizer_mode": LoaderWord(one_of("auto", "fast"), "tokenizer.json is read"),
    "load_format": LoaderWord(one_of("auto", "safetensors", "gguf"), "the path says it"),
    # of memory, queues and programs that are there as a batch needs them
    **dict.fromkeys(
        ("gpu_memory_utilization", "swap_space", "cpu_offload_gb", "enforce_eager", "max_num_seqs", "block_size"),
        LoaderWord(anything, ""),
    ),
    **dict.fromkeys(
        ("max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill", "disable_log_stats"),
        LoaderWord(anything, ""),
    ),
}
"""vLLM's arguments that change no text here, where they ask for what is done anyway."""


def _prompt_list(prompts: Any) -> list[Any]:
    """Texts and token ids of prompts. Raises ConfigError for a mapping with neither."""
    listed = []
    for prompt in [prompts] if isinstance(prompts, (str, Mapping)) else prompts:
        if isinstance(prompt, Mapping):
            key = next((key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None), None)
            if key is None or prompt.keys() - {"prompt", "prompt_token_ids"}:
                raise ConfigError(
                    f"generate: a prompt with {sorted(prompt)}; give its prompt, a text, or prompt_token_ids"
                )
            prompt = prompt[key]
        listed.append(prompt)
    return listed


def _reads_another(path: Path) -> bool:
    """Whether weights are of a model that reads a text and writes another."""
    return not is_gguf(path) and open_published(path, needs_weights=False).family.task == "seq2seq_lm"


@dataclass
class TextOutput(Completion):
    """A Completion and its text, stop strings left out; of a beam search its score."""

    text: str = ""
    score: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The result of one prompt: the prompt, its token ids, and n texts."""

    prompt: str
    prompt_token_ids: list[int]
    outputs: list[TextOutput]


class LLM:
    """A model and its tokenizer.

    model: a folder of published weights (of a decoder, or of a T5, BART or its kin, which write a text of each prompt),
    a GGUF file, the name of weights that `polyreme models fetch` brought, or a Decoder or T5, which needs a tokenizer.
    tokenizer: that of the adapter, or of the path, if None. dtype, plan, ...: as of
    AutoModelForCausalLM.from_pretrained; vLLM's max_model_len is its seq_len, and others of vLLM's words are taken
    where they ask for what is done anyway. speculative: "ngram", or a smaller model with the same tokens, likewise:
    drafts num_draft_tokens at a time for a prompt that is alone, the same text sooner (Speculation). adapter: the
    folder of one that was trained on the weights of the path, which is merged into them. kv_cache_dtype: of keys and
    values, as of TextGenerator.
    """

    tokenizer: TextTokenizer
    model: Any

    def __init__(
        self,
        model: Any,
        tokenizer: TextTokenizer | str | Path | None = None,
        *,
        dtype: Any = None,
        plan: Plan | None = None,
        speculative: Any = None,
        num_draft_tokens: int = 5,
        adapter: str | Path | None = None,
        kv_cache_dtype: Any = None,
        **options: Any,
    ) -> None:
        is_path = isinstance(model, (str, Path))
        model = resolve(model) if is_path else model
        if tokenizer is None and not is_path:
            raise ConfigError("LLM: a model without a path needs a tokenizer; give tokenizer=")
        has_tokenizer = adapter is not None and (Path(adapter) / "tokenizer.json").is_file()
        named = (adapter if has_tokenizer else model) if tokenizer is None else tokenizer
        self.tokenizer = named if isinstance(named, TextTokenizer) else AutoTokenizer.from_pretrained(named)
        options = without_met("LLM", options, _WORDS)
        if "max_model_len" in options:
            options.setdefault("seq_len", options.pop("max_model_len"))
        if not is_path and (dtype is not None or plan is not None or options):
            raise ConfigError("LLM: dtype, plan and options are for weights that are read; the model is there already")
        loader = AutoModelForSeq2SeqLM if is_path and _reads_another(model) else AutoModelForCausalLM
        self.model = loader.from_pretrained(model, dtype=dtype, plan=plan, **options) if is_path else model
        if isinstance(self.model, EncoderDecoder):
            if speculative is not None or adapter is not None or kv_cache_dtype is not None:
                raise ConfigError("LLM: speculative, adapter and kv_cache_dtype are of decoders without an encoder")
            self.generator: Any = Seq2SeqGenerator(self.model, self.tokenizer.end, self.tokenizer.vocab_size)
            return
        if adapter is not None:
            if not is_path:
                raise ConfigError(
                    "LLM: adapter is for weights that are read; put it on the model by models.files.adapters"
                )
            opened = open_adapter(adapter)
            check_base(opened, weights_digest(model), model)
            apply_adapter(self.model, opened)
            merge_adapters(self.model)
        speculation = None if speculative is None else speculation_of(speculative, num_draft_tokens, self.tokenizer)
        self.generator = TextGenerator(
            self.model, self.tokenizer.end, self.tokenizer.vocab_size, speculation, kv_cache_dtype
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters: as generation_config.json of the weights says."""
        return SamplingParams(**settings_of(self.model.generation_config))  # type: ignore[arg-type]  # checked there

    def get_tokenizer(self) -> TextTokenizer:
        """The tokenizer."""
        return self.tokenizer

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate texts after each prompt, a text, token ids, or one of both as vLLM has them, {"prompt": ...} or
        {"prompt_token_ids": ...}; all prompts are one batch.

        sampling_params: get_default_sampling_params() if None. use_tqdm: nothing is shown. Raises ConfigError for
        settings out of range, and for prompts that are empty or too long.
        """
        listed = _prompt_list(prompts)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else [int(i) for i in p] for p in listed]
        return self._write(listed, ids, sampling_params)

    def beam_search(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | Sequence[int]],
        params: BeamSearchParams | None = None,
    ) -> list[RequestOutput]:
        """The texts of highest score after each prompt, a text or token ids, one prompt after the other; of a text,
        `score` says it. Raises ConfigError as generate."""
        listed = _prompt_list(prompts)
        if isinstance(self.generator, Seq2SeqGenerator):
            raise ConfigError("LLM: beam_search is of decoders, not of an encoder with one; take generate")
        search, params = BeamSearch(self.generator), params or BeamSearchParams()
        outputs = []
        for prompt in listed:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
            texts = []
            for text in search.search(ids, params):
                stream = TextStream(self.tokenizer)
                written = stream.add(text.token_ids) + stream.finish()
                texts.append(TextOutput(text.token_ids, text.finish_reason, text=written, score=text.score))
            shown = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
            outputs.append(RequestOutput(shown, ids, texts))
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        **variables: Any,
    ) -> list[RequestOutput]:
        """The model's answer to a conversation, [{"role": ..., "content": ...}, ...], or to each of several.

        sampling_params, use_tqdm: as of generate. variables: others that the chat template reads. Raises ConfigError as
        generate, and without a template.
        """
        several = list(messages) if messages and not isinstance(messages[0], Mapping) else [messages]
        texts = [self.tokenizer.apply_chat_template(conversation, **variables) for conversation in several]  # type: ignore[arg-type]
        return self._write(texts, [self.tokenizer.encode(text, False) for text in texts], sampling_params)

    def _write(
        self,
        prompts: list[Any],
        ids: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        shared = params or self.get_default_sampling_params()
        settings = list(shared) if isinstance(shared, Sequence) else [shared] * len(ids)
        if len(settings) != len(ids):
            raise ConfigError(f"generate: {len(ids)} prompts and settings for {len(settings)}; give one for each")
        rows = [
            (number, replace(each, n=1, seed=each.seed + copy))
            for number, each in enumerate(settings)
            for copy in range(each.n)
        ]
        streams = [TextStream(self.tokenizer, own.stop, own.min_tokens) for _, own in rows]
        texts = [""] * len(rows)

        def take(row: int, token: int) -> bool:
            texts[row] += streams[row].add([token])
            return streams[row].stopped

        completions = self.generator.generate(
            [ids[number] for number, _ in rows],
            [settings_of_row for _, settings_of_row in rows],
            take,
            [without_words(own.bad_words, self.tokenizer, self.model.config.vocab_size) for _, own in rows],
        )
        outputs: list[list[TextOutput]] = [[] for _ in ids]
        for (number, _), completion, text, stream in zip(rows, completions, texts, streams, strict=True):
            outputs[number].append(TextOutput(**vars(completion), text=text + stream.finish()))
        shown = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in prompts]
        return [RequestOutput(*parts) for parts in zip(shown, ids, outputs, strict=True)]
