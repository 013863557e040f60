"""Tasks of the lm-evaluation-harness, put to a Scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError, did_you_mean
from polyreme.evaluation.scorer import Scorer
from polyreme.evaluation.tasks import TASKS, EvalOptions, TaskResult, beginning, encode_pair, score_pairs, windows
from polyreme.generation.sampling import SamplingParams
from polyreme.version import full_version


def harness_model(scorer: Scorer, options: EvalOptions) -> Any:
    """The scorer as the harness has models, a TemplateLM. Raises ConfigError where the harness is not installed."""
    prefix = [] if options.chat else beginning(scorer, options.add_bos)

    class ScorerLM(_module("lm_eval.api.model").TemplateLM):
        """Encodes, scores and writes by the scorer; what is before a text is said once, here."""

        tokenizer_name = ""

        @property
        def eot_token_id(self) -> int:
            """Stands before a continuation that has nothing before it."""
            ids = [scorer.token_id(name) for name in ("bos_token", "eos_token")]
            known = next((i for i in ids if i is not None), None)
            if known is None:
                raise ConfigError("the tokenizer names neither bos_token nor eos_token, which this task needs")
            return known

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            """Ids of a text, after the beginning that the options ask for."""
            return [*([] if add_special_tokens is False else prefix), *scorer.encode(string)]

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            return encode_pair(scorer, prefix, context, continuation)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return score_pairs(scorer, [(before, continuation) for _, before, continuation in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """Of whole texts, each token scored once, after as many as there are places for."""
            sums = []
            for (text,) in (request.args for request in requests):
                ids = [*(prefix or [self.eot_token_id]), *scorer.encode(text)]
                length = scorer.max_tokens
                parts = list(windows(len(ids), length, length - 1))
                scored = scorer.score([ids[begin:end] for begin, end, _ in parts])
                sums.append(
                    sum(
                        float(s.logprobs[first - begin - 1 :].sum())
                        for s, (begin, _, first) in zip(scored, parts, strict=True)
                    )
                )
            return sums

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """Texts up to the strings that each request names."""
            texts = []
            for context, settings in (request.args for request in requests):
                until = settings.get("until") or []
                params = SamplingParams(
                    temperature=settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0,
                    max_tokens=int(settings.get("max_gen_toks", options.max_new_tokens)),
                    stop=tuple([until] if isinstance(until, str) else until),
                    seed=options.seed,
                )
                most = scorer.max_tokens - params.max_tokens
                if most < 1:
                    raise ConfigError(f"max_gen_toks={params.max_tokens}: the model takes {scorer.max_tokens} tokens")
                texts += scorer.write([self.tok_encode(context)[-most:]], params)
            return texts

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            """A conversation as the template writes it."""
            if not add_generation_prompt:
                raise ConfigError("tasks that begin the answer themselves are not supported with --chat")
            return scorer.decode(scorer.encode_chat(chat_history))

    return ScorerLM()


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError("tasks lm_eval:NAME need the lm-evaluation-harness: pip install polyreme[eval]") from None


def run_harness(scorer: Scorer, name: str, options: EvalOptions, include: Path | None = None) -> list[TaskResult]:
    """The results of a task of the harness, or of a group of them; tasks that are shipped here are known to it too.

    include: a folder of tasks of your own. Raises ConfigError for a name that the harness does not know.
    """
    model = harness_model(scorer, options)
    tasks = _module("lm_eval.tasks").TaskManager(include_path=None if include is None else str(include))
    task: Any = name
    if name in TASKS and TASKS[name].files:
        task = choice_task(name, TASKS[name].files[0])
    elif name not in tasks.all_tasks:
        raise ConfigError(f"lm_eval:{name}: the harness has no such task{did_you_mean(name, tasks.all_tasks)}")
    told = _module("lm_eval.evaluator").simple_evaluate(
        model,
        tasks=[task],
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        bootstrap_iters=1000,  # of errors that no formula gives
        apply_chat_template=options.chat,
        random_seed=options.seed,
        numpy_random_seed=options.seed,
        fewshot_random_seed=options.seed,
        task_manager=tasks,
    )
    return [_result(scorer, options, own, told) for own in told["samples"]]


def choice_task(name: str, path: Path) -> dict[str, Any]:
    """A file of rows {"prompt", "choices", "answer"} as the harness describes tasks."""
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }


def _result(scorer: Scorer, options: EvalOptions, name: str, told: dict[str, Any]) -> TaskResult:
    metrics = {
        key.removesuffix(",none"): float(value)
        for key, value in told["results"][name].items()
        if isinstance(value, (int, float)) and not key.startswith("sample")
    }
    samples = told["samples"][name]
    first = samples[0]["arguments"]
    prompt = next(iter(first.values())) if isinstance(first, dict) else first[0]
    text = next(iter(prompt.values())) if isinstance(prompt, dict) else prompt[0]
    ids = [*([] if options.chat else beginning(scorer, options.add_bos)), *scorer.encode(text)]
    options = replace(
        options,
        num_fewshot=int(told["n-shot"].get(name, options.num_fewshot)),
        add_bos=bool(ids) and ids[0] == scorer.token_id("bos_token"),
    )
    facts = scorer.facts() | {"polyreme": full_version, "lm_eval": _module("lm_eval").__version__}
    count = len({sample["doc_id"] for sample in samples})
    return TaskResult(f"lm_eval:{name}", metrics, count, facts | asdict(options) | {"first_prompt": scorer.decode(ids)})
