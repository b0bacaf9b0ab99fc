"""Training requests where nothing changes in the course of a run."""

from data.batching.batches import Batches
from data.batching.settings import Setting


def plain_requests(order, subset, replica, replicas, num_micro_batches, start, stop, buckets=None):
    settings = [Setting(0, {"image": num_micro_batches})]
    batches = Batches(order, subset, settings, buckets)
    return batches.requests("image", replica, replicas, start, stop)
