"""Renderers for the terminal: what was gathered, as text and tables."""
