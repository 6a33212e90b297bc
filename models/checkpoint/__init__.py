"""Checkpoint readers."""
