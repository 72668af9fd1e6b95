"""How long ``evaluate`` takes to its first page, to its first verdict from all that decides, and to its end.

    python benchmarks/evaluate.py photos/test --model model.safetensors

All arguments are those of the command. Seconds on the wall, and of the processors (user) up to then.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DECIDING = "faithfulness", "localisation", "completeness"


def user_seconds(process: int) -> float:
    """Return the seconds of a process that runs; NaN where the system does not tell."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return float("nan")


def main() -> None:
    """Run the command and print the times."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytorch_grad_cam_pcasvm", "evaluate", *sys.argv[1:], "--out", folder]
        start, told, user = time.perf_counter(), set[str](), 0.0
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None:
                user = max(user, user_seconds(process.pid))
                pages = {}
                if (Path(folder) / "index.html").exists():
                    results = json.loads((Path(folder) / "report.json").read_text())["results"]
                    measured = [name for name in DECIDING if "rows" in results.get(name, {})]
                    pages = {"first page": True, "first look of all that decides": len(measured) == len(DECIDING)}
                for name in [name for name, stands in pages.items() if stands and name not in told]:
                    told.add(name)
                    print(f"{name}: {time.perf_counter() - start:.1f} s, {user:.1f} s user", flush=True)
                time.sleep(0.1)
        print(f"end: {time.perf_counter() - start:.1f} s, {user:.1f} s user, exit status {process.returncode}")
        report = Path(folder) / "report.json"
        if report.exists():
            for name, result in json.loads(report.read_text())["results"].items():
                print(f"  {name}: {result.get('settings', {}).get('measured', result.get('reason'))}")


if __name__ == "__main__":
    main()
