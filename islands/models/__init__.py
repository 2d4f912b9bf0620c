"""Model families, one file each.

A file holds ``Config`` (a :class:`~islands.config.ModelSection`), ``build(config, seq_len) -> nn.Module`` and
``num_flops_per_token(config, seq_len) -> int``. The module is written for one device; it maps token ids (batch, seq) to logits (batch,
seq, vocab), fills its own weights by name (``init_parameter``) and lists the blocks that strategies wrap (``blocks``).

For tensor parallelism the module says how it may be cut (``tensor_plan() -> TensorPlan``, in the words of
``islands/tensor_plan.py``), and the file has ``check_tensor_parallel(config, size)``, which raises ConfigError where ``size`` ranks
can't share the sizes in ``config``.

Generation uses ``new_cache()`` of the module and ``forward(tokens, cache)``, which gives the same logits as without a cache.

Folders in the form of Hugging Face: the file has ``from_hugging_face(config_json) -> dict`` (keys of ``Config``),
``to_hugging_face(config, seq_len) -> dict`` and ``hugging_face_name(parameter) -> str``; ``Config`` fills its keys where ``init_from`` is
given (``fill_keys`` and ``refuse_differences`` of ``islands/huggingface.py``); and the module tells the rows of parameters that are
not padding (``rows_in_use``).
"""
