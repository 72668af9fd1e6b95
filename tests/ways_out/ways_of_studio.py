"""What programs, files, atlases, figures and models refuse, and what follows the advice."""

import dataclasses
import json
import shutil

from atlases import Pictures
from atlases import layer as atlas_layer
from atlases import problem as atlas_problem
from PIL import Image
from pyarrow import parquet
from torch.utils.data import TensorDataset
from torchvision.models import VisionTransformer
from torchvision.transforms import ToTensor
from ways_builders import *

from pytorch_grad_cam_pcasvm import NoClosedFormError, ShapCAM, atlas, evaluation
from pytorch_grad_cam_pcasvm.studio.data.files import list_files
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder
from pytorch_grad_cam_pcasvm.studio.export import files, graph
from pytorch_grad_cam_pcasvm.studio.model.backbones import _read_state, _refuse_size
from pytorch_grad_cam_pcasvm.studio.pictures.read import read_picture


def tanh(x: Tensor) -> Tensor:
    return x.tanh()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer versions of torch call it deprecated
    scripted_tanh, ScriptedTanh = torch.jit.script(tanh), torch.jit.script(nn.Tanh())


def explainer(
    step: Any, method: Any = ClosedFormGradCAM, layer: str = "stem", before: Any = None, **options: Any
) -> tuple[Any, Tensor]:
    """Return a method and images in single precision, which programs are made of; ``before`` is a step of images."""
    torch.manual_seed(0)
    backbone = Stepped(step if isinstance(step, nn.Module) else Step(step)).eval()
    if before is not None:
        backbone.stem = nn.Sequential(Step(before), backbone.stem)
    net = PCASVMNet(backbone, head_for(backbone, IMAGES.float())).eval()
    return method(net, [layer], **options), IMAGES[:3].float()


def program(step: Any, *args: Any, targets: Any = None, **options: Any) -> Any:
    cam, x = explainer(step, *args, **options)
    return export.program(cam, x, targets)


def onnx(step: Any, path: Path, **options: Any) -> Any:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    cam, x = explainer(step)
    return export.onnx(cam, x, path / "explainer.onnx", **options)


def in_single_and_double() -> SignedMaps:
    cam, x = explainer(torch.tanh)
    return ClosedFormGradCAM(cam.model.double(), ["stem"]).explain(x.double())


def with_wrong_numbers(export_with: Callable[[], Any]) -> Any:
    """Export with an operator that computes something else."""
    table = files.decompositions()
    with pytest.MonkeyPatch.context() as patch:
        wrong = {torch.ops.aten.tanh.default: lambda x: 1 + x}
        patch.setattr(files, "decompositions", lambda: table | wrong)
        patch.setattr(graph, "plain_zeros", twisted)
        return export_with()


def twisted(traced: Any) -> None:
    for node in traced.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
        node.target = torch.ops.aten.sin.default


def closed_form_of_bessel() -> str:
    with pytest.raises(NoClosedFormError, match=r"aten\.i0") as caught:
        program(torch.special.i0)
    return caught.value.reason


def listed(name: str | None = None, *, as_masks: bool = True, prefix: str = "") -> Any:
    """Return the photos of a folder, beside which another has masks of the same names, or photos."""
    root = fresh("listed")
    for folder_name in ["images", *[name] * (name is not None)]:
        (root / folder_name).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng(number).integers(0, 256, (20, 30), np.uint8)
            marked = as_masks and folder_name != "images"
            file = f"{prefix if folder_name != 'images' else ''}{number}.png"
            Image.fromarray(np.kron(pixels[:2, :3] > 90, np.ones((10, 10), bool)) if marked else pixels).save(
                root / folder_name / file
            )
    return list_files(root).photos or None


