"""Docstrings: a method tells all of its arguments."""

import inspect
import re
import subprocess
import sys

import pytest

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import cams

METHODS = {name: getattr(cams, name) for name in cams.__all__}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_tells_all_of_its_arguments_in_order(name):
    text = METHODS[name].__doc__
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Args", "Raises", "Example"]
    (arguments,) = re.findall(r"^Args:\n((?:    .*\n)*)", text, re.MULTILINE)
    assert re.findall(r"^    (\w+):", arguments, re.MULTILINE) == list(inspect.signature(METHODS[name]).parameters)


def test_a_method_of_ones_own_tells_what_its_bases_do_and_keeps_what_it_says():
    class Mine(package.ContributionCAM):
        """Mine.

        Args:
            baseline: another one.
            more: something
                that is new.

        Note:
            Look.

        Raises:
            KeyError: none.
        """

        def __init__(self, model, target_layers, *, more=1, baseline="mean", **options):
            super().__init__(model, target_layers, baseline=baseline, **options)

    class Silent(Mine):
        pass

    text = Mine.__doc__
    assert text.startswith("Mine.\n\nArgs:\n    model: ")
    assert "\n    more: something\n        that is new.\n    baseline: another one.\n\nRaises:\n" in text
    assert "\n    KeyError: none.\n" in text
    assert '\n\nExample:\n    >>> maps = Mine(net, ["layer2"])' in text
    assert text.endswith("\n\nNote:\n    Look.")
    assert "jacobian: " not in text  # not in the signature
    assert text.count("DataParallel") == 1  # of all classes on the way
    assert Silent.__doc__ is None
    assert inspect.getdoc(Silent) == text


@pytest.mark.slow
def test_methods_need_no_docstrings():
    code = "import pytorch_grad_cam_pcasvm as p; print(p.ClosedFormScoreCAM.__doc__, p.ShapCAM.__name__)"
    told = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "None ShapCAM\n"
