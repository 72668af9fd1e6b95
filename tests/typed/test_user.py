"""A script with types: a type checker knows what the package takes and gives, and objects to what it does not."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.optional
pytest.importorskip("mypy")
SCRIPT = Path(__file__).with_name("user.py")
WRONG = """
from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, SignedMaps

def explain(net: PCASVMNet) -> SignedMaps:
    return ContributionCAM(net, ["layer4"], base_line="mean").explain(3)
"""


def checked(file: Path, cache: Path) -> tuple[int, str]:
    # As of an installed package: only the file itself is judged.
    options = ["--strict", "--follow-imports", "silent", "--cache-dir", str(cache)]
    run = subprocess.run([sys.executable, "-m", "mypy", *options, str(file)], capture_output=True, text=True)
    return run.returncode, run.stdout


def test_a_typed_script_is_understood_and_a_wrong_one_is_not(tmp_path):
    assert checked(SCRIPT, tmp_path / "cache") == (0, "Success: no issues found in 1 source file\n")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    code, found = checked(wrong, tmp_path / "cache")
    assert code == 1
    assert 'Unexpected keyword argument "base_line" for "ContributionCAM"' in found
    assert 'No overload variant of "explain" of "Method" matches argument type "int"' in found
