"""The version of the package: one place, read by the build too."""

__version__ = "0.5.0"
