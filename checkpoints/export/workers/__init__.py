"""Runtimes in processes of their own; each file runs alone, in whatever Python has the runtime."""
