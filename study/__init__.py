"""Small models trained in a grid, to see what each gate does: the paper's tables, re-run."""

from .corpus import Corpus, CorpusOptions, build_corpus
from .errors import StudyError
from .plan import ExtensionOptions, RunOptions, Study, TableOptions, TestOptions, load_study, make_study
from .run import run_study, usual_jobs
from .tasks import TASKS, TaskResult, TaskRow, task_accuracy


__all__ = [
    "TASKS",
    "Corpus",
    "CorpusOptions",
    "ExtensionOptions",
    "RunOptions",
    "Study",
    "StudyError",
    "TableOptions",
    "TaskResult",
    "TaskRow",
    "TestOptions",
    "build_corpus",
    "load_study",
    "make_study",
    "run_study",
    "task_accuracy",
    "usual_jobs",
]
