"""The exceptions that lily raises.

A bad argument is a plain `ValueError`. Everything else that can go wrong is an `Error`, whose
message is one sentence without a final period: where, what was found, what was expected. A second
line may say what to do about it:

    DeviceError: metal: command buffer failed in stage layer.12/experts: out of memory
    hint: open the session with a smaller context

The C++ core raises these same classes.
"""


class Error(Exception):
    """Base of all exceptions that are lily's own.

    Args:
        message: one sentence: where, what, expected, found.
        hint: what the reader can do about it; becomes the message's second line.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


class CheckpointError(Error):
    """The checkpoint's files are missing, damaged, inconsistent or of an unsupported kind."""


class SessionFileError(Error):
    """A session's file is damaged, of another version, or of another model."""


class DeviceError(Error):
    """The device is absent, out of memory, or failed at its work.

    A session that was running is unusable until it is reset or restored from a snapshot.
    """


class ContextError(Error):
    """The session would outgrow its context; it is unchanged."""


class InternalError(Error):
    """lily broke a promise to itself: a bug, worth a report. Names file and line."""


class Cancelled(Error):
    """`Session.cancel` ended a prefill; the session holds the chunks that were finished before."""
