"""Data sources, one file each: ``Config`` (a :class:`~islands.config.DataSection`) and ``build(config) -> Corpus``."""
