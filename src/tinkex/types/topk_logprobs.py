"""``TopkLogprobs`` and the logprob of its empty cells, under the path of the official SDK."""

from tinkex.types import TopkLogprobs
from tinkex.types.sampling import EMPTY_LOGPROB as MASK_LOGPROB

__all__ = ["MASK_LOGPROB", "TopkLogprobs"]
