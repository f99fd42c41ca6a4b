"""The layout of a folder: pairs, classes and splits from names alone, and the globs that name the pairs again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mural.errors import DataError
from mural.survey.file_patterns import patterns_of
from mural.survey.folder_layout import FolderLayout, Pair, layout_of


def layout(folder: Path, *names: str) -> FolderLayout:
    """The layout of empty files of these names."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return layout_of(folder)


def names(folder: Path, pairs: tuple[Pair, ...]) -> set[tuple[str, str]]:
    return {tuple(str(p.relative_to(folder)) if isinstance(p, Path) else str(p) for p in pair) for pair in pairs}  # type: ignore[misc]


LAYOUTS = {
    "folders": (("images/a.tif", "masks/a.tif"), ("images/b.tif", "masks/b.tif")),
    "other endings": (("images/a.jpg", "labels/a.png"), ("images/b.png", "labels/b.png")),
    "folder and name": (("JPEGImages/a.jpg", "GroundTruth/a_segmentation.png"),),
    "folders inside": (("images/x/1.tif", "masks/x/1.tif"), ("images/y/1.tif", "masks/y/1.tif")),
    "nnU-Net": (("imagesTr/c_01_0000.nii", "labelsTr/c_01.nii"), ("imagesTr/c_02_0000.nii", "labelsTr/c_02.nii")),
    "nnU-Net, cases with four digits": (
        ("imagesTr/case_0000_0000.nii", "labelsTr/case_0000.nii"),
        ("imagesTr/case_0001_0000.nii", "labelsTr/case_0001.nii"),
    ),
    "four digits": (("images/case_0000.tif", "masks/case_0000.tif"), ("images/case_0001.tif", "masks/case_0001.tif")),
    "four digits and a word": (
        ("images/c_0000.tif", "masks/c_0000_mask.tif"),
        ("images/c_0001.tif", "masks/c_0001_mask.tif"),
    ),
    "one case with four digits": (("images/case_0000.tif", "masks/case_0000.tif"),),
    "both named": (("img_1.png", "mask_1.png"), ("img_2.png", "mask_2.png")),
    "words and numbers": (("image1.png", "label1.png"), ("image2.png", "label2.png")),
    "prefixes in folders": (("scans/scan_7.tif", "segmentations/seg_7.tif"),),
    "a word above both": (("segmentation/images/a.tif", "segmentation/masks/a.tif"),),
    "slides": (("a.ome.tif", "a_mask.zarr"), ("b.ome.tif", "b_mask.zarr")),
}
BY_TABLE = {
    "beside": (("a.tif", "a_mask.tif"), ("b.tif", "b_mask.tif")),
    "cases": (("p1/image.nii", "p1/label.nii"), ("p2/image.nii", "p2/label.nii")),
    "in a folder for images": (("images/a.tif", "images/a_label.tif"), ("images/b.tif", "images/b_label.tif")),
}


@pytest.mark.parametrize("pairs", [*LAYOUTS.values(), *BY_TABLE.values()], ids=[*LAYOUTS, *BY_TABLE])
def test_images_find_their_masks_by_name(tmp_path: Path, pairs: tuple[tuple[str, str], ...]) -> None:
    found = layout(tmp_path, *(name for pair in pairs for name in pair))
    assert names(tmp_path, found.training) == set(pairs)
    assert not found.images_alone
    assert not found.masks_alone


@pytest.mark.parametrize("pairs", LAYOUTS.values(), ids=LAYOUTS)
def test_globs_name_the_pairs_where_training_makes_the_same_of_them(
    tmp_path: Path, pairs: tuple[tuple[str, str], ...]
) -> None:
    found = layout(tmp_path, *(name for pair in pairs for name in pair))
    assert patterns_of(found.training) is not None


@pytest.mark.parametrize("pairs", BY_TABLE.values(), ids=BY_TABLE)
def test_no_globs_where_they_would_find_other_files(tmp_path: Path, pairs: tuple[tuple[str, str], ...]) -> None:
    found = layout(tmp_path, *(name for pair in pairs for name in pair))
    assert patterns_of(found.training) is None


