"""The cases of `tests/engine/test_parity.py`: a covering array over what can be trained and how it can
be split (`tests/covering.py`).

A case is named by its values, without those that stand first, which are the plain ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from covering import Case as Values
from covering import apart_of, covering
from small_towers import SOUND_TOWERS, TOWERS
from split_training import NAMES, PAIRS, Case

SAMPLES = 24
FACTORS = {
    "layout": ("fork", "merged"),
    "branches": ("two", "three", "four"),  # images and texts, sounds, clips of unequal lengths
    "cut": ("whole", "cut", "cut_last"),  # the branch that is on two stages: none, the first, …
    "replicas": ("single", "replicas", "uneven"),
    "schedule": ("batch_sync", "replay", "keeping", "one_by_one", "per_micro_batch"),
    "micro_batches": ("several", "lone", "packed"),
    "towers": ("transformers", "resnet", "libraries"),
    "loss": ("infonce", "smoothed", "sigmoid", "milnce", "plain"),
    "further": ("pairs_only", "views", "similarities", "of_three"),  # a term that is no pair
    "equal_values": ("unlike", "masked", "positives", "negatives"),
    "texts": ("one_text", "three_texts"),
    "weights": ("even", "weighted"),
    "rows": ("all_rows", "lost", "lacking"),  # lost: could not be loaded
    "head": ("embeddings", "fusion", "regions"),
    "loss_weights": ("own", "given"),
    "zero": ("zero1", "zero0", "zero2", "zero3"),
    "precision": ("fp32", "bf16", "fp16"),
    "clipping": ("unclipped", "clipped"),
    "learning": ("all_learn", "locked", "lora"),
    "dropout": ("still", "dropout"),
    "checkpoints": ("stored", "checkpoints"),
    "compile": ("eager", "compiled"),
    "optimizer_state": ("here", "offloaded"),
}
RULES = [
    (("merged",), ("uneven", "cut_last")),  # a merged stage has a slice of each branch
    # each micro-batch is a batch by itself: the same samples of all branches, with every modality
    (("per_micro_batch",), ("uneven", "packed", "lacking", "regions")),
    # one row per sample, all of the same weight
    (("plain",), ("three_texts", "weighted", "views")),
    (("milnce",), ("positives",)),  # the captions of a clip are its positives
    # texts of an image with each other; the similarities of a teacher; one's own loss of three
    (("views",), ("one_text",)),
    (("similarities",), ("two", "three", "three_texts")),
    (("of_three",), ("two", "four", "three_texts", "weighted")),
    # DeepSpeed adds up in fp32, scales a loss and offloads under ZeRO alone
    (("zero0",), ("bf16", "fp16", "offloaded")),
    # whose stages hold whole branches, and which shares nothing out where there are no replicas
    (("zero2", "zero3"), ("cut", "cut_last", "single")),
    # scales no loss, leaves the state where it is, and has whole weights inside the layers alone
    (("zero3",), ("fp16", "offloaded", "fusion")),
    # each calls it otherwise; the tokens of OpenCLIP's texts are not as wide as their features
    (("libraries",), ("dropout", "fusion")),
    # each kind of layer is compiled by itself, for half a minute: those of one text tower; what is
    # compiled rounds less often, so that it is no nearer to what is not than to fp32
    (("compiled",), ("resnet", "libraries", "lora", "dropout", "bf16", "fp16")),
]
LIBRARIES = ("swin+mpnet", "siglip+t5", "tnt+coca", "dinov3+open_clip")
SOUNDS = ("toy", *SOUND_TOWERS)
NUMBERS = {"image": 3, "text": 2, "audio": 1, "video": 4}  # of micro-batches, on a line of its own
LOST = {"image": (3, 4, 5, 6, 7, 23), "text": (0, 36), "audio": (0, 3, 20), "video": (3, 9)}
LACKING = {"image": (0, 5, 11), "text": (2, 5), "video": (1, 5, 6, 20)}
LACKING["audio"] = tuple(range(1, SAMPLES, 3))  # a third of the samples
PREFIXES = (8, 16)  # of EMBED_DIM
SEED = 11  # of two dozen that with the fewest ranks and compilations
LIMIT = 0.01  # of norms, which are larger
LORA = {"text": {"r": 3, "alpha": 6, "target": "all"}}


def random_deal(seed: int, replicas: int, number: int, places: int | Sequence[int] = SAMPLES):
    """[replica][micro-batch] -> places of samples, of all sizes from 1."""
    draw = random.Random(seed)
    given = range(places) if isinstance(places, int) else places
    mixed = draw.sample(given, len(given))
    ends = sorted(draw.sample(range(1, len(given)), replicas * number - 1))
    parts = [tuple(mixed[a:b]) for a, b in zip([0, *ends], [*ends, len(given)])]
    return tuple(tuple(parts[r * number : (r + 1) * number]) for r in range(replicas))


def case_of(values: Values, number: int) -> Case:
    """`number`: by which what is no factor is chosen."""
    picked = set(values.values())

    def has(word: str) -> bool:
        return word in picked

    names = NAMES[: FACTORS["branches"].index(values["branches"]) + 2]
    pairs = {"two": "one", "three": ("two", "three")[number % 2], "four": "four"}
    pairs_name = pairs[values["branches"]]
    given: dict = {"pairs": pairs_name, "audio": SOUNDS[number % len(SOUNDS)]}

    # how it is split
    line, layout = values["layout"] != "fork", values["layout"]
    stages = {"merged": 1 + has("cut")}
    if not line:
        stages = dict.fromkeys(names, 1) | {names[0]: 1 + has("cut")}
        stages[names[-1]] += has("cut_last")
    replicas = 1 + has("replicas") if line else dict.fromkeys(names, 1)
    if not line and has("replicas"):
        replicas |= dict.fromkeys(names if has("per_micro_batch") else ("image", "text"), 2)
    if not line and has("uneven"):
        replicas |= {"image": 2} if number % 2 else {names[-1]: 2 if has("cut_last") else 3}
    numbers = dict.fromkeys(names, 3) if line or has("per_micro_batch") else NUMBERS
    numbers = {name: 1 if has("lone") else numbers[name] for name in names}
    of_each = {name: replicas if line else replicas[name] for name in names}
    sizes = {name: SAMPLES // of_each[name] // numbers[name] for name in names}
    given["texts_per_image"] = (texts := 1 + 2 * has("three_texts"),)
    if has("lost"):
        given["not_loaded"] = {name: LOST[name] for name in names}
        given["not_loaded"]["text"] = tuple(p for p in LOST["text"] if p < SAMPLES * texts)
    if has("lacking"):
        given["lacking"] = {name: LACKING[name] for name in names}
    if has("packed"):
        here = {
            n: [p for p in range(SAMPLES) if p not in LACKING[n] or has("all_rows") or has("lost")]
            for n in names
        }
        given["deals_texts"] = has("three_texts") and not line
        if given["deals_texts"]:
            here["text"] = [p * texts + k for p in here["text"] for k in range(texts)]
        given["deals"] = {
            name: random_deal(10 * number + place, of_each[name], numbers[name], here[name])
            for place, name in enumerate(names)
        }

    # what is trained, and in which numbers
    schedules = {"keeping": "replay"}
    given["schedule"] = schedules.get(values["schedule"], values["schedule"])
    if has("keeping") or (has("one_by_one") and number % 2):
        given["kept_micro_batches"] = 1
    if has("one_by_one"):
        given["imported"] = "examples.schedule"
    towers = {"transformers": "vit+clip", "resnet": "resnet+bert"}
    library = LIBRARIES[number % len(LIBRARIES)]
    if has("bf16") and "coca" in library:  # whose mask stays in fp32, which the next stage refuses
        library = LIBRARIES[0]
    given["towers"] = towers.get(values["towers"], library)
    if has("smoothed"):
        given |= {"loss": "infonce", "label_smoothing": 0.1}
    else:
        given["loss"] = values["loss"]
    given["prefixes"] = PREFIXES if number % 3 == 1 else ()
    given["duplicates"] = None if has("unlike") else values["equal_values"]
    given["weighted"] = names if has("weighted") else ()
    given["fusion"] = has("fusion") * (1 + has("resnet"))
    if has("regions"):  # where there are clips, moments of these
        given["annotated"] = "moment" if "video" in names else "region"
    if not has("pairs_only"):
        given["further"] = values["further"]
    given["evaluated"] = has("regions") and not has("three_texts") and not has("lacking")
    if has("given"):
        several = len(PAIRS[pairs_name]) > 1 or has("regions") or not has("pairs_only")
        suffix = "/image_text" if several else ""
        given["loss_weights"] = {f"contrastive{suffix}": 0.8}
        if has("fusion"):
            given["loss_weights"][f"matching{suffix}"] = 1.5
    if has("fp16") and given["audio"] == "ast":  # whose gradients leave fp16's range
        given["audio"] = "toy"
    given |= {"zero_stage": int(values["zero"][-1]), "precision": values["precision"]}
    if has("clipped"):
        given["clipping"] = dict.fromkeys((*names, "head"), LIMIT)
    given["locked"] = {"image": True} if has("locked") else {}
    given["lora"] = LORA if has("lora") else {}
    given["dropout"] = 0.1 * has("dropout")
    given["checkpoint_interval"] = int(has("checkpoints"))
    given["compile"] = {"text": "layers"} if has("compiled") else None
    given["offload"] = has("offloaded")
    if len(names) > 2:  # more losses make more gradient than fp16 holds of twice 2**9
        given["loss_scale"] = 2**6
    size = sizes[names[0]] if line else sizes
    return Case(layout, stages, replicas, size, name=name_of(values), **given)


def name_of(values: Values) -> str:
    words = [v for factor, v in values.items() if factor == "layout" or v != FACTORS[factor][0]]
    return "-".join(words)


def cases() -> list[Case]:
    return [case_of(values, n) for n, values in enumerate(covering(FACTORS, apart_of(RULES), SEED))]


assert {*LIBRARIES} <= {*TOWERS}
