"""Codecs, one file each: ``Config`` and ``build(config) -> Codec`` (:class:`diloco.reduction.Codec`)."""
