"""Of losses, towers and metrics."""

from mutants import Mutant

LOSSES = (
    "tests/models/test_losses.py tests/models/test_milnce.py tests/models/test_losses_everywhere.py"
)

MUTANTS = (
    Mutant(
        "half-loss",
        "models/losses/infonce.py",
        "half = asking_weights(sides[branch]) / 2",
        "half = asking_weights(sides[branch])",
        "each direction is half of the loss",
        LOSSES,
    ),
    Mutant(
        "smoothing-of-targets",
        "models/losses/infonce.py",
        "half * (1 - self.label_smoothing) / positives",
        "half / positives",
        "label smoothing takes mass from the positives",
        LOSSES,
    ),
    Mutant(
        "masked-row-in-the-softmax",
        "models/losses/infonce.py",
        "logits.masked_fill_(masked, -torch.inf)",
        "logits.masked_fill_(masked, 0.0)",
        "duplicates are in no softmax",
        LOSSES,
    ),
    Mutant(
        "sigmoid-of-the-other-sign",
        "models/losses/sigmoid.py",
        "d_logits = torch.where(positive, torch.neg(wrong, out=losses), wrong, out=logits)",
        "d_logits = torch.where(positive, wrong, wrong, out=logits)",
        "a positive pair is drawn together",
        LOSSES,
    ),
    Mutant(
        "bias-without-gradient",
        "models/losses/sigmoid.py",
        "d_bias += d_logits.sum()",
        "d_bias += 0",
        "the sigmoid loss learns its bias",
        LOSSES,
    ),
    Mutant(
        "scale-stuck-at-its-limit",
        "models/losses/blocks.py",
        'outward = (parameters["logit_scale"] >= LOGIT_SCALE_LIMIT) & (gradients["logit_scale"] < 0)',
        'outward = parameters["logit_scale"] >= LOGIT_SCALE_LIMIT',
        "a scale at its limit can come back below it",
        LOSSES,
    ),
    Mutant(
        "own-text-masked",
        "models/losses/blocks.py",
        "return None if found is None else found & ~belonging(sides, branch, rows)",
        "return found",
        "the own partner of a sample is never masked",
        LOSSES,
    ),
    Mutant(
        "nobodys-rows-ask",
        "models/losses/blocks.py",
        "return _shares((weight * (side.label >= 0)).to(side.embeds.dtype))",
        "return _shares(weight.to(side.embeds.dtype))",
        "given negatives answer and ask nothing",
        LOSSES,
    ),
    Mutant(
        "ties-win",
        "models/metrics/classification.py",
        "before = ~(similarity < of_right - TOLERANCE)",
        "before = similarity > of_right",
        "a collapsed model scores nothing",
        "tests/models/test_classification.py tests/models/test_retrieval.py",
    ),
    Mutant(
        "window-that-ties-best",
        "models/metrics/grounding.py",
        "return float(overlaps[~(similarity < similarity.max() - TOLERANCE)].min())",
        "return float(overlaps[~(similarity < similarity.max() - TOLERANCE)].max())",
        "a film that stands still chooses no window",
        "tests/models/test_grounding.py",
    ),
    Mutant(
        "other-frames",
        "models/towers/video.py",
        "return frames if video_frame_row is None else frames[video_frame_row]",
        "return frames",
        "a clip is shown its own frames where clips share them",
        "tests/models/test_video_towers.py",
    ),
    Mutant(
        "whole-model-beside-a-file",
        "models/towers/layers.py",
        "draws = any(isinstance(targets[local], nn.Parameter) for local in copied)",
        "draws = True",
        "what a file of weights gives is not drawn by the library's whole model",
        "tests/models/test_libraries.py",
    ),
    Mutant(
        "first-values-of-half-a-layer",
        "models/weights/reading.py",
        'if canonical in self.names and canonical.split(".")[0] in self.groups',
        'if canonical.split(".")[0] in self.groups',
        "what a file of weights lacks has its first values",
        "tests/models/test_weights.py",
    ),
)
