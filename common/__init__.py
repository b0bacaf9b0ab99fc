"""What all folders use: writing files, showing text."""
