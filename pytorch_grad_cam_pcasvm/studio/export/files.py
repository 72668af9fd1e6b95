"""Files: explanations that onnxruntime computes on servers and phones, and pages that compute them in a browser."""

import base64
import json
import logging
import shutil
import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor
from torch.export import ExportedProgram

from pytorch_grad_cam_pcasvm import __version__
from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.digests import described, digest_of_module
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, NoProgramError, refuse
from pytorch_grad_cam_pcasvm.runtime.files import atomically, check_folder, check_writable, name_path
from pytorch_grad_cam_pcasvm.studio.export.explainer import AS_STORED, FORMAT, KEY, Explainer, open_session
from pytorch_grad_cam_pcasvm.studio.export.graph import choose_errors, decompositions, traced_program
from pytorch_grad_cam_pcasvm.studio.export.outputs import about, checked, describe_range, describe_sample, name_outputs
from pytorch_grad_cam_pcasvm.targets import Target

_MOST_BYTES = 2_000_000_000  # protobuf's limit
_OLDEST_OPSET = 18  # that torch writes


def onnx(
    cam: ClosedFormCAM,
    images: Tensor,
    path: str | PathLike[str],
    targets: Sequence[Target] | Target | None = None,
    *,
    size: Sequence[int] | None = None,
    opset: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    resize: int | str | None = None,
    interpolation: str = "bilinear",
    white_level: float | None = None,
    float_white: float | None = None,
    exif: bool | None = None,
    page: int | None = None,
    window: Sequence[float] | None = None,
    errors: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Write the computation of ``cam.explain(images, targets)`` to one file for onnxruntime, for any number of images.

    Before it is written, the file is run on the given images, on the first of them alone and on noise, and compared
    with ``explain``. Its input is ``images`` (N, ...), float32; its outputs are those of :func:`program`, by name. It
    uses standard operators only. The network and the maps are in single precision, the head in double precision; erfcx,
    which ONNX lacks, is a rational function, accurate to 2e-15.

    The metadata describe the explanation, as JSON under the key ``"pytorch_grad_cam_pcasvm"``: ``method``, ``options``,
    ``targets`` and their ``titles``, ``classes``, ``target_layers``, ``features``, ``input`` (``shape``, and how to
    make one from a picture), ``versions``, ``digest`` of network and head as they are now, ``colours`` of the figures
    from -nu to nu, as ``rrggbb``, and ``differences`` from ``explain``: for each output the largest one, as a fraction
    of the largest value (for ``nu``, of its logarithm). ``sample`` is a coarse image and some of its outputs, with
    which :class:`Explainer` compares its own. Of dense features also ``label_colours`` of classes, ``heat``,
    the colours of anomalies, and ``anomaly_range``, where these start and end: ``net.anomaly_range()``, or where the
    head knows none the lowest and highest anomaly of the given images; ``usual``, what nearly all good patches stay
    below; and ``strongest``, the numbers of the targets whose values at every position are in ``evidence``.

    Args:
        cam: any method except Score-CAM, Ablation-CAM and ShapCAM.
        images: images to try the file on, preprocessed for the network, shape (N, ...).
        path: the file to write.
        targets: K targets, each for all images; None: every component, then the predicted class.
        size: (H, W) to upsample maps to; None: their own resolution.
        opset: version of ONNX's operators, from 18; None: torch's own choice.
        mean: the values that preprocessing subtracts from the channels of a picture in [0, 1]; for users of the file.
        std: the values by which it then divides the channels.
        resize: the size of a picture's shorter side, before its middle is cut out; None: pictures are resized to the
            size of the images, whatever their shape; ``"pad"``: they keep their shape, in a frame of that size.
        interpolation: ``"bilinear"`` or ``"bicubic"``, both antialiased as in Pillow.
        white_level: the integer that is white in pictures of more than 8 bits; None: the largest of their type.
        float_white: the number that is white in floating-point pictures; None: these are refused.
        exif: photos are turned as their EXIF orientation says; None: as the head says, and if it says nothing, not.
        page: of TIFFs of several pages the one that is read, from 1 on; None: they are refused.
        window: of grey DICOM files the centre and width, in the units of the modality; None: the files' own.
        errors: as for :func:`program`; ``sure_from`` of the metadata is then by how many of them a number of a map has
            to differ from 0 for its sign to be sure (95 %), and :class:`Explainer` also gives the mask ``sure``.
        progress: print what is being done, which takes longer the more operations follow the target layer.

    Returns:
        The metadata.

    Raises:
        ImportError: the ``[export]`` extra is not installed.
        OSError: nothing can be written there.
        NoProgramError: the method, a target or the network depends on tensor values, or needs autograd; an operator is
            not in ONNX; or onnxruntime gives different numbers.
        TypeError: ``cam`` is not a method.
        ValueError: as for ``explain``, the precision is not single, or the opset is older than torch writes; or there
            are no errors to tell.

    Example:
        >>> from pytorch_grad_cam_pcasvm.studio import export
        >>> metadata = export.onnx(cam, images, "explainer.onnx")
        >>> metadata["targets"], max(metadata["differences"].values()) < 1e-5
        (['PCATarget(0)', 'PCATarget(1)', 'PCATarget(2)', 'SVMTarget()'], True)
    """
    runtime = _runtime()
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    check_writable(path, folder=False)
    if opset is not None:
        _check_opset(opset)
    if interpolation not in ("bilinear", "bicubic"):
        raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {interpolation!r}")
    tell = print if progress else _silent
    cam = choose_errors(cam, errors)
    tell(f"tracing the maps of {type(cam).__name__}")
    program, maps, prepared = traced_program(cam, images, targets, size, decompositions())
    if isinstance(resize, str) and resize != "pad":
        raise ValueError(f"resize must be a number of pixels, 'pad' or None, got {resize!r}")
    if isinstance(resize, int) and resize < max(images.shape[2:]):
        raise ValueError(f"resize={resize} is smaller than the images, {tuple(images.shape[2:])}, that are cut out")
    for name, numbers in (("mean", mean), ("std", std)):
        if numbers is not None and len(numbers) != images.shape[1]:
            raise ValueError(f"{name} needs {images.shape[1]} numbers, one for each channel, got {len(numbers)}")
    mean, std = (None if numbers is None else [float(x) for x in numbers] for numbers in (mean, std))
    pictures = dict[str, Any](mean=mean, std=std, resize=resize, interpolation=interpolation)
    pictures |= {"white_level": white_level, "float_white": float_white}
    head = cam.model.head if isinstance(cam.model, PCASVMNet) else None
    if (head is not None and head.exif) if exif is None else exif:
        pictures["exif"] = True
    pictures |= ({"page": page} if page else {}) | ({"window": [*map(float, window)]} if window else {})
    if sum(value.nbytes for value in (*cam.model.parameters(), *cam.model.buffers())) > _MOST_BYTES:
        raise NoProgramError("a network of more than 2 GB does not fit into one ONNX file", "use export.program")
    names = [*name_outputs(maps, size)]
    count = sum(node.op == "call_function" for node in program.graph.nodes)
    tell(f"traced {count:,} operations; converting them to ONNX")
    model = _converted(program, names, opset)
    tell("comparing the file with explain")
    metadata = _metadata(cam, maps, prepared, pictures)
    if errors:
        metadata["sure_from"] = float(student.ppf(0.975, len(cam.model.head.resamples.heads) - 1))
    session = open_session(runtime, model.SerializeToString())

    def run(x: Tensor) -> dict[str, Any]:
        return dict(zip(names, session.run(names, {"images": x.cpu().numpy()}), strict=True))

    ways_out = ("use export.program", "see whether explain changes as much with net.double()", "report this network")
    metadata["differences"] = checked(run, cam, maps, prepared, size, "onnxruntime", ways_out)
    metadata |= describe_sample(run, cam, maps, prepared, size)
    model.metadata_props.add(key=KEY, value=json.dumps(metadata))
    with atomically(path) as file:
        file.write(model.SerializeToString())
    return metadata


def _check_opset(opset: Any) -> None:
    from onnx.defs import onnx_opset_version

    newest = onnx_opset_version()
    if not isinstance(opset, int) or not _OLDEST_OPSET <= opset <= newest:
        raise ValueError(
            f"opset must be an integer from {_OLDEST_OPSET}, the oldest that torch writes, to {newest}, the newest of "
            f"the installed onnx, got {opset!r}"
        )


def _silent(text: str) -> None:
    """Say nothing."""


def _converted(program: ExportedProgram, names: Sequence[str], opset: int | None) -> Any:
    """Return a program as a model of ONNX, with named outputs, in which N is the number of images."""
    converter = logging.getLogger("onnxscript.version_converter")
    level = converter.level
    try:
        converter.setLevel(logging.CRITICAL)  # which logs a traceback of C++ where it gives up
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's own, about itself
            if any(node.target in decompositions() for node in program.graph.nodes):  # of writes, now functions
                program = program.run_decompositions(decompositions())
            converted: Any = torch.onnx.export(
                program, dynamo=True, opset_version=opset, verbose=False, optimize=False,
                input_names=["images"], output_names=names, external_data=False,
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        raise NoProgramError(
            f"torch cannot bring this network to ONNX ({str(error.__cause__ or error).splitlines()[0]})",
            "use export.program, which needs no ONNX",
            "pass another opset",
        ) from error
    finally:
        converter.setLevel(level)
    _simplify(converted.model)
    model = converted.model_proto
    _merge_transposes(model.graph)
    # Where torch cannot bring it to the opset, it leaves it as it is.
    written = next(entry.version for entry in model.opset_import if not entry.domain)
    if opset is not None and written != opset:
        raise ValueError(
            f"torch writes this network with opset {written} instead of {opset}: pass opset={written}, or none"
        )
    symbol = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = dim.dim_param.replace(symbol, "N")
    return model


def _simplify(model: Any) -> None:
    """Compute constants; torch's own optimisation does so, too, and searches the whole graph for rewrites."""
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(model)
    for _ in range(2):
        optimizer.fold_constants(model, onnx_shape_inference=True)
        optimizer.remove_unused_nodes(model)
    for simplify in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
    ):
        simplify(model)


