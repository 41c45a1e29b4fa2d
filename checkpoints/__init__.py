"""Models in and out: formats, families, slicing, provenance, atomic saving."""
