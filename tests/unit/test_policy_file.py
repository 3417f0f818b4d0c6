"""A policy file may tighten or widen bounds; whatever is wrong in it is named by field, value, bound and remedy."""

from pathlib import Path

import pytest

from mem_core.domain.errors import RequestError
from mem_core.domain.policy import BUILT_IN_BOUNDS
from mem_core.infrastructure.request.policy_file import load_policy_file, parse_policy


def test_built_in_lanes_are_those_of_the_design() -> None:
    for lane, name in ((BUILT_IN_BOUNDS.cuda, "v89_real_chaos_mem_lane"), (BUILT_IN_BOUNDS.cpu, "cpu_mem_lane")):
        assert lane.lane == name
        assert (lane.lr_multiplier.at_least, lane.lr_multiplier.at_most) == (0.05, 0.85)
        assert (lane.gradient_clip_norm.at_least, lane.gradient_clip_norm.at_most) == (0.05, 1.25)
        assert (lane.loss_scale_initial_power.at_least, lane.loss_scale_initial_power.at_most) == (0, 10)


@pytest.mark.parametrize("raw", [b"", b"# nothing\n", b"{}", b"lanes: {}", b"schema_version: 1\nlanes: {cpu: {}}"])
def test_an_empty_file_changes_nothing(raw: bytes) -> None:
    assert parse_policy(raw) == BUILT_IN_BOUNDS


def test_a_file_tightens_one_lane_and_widens_another(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "lanes:\n  cpu:\n    lr_multiplier: {at_most: 0.5}\n    cool_down_segments: 7\n"
        "  cuda:\n    lane: our_lane\n    gradient_clip_norm: {at_least: 0.5, at_most: 3}\n"
    )
    bounds = load_policy_file(path)
    assert (bounds.cpu.lr_multiplier.at_least, bounds.cpu.lr_multiplier.at_most, bounds.cpu.cool_down_segments) == (0.05, 0.5, 7)
    assert (bounds.cuda.lane, bounds.cuda.gradient_clip_norm.at_most) == ("our_lane", 3.0)
    assert bounds.cuda.lr_multiplier == BUILT_IN_BOUNDS.cuda.lr_multiplier


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"lanes: {cpu: {lr_multiplier: {at_most: .nan}}}", ("lanes.cpu.lr_multiplier.at_most", "nan")),
        (b"lanes: {cpu: {lr_multiplier: {at_most: .inf}}}", ("lanes.cpu.lr_multiplier.at_most", "inf")),
        (b"lanes: {cpu: {lr_multiplier: {at_most: '0.5'}}}", ("lanes.cpu.lr_multiplier.at_most", "number")),
        (b"lanes: {cpu: {lr_multiplier: {at_most: true}}}", ("lanes.cpu.lr_multiplier.at_most",)),
        (b"lanes: {cpu: {lr_multiplier: {at_most: 0.01}}}", ("lanes.cpu.lr_multiplier", "0.05 is above at_most 0.01")),
        (b"lanes: {cpu: {lr_multiplier: {at_most: 11}}}", ("lanes.cpu", "lr_multiplier 0.05 to 11", "1e-06 to 10.0")),
        (b"lanes: {cpu: {loss_scale_initial_power: {at_most: 10.5}}}", ("loss_scale_initial_power.at_most", "integer")),
        (b"lanes: {cpu: {loss_scale_initial_power: {at_least: -1}}}", ("loss_scale_initial_power", "-1")),
        (b"lanes: {cpu: {learning_rate: 1}}", ("lanes.cpu.learning_rate",)),
        (b"lanes: {tpu: {}}", ("lanes.tpu", "cpu, cuda")),
        (b"bounds: {}", ("bounds", "schema_version, lanes")),
        (b"schema_version: 2", ("schema_version", "2")),
        (b"lanes: {cpu: {lane: 'Not A Name!'}}", ("lanes.cpu.lane", "Not A Name!")),
        (b"lanes: {cpu: {}, cpu: {}}", ("'cpu' is given twice", "line 1")),
        (b"lanes: {cpu: {lr_multiplier: {at_most: 0.5, at_most: 0.6}}}", ("'at_most' is given twice",)),
        (b"a: &a [1]\nlanes: *a", ("aliases",)),
        (b"lanes: [", ("not readable YAML",)),
        (b"- lanes", ("the file", "list")),
        (b"lanes: [1]", ("lanes", "list")),
        (b"lanes: {cpu: 3}", ("lanes.cpu", "int")),
        (b"1: 2", ("mapping with names",)),
        (b"lanes: {cpu: {lane: !!python/object/apply:os.getcwd []}}", ("not readable YAML",)),
        (b"\xff\xfe\x00", ("not readable YAML",)),
        (b"[" * 30_000, ("not readable YAML",)),
        (b"{[1]: 2}", ("not readable YAML",)),
        (b"#" * 70_000, ("too large",)),
    ],
)
def test_what_is_wrong_is_named(raw: bytes, words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_policy(raw)
    message = str(caught.value)
    assert message.startswith("policy.file")
    assert all(word in message for word in words), message
    assert len(message) < 700


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"absent\.yaml: No such file"):
        load_policy_file(tmp_path / "absent.yaml")
