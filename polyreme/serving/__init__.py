"""Serving a decoder over HTTP, as OpenAI's API has it."""
