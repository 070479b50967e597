"""The error for which a command ends with status 2."""


class BadRequestError(Exception):
    """What was asked cannot be done; the text names the value and is all that is shown."""
