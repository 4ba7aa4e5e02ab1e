"""Data sets, and the part of each rank. The order of samples depends only on seed and step."""

from minidist.data import digits, mnist, text
from minidist.data.images import ImageData, Images
from minidist.data.sampler import DistributedSampler

__all__ = ["DistributedSampler", "ImageData", "Images", "digits", "mnist", "text"]
