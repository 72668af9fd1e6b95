"""Exceptions and warnings; every message names the fault and how to fix it."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

# Packages whose frames lie between a user's line and a warning of this package.
_BETWEEN = {__name__.partition(".")[0], "pytorch_grad_cam", "torch", "contextlib", "functools", "importlib"}


class Fix(str):
    """A fix that names a Python argument; the command line replaces it with its own option."""

    argument: str

    def __new__(cls, text: str, argument: str) -> "Fix":
        """Return a text with the name of the argument."""
        way = super().__new__(cls, text)
        way.argument = argument
        return way

    def __reduce__(self) -> Any:
        """Return the parts from which another process rebuilds it."""
        return Fix, (str(self), self.argument)


def refuse(exception: type[Exception], reason: str, *ways_out: str) -> NoReturn:
    """Raise an error with a reason and ways out, in its message and as separate attributes."""
    error: Any = exception(compose_message(reason, ways_out))
    error.reason, error.ways_out = reason, ways_out
    raise error


def compose_message(reason: str, ways_out: Sequence[str]) -> str:
    """Return a reason and any workarounds as one sentence."""
    return f"{reason}: {', or '.join(ways_out)}" if ways_out else reason


class _RefusedError(ValueError):
    """A request is refused; the message names the reason and the ways out."""

    def __init__(self, reason: str, *ways_out: str) -> None:
        self.reason, self.ways_out = reason, ways_out
        super().__init__(compose_message(reason, ways_out))


class NoClosedFormError(_RefusedError):
    """A layer, an estimator or a kernel has no closed-form Jacobian; the message names the reason and the ways out.

    Attributes:
        tape: where a network's path is refused, the steps that were recorded, to be printed: operations, modules, and
            the first one without a rule; None for other refusals.

    Example:
        >>> tree = PCASVMNet(backbone, DecisionTreeClassifier().fit(features, labels)).eval()
        >>> try:
        ...     maps = ClosedFormGradCAM(tree, ["layer2"]).explain(images)
        ... except NoClosedFormError as error:
        ...     print(error.reason)
        DecisionTreeClassifier has no closed-form Jacobian, since its output is piecewise constant, its gradient 0
    """

    tape: str | None = None
    _autograd_helps = True  # False: its gradient would be wrong


class NoProgramError(_RefusedError):
    """An explanation cannot be exported as a program; the message names the reason and the ways out.

    Example:
        >>> from pytorch_grad_cam_pcasvm.studio import export
        >>> try:
        ...     export.program(ShapCAM(net, ["layer2"]), images)
        ... except NoProgramError as error:
        ...     print(error.reason)
        ShapCAM runs each image on its own, many times, which cannot be exported as one program
    """


class NoBoundaryError(ValueError):
    """A target has no boundary within reach of the training mean, and therefore no neutral baseline."""


class BlankMapWarning(UserWarning):
    """A requested map is zero everywhere; the message says why.

    Example:
        >>> warnings.simplefilter("error", BlankMapWarning)  # rather an error than a blank map
    """


class OutsideTrainingWarning(UserWarning):
    """Most images of a batch are far from the head's training images; the message says how far.

    Usually they were preprocessed differently, for example with values of 0 to 255 instead of [0, 1]; or their features
    come from another layer or pool, or were normalised before the head was fitted. Each method object gives this
    warning once.

    Example:
        >>> warnings.simplefilter("error", OutsideTrainingWarning)  # rather an error than maps of other images
    """


class BaselineWarning(UserWarning):
    """For most images of a batch, more of a decision is in the baseline than on the map.

    If the sum of a map and the value have opposite signs, the colours contradict the decision. Each method object gives
    this warning once.

    Example:
        >>> warnings.simplefilter("ignore", BaselineWarning)
    """


class CancellationWarning(UserWarning):
    """On a map of a decision without a gradient, evidence cancels that is much larger than the explained value.

    See :attr:`.SignedMaps.cancellation`. Each method object gives this warning once.

    Example:
        >>> warnings.simplefilter("ignore", CancellationWarning)
    """


class CoarseMapWarning(UserWarning):
    """A map has fewer than 4x4 positions. Each method object gives this warning once.

    Example:
        >>> warnings.simplefilter("ignore", CoarseMapWarning)
    """


class ConstantComponentWarning(UserWarning):
    """Components of a head did not vary over its training images, so that their maps are noise; the message names them.

    The usual reason is a PCA with as many components as images, of which the last one has nothing left to explain.

    Example:
        >>> warnings.simplefilter("error", ConstantComponentWarning)  # rather an error than maps of noise
    """


class UnstableComponentWarning(UserWarning):
    """Components are others in heads that were refitted on other samples of the photos; the message names them.

    Example:
        >>> warnings.simplefilter("error", UnstableComponentWarning)  # rather an error than maps of chance
    """


class AutogradFallbackWarning(UserWarning):
    """``jacobian="auto"`` found a path without a closed form and uses autograd for it.

    Example:
        >>> warnings.simplefilter("ignore", AutogradFallbackWarning)
    """


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the user's own line: the nearest caller outside this package and the libraries that run it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    scope = frame.f_globals
    # Not a stacklevel, which passes over some frames of its own: the frame itself, as warnings.warn would report it.
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=scope.get("__name__") or "<string>",  # as of exec(code, {}); with None nothing would be told
        registry=scope.setdefault("__warningregistry__", {}),
        source=None,
    )
