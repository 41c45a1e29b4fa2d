"""Masks, shape, compact model."""
