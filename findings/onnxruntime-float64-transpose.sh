#!/usr/bin/env bash
# onnxruntime: a float64 matrix product of a transposed tensor loads without optimisations, and not with them.
#
# Guess: graph optimisations make a valid model faster. What loads with them disabled loads with them, too.
# Versions: onnxruntime 1.20.1, 1.25.1 and 1.26.0 (CPU), onnx 1.19.1, opset 18, IR version 10.
# Behaviour: at the default level, a Transpose in front of MatMul is fused into com.microsoft.FusedMatMul, which has no
#   kernel for float64. InferenceSession raises NotImplemented. That is so even of a Transpose that moves nothing
#   (perm [0, 1] of a matrix). With ORT_DISABLE_ALL or ORT_ENABLE_BASIC the same model loads and is right, and written
#   with Gemm (transA, transB) it loads at every level. 1.26.0 loads all of them.
# Output seen:
#   1.20.1 and 1.25.1: transposed and identity: all NOT_IMPLEMENTED, basic ok, disabled ok; gemm: ok at each level
#   1.26.0: ok at each level
# Exit status: 1 if any of that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/run.py" <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

random = np.random.default_rng(0)
weight, x = random.normal(size=(5, 4)), random.normal(size=(3, 4))


def model(nodes, constant):
    graph = helper.make_graph(
        nodes, "product", [helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.DOUBLE, ["n", 5])],
        [helper.make_tensor("w", TensorProto.DOUBLE, constant.shape, constant.ravel())],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made.SerializeToString()


node = helper.make_node
models = {
    "transposed": model(
        [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("MatMul", ["w", "t"], ["p"]),
         node("Transpose", ["p"], ["y"], perm=[1, 0])], weight),
    "identity": model(
        [node("Transpose", ["x"], ["t"], perm=[0, 1]), node("MatMul", ["t", "w"], ["y"])], weight.T),
    "gemm": model([node("Gemm", ["x", "w"], ["y"], transB=1)], weight),
}
levels = {
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


def attempt(written, level):
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    try:
        session = ort.InferenceSession(written, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return "NOT_IMPLEMENTED" if "NOT_IMPLEMENTED" in str(error) else f"{type(error).__name__}"
    (y,) = session.run(None, {"x": x})
    return "ok" if np.allclose(y, x @ weight.T, rtol=1e-12, atol=1e-12) else "wrong"


found = {name: {level: attempt(written, value) for level, value in levels.items()} for name, written in models.items()}
print(ort.__version__, found)
old = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 26)
bad = {"all": "NOT_IMPLEMENTED" if old else "ok", "basic": "ok", "disabled": "ok"}
expected = {"transposed": bad, "identity": bad, "gemm": dict.fromkeys(levels, "ok")}
sys.exit(found != expected)
PYTHON
for version in 1.20.1 1.25.1 1.26.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install --quiet "onnxruntime==$version" "onnx==1.19.1" "numpy<2.4"
    "$folder/$version/bin/python" "$folder/run.py"
done
