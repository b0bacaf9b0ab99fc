"""How boxes travel from what loads them to the towers."""

WHOLE = 1 << 20
"""The side of an image: boxes are whole numbers, which keep their places where towers compute in
fp16 or bf16."""
