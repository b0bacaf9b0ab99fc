"""From the shell to the loop: options, the run's folder, tracking, one message per failure."""
