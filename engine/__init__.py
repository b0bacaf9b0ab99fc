"""The pipeline: which layers run where, in which order, and the one executor that runs them."""
