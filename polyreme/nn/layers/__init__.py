"""One file for each family of layers; the names are polyreme.nn's."""
