"""What ranks tell of a step comes together by rank."""

from engine.step_metrics import RankNumbers


def test_numbers_of_all_ranks_come_from_one_sum():
    own = [RankNumbers(*([10.0 * kind + rank] for kind in range(6))) for rank in range(3)]
    told = [each.between_zeros(rank, 3) for rank, each in enumerate(own)]
    together = RankNumbers.of_sum([sum(numbers) for numbers in zip(*told, strict=True)])
    assert together == RankNumbers(
        busy_s=[0.0, 1.0, 2.0],
        own_s=[10.0, 11.0, 12.0],
        step_s=[20.0, 21.0, 22.0],
        ready_s=[30.0, 31.0, 32.0],
        peak_bytes=[40.0, 41.0, 42.0],
        data_wait_s=[50.0, 51.0, 52.0],
    )
