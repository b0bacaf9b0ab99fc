"""The last that the fork server of `ranks.py` imports: what a process computes once, it computes
for all."""

import gc

from models.towers.text import text_tower

# the names by which saved models of transformers differ from its modules: a second of regular
# expressions
text_tower("clip-text-base:num_hidden_layers=1,hidden_size=8,num_attention_heads=1", None, 16)
# a collection in a fork would write into every object, and so copy the memory that forks share
gc.collect()
gc.freeze()
