"""Code that rewards with a model share: files of weights, models in memory, pairs of image and text encoders."""
