"""What published models have that rows of tables have no columns for, by name: latents, shared experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ROPED: dict[str, Any] = {"biases": False, "learned_positions": False, "tied": False}

_KNOWN: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    (
        r"deepseek-?(v3|r1)(?!.*lite)|kimi-?k2",
        {
            "kv_rank": 512,
            "q_rank": 1536,
            "rope_head_dim": 64,
            "head_dim": 192,
            "v_head_dim": 128,
            "shared_experts": 1,
            "rms_norm": True,
            "gated": True,
            **_ROPED,
            "ffn": 18432,
            "expert_ffn": 2048,
        },
        "arXiv:2412.19437, sections 2.1.2 and 4.2",
    ),
    (
        r"deepseek-?v2-?lite|moonlight",
        {
            "kv_rank": 512,
            "rope_head_dim": 64,
            "head_dim": 192,
            "v_head_dim": 128,
            "shared_experts": 2,
            "dense_layers": 1,
            "rms_norm": True,
            "gated": True,
            **_ROPED,
        },
        "arXiv:2405.04434, appendix B",
    ),
    (
        r"deepseek-?v2",
        {
            "kv_rank": 512,
            "q_rank": 1536,
            "rope_head_dim": 64,
            "head_dim": 192,
            "v_head_dim": 128,
            "shared_experts": 2,
            "dense_layers": 1,
            "rms_norm": True,
            "gated": True,
            **_ROPED,
        },
        "arXiv:2405.04434, section 3.1",
    ),
    (r"qwen-?3", {"qk_norm": True}, "arXiv:2505.09388, section 2"),
    (r"qwen2?.*57b-?a14b", {"shared_experts": 8, "qkv_bias": True}, "arXiv:2407.10671, table 1"),
    (r"qwen1\.5-?moe|qwen.*a2\.7b", {"shared_experts": 4, "qkv_bias": True}, "Qwen1.5-MoE-A2.7B, config.json"),
    (r"qwen-?(2|1\.5|7b|14b|72b)", {"qkv_bias": True}, "arXiv:2309.16609, section 2.3"),
    (r"nemotron-?4|nemotron-?(8b|15b|22b|340b)", {**_ROPED}, "arXiv:2402.16819, table 1"),
    (r"llama-?4", {"shared_experts": 1}, "Llama 4, config.json"),
    (r"pythia|neox|gpt-?j", {"learned_positions": False, "tied": False}, "arXiv:2204.06745, section 2.1; 2304.01373"),
    (r"bloom", {"learned_positions": False}, "arXiv:2211.05100, section 3.2"),
    (
        r"glm-?130b",
        {"learned_positions": False, "tied": False, "rms_norm": False, "biases": True},
        "arXiv:2210.02414, section 2.1",
    ),
    (r"palm", {"biases": False, "tied": True, "learned_positions": False}, "arXiv:2204.02311, section 2"),
)

_DENSE = {"deepseek-v3": 3, "deepseek-r1": 3, "kimi-k2": 1}

_REACH = {"deepseek-v3": 0.5, "deepseek-r1": 0.5}
"""Share of the machines that a token's experts are chosen on: 4 of 8 (arXiv:2412.19437, section 2.1.2)."""


def of_name(name: str) -> tuple[dict[str, Any], str]:
    """(fields of ModelShape, where they are from) of a published model by its name; ({}, "") of others.

    >>> of_name("DeepSeek-V3")[0]["kv_rank"], of_name("my-model")
    (512, ({}, ''))
    """
    plain = re.sub(r"[\s_]+", "-", name.lower())
    for pattern, known, source in _KNOWN:
        if re.search(pattern, plain):
            return {**known, **_by_version(plain)}, source
    return {}, ""


def _by_version(plain: str) -> dict[str, Any]:
    """What versions of a model have of their own."""
    letters, tables = plain.replace("-", ""), {"dense_layers": _DENSE, "expert_reach": _REACH}
    return {
        field: value
        for field, values in tables.items()
        for key, value in values.items()
        if key.replace("-", "") in letters
    }