def _merge_transposes(graph: Any) -> None:
    """Write products of a transposed matrix in double precision as Gemm.

    Of a MatMul behind a Transpose, onnxruntime up to 1.25 makes a FusedMatMul, which it has in single precision only.
    """
    from onnx import TensorProto, helper

    infos = (*graph.value_info, *graph.input, *graph.output)
    ranks = {info.name: len(info.type.tensor_type.shape.dim) for info in infos}
    doubles = {info.name for info in infos if info.type.tensor_type.elem_type == TensorProto.DOUBLE}
    ranks |= {constant.name: len(constant.dims) for constant in graph.initializer}
    transposed, unchanged = dict[str, str](), dict[str, str]()
    for node in graph.node:
        if node.op_type == "Transpose" and node.attribute:
            order = list(node.attribute[0].ints)
            found = transposed if order == [1, 0] else unchanged if order == sorted(order) else {}
            found[node.output[0]] = node.input[0]
    for node in graph.node:
        node.input[:] = [unchanged.get(name, name) for name in node.input]
        of_matrices = node.op_type == "MatMul" and all(ranks.get(name) == 2 for name in node.input)
        sides = [name in transposed for name in node.input]
        if not (of_matrices and any(sides) and node.output[0] in doubles):
            continue
        node.op_type = "Gemm"
        node.input[:] = [transposed.get(name, name) for name in node.input]
        node.attribute.extend(
            helper.make_attribute(name, int(side)) for name, side in zip(("transA", "transB"), sides, strict=True)
        )
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.output[0] not in used]:
        graph.node.remove(node)


