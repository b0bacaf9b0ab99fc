"""Requests where nothing changes in the course of a run, and images that are loaded for them."""

import numpy as np

from data.batching.batches import Batches
from data.batching.requests import MicroBatchRequest
from data.batching.settings import Setting
from data.modalities.image import ImageModality
from data.modalities.transforms import EvalTransform, TrainTransform, Views


def plain_requests(order, subset, replica, replicas, num_micro_batches, start, stop, buckets=None):
    settings = [Setting(0, {"image": num_micro_batches})]
    batches = Batches(order, subset, settings, buckets)
    return batches.requests("image", replica, replicas, start, stop)


def request_of(samples, epoch=0, training=True, **more):
    """For these samples, which stand at the positions from 0 on."""
    index = np.array(samples, np.int64)
    return MicroBatchRequest(0, epoch, index, np.arange(len(index)), training, **more)


def square_images(side, *more, side_multiple=1, **how):
    size = side, side
    return ImageModality(
        Views(TrainTransform(size), EvalTransform(size), side_multiple), *more, **how
    )
