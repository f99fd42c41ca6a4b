"""A separation network in one process: what its loss consists of, and batches and labels that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.domain import Ramp, Separation, SeparationNetwork, Weights, classification_network, segmentation_network
from mural.domain.code_losses import difference, discrepancy, scale_invariant_error
from mural.domain.default_parts import domain_classifier, map_decoder, map_encoder
from mural.domain.domain_terms import Adversary
from mural.domain.placement import by_part
from mural.engine.domain_stages import staged_by_domain
from mural.errors import ConfigError, DataError, PlanError


def small(**more: Any) -> SeparationNetwork:
    torch.manual_seed(0)
    return classification_network(["a", "b", "c"], 3, (1, 8, 8), code=4, width=2, **more).double()


def images(*counts: int, size: int = 8) -> tuple[Tensor, ...]:
    return tuple(torch.rand(n, 1, size, size, dtype=torch.float64) for n in counts)


def test_the_loss_is_the_tasks_and_the_weighted_means_over_domains() -> None:
    weights = Weights(reconstruction=0.3, difference=0.5, similarity=0.7)
    network, labels = small(separation=Separation(weights=weights)), torch.tensor([0, 2])
    batches = images(2, 3, 2)
    loss = network.loss()(network(*batches), labels)
    codes = [network.shared(x) for x in batches]
    own = [encoder(x) for encoder, x in zip(network.private.values(), batches, strict=True)]
    sums = zip(codes, own, batches, strict=True)
    made = sum(scale_invariant_error(network.reconstruction.decoder(c + p), x) for c, p, x in sums)
    apart = sum(difference(c, p) for c, p in zip(codes, own, strict=True))
    assert isinstance(network.similarity, Adversary)
    guessed = [network.similarity.classifier(code) for code in codes]
    told = sum(F.cross_entropy(g, torch.full((len(g),), d)) for d, g in enumerate(guessed))
    expected = F.cross_entropy(network.head(codes[0]), labels) + 0.3 * made / 3 + 0.5 * apart / 3 + 0.7 * told / 3
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)


def test_the_discrepancy_is_from_the_source_to_each_target() -> None:
    network = small(separation=Separation(similarity="mmd", ramp=Ramp(length=10)))
    network.at(5)
    batches = images(2, 3, 2)
    _, terms = network(*batches)
    a, b, c = (network.shared(x) for x in batches)
    strength = Ramp(length=10).at(5)
    torch.testing.assert_close(terms["similarity"], strength * (discrepancy(b, a) + discrepancy(c, a)) / 2)


def test_the_ramp_holds_back_encoders_and_not_the_adversary() -> None:
    network = small(separation=Separation(ramp=Ramp(start=3)))
    for step, pulled in ((0, False), (3, True)):
        network.zero_grad()
        network.at(step)
        network(*images(2, 2, 2))[1]["similarity"].backward()
        gradient = network.shared[-1].weight.grad  # type: ignore[index, union-attr]
        assert bool((gradient != 0).any()) is pulled
        assert network.similarity.classifier[0].weight.grad.abs().sum() > 0  # type: ignore[index, union-attr, operator]


def test_the_head_learns_from_the_source_alone_and_predicts_for_all_domains() -> None:
    network = small()
    batches = images(2, 3, 4)
    assert [len(p) for p in network(*batches)[0]] == [2]
    network.eval()
    predictions, _ = network(*batches)
    assert [tuple(p.shape) for p in predictions] == [(2, 3), (3, 3), (4, 3)]
    torch.testing.assert_close(network.predictor()(batches[2]), predictions[2])


def test_a_domain_without_images_is_named() -> None:
    network = small()
    with pytest.raises(DataError, match=r"domain 'b' has a batch of shape \(0, 1, 8, 8\), without images"):
        network(*images(2, 0, 2))
    with pytest.raises(DataError, match=r"2 batches for the 3 domains"):
        network(*images(2, 2))
    with pytest.raises(DataError, match=r"missing: \['c'\], unknown: \['d'\]"):
        network.arranged(dict(zip("abd", images(2, 2, 2), strict=True)))
    a, b, c = images(1, 2, 3)
    assert [len(x) for x in network.arranged({"c": c, "a": a, "b": b})] == [1, 2, 3]


def test_a_label_for_a_target_is_refused_in_training_and_ignored_in_evaluation() -> None:
    network, batches = small(), images(2, 2, 2)
    labels, loss = torch.tensor([0, 2]), network.loss()
    result = network(*batches)
    assert loss(result, {"a": labels, "b": None}) == loss(result, labels)
    with pytest.raises(DataError, match=r"\['b'\] are targets and were given labels"):
        loss(result, {"a": labels, "b": labels})
    with pytest.raises(DataError, match="the source 'a' has no labels"):
        loss(result, {"b": labels})
    result = network.eval()(*batches)
    assert loss(result, {"a": labels, "b": labels}) == loss(result, labels)


def test_images_of_the_source_without_a_label_still_count_in_the_other_terms() -> None:
    network, batches = small(), images(3, 2, 2)
    loss, result = network.loss(), network(*batches)
    some = loss(result, torch.tensor([1, -100, 2]))
    (prediction,), terms = result
    weighted = sum(getattr(network.separation.weights, name) * value for name, value in terms.items())
    torch.testing.assert_close(some, F.cross_entropy(prediction[[0, 2]], torch.tensor([1, 2])) + weighted)


def test_unequal_sizes_are_right_for_maps_and_an_error_for_a_decoder_of_one_size() -> None:
    maps = segmentation_network(["a", "b"], 2, (1, 8, 8), width=2).double()
    predictions, _ = maps.eval()(*images(1, size=8), *images(1, size=12))
    assert [tuple(p.shape[2:]) for p in predictions] == [(8, 8), (12, 12)]
    with pytest.raises(DataError, match=r"the decoder made \(1, 1, 8, 8\) for images of \(1, 1, 12, 12\)"):
        small()(*images(1, 1), *images(1, size=12))
    with pytest.raises(DataError, match=r"the decoder made \(1, 1, 8, 8\) for images of \(1, 1, 9, 9\)"):
        maps(*images(1, size=8), *images(1, size=9))


class DenseBoxes(nn.Module):
    """A score and a box at each position: a detector's head of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.box = nn.Conv2d(4, 1, 1), nn.Conv2d(4, 4, 1)

    def forward(self, code: Tensor) -> dict[str, Tensor]:
        return {"score": self.score(code), "box": self.box(code)}


