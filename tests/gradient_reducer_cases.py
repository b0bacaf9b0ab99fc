"""What a rank tells of the averages of its gradients."""

from split_training import Case, train_split

SMALL_BUCKETS = 2000  # bytes; the towers of the tests are small


def train_and_count(case: Case):
    """The result of this rank, and of every step how many sums were started before its last
    backward was over, of how many."""
    import engine.backend.deepspeed
    from engine.backend.gradient_reducer import GradientReducer

    early = []

    class Counted(GradientReducer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, bucket_bytes=SMALL_BUCKETS)

        def finish(self):
            early.append((self.num_started, self.num_buckets))
            super().finish()

    own, engine.backend.deepspeed.GradientReducer = (
        engine.backend.deepspeed.GradientReducer,
        Counted,
    )
    try:
        return train_split(case), early
    finally:
        engine.backend.deepspeed.GradientReducer = own
