"""The small squeezenet of tests of the command line, and the side of the images that it sees."""

from torch import nn

SIDE = 64


class Narrow(nn.Conv2d):
    """A convolution with half the channels."""

    def __init__(self, inputs, outputs, *args, **options):
        super().__init__(inputs if inputs == 3 else inputs // 2, outputs // 2, *args, **options)
