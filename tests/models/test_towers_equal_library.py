"""The claim: a tower run layer by layer is the library's model, bit for bit, in fp32: output,
gradients, BatchNorm statistics.

No tolerance: the same operations run in the same order on the same weights. The exceptions
(`Case.rounded`) are a gradient that SigLIP 2 adds up image by image and we add up at once, and
those below torch's self-attention, which is ours.
"""

from fnmatch import fnmatch
from itertools import product

import pytest
import torch
from rounding import assert_equal_rows

from models.towers.building import with_head
from models.towers.libraries import text_layers
from models.towers.text import text_tower

VOCAB, TOKENS, EOS = 120, 12, 7  # as in conftest.py


def build(tower):
    return [spec.build(seed=3) for spec in tower.specs]


def assert_same(case, name, ours, theirs):
    if any(fnmatch(name, pattern) for pattern in case.rounded):
        assert_equal_rows(ours, theirs)
    else:
        assert torch.equal(ours, theirs), name


def test_training_forward_and_gradients(cases, forward, subtests):
    for (name, case), dropout in product(cases.items(), (False, True)):
        with subtests.test(f"{name}, dropout={dropout}"):
            layers = build(case.tower(dropout))
            reference = case.reference(layers, dropout).train()
            inputs = case.inputs()

            torch.manual_seed(1)  # with dropout both sides draw the same numbers in the same order
            features = forward(layers, inputs)[f"{case.branch}_features"]
            torch.manual_seed(1)
            expected = case.run_reference(reference, inputs)
            assert torch.equal(features, expected)

            weight = torch.randn(features.shape, generator=torch.Generator().manual_seed(2))
            (features * weight).sum().backward()
            (expected * weight).sum().backward()
            expected_state = case.named(reference)  # after the forward: BatchNorm has counted
            expected_gradients = {
                name: tensor.grad
                for name, tensor in expected_state.items()
                # Whisper's positions do not learn
                if isinstance(tensor, torch.nn.Parameter)
                and tensor.requires_grad
                and not name.startswith(case.classifier_prefix)
            }
            for layer in layers:
                for local, parameter in layer.named_parameters():
                    name = layer.canonical_names[local].split(".", 1)[1]
                    assert_same(case, name, parameter.grad, expected_gradients.pop(name))
                for local, tensor in layer.state_dict().items():
                    name = layer.canonical_names[local].split(".", 1)[1]
                    assert torch.equal(tensor, expected_state[name]), name
            assert not expected_gradients


def test_split_anywhere(cases, forward, subtests):
    """Two stages at every cut, as the engine runs them: tensors cross without their graph, and the
    gradients that come back start the first stage's backward."""
    for name, case in cases.items():
        with subtests.test(name):
            features = f"{case.branch}_features"
            layers, inputs = build(case.tower()), case.inputs()
            reference = case.reference(layers).train()
            expected = case.run_reference(reference, inputs)
            weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
            (expected * weight).sum().backward()
            gradients = {name: tensor.grad for name, tensor in case.named(reference).items()}

            for cut in range(1, len(layers)):
                for layer in layers:
                    layer.zero_grad()
                sent = forward(layers[:cut], inputs)
                received = {
                    name: tensor.detach().requires_grad_(tensor.is_floating_point())
                    for name, tensor in sent.items()
                }
                made = forward(layers[cut:], received)
                assert set(made) == {features} and torch.equal(made[features], expected), cut
                (made[features] * weight).sum().backward()
                crossed = [name for name, tensor in sent.items() if tensor.requires_grad]
                torch.autograd.backward(
                    [sent[name] for name in crossed], [received[name].grad for name in crossed]
                )
                for layer in layers:
                    for local, parameter in layer.named_parameters():
                        name = layer.canonical_names[local].split(".", 1)[1]
                        assert_same(case, name, parameter.grad, gradients[name])


def test_evaluation_with_dropout_configured(cases, forward, subtests):
    for name, case in cases.items():
        with subtests.test(name):
            layers = [layer.eval() for layer in build(case.tower(dropout=True))]
            reference = case.reference(layers, dropout=True).eval()
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    features = forward(layers, case.inputs())[f"{case.branch}_features"]
                    assert torch.equal(features, case.run_reference(reference, case.inputs()))


def test_without_padding_and_shorter_texts(cases, forward):
    """The library then leaves its mask out; so must we."""
    for name, case in cases.items():
        if case.branch != "text" or name == "siglip":  # which reads texts of one length
            continue
        layers = build(case.tower())
        inputs = {key: tensor[:1, :7] for key, tensor in case.inputs().items() if tensor.dim() > 1}
        inputs |= {key: tensor[:1] for key, tensor in case.inputs().items() if tensor.dim() == 1}
        expected = case.run_reference(case.reference(layers), inputs)
        assert torch.equal(forward(layers, inputs)["text_features"], expected), name


