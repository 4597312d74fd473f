"""Images from folders and arrays, and what is done to them."""

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from phylon.data.augment import Augment, Pixels
from phylon.data.images import ImageArrays, ImageFolder, read_array
from phylon.spec import UserError, from_data, to_data

FASHION = Path(__file__).parents[2].parent / "shared" / "data" / "fashion-mnist-test"


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> ImageArrays:
    np.save(folder / "x.npy", pixels)
    np.save(folder / "y.npy", labels)
    return ImageArrays(images=str(folder / "x.npy"), labels=str(folder / "y.npy"))


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 4, 6), dtype=np.uint8)
LABELS = np.array([0, 2, 1, 1, 0], dtype=np.uint8)


def test_every_format_of_an_array_is_the_same_images(tmp_path):
    (tmp_path / "x-idx3-ubyte.gz").write_bytes(gzip.compress(idx(PIXELS)))
    (tmp_path / "y-idx1-ubyte").write_bytes(idx(LABELS))
    np.savez(tmp_path / "both.npz", images=PIXELS, labels=LABELS)
    with gzip.open(tmp_path / "x.npy.gz", "wb") as file:
        np.save(file, PIXELS)
    np.save(tmp_path / "y.npy", LABELS.astype(np.int64))
    for images, labels in [("x-idx3-ubyte.gz", "y-idx1-ubyte"), ("both.npz", "both.npz"), ("x.npy.gz", "y.npy")]:
        found = ImageArrays(images=str(tmp_path / images), labels=str(tmp_path / labels)).open()
        assert (len(found), found.classes) == (5, ("0", "1", "2"))
        assert found.labels.tolist() == LABELS.tolist()
        assert all((found.pixels(i) == PIXELS[i][None]).all() for i in range(5))
    colour = write(tmp_path, np.stack([PIXELS] * 3, -1), LABELS).open()
    assert colour.pixels(1).shape == (3, 4, 6)


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    for pixels, labels, message in [
        (PIXELS, LABELS[:4], "5 images and .* 4 labels"),
        (PIXELS.astype(np.float32), LABELS, "must hold uint8"),
        (PIXELS, LABELS.astype(np.float32), "must hold whole numbers"),
        (PIXELS, LABELS.astype(np.int64) - 1, r"image 0: the label -1 is out of range"),
        (PIXELS, np.where(LABELS, LABELS, np.int64(2**62)), r"image \d: the label 4611686018427387904 is out of range"),
        (PIXELS[:0], LABELS[:0], "and not nothing"),
    ]:
        with pytest.raises(UserError, match=message):
            write(tmp_path, pixels, labels).open()
    named = write(tmp_path, PIXELS, LABELS).replace(classes=("shirt", "bag"))
    with pytest.raises(UserError, match=r"y.npy', image 1: the label 2 is out of range: classes are 0 to 1"):
        named.open()
    assert from_data(ImageArrays, to_data(named)) == named


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a-idx3", idx(PIXELS)[:-1], "which is 120 bytes, and holds 119"),
        ("a-idx3", idx(PIXELS) + b"x", "and holds more"),
        ("a-idx3", bytes([0, 0, 8, 3]) + b"\xff" * 12 + b"abc", "and holds 3"),
        ("a-idx3", b"\0\0\x08\x03\0\0", "ends within its header"),
        ("a-idx3", b"GIF89a", "neither IDX nor"),
        ("a.npy", b"\x93NUMPYjunk", "damaged, or no array"),
        ("a.npz", b"PK\x03\x04junk", "damaged, or no array"),
        ("a-idx3.gz", gzip.compress(idx(PIXELS))[:-9], "damaged"),
    ],
)
def test_damaged_arrays_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{message}"):
        read_array(tmp_path / name, "images")
    with pytest.raises(UserError, match=r"cannot read .*no such file"):
        read_array(tmp_path / "none.npy", "images")


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="damaged, or no array"):
        read_array(tmp_path / "x.npy", "images")


