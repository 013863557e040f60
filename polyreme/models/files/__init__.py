"""Weights in files: folders as on the Hugging Face hub, GGUF, low-bit layouts, adapters, and where to fetch them."""
