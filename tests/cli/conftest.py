"""What tests of the command line share: lines of version 0.4 are typed in many, and say so, which is tested apart."""

import re
from collections import namedtuple

import pytest

_NOTE = re.compile(r"this line is of version 0\.4, and works until 0\.6; now it is:\n  pcasvm-cam .*\n")
Told = namedtuple("Told", "out err")


class WithoutNote:
    """What was printed, without the note that a line is of version 0.4."""

    def __init__(self, capture):
        self._capture = capture

    def readouterr(self):
        out, err = self._capture.readouterr()
        return Told(out, _NOTE.sub("", err))


@pytest.fixture
def capsys(capsys):
    return WithoutNote(capsys)