def _runtime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError as error:
        raise ImportError(f"export.onnx needs {error.name}: pip install 'pytorch_grad_cam_pcasvm[export]'") from error
    return onnxruntime


def _metadata(cam: ClosedFormCAM, maps: SignedMaps, images: Tensor, pictures: dict[str, Any]) -> dict[str, Any]:
    net = cam.model
    head, anomalies = net.head if isinstance(net, PCASVMNet) else None, name_outputs(maps).get("anomaly")
    backbone, source = net.feature_source(images) if isinstance(net, PCASVMNet) else (net, None)
    digest = {"network": digest_of_module(backbone)} | ({} if head is None else {"head": head.digest()})
    names = ("baseline", "combine", "attention")
    return {
        "format": FORMAT if "exif" in pictures else AS_STORED,
        "method": type(cam).__name__,
        "options": {name: described(getattr(cam, name)) for name in names if hasattr(cam, name)},
        "targets": [repr(target) for target in maps.targets],
        **about(maps.targets, net),
        **({} if head is None or anomalies is None else describe_range(head, [anomalies])),
        "pairwise_scores": _pairwise(head),
        "target_layers": list(maps.layers),
        "features": repr(source),
        "input": {"shape": list(images.shape[1:])} | pictures,
        "versions": {"pytorch_grad_cam_pcasvm": __version__, "torch": torch.__version__},
        "digest": digest,
    }


