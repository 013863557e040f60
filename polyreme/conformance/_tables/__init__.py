"""The contract of every op: rows of calls with what NumPy or SciPy gives for them, a module a subject."""
