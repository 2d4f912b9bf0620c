"""The words in which a model says how tensor parallelism may cut it; ``strategies/tensor.py`` acts on them."""

from enum import Enum


class Cut(Enum):
    """What tensor parallelism does with one module of a model.

    The *stream* is the residual stream (B, T, D) between the parts of a model. It is whole on each tensor rank, or, with
    sequence parallelism, cut along T. Between modules tensors are plain, the logits excepted.
    """

    VOCABULARY = "rows of a token embedding, tokens (B, T) in, stream out"
    NORM = "weights on every rank, stream in, stream out"
    HALF = "half of a block: its first argument, from the stream, is made whole once for all cut modules inside"
    COLUMNS = "a linear layer inside a half, cut by output features: whole in, a share of the features out"
    ROWS = "a linear layer inside a half, cut by input features: a share of the features in, stream out"
    LOGITS = "the output layer, cut by vocabulary: stream in, logits (B, T, V) out that stay cut along V"


#: Each module that holds parameters, and each half, by its name in the model; parts between dots may be shell patterns.
TensorPlan = dict[str, Cut]
