"""Evaluation of decoders: perplexity, choices, written answers; the same numbers in this process or behind a server."""

from polyreme.evaluation.scorer import EngineScorer, ScoredTokens, Scorer
from polyreme.evaluation.served import ServerScorer
from polyreme.evaluation.tasks import TASKS, EvalOptions, TaskResult

__all__ = ["TASKS", "EngineScorer", "EvalOptions", "ScoredTokens", "Scorer", "ServerScorer", "TaskResult"]
