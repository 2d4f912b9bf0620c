"""Model families, one file each.

A file holds ``Config`` (a :class:`~islands.config.ModelSection`), ``build(config, seq_len) -> nn.Module`` and
``num_flops_per_token(config, seq_len) -> int``. The module is written for one device; it maps token ids (batch, seq) to logits (batch,
seq, vocab), fills its own weights by name (``init_parameter``) and lists the blocks that strategies wrap (``blocks``).

For tensor parallelism the module says how it may be cut (``tensor_plan() -> TensorPlan``, in the words of
``islands/tensor_plan.py``), and the file has ``check_tensor_parallel(config, size)``, which raises ConfigError where ``size`` ranks
can't share the sizes in ``config``.
"""
