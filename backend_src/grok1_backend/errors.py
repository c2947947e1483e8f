"""The error by which a command tells its user what to put right."""


class UserError(Exception):
    """The message says it in a sentence or two; no traceback is of use."""
