"""Parallel strategies, one file each; ``islands/parallelize.py`` applies them in order."""
