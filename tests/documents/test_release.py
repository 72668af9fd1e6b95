"""What a release is made of: one version and one list of dependencies, wherever they are written."""

import re
import sys
from pathlib import Path

import yaml

from pytorch_grad_cam_pcasvm import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CONDA = {"pytorch": "torch", "matplotlib-base": "matplotlib"}


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version_and_of_the_paper():
    cited = read("CITATION.cff")
    assert cited["version"] == __version__
    assert "2508.11880" in str(cited)
    assert cited["license"] == project()["license"]


def test_the_conda_recipe_has_the_same_version_and_dependencies():
    recipe = read("conda/recipe.yaml")
    assert recipe["context"]["version"] == __version__
    assert project()["requires-python"] == f">={recipe['context']['python_min']}"
    needed = {re.sub(r"\[.*\]", "", each).replace(" ", "") for each in project()["dependencies"]}
    found = set()
    for each in recipe["requirements"]["run"][1:]:
        name, bound = each.split()
        found.add(CONDA.get(name, name) + bound)
    assert found == needed


def test_what_is_published_is_what_ci_built():
    build, publish = read(".github/workflows/ci.yml")["jobs"], read(".github/workflows/publish.yml")["jobs"]
    uploaded = [step["with"]["name"] for step in build["wheel"]["steps"] if "upload-artifact" in step.get("uses", "")]
    taken = [step["with"]["name"] for step in publish["pypi"]["steps"] if "download-artifact" in step.get("uses", "")]
    assert taken == uploaded != []


def test_hooks_before_a_commit_are_the_linters_of_ci():
    entries = [hook["entry"] for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    script = (ROOT / ".ci/run").read_text()
    for entry in entries:
        tool = entry.split()[0]
        assert tool in script, tool
