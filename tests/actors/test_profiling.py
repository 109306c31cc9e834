"""From measurements to a profile: medians, overlap by equation 1, fits, and when a profile is used again."""

import os
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from braid.actors.config import Config, parse_config
from braid.actors.controller import profiling
from braid.actors.controller.combining import _imbalance, combine
from braid.actors.controller.decisions import decide
from braid.actors.controller.planning import model_graphs
from braid.actors.controller.profiling import Profiled, find_or_measure, known_profile, profile_key
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.stage.measure.link_times import _ALONG
from braid.actors.stage.rank.messages import Samples, Together
from braid.scheduling.cost.profile import Profile, parse_profile
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Operator, Part
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.schedule.buckets import buckets_of, norm_axes

VOCABULARY = 256


def config_of(tmp_path: Path, **sections: Any) -> Config:
    content: dict[str, Any] = {
        "runs": str(tmp_path / "runs"),
        "model": {"hidden": 32, "layers": 2, "heads": 4, "sequence": 16, "vocabulary": VOCABULARY},
        "train": {"global_batch": 8, "micro_batch": 2},
        "parallel": {"tp": 2},
        "overlap": {"schedule": "braid"},
        "cluster": {"launcher": "processes", "cpus_per_rank": 0.25},
    }
    for section, values in sections.items():
        content[section] = {**content.get(section, {}), **values}
    return parse_config(content)


def samples_of(config: Config, draw: random.Random, oef: float) -> Samples:
    """What a rank would measure if operators took these times and overlapped by one OEF."""
    parts = model_graphs(config, config.check(VOCABULARY))
    solo: dict[str, list[int]] = {}
    spare_of: dict[str, str] = {}
    for op in operators_of(parts):
        time = 1_000_000 if op.kind.communicates else 800_000
        solo[op.key] = [round(time * draw.uniform(0.999, 1.001)) for _ in range(9)]
        if op.kind.communicates:
            spare_of[op.key] = "tp/one"
    together = {
        (key, "tp/one"): [
            Together(operator_ns=0, other_ns=0, both_ns=round(1_800_000 - oef * 800_000)) for _ in range(7)
        ]
        for key in solo
        if key not in spare_of
    }
    return Samples(
        solo_ns=solo,
        together=together,
        spares={"tp/one": [1_000_000] * 9},
        handling={"tp/one": [(40_000, 70_000), (50_000, 90_000), (45_000, 60_000)]},
        spare_of=spare_of,
        transfers={
            "pp/send_receive": [(1000, 3_000), (9000, 11_000), (1000, 3_100), (9000, 10_900)],
            "tp/all_reduce": [(1000, 20_000), (9000, 21_000)],
        },
        streams={"tp": Stream.INTRA, "pp": Stream.INTER},
        norm_ns_per_parameter=[1.0, 0.5, 2.0],
        optimizer_ns_per_parameter=[2.0, 3.0, 4.0],
        hardware="CPU made up",
    )


def combined(config: Config, seed: int, oef: float, pair: Sequence[Together]) -> Profile:
    """A profile of one rank on which one pair was measured as given."""
    samples = samples_of(config, random.Random(seed), oef)
    together = {**samples.together, ("layer/qkv", "tp/one"): [*pair]}
    parts = model_graphs(config, config.check(VOCABULARY))
    return combine([replace(samples, together=together)], parts)


def operators_of(parts: Mapping[str, Part]) -> list[Operator]:
    return [
        op for part in parts.values() for graph in (part.forward, part.backward) for op in graph.operators
    ]


