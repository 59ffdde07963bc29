"""How the attention of a running model is cut: which heads, which edges, and what is left."""