def test_a_folder_is_a_class_and_a_bad_image_is_named(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["b.png", "a.png"]):
        (tmp_path / "cat" / "deep").mkdir(parents=True, exist_ok=True)
        pillow.fromarray(PIXELS[number]).save(tmp_path / "cat" / "deep" / name)
    (tmp_path / "ant").mkdir()
    with pytest.raises(UserError, match=r"a folder of images .* for each class; the folder 'ant' of it has none"):
        ImageFolder(path=str(tmp_path)).open()
    pillow.fromarray(np.stack([PIXELS[2]] * 3, -1)).save(tmp_path / "ant" / "x.jpg", quality=100)
    (tmp_path / "ant" / "y.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    found = ImageFolder(path=str(tmp_path), channels=1).open()
    assert found.classes == ("ant", "cat")
    assert [found.name(i) for i in range(len(found))] == ["ant/x.jpg", "ant/y.png", "cat/deep/a.png", "cat/deep/b.png"]
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert (found.pixels(2) == PIXELS[1][None]).all()
    assert ImageFolder(path=str(tmp_path)).open().pixels(3).shape == (3, 4, 6)
    with pytest.raises(UserError, match=r"cannot read the image '.*ant/y.png'"):
        found.pixels(1)
    with pytest.raises(UserError, match="it has no folders"):
        ImageFolder(path=str(tmp_path / "cat" / "deep")).open()
    with pytest.raises(UserError, match="cannot read the folder"):
        ImageFolder(path=str(tmp_path / "none")).open()


def test_pillow_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"pip install 'phylon\[data\]'"):
        ImageFolder(path=str(tmp_path)).open()


def test_pixels_become_what_the_model_reads():
    pixels = np.array([[[0, 255], [51, 102]]], dtype=np.uint8)
    assert Pixels()(pixels).tolist() == pytest.approx(np.array([[[-1, 1], [-0.6, -0.2]]]), abs=1e-6)
    assert torch.allclose(Pixels(mean=(0.2,), std=(0.4,))(pixels), torch.tensor([[[-0.5, 2.0], [0.0, 0.5]]]))
    big = Pixels(size=(4, 4))(np.full((3, 2, 2), 51, np.uint8))
    assert big.shape == (3, 4, 4)
    assert torch.allclose(big, torch.tensor(-0.6))
    with pytest.raises(UserError, match="mean has 3 channels, the images 1"):
        Pixels(mean=(0.5,) * 3, std=(0.5,) * 3)(pixels)
    for bad in ({"std": (0.0,)}, {"mean": (0.1, 0.2)}, {"size": (0, 3)}):
        with pytest.raises(UserError):
            Pixels(**bad)


def test_augmentation_is_a_pure_function_of_seed_epoch_and_index():
    change, image = Augment(padding=2, flip=0.5), PIXELS[:1]
    seen = {(s, e, i): change(image, s, e, i).tobytes() for s in range(2) for e in range(4) for i in range(8)}
    assert len(set(seen.values())) > 15
    assert all(change(image, *key).tobytes() == value for key, value in seen.items())
    assert change(image, 0, 0, 0).shape == image.shape
    plain = Augment()
    assert (plain(image, 0, 0, 0) == image).all()
    assert (Augment(flip=1.0)(image, 0, 0, 0) == image[..., ::-1]).all()
    for bad in ({"padding": -1}, {"flip": 1.5}):
        with pytest.raises(UserError):
            Augment(**bad)


def test_every_shift_and_both_mirrors_come_up_evenly():
    image = np.zeros((1, 5, 5), np.uint8)
    image[0, 2, 2] = 255
    image[0, 2, 3] = 100  # says which way round it is
    places, mirrored = [], 0
    for index in range(900):
        y, x = np.argwhere(Augment(padding=1, flip=0.5)(image, 1, 0, index)[0] == 255)[0]
        row = Augment(padding=1, flip=0.5)(image, 1, 0, index)[0, y]
        mirrored += int(x + 1 >= 5 or row[x + 1] != 100)
        places.append((int(y), int(x)))
    counts = np.array([places.count((y, x)) for y in (1, 2, 3) for x in (1, 2, 3)])
    assert counts.sum() == 900
    assert ((counts - 100) ** 2 / 100).sum() < 26.1  # chi-squared, 8 degrees of freedom, p = 0.001
    assert abs(mirrored - 450) < 50


def test_the_real_images():
    if not FASHION.exists():
        pytest.skip("no ../shared/data/fashion-mnist-test here")
    found = ImageArrays(
        images=str(FASHION / "t10k-images-idx3-ubyte.gz"), labels=str(FASHION / "t10k-labels-idx1-ubyte.gz")
    ).open()
    assert len(found) == 10_000
    assert np.bincount(found.labels).tolist() == [1000] * 10
    assert found.pixels(0).shape == (1, 28, 28)


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_images_of_16_bits_keep_their_shades(tmp_path, channels):
    pillow = pytest.importorskip("PIL.Image")
    shades = np.array([[0, 257, 1000], [32768, 40000, 65535]], np.uint16)
    (tmp_path / "a").mkdir()
    pillow.fromarray(shades).save(tmp_path / "a" / "x.png")
    found = ImageFolder(path=str(tmp_path), channels=channels).open().pixels(0)
    assert found.shape == (channels, 2, 3)
    assert found.dtype == np.uint8
    assert found.flags.writeable, "PyTorch warns of others"
    assert all((plane == [[0, 1, 3], [127, 155, 255]]).all() for plane in found)