def test_ranks_are_combined(tmp_path: Path) -> None:
    config, draw = config_of(tmp_path), random.Random(1)
    parts = model_graphs(config, config.check(VOCABULARY))
    profile = combine([samples_of(config, draw, 0.75) for _ in range(2)], parts)
    assert profile.source == "measured: 2 x CPU made up"
    assert profile.solo_ns["layer/qkv"] == pytest.approx(800_000, rel=0.002)
    assert profile.oef["gemm|intra"] == pytest.approx(0.75, abs=0.01)
    assert 1 - profile.slowdown("layer/qkv", "layer/mlp_gather") == pytest.approx(0.75, abs=0.01)
    assert profile.effect("inter", "layer/mlp_gather") == profile.effect("inter", "inter") == 0
    fit = profile.transfers["pp/send_receive"]
    assert fit.ns_per_byte == pytest.approx(0.9875)
    assert fit.ns(5000) == pytest.approx(7000, rel=0.01)
    assert profile.streams == {"tp": Stream.INTRA, "pp": Stream.INTER}
    assert profile.norm_ns_per_parameter == 1.0
    assert profile.optimizer_ns_per_parameter == 3.0
    assert all(profile.spread_ns[key] < 2_000 for key in profile.solo_ns)
    assert profile.issue_ns["layer/mlp_gather"] == 45_000
    assert profile.take_ns["layer/mlp_gather"] == 70_000
    assert set(profile.issue_ns) == {key for key in profile.solo_ns if profile.classes[key] == "intra"}


def test_what_compute_and_transfers_suffer_is_told_apart(tmp_path: Path) -> None:
    """GEMMs of 0.8 ms take a tenth longer beside transfers of 1 ms, and those half as long again."""
    draw = random.Random(3)
    both = 0.88e6 + 1e6 - 0.88e6 / 1.5  # the transfer's last part runs alone
    times = [round(both * draw.uniform(0.99, 1.01)) for _ in range(20)] + [10_000_000]
    pair = [Together(operator_ns=880_000, other_ns=ns, both_ns=ns) for ns in times]
    profile = combined(config_of(tmp_path), 3, 0.75, pair)
    assert profile.slowdown("layer/qkv", "layer/mlp_gather") == pytest.approx(0.1, abs=0.01)
    assert profile.slowdown("layer/mlp_gather", "layer/qkv") == pytest.approx(0.5, abs=0.05)
    assert profile.slowdown("layer/qkv", "intra") == profile.slowdown("layer/qkv.dgrad", "intra")
    assert parse_profile(profile.to_json(), "p.json") == profile


def test_an_operator_in_the_middle_of_a_transfer_runs_beside_it_as_long_as_it_lasts(tmp_path: Path) -> None:
    """GEMMs of 0.8 ms begin at any time within transfers of 1 ms, and lose a tenth of the time together."""
    draw, pair = random.Random(4), []
    for _ in range(20):
        delay = draw.randrange(900_000)
        beside = min(1_000_000 - delay, round(800_000 / 0.9))  # of it a tenth is lost
        took = 800_000 + round(beside / 10)
        both = max(1_000_000, delay + took)
        pair.append(Together(operator_ns=took, other_ns=1_000_000, both_ns=both, delay_ns=delay))
    profile = combined(config_of(tmp_path), 4, 0.75, pair)
    assert profile.slowdown("layer/qkv", "layer/mlp_gather") == pytest.approx(1 / 9, abs=0.005)
    assert profile.slowdown("layer/mlp_gather", "layer/qkv") == pytest.approx(0.0, abs=0.005)


def test_a_measured_profile_is_used_again_until_something_changes(tmp_path: Path) -> None:
    """Real ranks on loopback: two processes, gloo."""
    config = config_of(tmp_path)
    shape, launcher = config.check(VOCABULARY), ProcessLauncher(config)
    assert known_profile(config, shape, launcher) is None
    found = find_or_measure(config, shape, launcher)
    assert not found.reused
    assert found.path.is_file()
    assert all(found.profile.solo(op.key) >= 0 for op in operators_of(model_graphs(config, shape)))
    assert found.profile.solo_ns["layer/qkv"] > 0
    for handling in (found.profile.issue_ns, found.profile.take_ns):
        assert 0 < handling["layer/mlp_gather"] < 1e9
    again = find_or_measure(config, shape, ProcessLauncher(config))
    assert again.reused
    assert again.profile == found.profile
    found.path.write_text("{}", encoding="utf-8")
    assert known_profile(config, shape, launcher) is None, "a damaged profile is measured anew"
    # Decisions made with it: all schedules are ranked, the serial one is no faster than the best.
    made = decide(config_of(tmp_path, overlap={"schedule": "auto"}), shape, found.profile)
    ranked, serial = list(made.candidates), made.serial
    names = {"megatron", "intra_batch", "wavelet", "dhelix", "merak", "oases", "braid"}
    assert {one.schedule for one in ranked} == names
    fastest = min(one.seconds for one in ranked)
    assert ranked[1:] == sorted(ranked[1:], key=lambda one: one.seconds)
    assert ranked[0].seconds < 1.02 * fastest
    alike = [one.peak_bytes for one in ranked if one.seconds < 1.02 * fastest]
    assert ranked[0].peak_bytes == min(alike)
    assert 0 < serial.alpha < 1
    assert serial.seconds == pytest.approx(next(o.seconds for o in ranked if o.schedule == "megatron"))
    assert serial.recovered(serial.seconds) == 0
    assert serial.recovered(serial.seconds / serial.limit_speedup) == pytest.approx(1)


