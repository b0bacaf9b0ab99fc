"""From samples (an image and its texts) to micro-batches: sources, splits, transforms, tokenizer,
order, loader."""
