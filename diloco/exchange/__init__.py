"""Exchanges, one file or package each: ``Config`` and ``build(config, state, schema) -> Exchange`` (see ``base``)."""
