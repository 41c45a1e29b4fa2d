"""The two kinds of failure that a user meets, and what the command line does with them."""


class DraftsmithError(Exception):
    """Work failed: the message names the place, the value and the cure (exit code 1)."""

    exit_code = 1


class RequestError(DraftsmithError):
    """The request itself is wrong: nothing was loaded or written yet (exit code 2)."""

    exit_code = 2
