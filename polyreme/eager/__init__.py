"""polyreme.eager: op by op, with a tape. Loading it puts the checked mode in force if its flag is set."""

from polyreme.eager import checked

__all__ = ["checked"]
