"""Checkpoints that are whole or do not count, and that any topology reads."""
