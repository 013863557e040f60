"""How good a decoder is: perplexity, choices, written answers; in this process or behind a server, the same numbers."""

from polyreme.evaluation.scorer import EngineScorer, ScoredTokens, Scorer
from polyreme.evaluation.served import ServerScorer
from polyreme.evaluation.tasks import TASKS, EvalOptions, TaskResult

__all__ = ["TASKS", "EngineScorer", "EvalOptions", "ScoredTokens", "Scorer", "ServerScorer", "TaskResult"]
