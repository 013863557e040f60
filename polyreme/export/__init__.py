"""Deployment artefacts: a pure function as StableHLO, its weights as safetensors, and a manifest with digests."""

from polyreme.export.artifact import Artifact, ArtifactFunction
from polyreme.export.paddle_artifact import PaddleArtifact
from polyreme.export.reading import read
from polyreme.export.spec import ArraySpec
from polyreme.export.writer import Function, write, write_functions

__all__ = [
    "ArraySpec",
    "Artifact",
    "ArtifactFunction",
    "Function",
    "PaddleArtifact",
    "read",
    "write",
    "write_functions",
]
