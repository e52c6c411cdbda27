"""The error for a pipeline that cannot be replayed; commands read it without the libraries of models."""


class PipelineError(RuntimeError):
    """The pipeline cannot be replayed; use another pipeline, or another way of evaluating its states."""