def key_of(config: Config, machine: str = "a", stream: Stream = Stream.INTRA) -> str:
    return profile_key(config, config.check(VOCABULARY), (machine,), {"tp": stream})


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"tp": 1, "cp": 2, "context": "all_gather"}},
        {"train": {"deterministic": True}},
        {"train": {"tf32": True}},
        {"train": {"reduce_dtype": "bf16"}},
        {"cluster": {"nccl": {"tp": {"max_ctas": 4}}}},
        {"cluster": {"env": {"NCCL_ALGO": "Ring"}}},
        {"cluster": {"threads_per_rank": 2}},
        {"model": {"hidden": 64}},
        {"train": {"dtype": "fp64"}},
    ],
)
def test_what_changes_costs_changes_the_key(tmp_path: Path, sections: Mapping[str, Any]) -> None:
    """What is computed again costs the same."""
    base = {"parallel": {"tp": 1, "cp": 2, "context": "ring"}} if "parallel" in sections else {}
    again = key_of(config_of(tmp_path, **base, **({} if base else {"train": {"recompute": "full"}})))
    assert key_of(config_of(tmp_path, **base)) == again
    assert key_of(config_of(tmp_path, **sections)) != key_of(config_of(tmp_path, **base))


def test_machines_links_and_sources_are_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    before = key_of(config)
    assert key_of(config, machine="b") != before != key_of(config, stream=Stream.INTER)
    monkeypatch.setattr(profiling, "_own_sources", lambda: "others")
    assert key_of(config) != before
    layer = tmp_path / "layer.py"
    digests = set()
    for text in ("class Layer: ...", "class Layer: pass"):
        layer.write_text(text)
        digests.add(profiling._layer_digest(f"{layer}:Layer"))
    assert len(digests) == 2
    assert profiling._layer_digest("json:Layer") != profiling._layer_digest("missing.module:Layer")


def measured_with(
    monkeypatch: pytest.MonkeyPatch, config: Config, left_out: Sequence[str] = ()
) -> list[object]:
    """Measuring finds made-up costs; returns a list that grows by each time."""
    samples = samples_of(config, random.Random(0), 0.5)
    parts = model_graphs(config, config.check(VOCABULARY))
    made = combine([samples] * 2, parts)
    costs = {key: cost for key, cost in made.solo_ns.items() if key not in left_out}
    times: list[object] = []

    def measure(*arguments: object) -> Profile:
        times.append(arguments)
        return replace(made, solo_ns=costs if len(times) == 1 else made.solo_ns)

    monkeypatch.setattr(profiling, "measure", measure)
    return times


def test_a_profile_that_lacks_a_cost_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    shape, launcher = config.check(VOCABULARY), ProcessLauncher(config)
    times = measured_with(monkeypatch, config, left_out=["layer/qkv"])
    assert "layer/qkv" not in find_or_measure(config, shape, launcher).profile.solo_ns
    again = find_or_measure(config, shape, launcher)
    assert (again.reused, len(times)) == (False, 2)
    assert again.profile.solo("layer/qkv") > 0
    assert find_or_measure(config, shape, launcher).reused