def detection_loss(found: dict[str, Tensor], boxes: dict[str, Tensor]) -> Tensor:
    missed = F.binary_cross_entropy_with_logits(found["score"], boxes["score"])
    return missed + (boxes["score"] * (found["box"] - boxes["box"]).abs()).mean()


def detector() -> SeparationNetwork:
    torch.manual_seed(0)
    encoders = {name: map_encoder(1, 2) for name in "ab"}
    return SeparationNetwork(
        encoders, map_encoder(1, 2), map_decoder(1, 2), DenseBoxes(), domain_classifier(4, 2), image=(1, 8, 8)
    ).double()


def test_a_detector_with_a_loss_of_its_own() -> None:
    network, plain = detector(), detector()
    batches = images(2, 1)
    boxes = {"a": {"score": torch.ones(2, 1, 2, 2).double(), "box": torch.rand(2, 4, 2, 2).double()}}
    expected = plain.loss(detection_loss)(plain(*batches), boxes)
    expected.backward()
    pm = mural.parallelize(network, mural.Plan(), network.loss(detection_loss))
    torch.testing.assert_close(pm.step(batches, boxes), expected.detach())
    for name, p in pm.named_parameters():
        torch.testing.assert_close(p.grad, plain.get_parameter(name).grad)


def test_networks_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="a source and at least one target"):
        classification_network(["a"], 2, (1, 8, 8))
    with pytest.raises(ConfigError, match=r"domain 'a\.b'"):
        classification_network(["a.b", "c"], 2, (1, 8, 8))
    parts = map_encoder(1, 2), map_decoder(1, 2), nn.Identity()
    encoders = {name: map_encoder(1, 2) for name in "ab"}
    with pytest.raises(ConfigError, match="needs a classifier of domains"):
        SeparationNetwork(encoders, *parts)
    with pytest.raises(ConfigError, match="has no adversary"):
        SeparationNetwork(encoders, *parts, nn.Identity(), Separation(similarity="mmd"))
    wide = SeparationNetwork({"a": map_encoder(1, 3), "b": map_encoder(1, 3)}, *parts, domain_classifier(4, 2))
    with pytest.raises(DataError, match=r"shared code has the shape \(1, 4, 2, 2\), the private one \(1, 6, 2, 2\)"):
        wide(torch.rand(1, 1, 8, 8), torch.rand(1, 1, 8, 8))


def test_plans_that_do_not_fit_a_network_are_refused() -> None:
    with pytest.raises(PlanError, match=r"domain = 2 divides the domains of .*, but the model is a Linear"):
        staged_by_domain(nn.Linear(2, 2), mural.Plan(domain=2), None, "cpu")
    with pytest.raises(PlanError, match="domain = 4, but the network has 3 domains"):
        staged_by_domain(small(), mural.Plan(domain=4), None, "cpu")
    with pytest.raises(PlanError, match="the placement by part sets both"):
        by_part(small(), mural.Plan(domain=2))
    with pytest.raises(PlanError, match=r"domain = 2 with microbatches = 2 cannot be run"):
        mural.Plan(domain=2, microbatches=2).check_runnable()
    with pytest.raises(PlanError, match="for images of some shape"):
        staged_by_domain(without_image(), mural.Plan(domain=2), None, "cpu")


def test_running_statistics_in_the_shared_encoder_are_refused_on_several_ranks() -> None:
    network = small()
    network.shared.append(nn.BatchNorm1d(4).double())  # type: ignore[operator]
    for plan in (mural.Plan(domain=3), by_part(network)):
        with pytest.raises(PlanError, match=r"batch norm shared\.9 .* every domain moves.*a group norm"):
            staged_by_domain(network, plan, None, "cpu")
    network.shared.eval()
    assert staged_by_domain(network, mural.Plan(domain=3), None, "cpu").stage == 3


def test_the_domain_axis_is_stages_on_seats() -> None:
    plan = staged_by_domain(small(), mural.Plan(domain=3), None, "cpu")
    assert plan.cuts == ("private.b", "private.c", "head")
    assert (plan.stage, plan.domain, plan.seats) == (3, 1, (0, 1, 2, 0))
    plan = staged_by_domain(small(), mural.Plan(domain=2, stage=2, cuts=("shared",)), None, "cpu")
    assert plan.cuts == ("shared", "private.b", "shared@2", "private.c", "shared@3", "head")
    assert (plan.stage, plan.seats) == (4, (0, 2, 0, 2, 1, 3, 2))


def test_the_placement_by_part_has_six_twelve_and_eighteen_ranks() -> None:
    for targets, ranks in ((1, 6), (4, 12), (7, 18)):
        names = [f"d{i}" for i in range(targets + 1)]
        network = classification_network(names, 2, (1, 8, 8), code=4, width=2)
        assert by_part(network).devices == ranks
        assert by_part(network, head_apart=False).devices == ranks - 1
    assert by_part(network, mural.Plan(spatial=(2, 1), data=2)).devices == 72


def without_image() -> SeparationNetwork:
    network = small()
    network.image = None
    return network
