"""LLM: text in, text out, with published weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from polyreme.errors import ConfigError
from polyreme.generation.beams import BeamSearch, BeamSearchParams
from polyreme.generation.choosing import Completion
from polyreme.generation.generator import TextGenerator
from polyreme.generation.grammar import without_words
from polyreme.generation.images import ImageProcessor, ImagePrompts, parts_of_messages
from polyreme.generation.prompt_vectors import PromptVectors
from polyreme.generation.sampling import SamplingParams, settings_of
from polyreme.generation.seq2seq import Seq2SeqGenerator
from polyreme.generation.speculation import Speculation
from polyreme.generation.text_stream import TextStream
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer
from polyreme.mesh import Plan
from polyreme.models.auto import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
from polyreme.models.files.adapters import apply_adapter, check_base, merge_adapters, open_adapter
from polyreme.models.files.folder import weights_digest
from polyreme.models.files.gguf_file import is_gguf
from polyreme.models.files.loader_words import LoaderWord, anything, one_of, without_met
from polyreme.models.files.packages import resolve
from polyreme.models.parts.encoder_decoder import EncoderDecoder
from polyreme.models.parts.image_text import ImageTextModel
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


class _Prompt(NamedTuple):
    """A text or token ids, and the images that they are about."""

    text: Any
    images: Sequence[Any] = ()


def _prompt_list(prompts: Any) -> list[_Prompt]:
    """Prompts one by one. Raises ConfigError for a mapping with neither a text nor token ids."""
    listed = []
    for prompt in [prompts] if isinstance(prompts, (str, Mapping)) else prompts:
        if not isinstance(prompt, Mapping):
            listed.append(_Prompt(prompt))
            continue
        key = next((key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None), None)
        data = prompt.get("multi_modal_data") or {}
        if key is None or prompt.keys() - {"prompt", "prompt_token_ids", "multi_modal_data"} or data.keys() - {"image"}:
            raise ConfigError(
                f"generate: a prompt with {sorted([*prompt, *data])}; give its prompt, a text, or prompt_token_ids, "
                "and of pictures multi_modal_data with image"
            )
        image = data.get("image", ())
        listed.append(_Prompt(prompt[key], image if isinstance(image, (list, tuple)) else [image]))
    return listed


def _loader_of(path: Path) -> type[AutoModel]:
    """What loads weights of a model that writes."""
    task = "causal_lm" if is_gguf(path) else open_published(path, needs_weights=False).family.task
    loaders = {"seq2seq_lm": AutoModelForSeq2SeqLM, "image_text_to_text": AutoModelForImageTextToText}
    return loaders.get(task, AutoModelForCausalLM)


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
    values, as of TextGenerator. image_processor: of a model that reads images too; that of the folder if None.
    """

    tokenizer: TextTokenizer
    model: Any
    images: ImagePrompts | None

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
        image_processor: ImageProcessor | None = None,
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
        self.model = _loader_of(model).from_pretrained(model, dtype=dtype, plan=plan, **options) if is_path else model
        self.images = None
        if isinstance(self.model, EncoderDecoder):
            if speculative is not None or adapter is not None or kv_cache_dtype is not None:
                raise ConfigError("LLM: speculative, adapter and kv_cache_dtype are of decoders without an encoder")
            self.generator: Any = Seq2SeqGenerator(self.model, self.tokenizer.end, self.tokenizer.vocab_size)
            return
        writer = self.model
        if isinstance(self.model, ImageTextModel):
            if adapter is not None:
                raise ConfigError("LLM: adapter is of models that read text alone; leave it out")
            if image_processor is None and not is_path:
                raise ConfigError("LLM: a model without a path that reads images needs image_processor=")
            self.images = ImagePrompts(self.model, image_processor or ImageProcessor.from_pretrained(model))
            writer = self.model.language
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
            writer, self.tokenizer.end, self.tokenizer.vocab_size, speculation, kv_cache_dtype
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
        {"prompt_token_ids": ...}, with {"multi_modal_data": {"image": ...}} for the images that the image token stands
        for; all prompts are one batch.

        sampling_params: get_default_sampling_params() if None. use_tqdm: nothing is shown. Raises ConfigError for
        settings out of range, for prompts that are empty or too long, and for images of a model that reads none.
        """
        listed = _prompt_list(prompts)
        ids = [self._ids_of(prompt.text) for prompt in listed]
        return self._write([p.text for p in listed], ids, sampling_params, [p.images for p in listed])

    def beam_search(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | Sequence[int]],
        params: BeamSearchParams | None = None,
    ) -> list[RequestOutput]:
        """The texts of highest score after each prompt, a text or token ids, one prompt after the other; of a text,
        `score` says it. Raises ConfigError as generate."""
        listed = _prompt_list(prompts)
        if any(prompt.images for prompt in listed):
            raise ConfigError("LLM: beam_search reads text alone; take generate for images")
        if isinstance(self.generator, Seq2SeqGenerator):
            raise ConfigError("LLM: beam_search is of decoders, not of an encoder with one; take generate")
        search, params = BeamSearch(self.generator), params or BeamSearchParams()
        outputs = []
        for prompt, _ in listed:
            ids = self._ids_of(prompt)
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

        Content is a text, or parts as OpenAI has them, {"type": "text", "text": ...} and {"type": "image_url",
        "image_url": {"url": "data:..."}}, or {"type": "image", "image": a Pillow image or pixels}. sampling_params,
        use_tqdm: as of generate. variables: others that the chat template reads. Raises ConfigError as generate, and
        without a template.
        """
        several: list[Any] = list(messages) if messages and not isinstance(messages[0], Mapping) else [messages]
        images: list[Sequence[Any]] = [()] * len(several)
        if self.images is not None:
            several, images = map(list, zip(*map(parts_of_messages, several), strict=True))  # type: ignore[assignment]
        texts = [self.tokenizer.apply_chat_template(conversation, **variables) for conversation in several]
        return self._write(texts, [self.tokenizer.encode(text, False) for text in texts], sampling_params, images)

    def _ids_of(self, prompt: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]

    def _write(
        self,
        prompts: list[Any],
        ids: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        images: Sequence[Sequence[Any]],
    ) -> list[RequestOutput]:
        vectors: list[PromptVectors | None] = [None] * len(ids)
        if self.images is not None:
            ids, vectors = map(list, zip(*map(self.images.expand, ids, images), strict=True))  # type: ignore[assignment]
        elif any(images):
            raise ConfigError(f"LLM: a {type(self.model).__name__} reads text alone; leave the images out")
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
            **({} if self.images is None else {"vectors": [vectors[number] for number, _ in rows]}),
        )
        outputs: list[list[TextOutput]] = [[] for _ in ids]
        for (number, _), completion, text, stream in zip(rows, completions, texts, streams, strict=True):
            outputs[number].append(TextOutput(**vars(completion), text=text + stream.finish()))
        shown = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in prompts]
        return [RequestOutput(*parts) for parts in zip(shown, ids, outputs, strict=True)]
