"""Evaluation of models on tasks: questions with expected answers, scored and compared with confidence intervals.

::

    import tinkex
    from tinkex.evaluation import evaluate, read_task, summarize

    task = read_task("arithmetic.jsonl")
    service = tinkex.ServiceClient(base_url="local")
    sampler = service.create_sampling_client(base_model="HuggingFaceTB/SmolLM2-135M-Instruct")
    for score in summarize([evaluate(task, "base", sampler)]):
        print(score.metric, score.value, score.interval)
"""

from tinkex.evaluation.evaluate import EvaluationOptions, evaluate
from tinkex.evaluation.results import ItemResult, Score, TaskResult, summarize
from tinkex.evaluation.statistics import Interval, bootstrap_interval, wilson_interval
from tinkex.evaluation.tasks import Task, TaskItem, read_task

__all__ = [
    "EvaluationOptions",
    "Interval",
    "ItemResult",
    "Score",
    "Task",
    "TaskItem",
    "TaskResult",
    "bootstrap_interval",
    "evaluate",
    "read_task",
    "summarize",
    "wilson_interval",
]
