"""What a release is made of agrees: versions, the paper, dependencies, and the files that publish it."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from pytorch_grad_cam_pcasvm import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
WORKFLOWS = {file.name: yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "workflows").glob("*.yml")}
OF_CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # without a window


def test_the_citation_is_of_this_version_and_names_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    pattern = rf"^## \[{re.escape(__version__)}\] - (\S+)$"
    released = re.search(pattern, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation.get("date-released") == (released and released[1])
    (paper,) = citation["references"]
    assert paper["url"] == PROJECT["urls"]["Paper"]
    assert paper["url"].endswith(paper["identifiers"][0]["value"].removeprefix("arXiv:"))
    assert paper["title"] in " ".join((ROOT / "README.md").read_text().split())
    assert paper["title"] in re.sub("[{}]", "", (ROOT / "docs" / "references.bib").read_text())
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert (citation["license"], citation["keywords"]) == (PROJECT["license"], PROJECT["keywords"])


def test_the_recipe_of_conda_is_of_this_version_and_has_the_dependencies_of_the_project():
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == __version__
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    assert recipe["package"]["name"] == PROJECT["name"]

    def of_conda(requirement):
        name, rest = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
        return f"{OF_CONDA.get(name, name)} {rest}"

    needed = recipe["requirements"]
    assert sorted(needed["run"]) == sorted(["python >=${{ python_min }}", *map(of_conda, PROJECT["dependencies"])])
    assert set(map(of_conda, PYPROJECT["build-system"]["requires"])) <= set(needed["host"])
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_what_is_published_is_what_ci_built():
    jobs = WORKFLOWS["publish.yml"]["jobs"]
    called = next(name for name, job in jobs.items() if job.get("uses") == "./.github/workflows/ci.yml")
    assert "workflow_call" in WORKFLOWS["ci.yml"][True]  # "on", in YAML
    (publish,) = (job for job in jobs.values() if "steps" in job)
    assert publish["needs"] == called
    assert publish["permissions"] == {"id-token": "write"}
    built = [step for job in WORKFLOWS["ci.yml"]["jobs"].values() for step in job["steps"] if "uses" in step]
    (upload,) = (step for step in built if step["uses"].startswith("actions/upload-artifact@"))
    (download,) = (step for step in publish["steps"] if step.get("uses", "").startswith("actions/download-artifact@"))
    assert download["with"]["name"] == upload["with"]["name"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_extras_that_a_workflow_installs_exist(name):
    extras = PROJECT["optional-dependencies"]
    commands = [
        step["run"] for job in WORKFLOWS[name]["jobs"].values() for step in job.get("steps", ()) if "run" in step
    ]
    named = re.findall(r'"\.\[([\w,]+)\]"', "\n".join(commands))
    assert {extra for each in named for extra in each.split(",")} <= set(extras)


def test_the_hooks_run_what_the_extra_dev_installs():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {hook["entry"].split()[0] for hook in local["hooks"]}
    dev = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["optional-dependencies"]["dev"]}
    assert {tool.removeprefix(".venv/bin/") for tool in tools} == {"ruff", "mypy"} <= dev


def test_the_changelog_is_one_line_a_change_and_at_most_sixty_lines_a_version():
    released = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for version in released:
        name, *lines = version.splitlines()
        said = [line for line in lines if line and not line.startswith("#")]
        assert len(said) <= 60, f"{name} has {len(said)} lines: merge and shorten them"
        assert max(map(len, said)) <= 160, name
        changes = version.partition("\n### ")[2].splitlines()
        one_line = all(line.startswith(("- ", "#")) for line in changes[1:] if line)
        assert one_line or "Unreleased" in name or "0.1.0" in name, f"{name} has a change of several lines"
    told = [line for version in released for line in version.splitlines() if line.startswith("- ")]
    assert len(told) == len({*told}), "a change is told twice"
