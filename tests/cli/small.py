"""The side of the images that squeezenet sees in tests of the command line."""

SIDE = 64
