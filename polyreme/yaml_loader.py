"""YAML as data from anywhere: PyYAML's safe loader, bounded in depth, whose refusals are all YAMLErrors."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.scanner import ScannerError

from polyreme.errors import ConfigError

MAX_DEPTH = 32
"""Levels of nesting. PyYAML's time grows with the square of the depth, and its parser recurses."""


class YamlLoader(yaml.SafeLoader):
    """Raises YAMLError for text nested deeper than MAX_DEPTH and for values that are not what their tag says."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        self._check_depth(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        self._check_depth(len(self.indents))
        return super().add_indent(column)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node."""
        try:
            return super().construct_object(node, deep)
        except ConfigError:
            raise
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"a value that is no {kind}"
            raise ConstructorError(None, None, problem, node.start_mark) from error

    def _check_depth(self, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise ScannerError(None, None, f"nested deeper than {MAX_DEPTH} levels", self.get_mark())
