"""What is refused by names and by headers of files, before anything heavy is imported, and options without a use."""

import re
import shutil
import subprocess
import sys

import pytest
import test_lines
from atlases import folder
from golden import transcript

from pytorch_grad_cam_pcasvm import Head, load_model
from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.cli.arguments import parse_arguments

NETWORK = ["--backbone", "lines_backbone:make", "--device", "cpu"]
SMALL = ["--size", "64"]
TRUST = ["--trust", "lines_backbone:make", "--device", "cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Photos of two classes, those of one, a model and an empty folder; a network of one's own."""
    root = tmp_path_factory.mktemp("refusals")
    folder(root / "photos", 12)
    shutil.copytree(root / "photos" / "cat", root / "good")
    shutil.copytree(root / "good", root / "flat")
    (root / "empty").mkdir()
    (root / "model.onnx").touch()
    (root / "broken.safetensors").write_bytes(b"\x05broken")
    (root / "via").mkdir()
    (root / "via" / "a.json").write_text('{"_via_img_metadata": {}}')
    (root / "notes.txt").write_text("a note on the photos")
    (root / "lines_backbone.py").write_text(test_lines.BACKBONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.syspath_prepend(root)
        assert main(["fit", "photos", *NETWORK, *SMALL, "--components", "3", "--no-cache"]) == 0
    strings, tensors = storage.read(root / "model.safetensors", "x", [storage.MODEL])
    del strings["sha256"]
    storage.write(root / "newer.safetensors", tensors, strings | {"format": "pytorch_grad_cam_pcasvm model 3"})
    Head.load(root / "model.safetensors").save(root / "head.safetensors")
    return root


LINES = """
fit photos --normal gud
fit photos --groups 1
fit photos --groups 2
fit photos --rate 0.3
fit photos --pool dense --purity 0.5
fit photos --classifier neighbours
fit flat
fit empty
explain empty
evaluate empty
atlas empty
export empty
explain empty --model model.onnx
explore nowhere
evaluate photos --count 10
evaluate photos --masks via
evaluate photos --masks via/a.json
evaluate photos
evaluate photos --all-images --minutes 1
explain photos --class cow
explain photos --class cat --versus cat
explain photos --components 300
export photos --at 3
explain photos --model broken.safetensors
explain photos --model notes.txt
explain photos --model newer.safetensors
explain photos --model head.safetensors
evaluate photos --model model.onnx
atlas photos --model model.onnx
export photos --model model.onnx
evaluate photos/cat/0.png
fit p --pool dense:abc
fit p --pool dense:0
fit p --pool dense:4
fit p --pool gem:x
fit p --pool gem:inf
fit p --sample -1
fit p --sample 0
fit p --coreset nan
fit p --coreset 2.5
fit p --purity 3
fit p --C inf
evaluate p --minutes inf
"""


def test_what_cannot_work_is_refused_before_anything_heavy_is_imported(place, told_by, golden):
    told = told_by(LINES.strip().splitlines(), place)
    assert {(status, printed, *heavy) for status, printed, _, heavy in told.values()} == {(2, "")}
    assert all(error.count("\n") == 1 for _, _, error, _ in told.values())
    golden("refused_by_names", transcript((line, error) for line, (_, _, error, _) in told.items()))


@pytest.mark.parametrize(
    "options",
    ["--method LIFTCAM", "--baseline zero", "--resize pad", "--at max", "--tokens", "--trust x", "--device cpu",
     "--batch-size 2", "--train photos", "--class cat", "--components 0"],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_a_file_takes_no_options_that_it_has_decided(options, capsys):
    assert main(["explain", "photos", "--model", "model.onnx", *options.split()]) == 2
    assert (
        f"{options.split()[0]} is not for model.onnx, which says what is explained, and how: leave it out\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("wrong", "message", "other"),
    [
        ("--overlap 0.5", "--overlap is for tiles: leave it out, or add --tiles 3x2 or --tile 512", "--tiles 3x2"),
        ("--overlap 0.5", "--overlap is for tiles: leave it out, or add --tiles 3x2 or --tile 512", "--tile 512"),
        (
            "--search --kernel rbf",
            "--kernel and --search are for SVMs: leave them out, or fit one, --classifier svm",
            "--classifier svm",
        ),
        (
            "--coreset 5",
            "--coreset is for heads that decide at every position: leave it out, or add --pool dense",
            "--pool dense",
        ),
        (
            "--pool dense --purity 0.9",
            "--purity is for patches of masks: leave it out, or add --masks DIR",
            "--masks DIR",
        ),
    ],
)
def test_each_way_out_of_an_option_that_does_nothing_is_one(wrong, message, other):
    line = ["fit", "photos", "--classifier", "forest"]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_arguments([*line, *wrong.split()]).check()
    parse_arguments(line).check()
    parse_arguments([*line, *wrong.split(), *other.split()]).check()


@pytest.mark.usefixtures("here")
def test_options_of_heads_are_compared_with_a_model(capsys):
    assert main(["explain", "photos", *TRUST, "--tokens"]) == 2
    assert "--tokens is for transformers, but the layers of this model give no tokens" in capsys.readouterr().err
    assert main(["explain", "photos", *TRUST, "--train", "photos"]) == 0
    assert "--train is not needed: the means of these layers are known\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--layer", "7"], "has no layer '7'"),
        (["--features", "7"], "has no layer '7'"),
        (
            ["--features", "2", "--layer", "4"],
            "--layer 4 does not run before the features, '2': name a layer that does",
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_layers_of_fit_are_checked_before_photos_are_read(options, told, capsys, monkeypatch):
    monkeypatch.setattr("pytorch_grad_cam_pcasvm.studio.cli.fitting.training_set", lambda *args: pytest.fail("read"))
    assert main(["fit", "photos", *NETWORK, *options]) == 2
    assert told in capsys.readouterr().err


def test_the_folder_that_one_is_in_is_explained(here, capsys, monkeypatch):
    monkeypatch.chdir(here / "photos")
    assert main(["explain", ".", "--model", "../model.safetensors", *TRUST, "--out", "../maps"]) == 0
    assert "wrote maps of 12 images " in capsys.readouterr().out


def test_one_photo_is_explained(here, capsys):
    photo = sorted((here / "photos" / "cat").glob("*.png"))[0].relative_to(here)
    assert main(["explain", str(photo), *TRUST]) == 0
    assert "wrote maps of 1 image " in capsys.readouterr().out
    assert (here / "maps" / photo.name).exists()
    assert main(["explain", "photos/cat/nowhere.png", *TRUST]) == 2
    assert "there is no folder photos/cat/nowhere.png" in capsys.readouterr().err


# --- few photos -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [[], ["--pool", "dense"]], ids=["images", "patches"])
def test_few_photos_of_a_class_are_validated_by_default(here, pool, capsys):
    assert main(["fit", "photos", *NETWORK, *SMALL, *pool]) == 0
    told = capsys.readouterr().out
    assert "no cross-validation" not in told
    assert "5-fold cross-validation: " in told
    assert ("nothing is chosen, for which each class needs 10 photos: 7 components, C 1" in told) is not bool(pool)


@pytest.mark.parametrize("classifier", ["residual", "neighbours", "sklearn.svm:OneClassSVM"])
def test_few_good_photos_have_a_threshold_by_default(here, classifier, capsys):
    assert main(["fit", "good", *NETWORK, "--classifier", classifier]) == 0
    told = capsys.readouterr().out
    assert "1 in 7 of new good ones, by the scores of 6 good photos that were left out, a fifth at a time" in told
    assert load_model("model.safetensors", "lines_backbone:make").threshold is not None
    assert main(["fit", "good", *NETWORK, "--classifier", classifier, "--components", "6"]) == 0
    told = capsys.readouterr().out
    assert "no threshold: for it photos are left out in turn, and 6 components cannot be fitted on the others" in told
    assert "lower --components, to 3 or fewer" in told
    assert main(["fit", "good", *NETWORK, "--classifier", classifier, "--components", "3"]) == 0  # the way out
    assert "left out, a fifth at a time" in capsys.readouterr().out


def test_time_is_counted_from_the_start_of_the_process(place):
    code = "import time; from pytorch_grad_cam_pcasvm.studio import cli\n"
    code += "from pytorch_grad_cam_pcasvm.studio.cli import arguments\n"
    code += "arguments.CheckOptions.run = lambda self: print(time.monotonic() - self.started)\n"
    code += "time.sleep(0.5); cli.main(['check', 'photos'])"  # as what is imported first takes its time
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=place)
    assert 0.5 <= float(done.stdout) < 60


@pytest.mark.parametrize(
    "command",
    [["atlas"], pytest.param(["evaluate", "--all-images"], marks=pytest.mark.slow)],
    ids=["atlas", "evaluate"],
)
def test_all_broken_photos_are_named_at_once(here, capsys, command):
    for name in ("cat/broken.png", "dog/broken.png"):
        (here / "photos" / name).write_bytes(b"no photo")
    line = [*command, "photos", "--trust", "lines_backbone:make", "--device", "cpu", "--out", "out"]
    assert main(line) == 2
    told = capsys.readouterr().err
    assert "2 photos cannot be read: cat/broken.png (" in told
    assert "dog/broken.png (" in told
    assert "mend or delete them, or add --skip-bad-images" in told
    assert main([*line, "--skip-bad-images"]) == 0
    assert "skipped 2 images that cannot be read: cat/broken.png, dog/broken.png\n" in capsys.readouterr().out
