#!/usr/bin/env bash
# A day with a GPU, in at most eight minutes: the CUDA tests, then what explanations cost, as one section of Markdown.
#
#     benchmarks/gpu.sh [--wheels DIR] [--device cpu] [--small] [--out FILE]
#
# It takes .venv, or else python3 if that has torch, and needs no network: what they lack is installed from DIR into a
# folder that goes afterwards. Where grad-cam alone is missing, elsewhere: pip wheel --no-deps --wheel-dir DIR grad-cam ttach
# Where there is neither, it makes .venv: of the wheels in DIR, which then have to be all, or without DIR from the network.
# The section is printed, and written to FILE (gpu.md). The exit status is 1 if a part failed; the others have run all
# the same. On the CPU, --device cpu --small shows in a minute that the script runs.
set -euo pipefail
wheels="" options=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=$(realpath "$2") && shift 2 ;;
        --out) options+=(--out "$(realpath --canonicalize-missing "$2")") && shift 2 ;;
        *) options+=("$1") && shift ;;
    esac
done
cd "$(dirname "$0")/.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -x .venv/bin/python ]; then
    python=.venv/bin/python
elif python3 -c "import torch" 2>/dev/null; then
    python=python3
else
    python3 -m venv .venv
    python=.venv/bin/python
    if [ -n "$wheels" ]; then
        "$python" -m pip install --quiet --no-index "$wheels"/*.whl
    else
        "$python" -m pip install --quiet --editable ".[test]"
    fi
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ] && ! "$python" -c "import pytorch_grad_cam" 2>/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$wheels"/*.whl
fi
"$python" benchmarks/gpu.py "${options[@]}"
