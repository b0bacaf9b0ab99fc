"""Which panel each metric goes to."""

from launch.tracking.names import NAMES, branch_names, evaluation_names, rank_names, step_names

LINE = {
    "step": 7,
    "epoch": 0.5,
    "loss": 3.0,
    "loss/birds": 2.5,
    "contrastive_loss/image_text": 2.0,
    "lr": 1e-3,
    "logit_scale_exp": 14.0,
    "audio_text_logit_scale_exp": 15.0,
    "grad_norm/image": 1.0,
    "clip_coefficient/text": 0.5,
    "clipped_share/head": 0.1,
    "samples_per_s": 50.0,
    "images_per_s": 50.0,
    "text_tokens_per_s": 900.0,
    "step_s": 2.0,
    "idle/image 0": 0.25,
    "busy_s/image 0": 1.5,
    "busy_s/image 1": 2.0,
    "busy_s/text 0": 0.5,
    "data_wait_s/text 0": 0.1,
    "padding_share/text": 0.2,
    "peak_memory_bytes": 100,
    "step_applied": False,
    "something_new/image": 4.0,
}


def test_metrics_go_to_the_panel_of_their_kind():
    names = step_names(LINE)
    assert len(names) == len(LINE) - 1  # no two share a name
    assert {name.partition("/")[0] for name in names} == {
        *("loss", "optimizer", "clipping", "throughput", "idle", "busy_s", "data_wait"),
        *("padding", "memory", "data", "something_new"),
    }
    assert names["loss/total"] == 3.0 and names["loss/birds"] == 2.5
    assert names["optimizer/logit_scale_exp/audio_text"] == 15.0
    assert names["data_wait/text 0"] == 0.1 and names["optimizer/step_applied"] == 0
    assert len(set(NAMES.values())) == len(NAMES)


def test_each_rank_and_each_branch_has_its_own():
    memory = {"memory/rank_0_bytes": 5, "memory/rank_1_bytes": 6}
    busy = {"utilisation/rank_0": 0.5, "utilisation/rank_1": 1.0}
    assert rank_names([5, 6], [1.0, 3.0], 2.0) == memory | busy
    # 100 samples a step; the slowest stage of the image branch computes for 2 s
    assert branch_names(LINE) == {
        "throughput/image/possible_samples_per_s": 50.0,
        "throughput/text/possible_samples_per_s": 200.0,
    }


def test_retrieval_is_by_set_and_direction():
    values = {"image_to_text_R@1": 0.5, "text_to_tone_R@10": 1.0, "uniformity/image": -1.0}
    for held_out in ("validation", "ema/validation"):
        assert evaluation_names(held_out, values) == {
            f"retrieval/{held_out}/image_to_text/R@1": 0.5,
            f"retrieval/{held_out}/text_to_tone/R@10": 1.0,
            f"alignment/{held_out}/uniformity/image": -1.0,
        }
