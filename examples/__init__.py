"""One file per way of extending what is here. None of them edits another file."""
