"""Exports: an atlas for other tools, written a block of rows at a time."""

import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.targets import PCATarget, SVMTarget

_PIXELS = 96  # of pictures and attributions for ViRelAy


def export(store: Any, kind: str, path: Path) -> Path:
    """Write an atlas: see :meth:`Atlas.export`."""
    writers: dict[str, Callable[[Any, Path], None]] = {"npz": _npz, "zarr": _zarr, "virelay": _virelay}
    if kind not in writers:
        raise ValueError(f"kind must be one of {', '.join(sorted(writers))}, got {kind!r}")
    if path.exists():
        raise FileExistsError(f"{path} already exists: choose another path")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write in: make it first")
    warn(
        f"export({kind!r}) goes in version 0.7: the atlas is Parquet, which pandas, DuckDB and Hugging Face datasets "
        "read as it is; to_pandas() gives the numbers, and maps() the maps",
        FutureWarning,
    )
    try:
        writers[kind](store, path)
    except BaseException:  # nothing half written is left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
    return path


def make_frame(store: Any) -> Any:
    """Return a DataFrame of an atlas: see :meth:`Atlas.to_pandas`."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("to_pandas needs pandas: pip install pandas") from error
    columns: dict[str, Any] = {"row": store.rows, "id": store.ids}
    for name, values in (("label", store.labels), ("prediction", store.predictions)):
        if values is not None:
            columns[name] = values
    with suppress(ValueError):  # nothing to compare
        columns["correct"] = store.correct
    classes = store.manifest["classes"]
    width = store.scores.shape[1]
    of_classes = store.names(classes) if classes is not None and len(classes) == width else range(width)
    columns |= {f"score {name}": store.scores[:, c] for c, name in enumerate(of_classes)}
    columns |= {f"p{b + 1}": store.components[:, b] for b in range(store.components.shape[1])}
    return pd.DataFrame(columns)


def _list_numbers(store: Any) -> dict[str, np.ndarray]:
    """Return the columns of one number, or a few, for each row."""
    names = ("rows", "ids", "places", "labels", "predictions", "scores", "components", "nu", "log_scale",
             "baseline_values", "remainder")  # fmt: skip
    columns = {name: getattr(store, name) for name in names}
    return {name: array for name, array in columns.items() if array is not None}


def _npz(store: Any, path: Path) -> None:
    """Write arrays named as the store's; ``maps`` (R, B, H, W) in half precision, divided by ``nu``."""
    shape = (len(store), *store.manifest["columns"]["maps"][1:])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in _list_numbers(store).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
        with archive.open("maps.npy", "w", force_zip64=True) as file:
            header = {
                "descr": np.lib.format.dtype_to_descr(np.dtype(np.float16)),
                "fortran_order": False,
                "shape": shape,
            }
            np.lib.format.write_array_header_2_0(file, header)
            for _, block in store.table.blocks(["maps"]):
                file.write(np.ascontiguousarray(block["maps"]).tobytes())


def _zarr(store: Any, path: Path) -> None:
    """Write a group of arrays named as the store's; ``maps`` in half precision, divided by ``nu``."""
    try:
        import zarr
    except ImportError as error:
        raise ImportError("export('zarr') needs zarr: pip install zarr") from error
    group = zarr.open_group(str(path), mode="w")
    for name, array in _list_numbers(store).items():
        if array.dtype.kind in "UO":
            group.attrs[name] = [None if value is None else str(value) for value in array.tolist()]
        else:
            group.create_array(name, shape=array.shape, dtype=array.dtype)[...] = array
    shape = (len(store), *store.manifest["columns"]["maps"][1:])
    maps = group.create_array("maps", shape=shape, dtype=np.float16, chunks=(min(256, shape[0]), *shape[1:]))
    for start, block in store.table.blocks(["maps"]):
        maps[start : start + len(block["maps"])] = block["maps"]
    group.attrs["manifest"] = store.manifest


