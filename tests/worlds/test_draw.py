"""Drawing: where shapes land, what they cover, and how they blend."""

import math

import numpy as np
import pytest

from flowgrpo.worlds.scenes.draw import COLOURS, GROUND, SHAPES, SIZE, Thing, draw, mask, outline

RADII = (6.5, 9.0, 12.0)


def shoelace(corners: list[tuple[float, float]]) -> float:
    following = corners[1:] + corners[:1]
    return abs(sum(x * v - u * y for (x, y), (u, v) in zip(corners, following))) / 2


def test_an_empty_scene_is_ground():
    picture = draw([])
    assert picture.shape == (SIZE, SIZE, 3)
    assert picture.dtype == np.float32
    assert np.allclose(picture, GROUND)
    assert np.allclose(draw([], (0.1, 0.2, 0.3)), (0.1, 0.2, 0.3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", RADII)
def test_a_mask_covers_the_area_of_its_outline(shape: str, radius: float):
    coverage = mask(shape, radius)
    assert coverage.min() == 0.0
    assert coverage.max() == 1.0
    # Rasterised at 8 subpixels: half a subpixel is lost or won along the outline.
    assert coverage.sum() == pytest.approx(shoelace(outline(shape, radius)), rel=0.06)


@pytest.mark.parametrize("radius", RADII)
def test_size_tells_little_about_shape(radius: float):
    areas = [float(mask(shape, radius).sum()) for shape in SHAPES]
    assert max(areas) < 1.5 * min(areas)
    assert mask("circle", radius).sum() == pytest.approx(math.pi * radius**2, rel=0.03)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mask_fits_its_patch_and_is_the_same_from_left_and_right(shape: str):
    coverage = mask(shape, 10.0)
    assert coverage.shape[0] == coverage.shape[1]
    assert coverage.shape[0] % 2 == 1
    border = np.concatenate([coverage[0], coverage[-1], coverage[:, 0], coverage[:, -1]])
    assert not border.any()
    # The corner rule of the rasteriser may shift an edge by one subpixel, an eighth of a pixel.
    assert np.abs(coverage - coverage[:, ::-1]).max() <= 0.26
    if shape in ("circle", "square", "cross"):
        assert np.abs(coverage - coverage.T).max() <= 0.26


def test_triangles_and_stars_point_up():
    for shape in ("triangle", "star"):
        rows = np.nonzero(mask(shape, 10.0).sum(1))[0]
        widths = (mask(shape, 10.0) > 0.5).sum(1)
        assert widths[rows[1]] < widths[rows[len(rows) // 2]]
    assert outline("triangle", 10.0)[0][1] < 0


def test_shapes_differ_in_more_than_their_edge():
    patches = {shape: mask(shape, 10.0) for shape in SHAPES}
    for one in SHAPES:
        for two in SHAPES:
            if one != two:
                assert np.abs(patches[one] - patches[two]).sum() > 0.15 * patches[one].sum()


def test_masks_are_kept_and_cannot_be_spoilt():
    assert mask("star", 8.0) is mask("star", 8.0)
    with pytest.raises(ValueError, match="read-only"):
        mask("star", 8.0)[0, 0] = 1.0


@pytest.mark.parametrize("colour", COLOURS)
def test_the_centre_has_the_colour_and_the_far_corner_the_ground(colour: str):
    picture = draw([Thing("cross", colour, 40, 20, 9.0)])
    assert np.allclose(picture[20, 40], COLOURS[colour], atol=1e-6)
    assert np.allclose(picture[40, 20], GROUND, atol=1e-6)


def test_moving_a_thing_moves_its_pixels():
    here = draw([Thing("star", "blue", 20, 30, 8.0)])
    there = draw([Thing("star", "blue", 33, 25, 8.0)])
    assert np.array_equal(np.roll(here, (-5, 13), axis=(0, 1)), there)


def test_edges_blend_between_ground_and_colour():
    picture = draw([Thing("circle", "red", 32, 32, 10.0)])
    share = (picture[..., 1] - GROUND[1]) / (COLOURS["red"][1] - GROUND[1])
    half = mask("circle", 10.0).shape[0] // 2
    window = slice(32 - half, 32 + half + 1)
    assert np.allclose(share[window, window], mask("circle", 10.0), atol=1e-5)


def test_a_thing_over_the_border_is_cut_there():
    whole = draw([Thing("square", "green", 32, 32, 10.0)])
    cut = draw([Thing("square", "green", 0, 63, 10.0)])
    assert np.allclose(cut[63 - 12 :, :13], whole[32 - 12 : 33, 32:45])
    assert np.allclose(cut[:40, 30:], GROUND)


def test_later_things_cover_earlier_ones():
    one, two = Thing("circle", "red", 32, 32, 10.0), Thing("square", "blue", 34, 32, 8.0)
    assert np.allclose(draw([one, two])[32, 32], COLOURS["blue"], atol=1e-6)
    assert np.allclose(draw([two, one])[32, 32], COLOURS["red"], atol=1e-6)


def test_an_unknown_shape_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"'heart'.*circle, square, triangle, star, cross"):
        outline("heart", 5.0)
