"""Changes of training images: what each leaves alone, what it does, and that the generator decides all of it."""

import pytest
import torch

from kinformer.lab.tasks.images import (
    ALONE,
    CHANGES,
    CUTMIX,
    MIXED,
    Augmented,
    augment,
    crop,
    cutmix,
    erase,
    flip,
    jitter,
    mixup,
    rand_augment,
    resized_crop,
)
from kinformer.lab.tasks.options import AUGMENTATIONS


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def images(rows=64, channels=3, height=16, width=24):
    return torch.rand(rows, channels, height, width, generator=drawn(1))


def test_names_are_those_of_the_options():
    assert set(AUGMENTATIONS) == {*ALONE, *MIXED}


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_generator_decides(name, channels):
    batch = Augmented(images(8, channels), torch.arange(8))
    one, same, other = (augment(batch, [name], drawn(seed)) for seed in (3, 3, 4))
    assert torch.equal(one.images, same.images) and not torch.equal(one.images, other.images)
    assert one.images.shape == batch.images.shape and not torch.equal(one.images, batch.images)
    assert one.images.min() >= 0 and one.images.max() <= 1 + 1e-6
    assert torch.equal(one.labels, batch.labels)


def test_a_shift_moves_whole_pixels_by_an_eighth_at_most():
    x = torch.zeros(200, 1, 16, 24)
    x[:, :, 8, 12] = 1
    moved = crop(x, drawn())
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(200))
    places = moved.nonzero()[:, 2:] - torch.tensor([8, 12])
    assert places.amin(0).tolist() == [-2, -3] and places.amax(0).tolist() == [2, 3]


def test_half_of_the_images_are_flipped():
    x = images(400)
    y = flip(x, drawn())
    turned = torch.tensor([torch.equal(a, b.flip(2)) for a, b in zip(y, x, strict=True)])
    assert 150 < turned.sum() < 250 and torch.equal(y[~turned], x[~turned])


def test_erased_boxes_are_rectangles_of_noise_in_a_quarter():
    x = torch.full((400, 1, 32, 32), 2.0)
    gone = erase(x, drawn()) < 2
    share = gone.float().mean((1, 2, 3))
    assert 60 < (share > 0).sum() < 140 and share.max() < 0.45
    for each in gone[share > 0]:
        rows, columns = each[0].any(1), each[0].any(0)
        assert each[0].sum() == rows.sum() * columns.sum()


def test_two_images_in_one_have_the_labels_of_both_by_their_shares():
    x = torch.arange(6.0)[:, None, None, None].expand(6, 1, 16, 16) / 5
    labels = torch.arange(6)
    for change in (mixup, cutmix):
        for seed in range(20):
            found = change(Augmented(x, labels), drawn(seed))
            assert torch.equal(found.others, labels.flip(0))
            mean = found.shares * x.mean((1, 2, 3)) + (1 - found.shares) * x.flip(0).mean((1, 2, 3))
            assert torch.allclose(found.images.mean((1, 2, 3)), mean, atol=1e-5)
    cut = cutmix(Augmented(x, labels), drawn(2))
    assert CUTMIX == 1.0 and set(cut.images[0].unique().tolist()) <= {0.0, 1.0}
    both = [augment(Augmented(x, labels), ["mixup", "cutmix"], drawn(seed)).images[0].unique() for seed in range(20)]
    assert any(len(each) == 1 and 0 < each < 1 for each in both) and any(len(each) == 2 for each in both)


def alone(name, x, strength=0.3, sign=1.0):
    change = CHANGES[name]
    return change(x, torch.full((len(x),), strength), torch.full((len(x),), sign))


def test_each_change_of_randaugment_does_what_it_says():
    x = 0.25 + 0.5 * images(4)
    assert len(CHANGES) == 14 and torch.equal(alone("identity", x), x)
    stretched = alone("autocontrast", x)
    assert torch.allclose(stretched.amin((2, 3)), torch.zeros(4, 3)) and torch.allclose(
        stretched.amax((2, 3)), torch.ones(4, 3)
    )
    even = alone("equalise", x).flatten(2).sort(2).values
    assert (even - torch.linspace(0, 1, even.shape[2])).abs().max() < 0.03
    assert torch.equal(alone("solarise", x), torch.where(x >= 0.7, 1 - x, x))
    assert len((alone("posterise", x, 1.0) * 255).round().unique()) <= 16
    assert torch.allclose(alone("brightness", x), 1.27 * x)
    assert torch.allclose(alone("contrast", x).mean((1, 2, 3)), x.mean((1, 2, 3)), atol=1e-5)
    assert alone("contrast", x).std() > x.std() > alone("contrast", x, sign=-1.0).std()
    grey = x[:, :1].expand(-1, 3, -1, -1)
    assert torch.allclose(alone("colour", grey), grey, atol=1e-5) and not torch.allclose(alone("colour", x), x)
    flat = torch.full_like(x, 0.4)
    assert torch.allclose(alone("sharpness", flat), flat) and alone("sharpness", x).std() > x.std()


def test_pixels_move_as_they_are_told():
    x = torch.zeros(1, 1, 15, 15)
    x[:, :, 7, 11] = 1

    def place(name, sign=1.0, strength=0.3):
        return divmod(int(alone(name, x, strength, sign)[0, 0].flatten().argmax()), 15)

    assert place("translate_x") == (7, 9) and place("translate_x", -1.0) == (7, 13)
    assert place("translate_y") == (5, 11)
    assert place("rotate")[0] != 7 and place("shear_y", strength=1.0)[0] != 7
    x[:, :, 7, 11], x[:, :, 11, 7] = 0, 1
    assert place("shear_x", strength=1.0)[1] != 7


def test_grey_and_tiny_images_are_changed_too():
    assert rand_augment(images(40, 1, 2, 2), drawn()).shape == (40, 1, 2, 2)


def test_a_resized_crop_is_a_box_of_the_image_and_the_whole_where_its_area_is(monkeypatch):
    """Of a ramp from left to right a box is a gentler ramp; means of areas follow the share drawn."""
    ramp = torch.linspace(0, 1, 64).expand(400, 1, 48, 64)
    got = resized_crop(ramp, drawn())
    slopes = (got[:, 0, 20, 40] - got[:, 0, 20, 20]) / (ramp[0, 0, 20, 40] - ramp[0, 0, 20, 20])
    assert got.min() >= 0 and got.max() <= 1 and slopes.max() <= 1 + 1e-5
    assert 0.6 < slopes.mean() < 0.8 and slopes.min() > 0.2  # E sqrt(area) of 0.08 to 1
    monkeypatch.setitem(jitter.__globals__, "CROPPED", (1.0, 1.0))
    monkeypatch.setitem(jitter.__globals__, "ASPECTS", (4 / 3, 4 / 3))  # that of the image itself
    x = images(4, 3, 48, 64)
    torch.testing.assert_close(resized_crop(x, drawn()), x, rtol=0, atol=1e-4)


def test_jitter_is_its_three_factors(monkeypatch):
    x = images(200)
    got = jitter(x, drawn())
    ratio = got.mean((1, 2, 3)) / x.mean((1, 2, 3))
    assert 0.55 < ratio.min() < 0.7 and 1.2 < ratio.max() < 1.45
    grey = x.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    changed = jitter(grey, drawn())
    torch.testing.assert_close(changed[:, 0], changed[:, 2], rtol=0, atol=1e-5)  # saturation moves no grey
    monkeypatch.setitem(jitter.__globals__, "JITTER", 0.0)
    torch.testing.assert_close(jitter(x, drawn()), x, rtol=0, atol=1e-6)
