"""What a person sees: token labels, and the renderers that share them."""
