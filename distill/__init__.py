"""The teacher's signal, losses and the training loop that restores acceptance."""
