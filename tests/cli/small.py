"""The small squeezenet of tests of the command line, the side of the images that it sees, and its options."""

from torch import nn

SIDE = 64


def of_fit(words):
    """Return options of a network for ``fit``, where the layer of the other commands is that of the features."""
    return ["--features" if word == "--layer" else word for word in words]


class Narrow(nn.Conv2d):
    """A convolution with half the channels."""

    def __init__(self, inputs, outputs, *args, **options):
        super().__init__(inputs if inputs == 3 else inputs // 2, outputs // 2, *args, **options)