def _pairwise(head: Head | None) -> bool:
    """Return whether the scores of a head are scores of pairs of classes."""
    if head is None or head.decision_position is None:
        return False
    return head.voting.score == "values"


_PACKAGE = Path(__file__).parent
MARK = "pytorch_grad_cam_pcasvm explainer"  # in the style sheet of every page
_PART = 12 << 20  # bytes of a file in one script
_RUNTIME = {
    "runtime": "ort.wasm.min.js", "glue": "ort-wasm-simd-threaded.mjs", "wasm": "ort-wasm-simd-threaded.wasm",
}  # fmt: skip


def page(
    model: str | PathLike[str], out: str | PathLike[str], runtime: str | PathLike[str], *, title: str | None = None
) -> Path:
    """Write a page that explains photos in the browser, with a file from :func:`onnx` and without a server.

    The folder opens from the file system, offline. Photos that are dropped on the page are prepared as by Pillow (with
    the file's ``resize`` and ``interpolation``), explained by onnxruntime-web on one thread, and shown with scores and
    signed maps. Nothing leaves the computer: the page's own security policy forbids contact with any server.

    Args:
        model: the file from :func:`onnx`.
        out: a new or empty folder, or one with an earlier page, which is replaced.
        runtime: the folder of the npm package onnxruntime-web; ``npm install onnxruntime-web`` creates
            ``node_modules/onnxruntime-web``. 15 MB of it are copied.
        title: the title of the page; None: "Explain a photo".

    Returns:
        The path of the page.

    Raises:
        FileExistsError: the folder contains something else.
        FileNotFoundError: the runtime is missing.
        ImportError: the ``[export]`` extra is not installed.
        ValueError: the file is not an explanation, or not one of pictures.

    Example:
        >>> export.page("explainer.onnx", "page", "node_modules/onnxruntime-web")  # doctest: +SKIP
        PosixPath('page/index.html')
    """
    model, out, runtime = Path(model), Path(out), Path(runtime)
    about = Explainer(model).about
    shape = about["input"]["shape"]
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(f"{model} explains images of shape {tuple(shape)}, and browsers read pictures: (1 or 3, H, W)")
    files = runtime_files(runtime) | {"model": model}
    check_folder(out, "page.css", MARK, "page")
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    (out / "index.html").unlink(missing_ok=True)
    # First of all, so that a folder whose writing was stopped is known as one of a page.
    script = files.pop("runtime")
    for source in (_PACKAGE / "page.css", _PACKAGE / "page.js", script):
        with name_path(out / source.name):
            shutil.copyfile(source, out / source.name)
    for old in data.glob("*.js"):
        old.unlink()
    parts = {name: _write(data, name, file.read_bytes()) for name, file in files.items()}
    for name in ("sample", "measured"):  # which the page has no use for
        about.pop(name, None)
    about["page"] = {"title": title or "Explain a photo", "parts": parts}
    _write(data, "about", json.dumps(about).encode())
    with atomically(out / "index.html") as file:  # only now is it a page
        file.write((_PACKAGE / "page.html").read_bytes())
    return out / "index.html"


def runtime_files(runtime: Path) -> dict[str, Path]:
    """Return the files of onnxruntime-web that a page needs.

    Raises:
        FileNotFoundError: a file is missing.
    """
    files = {}
    for key, name in _RUNTIME.items():
        path = next((path for path in (runtime / "dist" / name, runtime / name) if path.is_file()), None)
        if path is None:
            install = "run 'npm install onnxruntime-web', and pass runtime='node_modules/onnxruntime-web'"
            refuse(FileNotFoundError, f"{runtime} has no {name}", Fix(install, "runtime"))
        files[key] = path
    return files


def _write(data: Path, name: str, content: bytes) -> int:
    """Write bytes as scripts, which are all that a page from the file system may read, and return how many."""
    starts = range(0, len(content), _PART)
    for part, start in enumerate(starts):
        encoded = base64.b64encode(content[start : start + _PART]).decode()
        with name_path(data / f"{name}{part}.js"):
            (data / f"{name}{part}.js").write_text(f'explainer.receive("{name}", "{encoded}");\n')
    return len(starts)
