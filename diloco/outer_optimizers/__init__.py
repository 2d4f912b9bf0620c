"""Outer optimizers, one file each: ``Config`` and ``build(config) -> OuterOptimizer``."""
