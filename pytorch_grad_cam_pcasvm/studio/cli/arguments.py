"""The arguments of the command line: the options of each command, as they are typed."""

import argparse
import shlex
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.studio.cli.options import (
    Parser,
    ShowVersions,
    add_options,
    list_flags,
    number_from,
    option,
    parse_amount,
    parse_gamma,
    parse_name,
    parse_place,
    parse_region,
    parse_share,
    parse_size,
    parse_tiles,
    parse_window,
    place,
    read_options,
)

# What the commands need is imported when they run: help is asked for more often.
METHODS = sorted(package._NAMES["methods"].split())
CLASSIFIERS = ("svm", "forest", "boosting", "pca", "neighbours", "residual")
BACKGROUND = "background"  # outside of masks
COVERAGE = 0.2  # of a patch
GOOD_PARTS = ("pca", "neighbours", "residual")  # classifiers that learn from good parts alone
POOLS = ("mean", "max", "gem", "cls", "cls+mean", "dense", "none")
RUN = "pcasvm-cam"
MODEL = Path("model.safetensors")
# What explains with a file takes.
_OF_FILES = ("images", "model", "out", "outline", "regions", "skip_bad_images", "threads")
_NET, _PATCH, _GOOD = "network and pictures", "patches, with --pool dense", "threshold"
_SVM, _RUNS = "SVM", "reading and computing"
OF_HEADS = "for a head alone, of Head.save or of version 0.4"

_NORMAL = "--masks: the class of photos with nothing on them (default: good, normal, ok, healthy, ...)"
_COUNT = number_from(1, whole=True)
_PAGE = "of TIFFs of several pages, and DICOM of several frames, the one that is the photo (default: {})"
_DEVICE = parse_name(
    "cpu", "cuda", "mps", form="cuda:NUMBER", fits=lambda text: text[:5] == "cuda:" and text[5:].isdigit()
)
_NAMED_POOL = parse_name(*POOLS, form="dense:NUMBER", fits=lambda text: text.partition(":")[0] in ("dense", "gem"))
_RATE = parse_share("0.01 for one in a hundred", above=True)
_RESIZE = parse_name("stretch", "pad", "crop")
_CLASSIFIER = parse_name(*CLASSIFIERS, form="module:Class", fits=lambda text: ":" in text)


def parse_pool(text: str) -> str:
    """Return a pool, whose number is an odd size for dense:NUMBER, and a power for gem:NUMBER."""
    name, colon, number = _NAMED_POOL(text).partition(":")
    if not colon:
        return text
    try:
        fits = int(number) > 0 and int(number) % 2 == 1 if name == "dense" else 0 < float(number) < float("inf")
    except ValueError:
        fits = False
    if not fits:
        expected = "an odd size, as in dense:3" if name == "dense" else "a positive power, as in gem:3"
        raise argparse.ArgumentTypeError(f"{name}:NUMBER takes {expected}, got {text!r}")
    return text


@dataclass(kw_only=True)
class Command:
    """The options that all commands have.

    Attributes:
        name: of the command.
        text: what it does.
        examples: what may be typed behind its name.
        runs: where the function is that runs it.
        writes_file: whether ``out`` is a file.
        resumes: whether work that is finished is kept, and not done again.
        started: when the process started, by ``time.monotonic``; no option.
    """

    name: ClassVar[str]
    text: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    runs: ClassVar[str]
    writes_file: ClassVar[bool] = False
    resumes: ClassVar[bool] = False

    threads: int | None = option(
        "threads to compute with (default: the cores of this process)", parse=_COUNT, group=_RUNS
    )
    started: float = field(default=0.0, compare=False)

    def check(self) -> None:
        """Refuse options that contradict each other, before anything is imported that takes long."""

    def run(self) -> None:
        """Run the command."""
        module, name = self.runs.split(":")
        getattr(import_module(f"pytorch_grad_cam_pcasvm.studio.cli.{module}"), name)(self)


