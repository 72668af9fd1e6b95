"""Import places of version 0.3."""

import importlib

import pytest

import pytorch_grad_cam_pcasvm as package

OLD = {
    "autodiff.rules": "register_jacobian",
    "cams": "ContributionCAM",
    "cams.base": "ClosedFormCAM",
    "errors": "NoClosedFormError",
    "maps": "SignedMaps",
    "model.features": "extract_features",
    "model.net": "PCASVMNet",
}


@pytest.mark.parametrize("place", OLD)
def test_public_names_are_where_they_were(place):
    name = f"{package.__name__}.{place}"
    importlib.sys.modules.pop(name, None)
    if place == "maps":
        module = importlib.import_module(name)
    else:
        with pytest.warns(DeprecationWarning, match=f"{place} is now .*; the old way goes in version 0.5") as caught:
            module = importlib.import_module(name)
        assert {warning.filename for warning in caught} == {__file__}  # where it is seen without -W always
    assert getattr(module, OLD[place]) is getattr(package, OLD[place])


def test_what_was_nowhere_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pytorch_grad_cam_pcasvm.cams.nonsense")
    with pytest.raises(AttributeError):
        package.nonsense  # noqa: B018