def masked(*names: str, mask: str) -> Any:
    """Return the pixels of the mask of the last of some photos."""
    root = fresh("masked")
    for name in (*(f"photos/{one}" for one in names), f"masks/{mask}"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(root / name)
    return MaskFolder(root / "masks", names, [root / "photos" / one for one in names]).of(len(names) - 1, (8, 8), None)


def annotated(*names: str, said: str, mask: str = "", at: str = "marked", width: int = 8) -> Any:
    """Return the pixels that COCO's annotations mark on the last of some photos, which they call by a name."""
    root = fresh("annotated")
    (root / "marked").mkdir(parents=True)
    for name in (*(f"photos/{one}" for one in names), *[mask] * bool(mask)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(root / name)
    photo = {"id": 1, "file_name": said, "width": width, "height": 8}
    thing = {"image_id": 1, "category_id": 1, "bbox": [2, 2, 4, 4]}
    text = {"images": [photo], "annotations": [thing], "categories": [{"id": 1, "name": "dent"}]}
    (root / "marked" / "a.json").write_text(json.dumps(text))
    return MaskFolder(root / at, names, [root / "photos" / one for one in names]).of(len(names) - 1, (8, 8), None)


def named_alike(name: str) -> Any:
    place = fresh("alike")
    place.mkdir()
    for file, inside, outside in (("a.bmp", 0, 200), (name, 255, 0)):
        picture = Image.new("L", (40, 30), outside)
        picture.paste(inside, (5, 5, 15, 15))
        picture.save(place / file)
    return np.array([len(list_files(place).photos)])


def paged(page: int | None = None) -> Any:
    path = fresh("paged").with_suffix(".tif")
    one, other = (Image.new("L", (4, 4), grey) for grey in (10, 20))
    one.save(path, save_all=True, append_images=[other])
    return np.asarray(read_picture(path, page=page))


def coloured() -> Any:
    path = fresh("coloured").with_suffix(".tif")
    Image.new("RGB", (4, 4)).save(path)
    return np.asarray(read_picture(path))


def fresh(name: str) -> Path:
    """Return an empty place of its own for an atlas."""
    return folder() / f"{name}{next(NUMBERING)}"


def build(out: Path, data: Any = None, net: Any = None, **options: Any) -> Any:
    own, rows = atlas_problem()
    rows = TensorDataset(*(tensor[:40] for tensor in rows.tensors)) if data is None else data
    options = {"shard_size": 32, "progress": False} | options
    return atlas.build(net or own, rows, [atlas_layer(net or own)], out, **options)


def built(name: str, **options: Any) -> Path:
    out = fresh(name)
    build(out, **options)
    return out


def changed_rows() -> TensorDataset:
    """Return the data set with another image at the beginning of the second shard."""
    x, y = (tensor[:40].clone() for tensor in atlas_problem()[1].tensors)
    x[32] += 1
    return TensorDataset(x, y)


def without_the_other_shard(out: Path) -> Any:
    (out / "part-00001.parquet").unlink()
    return build(out, changed_rows())


def of_version_0_2_0() -> Path:
    """Return an atlas whose shards have no digests."""
    out = built("old")
    for number, shard in enumerate(sorted(out.glob("*.parquet"))):
        table = parquet.read_table(shard)
        first = [32 * number, table["digest"][0].as_py(), table["label"][0].as_py()]
        metadata = table.schema.metadata | {b"first": json.dumps(first).encode()}
        parquet.write_table(table.drop(["digest"]).replace_schema_metadata(metadata), shard)
    return out


def in_the_way() -> Path:
    out = fresh("other")
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    return out


def missing_row(**options: Any) -> Any:
    _, rows = atlas_problem()
    return build(fresh("bad"), Pictures(TensorDataset(*(tensor[:40] for tensor in rows.tensors)), (3,)), **options)


def rebuilt(out: Path, **options: Any) -> Any:
    shutil.rmtree(out)
    return build(out, **options)


def hooked_net() -> PCASVMNet:
    """Return the same network with a hook that changes its numbers."""
    net = copy.deepcopy(atlas_problem()[0])
    atlas_layer(net).register_forward_hook(lambda module, args, output: 2 * output)
    return net


ANOTHER = {"give another folder as out=": lambda: build(fresh("another"))}
BUILT = "studio/atlas/"


def of_signals() -> tuple[Tensor, SignedMaps]:
    backbone = seeded(lambda: nn.Sequential(nn.Conv1d(2, 5, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten()))
    x = random(9, 2, 16)
    return x, ClosedFormGradCAM(PCASVMNet(backbone, head_for(backbone, x)).eval(), ["1"]).explain(x)


@cache
def stored_features() -> Any:
    return atlas.extract(BACKBONE, list(PICTURES), "0", out=folder() / "stored", progress=False)


def read_features(layer: str = "0") -> np.ndarray:
    return extract_features(BACKBONE, stored_features(), layer, progress=False)[0]


def extracted_anew() -> Any:
    return atlas.extract(BACKBONE, list(PICTURES), "1", out=folder() / "anew", progress=False)


def one_slice() -> Any:
    x, maps = of_volumes()
    return figures.plot_maps(x[:, 0, 0], dataclasses.replace(maps, maps=maps.maps[:, :, 0]))


def weights(name: str, content: Any, save: Any = torch.save) -> Path:
    path = folder() / name
    save(content, path)
    return path


def state_of_script() -> Any:
    path = weights("script.pt", ScriptedTanh, lambda module, path: module.save(path))
    torch.save(torch.jit.load(path).state_dict(), folder() / "weights.pth")
    return _read_state(folder() / "weights.pth")


def state_of_network() -> Any:
    net = torch.load(weights("network.pth", nn.Linear(2, 2)), weights_only=False)
    return _read_state(weights("state.pth", net.state_dict()))


FIXED = seeded(lambda: VisionTransformer(32, 16, 1, 2, 8, 8))
UNIT = PICTURES[:3].sigmoid()  # as people see them


# fmt: off
ROWS = [
    Row("studio/model/model.py: takes a head that decides once for each image",
        lambda: figures.plot_jacobian(net_at("dense").eval(), None, PICTURES[:1]),
        "plot_jacobian takes a head that decides once for each image", {
        "explain it with cam.explain": partial(at_a_place, pool="dense"),
        "draw it with figures.plot_positions": lambda: figures.plot_positions(torch.zeros(2, 8, 8),
            net_at("dense").eval()(PICTURES[:2])[:, 0])}),
    Row(PROGRAM + "runs each image on its own", partial(program, torch.tanh, ShapCAM, baseline="zero"),
        "ShapCAM runs each image on its own", {
        "export ContributionCAM": partial(program, torch.tanh, ContributionCAM, baseline="zero"),
        "or a gradient method": partial(program, torch.tanh)}),
    Row(PROGRAM + "a program has no autograd", partial(program, torch.special.i0, jacobian="auto"),
        "a program has no autograd", {
        LATER: partial(program, torch.special.i0, layer="later", jacobian="auto"),
        "use jacobian='closed_form', which names the step": closed_form_of_bessel}),
    Row(PROGRAM + "is a function of your own", partial(program, torch.tanh, targets=[OwnTarget()]),
        "is a function of your own", {
        "SVMTarget": partial(program, torch.tanh, targets=[SVMTarget()]),
        "PCATarget": partial(program, torch.tanh, targets=[PCATarget(0)])}),
    Row(PROGRAM + "decides by the value of a number", partial(program, lambda x: x if x.mean() > 1e6 else 2 * x),
        "decides by the value of a number", {
        "take the decision out of the network": partial(program, lambda x: 2 * x),
        "cam.explain(images)": lambda: (lambda cam,
            x: cam.explain(x))(*explainer(lambda x: x if x.mean() > 1e6 else 2 * x))}),
    Row(PROGRAM + "cannot be traced through",
        partial(program, torch.tanh, before=lambda x: torch.from_numpy(x.numpy())),
        "ClosedFormGradCAM cannot be traced through PCASVMNet", {
        "if the network does that, write it with torch's functions": partial(program, torch.tanh),
        "if its derivative does, choose a later target layer": "has a row of its own",
        "export a gradient method such as ClosedFormGradCAM": "has a row of its own"}),
    Row(PROGRAM + "cannot be traced through", partial(program, nn.GroupNorm(2, 4), ClosedFormShapleyCAM),
        "ClosedFormShapleyCAM cannot be traced through PCASVMNet", {
        "if the network does that, write it with torch's functions": "has a row of its own",
        "if its derivative does, choose a later target layer": partial(program, nn.GroupNorm(2, 4),
            ClosedFormShapleyCAM, "later"),
        "export a gradient method such as ClosedFormGradCAM": partial(program, nn.GroupNorm(2, 4))}),
    Row(PROGRAM + "images only", partial(program, lambda x: x / len(x)), "is traced for 61 images only", {
        "use x.shape[0]": partial(program, lambda x: x / x.shape[0]),
        "where it is a second derivative": "has a row of its own"}),
    Row(PROGRAM + "images only", partial(program, nn.MaxPool2d(3, 1, 1), ClosedFormShapleyCAM),
        "a second derivative of ClosedFormShapleyCAM", {
        "use x.shape[0]": "has a row of its own",
        "export ContributionCAM": partial(program, nn.MaxPool2d(3, 1, 1), ContributionCAM, baseline="zero"),
        "or ClosedFormGradCAM": partial(program, nn.MaxPool2d(3, 1, 1))}),
    Row("studio/export/outputs.py: differ from explain", lambda: with_wrong_numbers(partial(program, torch.tanh)),
        "the program gives", {"report this network": "is for us to mend"}),
    Row("studio/export/outputs.py: differ from explain",
        lambda: with_wrong_numbers(partial(onnx, torch.tanh, folder())), "onnxruntime gives", {
        "use export.program": partial(program, torch.tanh),
        "see whether explain changes as much with net.double()": in_single_and_double,
        "report this network": "is for us to mend"}),
    Row("studio/export/files.py: torch cannot bring this network to ONNX",
        lambda: (bessel(), onnx(torch.special.i0, folder())), "torch cannot bring this network to ONNX", {
        "use export.program, which needs no ONNX": lambda: (bessel(), program(torch.special.i0))[1],
        "pass another opset": "is for an operator that only later ones have"}),
    Row(BUILT + "run.py: is not empty and not an atlas", lambda: build(in_the_way()), "is not empty and not an atlas",
        ANOTHER),
    Row(BUILT + "run.py: was made from other images or labels", lambda: build(built("images"), changed_rows()),
        "was made from other images or labels",
        ANOTHER | {"delete part-00001.parquet, and run the same build again": lambda: without_the_other_shard(
                built("images")), "compare every image before that, with verify=True": lambda: build(built("verified"),
                verify=True)}),
    Row(BUILT + "run.py: cannot be verified", lambda: build(of_version_0_2_0(), verify=True),
        "cannot be verified, as version 0.2.0 made it",
        ANOTHER | {"leave out verify=True": lambda: build(of_version_0_2_0())}),
    Row(BUILT + "run.py: cannot be read", missing_row, "image 3 (3) cannot be read", {
        "mend the image and run the same again": lambda: build(fresh("mended")),
        "pass skip_bad_images=True": partial(missing_row, skip_bad_images=True)}),
    Row(BUILT + "disk.py: there is no atlas in", lambda: atlas.load(fresh("nothing")), "there is no atlas in", {
        "make one with atlas.build(": lambda: atlas.load(built("made"))}),
    Row(BUILT + "disk.py: has {noun} of something else ({differences})",
        lambda: build(built("head"), net=atlas_problem("linear")[0]), "has an atlas of something else",
        ANOTHER | {"delete it": lambda: rebuilt(built("head"), net=atlas_problem("linear")[0])}),
    Row(BUILT + "disk.py: have hooks, attributes or functions", lambda: build(built("hooks"), net=hooked_net()),
        "have hooks, attributes or functions of the network changed?",
        ANOTHER | {"delete it": lambda: rebuilt(built("hooks"), net=hooked_net())}),
    Row("studio/atlas/build.py: an atlas is made of a PCASVMNet",
        lambda: atlas.build(BACKBONE, TensorDataset(PICTURES), ["0"], fresh("net")), "an atlas is made of a PCASVMNet",
        {"use PCASVMNet(backbone, head)": lambda: build(fresh("net"))}),
    Row("studio/atlas/build.py: but the head has several outputs",
        lambda: build(fresh("several"), TensorDataset(PICTURES[:40], torch.tensor(THREE[:40])),
            net_of(make_pipeline(PCA(2), MultiOutputClassifier(SVC())), COLUMNS)),
        "an atlas keeps one prediction for each image", {
        "fit a head for each of them": lambda: build(fresh("one"), TensorDataset(PICTURES[:40], torch.tensor(TWO[:40])),
            net_of(make_pipeline(PCA(2), SVC()), TWO)),
        "explain images with cam.explain": partial(maps_of, MultiOutputClassifier(SVC()), COLUMNS)}),
    Row("studio/data/images.py: but the network takes tensors: pass transform=",
        lambda: build(fresh("pictures"), [(Image.new("RGB", (12, 12), (9 * n, 0, 0)), n % 2) for n in range(9)]),
        "the image is a Image, but the network takes tensors", {
        "pass transform=": lambda: build(fresh("pictures"),
            [(Image.new("RGB", (12, 12), (9 * n, 0, 0)), n % 2) for n in range(9)], transform=ToTensor())}),
    Row("studio/evaluation/subject.py: pass target=PCATarget(0)",
        lambda: evaluation.faithfulness(net_of(HALF), PICTURES[:6], ["0"], progress=False),
        "the head has no SVM, so there is no decision to explain", {
        "pass target=PCATarget(0)": lambda: evaluation.faithfulness(net_of(HALF), PICTURES[:6], ["0"],
            target=PCATarget(0), progress=False)}),
    Row("studio/figures/grid.py: are of volumes", lambda: figures.plot_maps(*of_volumes()), "are of volumes", {
        "use figures.plot_volume": lambda: figures.plot_volume(*of_volumes()),
        "dataclasses.replace(maps, maps=maps.maps[:, :, d])": one_slice}),
    Row("studio/figures/grid.py: are of signals", lambda: figures.plot_maps(*of_signals()), "are of signals", {
        "use figures.plot_signal": lambda: figures.plot_signal(*of_signals())}),
    Row("studio/data/mask_search.py: by name, but", partial(listed, "masks", as_masks=False),
        "0.png has as many colours as a photo", {
        "rename the folder": partial(listed, "dents", as_masks=False),
        "save them as PNG, in few colours, with the names and sizes of their photos": partial(listed, "masks"),
        "or move them out of": listed}),
    Row("studio/data/mask_search.py: are photos by name", partial(listed, "dents"),
        "are photos by name, but have few colours, and the names and sizes of others", {
        "rename the folder to": partial(listed, "masks"),
        "name the files otherwise, as in new_0.png": partial(listed, "dents", prefix="new_")}),
    Row("studio/data/photo_names.py: would have the same mask",
        partial(masked, "good/0.png", "dent/0.png", mask="0.png"),
        "good/0.png and dent/0.png would have the same mask", {
        "put masks into folders as the pictures are": partial(masked, "good/0.png", "dent/0.png", mask="dent/0.png"),
        "name pictures differently": partial(masked, "good/1.png", "dent/0.png", mask="0.png")}),
    Row("studio/data/photo_names.py: which may be", partial(annotated, "good/0.png", "dent/0.png", said="0.png"),
        "has annotations of 0.png, which may be good/0.png and dent/0.png", {
        "name photos there with their folders": partial(annotated, "good/0.png", "dent/0.png", said="dent/0.png"),
        "name pictures differently": partial(annotated, "good/1.png", "dent/0.png", said="0.png")}),
    Row("studio/data/mask_owners.py: and masks", partial(annotated, "0.png", said="0.png", mask="marked/0.png"),
        "keep one kind in a folder", {
        "keep one kind in a folder": partial(annotated, "0.png", said="0.png"),
        "or name a file of annotations":
            partial(annotated, "0.png", said="0.png", mask="marked/0.png", at="marked/a.json")}),
    Row("studio/data/masks.py: was it cropped", partial(annotated, "0.png", said="0.png", width=9),
        "9 x 8 pixels, but its picture 8 x 8", {
        "Take the picture that was annotated": partial(annotated, "0.png", said="0.png")}),
    Row("studio/data/mask_search.py: have one name, and few colours both", partial(named_alike, "a.png"),
        "have one name, and few colours both", {
        "end its name in _mask, as in a_mask.png": partial(named_alike, "a_mask.png"),
        "name them differently": partial(named_alike, "b.png")}),
    Row("studio/pictures/read.py: and nobody knows which", paged,
        "it has 2 pages, and nobody knows which is the picture", {
        "name it, --page 1 (in Python page=1)": partial(paged, 1), "save them as one picture in RGB": coloured}),
    Row("studio/atlas/features.py: has features of something else", partial(read_features, "1"),
        "has features of something else", {
        "pass the same network, layer and pool": read_features,
        "extract them anew, atlas.extract(..., out=) with another folder": extracted_anew}),
    Row("studio/atlas/disk.py: there are no features in", lambda: atlas.Features(folder()), "there are no features in",
        {"extract them, atlas.extract(..., out=": extracted_anew}),
    Row("studio/atlas/disk.py: has {nouns[0]}, and not", lambda: atlas.load(stored_features().folder),
        "has features, and not an atlas", {"give another folder as out=": extracted_anew}),
    Row("studio/figures/grid.py: and cannot be compared",
        lambda: figures.plot_maps(UNIT, {"one": of_components(), "other": of_components(targets=[SVMTarget(0)])},
            compare=True), "have different targets", {
        "give every explain the same targets": lambda: figures.plot_maps(UNIT,
            {"one": of_components(), "other": of_components(ClosedFormGradCAM)})}),
    Row("studio/figures/decision.py: gradient maps do not add up to the decision",
        lambda: figures.plot_decision(UNIT, of_components(ClosedFormGradCAM),
            make_pipeline(StandardScaler(), PCA(3), LinearSVC()).fit(FEATURES, THREE)),
        "gradient maps do not add up to the decision", {
        "give those of ContributionCAM(...).explain(x)": lambda: figures.plot_decision(UNIT, of_components(),
            make_pipeline(StandardScaler(), PCA(3), LinearSVC()).fit(FEATURES, THREE))}),
    Row("studio/model/backbones.py: as its positions are those of one size",
        lambda: _refuse_size(FIXED, "vit", (48, 64)), "vit does not take images of 64x48 pixels", {
        "cut pictures into tiles of its own size": lambda: TiledNet(FIXED, "encoder", "cls",
            tiles=(2, 1))(random(1, 3, 32, 48)),
        "take a convolutional network": lambda: _refuse_size(WINDOW, "cnn", (48, 64)) or WINDOW}),
    Row("studio/model/backbones.py: is a TorchScript archive",
        lambda: _read_state(weights("script.pt", ScriptedTanh, lambda module, path: module.save(path))),
        "is a TorchScript archive", {"torch.jit.load(": state_of_script}),
    Row("studio/model/backbones.py: has no state dict", lambda: _read_state(weights("network.pth", nn.Linear(2, 2))),
        "has no state dict", {"write it with torch.save(net.state_dict(), 'network.pth')": state_of_network}),
]
# fmt: on