def test_two_runs_measure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    shape, launcher = config.check(VOCABULARY), ProcessLauncher(config)
    times = measured_with(monkeypatch, config)
    path = profiling._profile_path(config, shape, launcher)
    found: list[Profiled] = []
    other = threading.Thread(target=lambda: found.append(find_or_measure(config, shape, launcher)))
    with profiling._held(path):
        other.start()
        other.join(0.2)
        assert other.is_alive()
        assert times == []
        profiling._keep(path, profiling.measure(None, None, None))  # type: ignore[arg-type]
    other.join(30)
    assert found[0].reused
    assert len(times) == 1


def test_a_profile_that_cannot_be_written_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "profiles").touch()
    config = config_of(tmp_path)
    measured_with(monkeypatch, config)
    found = find_or_measure(config, config.check(VOCABULARY), ProcessLauncher(config))
    assert found.profile.solo_ns
    assert "the profile is used, and not kept" in found.trouble


def test_a_profile_under_a_quota_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    measured_with(monkeypatch, config)
    stops = iter([3, 8])
    monkeypatch.setattr(profiling, "throttled", lambda: next(stops))
    found = find_or_measure(config, config.check(VOCABULARY), ProcessLauncher(config))
    assert "stopped ranks 5 times" in found.trouble
    assert not found.path.exists()


def test_profiles_that_are_not_used_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    shape, launcher = config.check(VOCABULARY), ProcessLauncher(config)
    measured_with(monkeypatch, config)
    used = find_or_measure(config, shape, launcher)
    assert profiling.KEPT == 64, "as docs/schedules.md says"
    monkeypatch.setattr(profiling, "KEPT", 2)
    os.utime(used.path, (1, 1))
    old = used.path.with_name("0123456789abcdef.json")
    decisions = used.path.with_name("decisions-0123456789abcdef.json")
    for file in (old, decisions):
        file.write_text("{}")
        os.utime(file, (2, 2))
    assert known_profile(config, shape, launcher) is not None  # used: the last to go
    profiling._keep(used.path.with_name("fedcba9876543210.json"), used.profile)
    assert used.path.exists()
    assert decisions.exists()
    assert not old.exists()


def test_attention_within_documents_is_measured_without_data(tmp_path: Path) -> None:
    config = config_of(tmp_path, parallel={"tp": 1, "cp": 2}, data={"document_mask": True})
    shape, launcher = config.check(VOCABULARY), ProcessLauncher(config)
    profile = find_or_measure(config, shape, launcher).profile
    assert all(profile.solo(op.key) >= 0 for op in operators_of(model_graphs(config, shape)))


def test_rows_of_each_group_count_for_the_imbalance_of_a_profile() -> None:
    """Two groups of two ranks: one even; one with 150 beside 50 in one pass, 90 beside 110 in another."""
    rows = [[100, 100], [100, 100], [150, 90], [50, 110]]
    groups = [(0, 1), (0, 1), (2, 3), (2, 3)]
    samples: list[Any] = [
        SimpleNamespace(expert_rows=own, experts_with=group) for own, group in zip(rows, groups, strict=True)
    ]
    assert _imbalance(samples) == pytest.approx((1 + 1 + 1.5 + 1.1) / 4)
    nothing: Any = SimpleNamespace(expert_rows=[], experts_with=())
    assert _imbalance([nothing]) == 0.0


def test_every_sum_has_a_link_that_is_measured() -> None:
    """Of gradients, and of the squares of their norm; stages that share a table are stages."""
    shape = replace(parse_config({}).check(256), family="moe", experts=4, top_k=2)
    layouts = [ParallelLayout(pp=2, tp=2, dp=4, ep=2), ParallelLayout(dp=4, zero=3, shards=2)]
    summed = {axis for layout in layouts for axis in norm_axes(layout)}
    for layout in layouts:
        parts = built_in_parts(PartSizes(shape, layout, 8))
        summed |= {*buckets_of(parts, layout, shape.kinds).axes(0)}
    assert {"ep", "edp", "replica"} <= summed - {"ends"} <= {*_ALONG}
