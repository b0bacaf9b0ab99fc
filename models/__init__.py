"""Towers as ordered lists of layers, the heads, the losses; nothing here knows of processes (see
README.md)."""
