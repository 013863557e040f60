"""Linear algebra: products, norms, factorizations and what solves with them."""