@dataclass(kw_only=True)
class Reading(Command):
    """How photos are read."""

    device: str | None = option("cuda or cpu (default: cuda if available)", parse=_DEVICE, group=_RUNS)
    batch_size: int = option("photos at a time (default: 16)", 16, parse=_COUNT, group=_RUNS)
    workers: int = option("processes that read photos (default: 0)", 0, parse=number_from(0, whole=True), group=_RUNS)
    no_cache: bool = option("do not keep features, or use those that were kept", False, group=_RUNS)
    skip_bad_images: bool = option("leave out photos that cannot be read, and list them", False, group=_RUNS)


@dataclass(kw_only=True)
class EngineOptions(Reading):
    """Where a whole folder is computed."""

    engine: str = option("where to run: local (default) or ray", "local", parse=parse_name("local", "ray"), group=_RUNS)
    processes: int | None = option(
        "number of processes, each with its share of the threads or a GPU", parse=_COUNT, group=_RUNS
    )


@dataclass(kw_only=True)
class FitOptions(EngineOptions):
    """The options of ``fit``.

    Attributes:
        chooses_components: whether the number of components is to be chosen, as none was typed; no option.
    """

    name = "fit"
    text = "learn from folders of photos: one model file"
    examples = ("photos/train", "photos/good")
    runs = "fitting:fit"
    writes_file = resumes = True

    chooses_components: bool = field(default=False, compare=False)

    images: Path = place("folder with one subfolder of photos for each class", metavar="PHOTOS")
    out: Path = option("file for the model (default: model.safetensors)", MODEL, flag="--out --model", metavar="FILE")
    backbone: str = option(
        "a torchvision model, timm:NAME, or module:function that returns your own (default: mobilenet_v2)",
        "mobilenet_v2",
        group=_NET,
    )
    weights: Path | None = option(
        "its weights, a state dict (default: the library's, downloaded)", metavar="FILE", group=_NET
    )
    features: list[str] = option(
        "layer that the features come from; may be repeated (default: the last block)", [], group=_NET
    )
    pool: str | None = option(
        "feature pooling: mean (default), max, gem, cls, cls+mean, none; dense: decide at every "
        "position (dense:3: of means over 3x3 neighbours)",
        parse=parse_pool,
    )
    layer: list[str] = option(
        "layer of the maps that the model draws; may be repeated (default: the last block before the features)",
        [],
        group=_NET,
    )
    resize: str | None = option(
        "what the network sees: the whole photo, stretched to a square (default) or in a frame "
        "(pad), or only its middle (crop)",
        metavar="HOW",
        parse=_RESIZE,
        group=_NET,
    )
    size: tuple[int, int] | None = option(
        "size of the images that the network sees, a side such as 448, or WIDTHxHEIGHT such as 672x448 (default: that "
        "of its weights)",
        metavar="SIZE",
        parse=parse_size,
        group=_NET,
    )
    tiles: tuple[int, int] | None = option(
        "look at each photo through tiles of that size, COLUMNSxROWS such as 3x2",
        metavar="NUMBERS",
        parse=parse_tiles,
        group=_NET,
    )
    tile: int | None = option(
        "the same, with as many tiles as a photo needs: how many of its pixels one covers, such as 512",
        metavar="PIXELS",
        parse=_COUNT,
        group=_NET,
    )
    overlap: float | None = option(
        "least share of a tile that the next one sees, too (default: 0.25)",
        metavar="SHARE",
        parse=parse_share("0.25 for a quarter of a tile", above=False),
        group=_NET,
    )
    white_level: float | None = option(
        "white in photos of 16 bits, such as 4095 (default: 65535)", parse=number_from(0, above=True), group=_NET
    )
    tiff_page: int | None = option(_PAGE.format("such files are refused"), flag="--page", parse=_COUNT, group=_NET)
    window: tuple[float, float] | None = option(
        "what is black and white in grey DICOM files, such as 40,400 of a CT (default: the files' first window, or all "
        "that their numbers may be)",
        metavar="CENTER,WIDTH",
        parse=parse_window,
        group=_NET,
    )
    classifier: str = option(
        "svm (default), forest, boosting, or module:Class of scikit-learn's kind; of good parts "
        "alone: pca (how far from them by a PCA; the default of a folder of good photos), neighbours (distance to the "
        "nearest), residual (what a PCA leaves out)",
        "svm",
        parse=_CLASSIFIER,
    )
    components: int | None = option(
        "number of principal components (default: chosen by cross-validation)", parse=_COUNT
    )
    groups: int | None = option(
        "photos of one object are in one folder: its level below PHOTOS, 2 for PHOTOS/crack/part07/3.jpg; they are "
        "left out together",
        metavar="LEVEL",
        parse=_COUNT,
    )
    rate: float | None = option(
        "of good parts alone: how many good photos may fail (default: 0.01)",
        metavar="SHARE",
        parse=_RATE,
        group=_GOOD,
    )
    skip_suspicious: bool = option(
        "of good photos alone: leave out those that are unlike all others, and list them", False, group=_GOOD
    )
    normal: str | None = option(
        "the class that is an absence, such as good: maps then show the evidence for any other "
        "class against it, also where it is predicted",
        metavar="CLASS",
    )
    masks: Path | None = option(
        "--pool dense: where classes are, to label patches: a folder of masks, or a folder or file of annotations "
        "(COCO, LabelMe, YOLO, Pascal VOC, CVAT, run lengths)",
        metavar="DIR",
    )
    purity: float = option(
        "--masks: leave out patches less of which has one label (default: 0)",
        0.0,
        metavar="SHARE",
        parse=number_from(0, most=1),
        group=_PATCH,
    )
    coverage: float = option(
        "--masks: the share of a patch from which on it has the class of a small thing (default: 0.2)",
        COVERAGE,
        metavar="SHARE",
        parse=number_from(0, above=True, most=1),
        group=_PATCH,
    )
    faults: int = option(
        "--pool dense on class folders without masks: patches of each faulty photo that are taken for its faults "
        "(default: 3)",
        3,
        parse=_COUNT,
        group=_PATCH,
    )
    sample: float | None = option(
        "--pool dense: patches of each photo, a number or a fraction (default: as many as "
        "are 20,000 in all, for neighbours 50,000)",
        parse=parse_amount,
        group=_PATCH,
    )
    coreset: float | None = option(
        "patches to keep, far from each other, a number or a fraction (default: all; of neighbours 0.1)",
        parse=parse_amount,
        group=_PATCH,
    )
    kernel: str | None = option(
        "SVM kernel: rbf (default), linear or poly", parse=parse_name("rbf", "linear", "poly"), group=_SVM
    )
    C: float | None = option("SVM: cost of a mistake (default: chosen)", parse=number_from(0, above=True), group=_SVM)
    gamma: Any = option("SVM: width of the kernel (default: scale)", metavar="NUMBER", parse=parse_gamma, group=_SVM)
    search: bool = option("choose C and gamma among twelve pairs, by cross-validation", False, group=_SVM)
    class_weight: str | None = option(
        "balanced: every class counts the same, however few photos it has; none (default, of SVMs: chosen)",
        parse=parse_name("balanced", "none"),
        group=_SVM,
    )
    resample: int | None = option(
        "refits on other samples of the same photos, by which maps say how sure they are; 0: none (default: 30 where "
        "they are cheap)",
        parse=number_from(0, whole=True),
    )
    no_pictures: bool = option(
        "do not store names and small pictures of the support vectors, and hashes of photos", False, group=_SVM
    )

    @property
    def is_dense(self) -> bool:
        """Whether the head is to decide at every position."""
        return (self.pool or "").partition(":")[0] == "dense"

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ValueError: some do.
        """
        dense = self.is_dense
        if self.tiles is not None and self.tile is not None:
            raise ValueError(
                "--tiles is how many tiles a photo has, --tile how many of its pixels one covers: name one"
            )
        if self.tile is not None and self.resize is not None:
            raise ValueError("--tile scales photos in their own shape: leave out --resize, or give --tiles")
        cuts = self.tiles is not None or self.tile is not None
        _refuse_typed(not cuts, "for tiles", "add --tiles 3x2 or --tile 512", overlap=self.overlap is not None)
        if "auto" in self.layer + self.features:
            raise ValueError("--layer auto compares layers on photos to explain: name one here, or leave it out")
        _refuse_typed(
            self.classifier != "svm",
            "for SVMs",
            "fit one, --classifier svm",
            kernel=self.kernel,
            C=self.C,
            gamma=self.gamma,
            search=self.search,
        )
        _refuse_typed(
            not dense,
            "for heads that decide at every position",
            "add --pool dense",
            masks=self.masks,
            purity=self.purity,
            coverage=self.coverage != COVERAGE,
            faults=self.faults != type(self).faults,
            sample=self.sample,
            coreset=self.coreset,
        )
        _refuse_typed(self.masks is None, "for patches of masks", "add --masks DIR", purity=self.purity)
        _refuse_typed(
            self.classifier == "pca",
            "not for --classifier pca, which learns all components of all patches",
            "",
            components=self.components,
            sample=self.sample,
            coreset=self.coreset,
        )
        if self.classifier == "pca" and not dense:
            raise ValueError("--classifier pca learns patches of photos: add --pool dense:3")
        if self.search and dense:
            raise ValueError("--search compares one row for each image: choose --C and --gamma for patches")
        if self.search and self.groups is not None:
            raise ValueError("--search does not keep photos of one object together: leave out --search or --groups")
        if self.search and (self.C, self.gamma) != (None, None):
            raise ValueError("--search chooses C and gamma: leave out --C and --gamma")
        if self.resample == 1:
            raise ValueError("--resample 1: errors are a spread, which needs 2 refits or more, or 0 for none")
        if self.out.suffix != ".safetensors":
            raise ValueError(f"--out must end in .safetensors, got {self.out}")


@dataclass(kw_only=True)
class ModelOptions(Reading):
    """Which model explains, and with which maps."""

    model: Path = option("model from 'fit' (default: model.safetensors)", MODEL, metavar="FILE")
    layer: list[str] = option(
        "layer of the maps; may be repeated: finer ones say where; auto: compare layers on the "
        "photos (default: as stored in the model)",
        [],
    )
    baseline: str = option(
        "start of contributions: where a target is undecided (neutral, the default), the mean of the "
        "training photos, or zeros (zero)",
        "neutral",
        parse=parse_name("neutral", "mean", "zero"),
    )
    trust: list[str] = option(
        "type of estimator, or module:function of a backbone, that the model's file may name and run; may be repeated",
        [],
        metavar="TYPE",
    )
    weights: Path | None = option("the backbone's weights, if their file was moved", metavar="FILE")
    backbone: str | None = option(
        "the backbone that it was fitted behind; of a model, module:function again", group=OF_HEADS
    )
    features: list[str] = option("layer that its features come from; may be repeated", [], group=OF_HEADS)
    pool: str | None = option("their pooling (default: mean)", parse=parse_pool, group=OF_HEADS)
    resize: str | None = option(
        "stretch, pad or crop: what the network saw", metavar="HOW", parse=_RESIZE, group=OF_HEADS
    )
    white_level: float | None = option("white in photos of 16 bits", group=OF_HEADS, parse=number_from(0, above=True))
    train: Path | None = option("photos that it was fitted on: for layers whose means it lacks", group=OF_HEADS)
    tokens: bool = option("of a transformer: find the grid of the patches", False, group=OF_HEADS)


@dataclass(kw_only=True)
class MethodOptions(ModelOptions):
    """By which method."""

    method: str = option(
        "ContributionCAM (default), ClosedFormGradCAM, ...", "ContributionCAM", parse=parse_name(*METHODS)
    )


@dataclass(kw_only=True)
class TargetOptions(MethodOptions):
    """What is explained."""

    category: str | None = option(
        "the class to explain (default: the predicted one; of models with a normal class any "
        "other against it; at every position each but the background)",
        flag="--class",
        metavar="CLASS",
    )
    versus: str | None = option("explain the evidence for a class against this one", metavar="CLASS")
    components: int | None = option(
        "number of components (default: 3, those that carry most of the decision; in a file "
        "all; of models at every position none)",
        parse=number_from(0, whole=True),
    )
    at: Any = option(
        "models at every position: which one to explain, ROW,COLUMN or max, the strongest of each photo (default: max)",
        metavar="PLACE",
        parse=parse_place,
    )


@dataclass(kw_only=True)
class ExplainOptions(TargetOptions):
    """The options of ``explain``."""

    name = "explain"
    text = "draw the maps of photos: pictures, a table and a gallery"
    examples = ("photos/test", "photos/test --model explainer.onnx")
    runs = "drawing:explain"

    images: Path = place("folder of photos, or with one subfolder for each class", metavar="PHOTOS")
    out: Path = option("folder for pictures and values.csv (default: maps)", Path("maps"))
    tiff_page: int | None = option(_PAGE.format("that of the model"), flag="--page", parse=_COUNT, group=_RUNS)
    region: Any = option(
        "say which part of the evidence lies in a region, and if the decision changes when it is covered: "
        "LEFT,TOP,WIDTH,HEIGHT as shares of the photo, or masks or annotations of the photos",
        metavar="WHERE",
        parse=parse_region,
    )
    outline: bool = option("surround the strongest evidence by lines, in place of colours over it", False)
    regions: str | None = option(
        "also write polygons for a labelling tool, coco, labelme or yolo: of what is beyond the threshold, of the "
        "class of each position, or of sure evidence; --masks reads them again",
        metavar="FORMAT",
        parse=parse_name("coco", "labelme", "yolo"),
    )
    batch_size: int = option("photos at a time (default: 4)", 4, parse=_COUNT, group=_RUNS)

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ValueError: some do.
        """
        usual = type(self)(images=self.images)
        file_options = {
            list_flags(entry)[0].removeprefix("--"): True
            for entry in fields(self)
            if "text" in entry.metadata
            and entry.name not in _OF_FILES
            and getattr(self, entry.name) != getattr(usual, entry.name)
        }
        _refuse_typed(
            self.model.suffix == ".onnx",
            f"not for {self.model}, which says what is explained, and how",
            "",
            **file_options,
        )
        if self.out.resolve().is_relative_to(self.images.resolve()):
            raise ValueError(
                f"--out {self.out} is inside {self.images}, and its maps would be explained next time: name another "
                "folder"
            )


