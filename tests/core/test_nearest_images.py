"""Distances to the nearest image of a group, and the factors of advantages that they give."""

import math

import pytest
import torch

from flowgrpo.core.nearest_images import nearest_distances, novelty_factors, patch_means


def test_the_nearest_image_of_the_same_group_counts() -> None:
    # Angles of 0, 60 and 90 degrees, and an image of another group at 60 degrees, which does not count.
    angles = torch.tensor([0.0, 60.0, 90.0, 60.0, 240.0]).deg2rad()
    features = torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor([1.0, 5.0, 0.1, 2.0, 3.0])[:, None]
    found = nearest_distances(features, torch.tensor([0, 0, 0, 1, 1]))
    assert found.tolist() == pytest.approx([0.5, 1 - math.sqrt(0.75), 1 - math.sqrt(0.75), 2.0, 2.0], abs=1e-6)


def test_an_image_alone_has_no_distance_and_equal_images_have_none_between_them() -> None:
    found = nearest_distances(torch.ones(3, 4), torch.tensor([0, 1, 1]))
    assert math.isnan(float(found[0]))
    assert found[1:].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_good_images_get_their_distance_over_the_mean_and_others_stay() -> None:
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    distances = torch.tensor([0.1, 0.2, 0.6, 1.0, 0.5, 0.0])
    advantages = torch.tensor([2.0, -1.0, 1.0, -1.0, 3.0, 0.0])
    # The means of the groups are 0.3 and 0.5.
    assert novelty_factors(distances, advantages, groups).tolist() == pytest.approx([1 / 3, 1.0, 2.0, 1.0, 1.0, 1.0])


def test_the_order_of_samples_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    features, advantages = torch.randn(8, 5, generator=generator), torch.randn(8, generator=generator)
    groups, order = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]), torch.randperm(8, generator=generator)
    plain = novelty_factors(nearest_distances(features, groups), advantages, groups)
    mixed = novelty_factors(nearest_distances(features[order], groups[order]), advantages[order], groups[order])
    torch.testing.assert_close(mixed, plain[order])


def test_without_distances_nothing_changes() -> None:
    groups, advantages = torch.tensor([0, 0, 1]), torch.tensor([1.0, 2.0, 3.0])
    for distances in (torch.zeros(3), torch.full((3,), torch.nan), torch.tensor([0.0, 0.0, torch.nan])):
        assert novelty_factors(distances, advantages, groups).tolist() == [1.0, 1.0, 1.0]
    # A missing distance does not enter the mean of the others.
    found = novelty_factors(torch.tensor([0.2, torch.nan, 0.4]), torch.ones(3), torch.zeros(3, dtype=torch.long))
    assert found.tolist() == pytest.approx([2 / 3, 1.0, 4 / 3])


def test_patch_means_are_colours_from_mid_grey() -> None:
    image = torch.zeros(1, 3, 4, 4)
    image[0, 0, :2] = 1.0
    assert patch_means(image, 2)[0].tolist() == [0.5, 0.5, -0.5, -0.5] + [-0.5] * 8