def _virelay(store: Any, path: Path) -> None:
    """Write a project folder: pictures, the map of each image's predicted class, components as the embedding."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError("export('virelay') needs h5py: pip install h5py") from error
    if len(store.manifest["columns"]["maps"]) != 4:
        raise ValueError("ViRelAy shows pictures, but these are maps of volumes: read them with store.maps()")
    if not store.manifest["thumbnails"]:
        raise ValueError("ViRelAy shows pictures, but this atlas was built with thumbnails=False")
    decided = store.head.classes_ is not None
    shown = store.predictions if decided and store.predictions is not None else np.zeros(len(store), int)
    classes = store.manifest["classes"] if decided else [0]
    truth = shown if store.labels is None else store.labels
    # Labels that are none of the head's classes have numbers behind these.
    names = list(dict.fromkeys([*store.names(classes), *sorted(set(store.names(truth)))]))
    number = {name: index for index, name in enumerate(names)}
    path.mkdir()
    with h5py.File(path / "input.h5", "w") as input_, h5py.File(path / "attribution.h5", "w") as attribution:
        size = (len(store), 3, _PIXELS, _PIXELS)
        data = input_.create_dataset("data", size, np.float32, chunks=(1, *size[1:]))
        input_["label"] = np.array([number[name] for name in store.names(truth)], np.uint16)
        maps = attribution.create_dataset("attribution", (len(store), 1, _PIXELS, _PIXELS), np.float32)
        attribution["index"] = np.arange(len(store), dtype=np.uint32)
        attribution["label"] = np.array([number[name] for name in store.names(shown)], np.uint16)
        attribution["prediction"] = store.scores.astype(np.float32)
        target: Any = SVMTarget() if decided else PCATarget(0)
        for start in range(0, len(store), 256):
            rows = range(start, min(start + 256, len(store)))
            data[rows[0] : rows[-1] + 1] = np.stack(list(_write_pictures(store, rows)))
            maps[rows[0] : rows[-1] + 1] = upsample_maps(store.explain(rows, [target]).maps, (_PIXELS, _PIXELS)).numpy()
    with h5py.File(path / "analysis.h5", "w") as analysis:
        group = analysis.create_group("components")
        group["index"] = np.arange(len(store), dtype=np.uint32)
        group["embedding/pca"] = store.components.astype(np.float32)
        group["cluster/prediction"] = np.array([number[name] for name in store.names(shown)], np.uint32)
    label_map = [{"index": index, "word_net_id": f"{index:08d}", "name": name} for index, name in enumerate(names)]
    (path / "label-map.json").write_text(json.dumps(label_map, indent=1), encoding="utf-8")
    project = {
        "project": {
            "name": store.folder.name,
            "model": store.manifest["backbone"],
            "label_map": "label-map.json",
            "dataset": {
                "name": store.folder.name,
                "type": "hdf5",
                "path": "input.h5",
                "input_width": _PIXELS,
                "input_height": _PIXELS,
                "up_sampling_method": "none",
                "down_sampling_method": "none",
            },
            "attributions": {
                "attribution_method": store.manifest["method"],
                "attribution_strategy": "predicted_label",
                "sources": ["attribution.h5"],
            },
            "analyses": [{"analysis_method": "PCA", "sources": ["analysis.h5"]}],
        }
    }
    # JSON is YAML.
    (path / "project.yaml").write_text(json.dumps(project, indent=2) + "\n", encoding="utf-8")


def _write_pictures(store: Any, rows: range) -> Iterator[np.ndarray]:
    """Yield the small pictures of rows, (3, h, w) in [0, 1], of one size."""
    for written in store.thumbnails(rows):
        picture = Image.open(io.BytesIO(written)).convert("RGB").resize((_PIXELS, _PIXELS))
        yield np.asarray(picture, np.float32).transpose(2, 0, 1) / 255