def test_files_without_a_partner_are_told_apart(tmp_path: Path) -> None:
    found = layout(tmp_path, "images/a.tif", "images/b.tif", "images/notes.txt", "masks/a.tif", "masks/c.tif", ".x.tif")
    assert names(tmp_path, found.training) == {("images/a.tif", "masks/a.tif")}
    assert [p.name for p in found.images_alone] == ["b.tif"]
    assert [p.name for p in found.masks_alone] == ["c.tif"]
    assert found.others == {".txt": 1}


def test_a_mask_that_two_images_could_have_is_given_to_none(tmp_path: Path) -> None:
    found = layout(tmp_path, "images/a.tif", "images/a.png", "images/b.tif", "masks/a.png", "masks/b.png")
    assert names(tmp_path, found.training) == {("images/b.tif", "masks/b.png")}
    assert len(found.images_alone) == 2


def test_folders_say_what_is_held_out_and_what_is_for_a_test(tmp_path: Path) -> None:
    files = [f"{split}/{kind}/{split}.png" for split in ("train", "val", "test") for kind in ("images", "masks")]
    found = layout(tmp_path, *files)
    assert names(tmp_path, found.training) == {("train/images/train.png", "train/masks/train.png")}
    assert names(tmp_path, found.validation) == {("val/images/val.png", "val/masks/val.png")}
    assert len(found.test) == 2


def test_further_channels_are_not_images_without_a_mask(tmp_path: Path) -> None:
    found = layout(tmp_path, "imagesTr/c_0000.nii", "imagesTr/c_0001.nii", "labelsTr/c.nii", "imagesTs/d_0000.nii")
    assert names(tmp_path, found.training) == {("imagesTr/c_0000.nii", "labelsTr/c.nii")}
    assert [p.name for p in found.channels_alone] == ["c_0001.nii"]
    assert not found.images_alone


def test_an_image_without_a_mask_is_not_a_channel_of_case_0000(tmp_path: Path) -> None:
    """The numbers were taken for those of channels, so that the image was left out without a word of its own."""
    found = layout(
        tmp_path, "images/c_0000.tif", "images/c_0001.tif", "images/c_0002.tif", "masks/c_0000.tif", "masks/c_0002.tif"
    )
    assert names(tmp_path, found.training) == {(f"images/c_000{n}.tif", f"masks/c_000{n}.tif") for n in (0, 2)}
    assert [p.name for p in found.images_alone] == ["c_0001.tif"]
    assert not found.channels_alone


def test_a_volume_that_was_unpacked_next_to_itself_is_there_once(tmp_path: Path) -> None:
    packed = ("images/a.nii.gz", "masks/a.nii.gz")
    found = layout(tmp_path, *packed, "images/a.nii", "masks/a.nii")
    assert names(tmp_path, found.training) == {("images/a.nii", "masks/a.nii")}


def test_folders_without_masks_are_classes(tmp_path: Path) -> None:
    found = layout(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/2.png")
    assert found.classes == ("cat", "dog")
    assert names(tmp_path, found.training) == {("train/cat/1.png", "0"), ("train/dog/1.png", "1")}
    assert names(tmp_path, found.validation) == {("val/cat/2.png", "0")}


def test_what_mural_wrote_is_no_data(tmp_path: Path) -> None:
    found = layout(
        tmp_path, "images/a.tif", "masks/a.tif", "runs/1/status.json", "runs/1/predictions/step-1/a.tif",
        "out/predictions.json", "out/a.tif",
    )  # fmt: skip
    assert names(tmp_path, found.training) == {("images/a.tif", "masks/a.tif")}
    assert not found.images_alone


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "there is nothing in it"),
        (("a.txt", "b.xml"), "no image among 2 files"),
        (("a.png", "b.png"), "2 images, but no masks"),
        (("train/a.png", "val/a.png"), "2 images, but no masks"),
        (("images/a.png", "masks/z.png"), "no two have names that belong together"),
    ],
)
def test_a_folder_without_pairs_is_told_what_was_looked_for(tmp_path: Path, files: tuple[str, ...], said: str) -> None:
    with pytest.raises(DataError, match=said):
        layout(tmp_path, *files)
