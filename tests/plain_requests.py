"""Training requests where nothing changes in the course of a run."""

from data.batching.sampler import training_requests
from data.batching.settings import Setting, Settings


def plain_requests(order, subset, replica, replicas, num_micro_batches, start, stop, dealer=None):
    settings = Settings([Setting(0, {"image": num_micro_batches})])
    return training_requests(
        order, subset, replica, replicas, "image", settings, start, stop, [dealer] if dealer else []
    )
