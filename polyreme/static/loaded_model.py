"""A model that PaddlePaddle saved for inference, as an Executor runs it."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.errors import ProgramError, did_you_mean
from polyreme.export import ArraySpec, Artifact


class LoadedModel:
    """What load_inference_model gives for files that PaddlePaddle wrote: an Executor runs it like a Program.

    It is not a Program: it is not changed, cloned or trained on. jit.load gives a Layer of the same files for that.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact

    @property
    def feeds(self) -> list[str]:
        """Names to feed, in order."""
        return [spec.name for spec in self.artifact.inputs]

    @property
    def fetches(self) -> list[ArraySpec]:
        """What it gives, in order; an Executor's fetch_list may be of these, or of their names."""
        return self.artifact.outputs

    def execute(self, executor: Any, feed: Any, fetch_list: Any, scope: Any, return_numpy: bool) -> list[Any]:
        """What Executor.run calls. Raises ProgramError for a feed that is missing or a fetch that there is not."""
        feed = {} if feed is None else feed
        missing = [name for name in self.feeds if name not in feed]
        if missing:
            raise ProgramError(f"{self.artifact.prefix}: no feed for {', '.join(missing)}; it is fed {self.feeds}")
        asked = [fetch if isinstance(fetch, str) else fetch.name for fetch in fetch_list or ()]
        names = [spec.name for spec in self.fetches]
        for name in asked:
            if name not in names:
                raise ProgramError(f"{self.artifact.prefix} has no output {name!r}{did_you_mean(name, names)}")
        with executor.on_place():
            outs = self.artifact.call([np.asarray(feed[name]) for name in self.feeds])
        by_name = dict(zip(names, outs, strict=True))
        return [np.asarray(by_name[n]) if return_numpy else by_name[n] for n in asked]
