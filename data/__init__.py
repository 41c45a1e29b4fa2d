"""Text in, and the store of the target's own text."""
