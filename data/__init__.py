"""From samples (a picture and its texts) to micro-batches: sources, splits, transforms, tokenizer,
order, loader."""
