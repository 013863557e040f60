"""Checking an installation from Python."""

from polyreme.recipes.doctor import as_text, examine


def run_check() -> None:
    """Check that this machine can train: prints versions, devices, memory, folders; RuntimeError if one fails."""
    checks = examine()
    print(as_text(checks))  # noqa: T201  (what it is for)
    failed = [c.name for c in checks if c.is_failure]
    if failed:
        raise RuntimeError(f"run_check: {', '.join(failed)} failed; the lines above say how to mend it")
    print("polyreme is installed and works.")  # noqa: T201
