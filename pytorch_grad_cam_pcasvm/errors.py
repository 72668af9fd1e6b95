"""Exceptions and warnings; every message says what was wrong and how to mend it."""


class NoClosedFormError(ValueError):
    """A layer, an estimator or a kernel has no closed-form Jacobian here.

    Args:
        reason: what has none.
        *ways_out: what to do about it.
    """

    def __init__(self, reason: str, *ways_out: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}: {', or '.join(ways_out)}" if ways_out else reason)


class BlankMapWarning(UserWarning):
    """A map that was asked for is zero everywhere; the message says why."""


class AutogradFallbackWarning(UserWarning):
    """``jacobian="auto"`` met a path without a closed form and uses autograd on it."""
