"""OpenAI's client, which takes a second to import: in the worker that runs its tests alone."""

import pytest


@pytest.fixture(scope="session")
def openai():
    return pytest.importorskip("openai")
