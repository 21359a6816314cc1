"""Terminal output for long tasks: progress lines, and curves as text.

>>> from tinkex.observability.terminal import text_plot
>>> print(text_plot([2.0, 1.0], height=1))
1.00 ┤█▁
     └── 2 points
"""

from tinkex.observability.terminal.live import is_live
from tinkex.observability.terminal.loading import LoadingLine, counts
from tinkex.observability.terminal.plot import text_plot
from tinkex.observability.terminal.training import TrainingLine, training_line

__all__ = ["LoadingLine", "TrainingLine", "counts", "is_live", "text_plot", "training_line"]
