"""Between islands: train apart for many steps, then agree on how far all of them moved (DiLoCo, arXiv 2311.08105)."""
