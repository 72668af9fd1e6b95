"""The script for a day with a GPU: on the CPU it runs to its end; a part that fails or is slow ends nothing else."""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NETWORKS = ("ResNet-50", "VGG16", "ViT-B/16")


@pytest.mark.slow
def test_the_day_runs_to_its_end_on_the_cpu(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where there is no .venv
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {"PATH": path}
    command = [ROOT / "benchmarks/gpu.sh", "--device", "cpu", "--small", "--out", "day.md"]
    day = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert day.returncode == 0, day.stdout + day.stderr
    section = (tmp_path / "day.md").read_text()
    assert section in day.stdout
    lines = section.splitlines()
    assert sum(line.startswith("## ") for line in lines) == 1
    assert sum(line.endswith("| ran |") for line in lines) == 7
    for network in NETWORKS:
        for how, methods in (("eager", ["Grad-CAM", "contributions"]), ("compiled", ["Grad-CAM"])):
            for method in methods:
                (row,) = [line for line in lines if line.startswith(f"| {network} | {how} | {method} | 2 |")]
                difference = row.split("|")[-2].strip()
                assert (method == "contributions") or float(difference) < 1e-3


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


def test_a_part_that_fails_or_is_slow_keeps_its_rows_and_ends_alone(gpu, monkeypatch):
    codes = {
        "CUDA tests": "print('3 passed in 1.00s')",
        "slow": f'print({gpu.ROW!r} + \'{{"network": "A", "images": 1}}\', flush=True); import time; time.sleep(60)',
        "broken": "raise RuntimeError('no memory')",
        "fine": f'print({gpu.ROW!r} + \'{{"network": "B", "host / ours": 2.0}}\')',
    }
    monkeypatch.setattr(gpu, "make_command", lambda part, options: [sys.executable, "-c", codes[part.name]])
    outcomes = []
    for name in codes:
        part = gpu.Part(name, 3)
        outcomes.append((part, 1.0, *gpu.run_part(part, 3 if name == "slow" else 30, argparse.Namespace())))
    assert [reason for *_, reason in outcomes] == [None, "cut off after 3 s", "exit status 1", None]
    section = gpu.write_section(outcomes, "gpu.sh", "a machine")
    assert "CUDA tests: 3 passed in 1.00s" in section
    assert "| slow | 1 | FAILED: cut off after 3 s |" in section
    assert "RuntimeError: no memory" in section
    assert "| network | images | host / ours |\n| --- | --- | --- |\n| A | 1 |  |\n| B |  | 2 |" in section


def test_the_limits_of_all_parts_fit_into_eight_minutes(gpu):
    assert sum(part.seconds for part in gpu.PARTS) <= 470


def test_files_with_tests_for_a_gpu_are_found(gpu):
    files = gpu.list_tests()
    assert "tests/methods/test_cuda.py" in files
    assert "tests/export/test_program.py" in files
    assert not [file for file in files if "is_available()" not in (ROOT / file).read_text()]
