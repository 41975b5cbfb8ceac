"""The one exception that means "the user can fix this".

The command line prints its sentence without a traceback; everything else is a bug and keeps its traceback.
"""


class UserError(ValueError):
    """Bad input. The message is one sentence that names the offending value and the remedy."""