@dataclass(kw_only=True)
class EvaluateOptions(ModelOptions):
    """The options of ``evaluate``."""

    name = "evaluate"
    text = "measure whether maps can be trusted: a report page"
    examples = ("photos/test", "photos/test --masks photos/masks")
    runs = "commands:evaluate"

    images: Path = place("folder of photos, or with one subfolder for each class", metavar="PHOTOS")
    out: Path = option("folder for the page and its JSON (default: evaluation)", Path("evaluation"))
    masks: Path | None = option(
        "where defects are: a folder of masks, named as the photos, or annotations, as for fit", metavar="DIR"
    )
    normal: str | None = option(_NORMAL, metavar="CLASS")
    tiff_page: int | None = option(_PAGE.format("that of the model"), flag="--page", parse=_COUNT, group=_RUNS)
    rate: float = option(
        "--masks: how many good photos may raise a false alarm (default: 0.01)", 0.01, metavar="SHARE", parse=_RATE
    )
    method: list[str] = option(
        "method; may be repeated (default: ClosedFormGradCAM and ContributionCAM; without a "
        "gradient ContributionCAM and LIFTCAM)",
        [],
        parse=parse_name(*METHODS),
    )
    count: int = option("number of photos, chosen at random (default: 200)", 200, parse=_COUNT)
    seed: int = option("random seed (default: 0)", 0, parse=number_from(0, whole=True))
    minutes: float = option(
        "how long it may take (default: 2); the page stands after the first look", 2.0, parse=number_from(0, above=True)
    )
    checks: bool = option(
        "also measure whether maps depend on the head and the layers, and change little with the photo: sensitivity "
        "and stability",
        False,
    )
    all_images: bool = option(
        "measure all of these, also where a part of them gives a clear answer, however long it takes", False
    )

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ValueError: some do.
        """
        if self.all_images and self.minutes != type(self).minutes:
            raise ValueError("--all-images takes as long as it takes: leave it out, or --minutes")


@dataclass(kw_only=True)
class AtlasOptions(MethodOptions, EngineOptions):
    """The options of ``atlas``."""

    name = "atlas"
    text = "explain a whole folder once, and browse it: files and a page that works offline"
    examples = ("photos/test",)
    runs = "commands:atlas"
    resumes = True

    images: Path = place("folder of photos, or with one subfolder for each class", metavar="PHOTOS")
    out: Path = option("folder for the atlas (default: atlas)", Path("atlas"))
    page: Path | None = option("folder for the page (default: explorer, in that of the atlas)")
    patches: int = option("models at every position: patches to keep of each photo (default: 4)", 4, parse=_COUNT)
    verify: bool = option("compare all photos with existing files, not a sample", False)


@dataclass(kw_only=True)
class ExploreOptions(Command):
    """The options of ``explore``."""

    name = "explore"
    text = "write the page of an atlas that exists anew"
    examples = ("atlas --single-file --out explorer.html",)
    runs = "commands:explore"

    atlas: Path = place("folder of the atlas", metavar="ATLAS")
    out: Path = option("folder or file (default: explorer)", Path("explorer"), metavar="PATH")
    trust: list[str] = option(
        "type of estimator that a head's file may have, besides those that are known to be harmless; may be repeated",
        [],
        metavar="TYPE",
    )
    head: list[str] = option("another head for the page; may be repeated", [], metavar="NAME=FILE")
    single_file: bool = option("write a single file, which is easy to send", False)


@dataclass(kw_only=True)
class ExportOptions(TargetOptions):
    """The options of ``export``."""

    name = "export"
    text = "make one file that explains photos without PyTorch"
    examples = ("photos/test", "photos/test --page line")
    runs = "commands:export"
    writes_file = True

    images: Path | None = place("folder of photos to try it on (default: noise)", None, metavar="PHOTOS")
    out: Path = option("file to write (default: explainer.onnx)", Path("explainer.onnx"), metavar="FILE")
    errors: bool = option(
        "also how sure maps and values are, by the refits of the head; making it takes four to six times as long", False
    )
    page: Path | None = option(
        "also write a page that explains photos, which needs onnxruntime-web: 'npm install onnxruntime-web' first "
        "(npm is part of Node.js)"
    )
    runtime: Path = option(
        "for --page: from npm install (default: node_modules/onnxruntime-web)", Path("node_modules/onnxruntime-web")
    )

    def check(self) -> None:
        """Refuse options that need photos, or a page, without any.

        Raises:
            ValueError: there are none.
        """
        script = "ort.wasm.min.js"
        if self.page is not None and not any((self.runtime / folder / script).is_file() for folder in (".", "dist")):
            raise ValueError(
                f"--page needs onnxruntime-web, and {self.runtime} has no {script}: run 'npm install onnxruntime-web' "
                "(npm is part of Node.js), or name its folder, --runtime FOLDER"
            )
        if self.layer == ["auto"] and self.images is None:
            raise ValueError("--layer auto compares layers on photos: name their folder")


@dataclass(kw_only=True)
class AddOptions(Command):
    """The options of ``add``."""

    name = "add"
    text = "add good photos to a model of good photos, such as those that it fails; those of the fit are not needed"
    examples = ("model.safetensors photos/false-alarms",)
    runs = "adding:add"
    writes_file = True

    model: Path = place("model from 'fit' on good photos", metavar="MODEL")
    images: Path = place("folder of more good photos", metavar="PHOTOS")
    out: Path | None = option("file to write (default: MODEL itself)", metavar="FILE")
    trust: list[str] = option("as for 'explain'; may be repeated", [], metavar="TYPE")
    weights: Path | None = option("the backbone's weights, if their file was moved", metavar="FILE")
    device: str | None = option("cuda or cpu (default: cuda if available)", parse=_DEVICE, group=_RUNS)


@dataclass(kw_only=True)
class CheckOptions(Command):
    """The options of ``check``."""

    name = "check"
    text = "look at photos before any work: what is broken, odd or doubled; nothing is written"
    examples = ("photos", "photos/test --masks photos/masks")
    runs = "checking:check"

    images: Path = place("folder of photos, or with one subfolder for each class", metavar="PHOTOS")
    masks: Path | None = option("masks or annotations, whose names are compared with the photos'", metavar="DIR")
    normal: str | None = option(_NORMAL, metavar="CLASS")
    tiff_page: int | None = option(_PAGE.format("such files are refused"), flag="--page", parse=_COUNT)
    window: tuple[float, float] | None = option("as for 'fit', to try it", metavar="CENTER,WIDTH", parse=parse_window)


def _refuse_typed(wrong: bool, meant: str, way: str, **typed: Any) -> None:
    """Refuse options that are typed where they do nothing; ``way``: what else may be done than leave them out."""
    names = [f"--{name}" for name, value in typed.items() if value]
    if wrong and names:
        are, them = ("is", "it") if len(names) == 1 else ("are", "them")
        raise ValueError(f"{' and '.join(names)} {are} {meant}: leave {them} out{way and f', or {way}'}")


COMMANDS: tuple[type[Command], ...] = (
    CheckOptions,
    FitOptions,
    ExplainOptions,
    EvaluateOptions,
    AtlasOptions,
    ExploreOptions,
    ExportOptions,
    AddOptions,
)


def write_line(options: Command, name: str, **changed: Any) -> str:
    """Return the line of a command with the options that were typed, as far as it takes them.

    Args:
        options: those that were typed, which may be of another command.
        name: of the command.
        **changed: other values; None leaves an option out.
    """
    kind = next(entry for entry in COMMANDS if entry.name == name)
    usual = {entry.name: entry.default for entry in fields(options)}
    typed = {entry: value for entry, value in vars(options).items() if value not in (usual[entry], [])}
    if not isinstance(options, kind) and (out := typed.pop("out", None)) and isinstance(options, FitOptions):
        typed["model"] = out
    words = [RUN, name]
    for entry in sorted(fields(kind), key=lambda entry: entry.name not in kind.__annotations__):
        value = (typed | changed).get(entry.name)
        if "text" not in entry.metadata or value is None or value is False:
            continue
        for part in value if isinstance(value, list) else [value]:
            text, flag = shlex.quote(_write_value(entry.name, part)), list_flags(entry)[0]
            gap = "=" if text.startswith("-") else " "
            words.append(text if entry.metadata.get("in_place") else flag + f"{gap}{text}" * (part is not True))
    return " ".join(words)


def _write_value(name: str, value: Any) -> str:
    """Return the value of an option as it is typed."""
    if name == "size" and len(set(value)) == 1:
        return str(value[0])
    if isinstance(value, tuple):  # a size is (H, W), and typed the other way round
        return ("," if name == "at" else "x").join(map(str, value[::-1] if name == "size" else value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


@cache  # for programs that call main again and again
def make_parser() -> Parser:
    """Return the parser of the command line; the parsed options have ``kind``, the dataclass of the command."""
    lines = "".join(f"  {RUN} {entry.name} {entry.examples[0]}\n" for entry in COMMANDS if entry is not ExploreOptions)
    parser = Parser(
        prog=RUN,
        description="Signed attention maps through a PCA and a classifier, for folders of photos.",
        epilog=f"example, of photos with one folder per class:\n{lines}\nOf signals there is no command line: see the "
        "documentation, 'Signals'.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersions, nargs=0, help="versions, for a report of a problem")
    places = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for entry in COMMANDS:
        command = places.add_parser(
            entry.name,
            help=entry.text,
            description=f"{entry.text[0].upper()}{entry.text[1:]}.",
            epilog="example:\n" + "".join(f"  {RUN} {entry.name} {example}\n" for example in entry.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(kind=entry, parser=command)
        add_options(command, entry)
    return parser


def parse_arguments(arguments: list[str]) -> Command:
    """Return the options of a command as they were typed; a line that cannot be understood ends the process."""
    if "--window" in arguments[:-1]:  # whose centre may be below 0, which would be an option
        at = arguments.index("--window")
        arguments = [*arguments[:at], f"--window={arguments[at + 1]}", *arguments[at + 2 :]]
    parsed, unknown = make_parser().parse_known_args(arguments)
    if unknown:
        parsed.parser.refuse_unknown(unknown)
    return read_options(parsed.kind, parsed)
