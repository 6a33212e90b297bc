"""Ways to accept."""