def test_xlm_without_languages_reads_its_own(cases, forward):
    """`lang_id` of its configuration for all texts."""
    case = cases["xlm"]
    layers, inputs = build(case.tower()), case.inputs()
    assert "language_ids" in case.tower().inputs
    assert case.tower().config["languages"] == {"names": {}, "number": 3, "default": 0}
    expected = forward(layers, {**inputs, "language_ids": torch.zeros(4, dtype=torch.int64)})
    del inputs["language_ids"]
    assert torch.equal(forward(layers, inputs)["text_features"], expected["text_features"])


def test_siglip_reads_texts_of_full_length(cases, forward):
    """Shorter ones are padded, and the padding is seen, whatever the mask says of it."""
    layers = build(cases["siglip"].tower())
    whole = cases["siglip"].inputs()
    expected = cases["siglip"].run_reference(cases["siglip"].reference(layers), whole)
    shorter = {name: tensor[[1, 3], :5] for name, tensor in whole.items()}
    made = forward(layers, shorter)["text_features"]
    assert_equal_rows(made, expected[[1, 3]])


@pytest.mark.parametrize(("name", "kinds"), [("bert", 1), ("t5", 1), ("modernbert", 3)])
def test_the_blocks_of_a_stage_share_what_they_make_of_a_mask(
    cases, forward, monkeypatch, name, kinds
):
    """For another tensor, or another content, it is made anew. ModernBERT's windows are made of the
    other mask."""
    asked = []
    for function in ("bidirectional_mask", "window_mask"):
        own = getattr(text_layers, function)

        def make(*given, own=own):
            asked.append(own)
            return own(*given)

        monkeypatch.setattr(text_layers, function, make)
    layers, inputs = build(cases[name].tower()), cases[name].inputs()
    first = forward(layers, inputs)["text_features"]
    assert len(asked) == kinds
    assert torch.equal(forward(layers, inputs)["text_features"], first) and len(asked) == kinds
    copied = {key: tensor.clone() for key, tensor in inputs.items()}
    assert torch.equal(forward(layers, copied)["text_features"], first)
    assert len(asked) == 2 * kinds
    inputs["attention_mask"][0, 9:] = 0
    assert not torch.equal(forward(layers, inputs)["text_features"], first)
    assert len(asked) == 3 * kinds


def test_padding_is_not_seen(cases, forward):
    """Other ids behind the mask change nothing; the same ids in front of it do."""
    for name, case in cases.items():
        if case.branch != "text" or name == "siglip":
            continue
        layers, inputs = build(case.tower()), case.inputs()
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        behind = {**inputs, "input_ids": torch.where(mask == 0, 50, ids)}
        seen = {**inputs, "input_ids": torch.where(mask == 1, (ids + 1) % 120, ids)}
        features = forward(layers, inputs)["text_features"]
        assert torch.equal(features, forward(layers, behind)["text_features"]), name
        assert not torch.allclose(features, forward(layers, seen)["text_features"]), name


def test_every_token_of_a_text_learns(cases, forward, subtests):
    """Also the one that ends it where the tokenizer pads with that too, and whichever the library
    takes for padding: no first value is zero, and neither is its gradient."""
    for name, case in cases.items():
        if case.branch != "text":
            continue
        tower = text_tower(case.name, VOCAB, TOKENS, EOS, EOS)
        with subtests.test(name):
            layers = build(tower)
            words = next(p for p in layers[0].parameters() if p.shape[0] == VOCAB)
            assert words.abs().amax(1).min() > 0
            # 1 and 2 are MPNet's and XLM's padding
            ids = torch.arange(1, EOS + 1)[None]
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            features = forward(layers, inputs)["text_features"]
            weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
            (features * weights).sum().backward()
            rows = words.grad[ids[0]].abs().amax(1)
            assert rows.min() > 1e-3 * rows.max(), rows


def test_clip_pools_at_the_end_of_text_or_at_the_highest_id(cases):
    tower, inputs = cases["clip"].tower(), cases["clip"].inputs()
    assert tower.specs[0].build(0)(inputs)["text_pool_position"].tolist() == [11, 4, 8, 2]
    # given by the caller, 2 is an id like any other
    given = text_tower(cases["clip"].name, 120, 12, None, eos_token_id=2)
    made = given.specs[0].build(0)({"input_ids": torch.tensor([[5, 119, 2, 0]])})
    assert made["text_pool_position"].tolist() == [2]


def test_bf16(cases, forward, subtests):
    for name, case in cases.items():
        with subtests.test(name):
            layers = [spec.build(0) for spec in with_head(case.tower(), 16).specs]
            # as DeepSpeed casts: buffers stay in fp32
            for parameter in (p for layer in layers for p in layer.parameters()):
                parameter.data = parameter.data.to(torch.bfloat16)
            inputs = {
                name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
                for name, tensor in case.inputs().items()
            }
            tensors = forward(layers[:-2], inputs)
            assert tensors[f"{case.branch}_hidden"].dtype == torch.bfloat16
            embeds = forward(layers[-2:], tensors)[f"{case.branch}_embeds"]
            assert embeds.dtype == torch.float32 and embeds.shape == (4, 16)
            # fp32 rounding only: the length is made 1 in fp32
            torch.testing.assert_close(embeds.norm(dim=-1), torch.ones(4))
