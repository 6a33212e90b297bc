"""Ways to draft."""
