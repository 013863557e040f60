"""The logical dims of a model that names none, found from its own ops."""
