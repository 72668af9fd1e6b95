"""Exceptions and warnings; every message says what was wrong and how to mend it."""


class NoClosedFormError(ValueError):
    """A layer, an estimator or a kernel has no closed-form Jacobian here."""


class BlankMapWarning(UserWarning):
    """A map that was asked for is zero everywhere; the message says why."""


class AutogradFallbackWarning(UserWarning):
    """``jacobian="auto"`` met a path without a closed form and uses autograd on it."""
