"""The architecture once more, in plain NumPy: what the engine is tested against."""
