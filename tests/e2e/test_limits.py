"""Tests of the table of features that exclude each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import Job, job

import fft
from fft.errors import ConfigError, DataError, FftError
from fft.protocol.load import load_spec
from fft.train.limits import EXCLUSIONS, Feature, FeaturesInUse
from fft.train.paradigms.selection import traits_of
from tools.reference import SPECS

TRAITS = {name: traits_of(load_spec(name), 1) for name in SPECS}


def test_each_shipped_spec_is_on_the_page() -> None:
    shipped = {path.stem for path in (Path(__file__).parents[2] / "fsm_specs").glob("*.yaml")}
    assert shipped - {"main_thread"} == set(SPECS)


def test_second_feature_of_a_pair_is_refused_in_either_order() -> None:
    for exclusion in EXCLUSIONS:
        for other in exclusion.others:
            for first, second in itertools.permutations((exclusion.feature, other)):
                features = FeaturesInUse("mine", ())
                features.use(first)
                with pytest.raises(exclusion.error) as raised:
                    features.use(second)
                assert str(exclusion.feature) in str(raised.value)
                assert str(other) in str(raised.value)


def test_refused_feature_is_not_in_use() -> None:
    features = FeaturesInUse("hsdp", {Feature.LOCKSTEP})
    with pytest.raises(FftError, match="global_batch= with sharded="):
        features.use(Feature.SHARDED, Feature.GLOBAL_BATCH)
    features.use(Feature.GLOBAL_BATCH)
    with pytest.raises(FftError, match="global_batch= with sharded="):
        features.use(Feature.SHARDED)


def test_message_names_the_spec() -> None:
    features = FeaturesInUse("my_spec", {Feature.ASYNC})
    with pytest.raises(FftError, match=r"^fft\.LocalSGD with spec='my_spec': bases differ"):
        features.use(Feature.LOCAL_SGD)


@pytest.mark.parametrize(
    ("feature", "supporting"),
    [
        (Feature.STOP, {"hsdp", "ddp", "pipeline"}),
        (Feature.LIVE, {"hsdp", "ddp", "pipeline"}),
        (Feature.GLOBAL_BATCH, {"hsdp", "ddp"}),
        (Feature.SHARDED, {"hsdp", "ddp", "pipeline"}),
        (Feature.SHARDED_BY_RANK, {"hsdp", "ddp", "local_sgd", "diloco", "async", "hsdp_diloco"}),
        (Feature.PIPELINE_SCHEDULE, {"pipeline", "pipeline_ahead"}),
        (Feature.STAGE_QUEUE, {"pipeline_ahead"}),
        (Feature.LOCAL_SGD, {"local_sgd", "diloco", "hsdp_diloco"}),
        (Feature.DILOCO, {"local_sgd", "diloco", "hsdp_diloco", "async"}),
        (Feature.SYNC_GRADIENTS, {"hsdp", "ddp", "pipeline", "pipeline_ahead"}),
        (Feature.SEQUENTIAL, {"hsdp", "ddp", "pipeline"}),
        (Feature.SEVERAL_RANKS, {"hsdp", "pipeline", "pipeline_ahead", "hsdp_diloco"}),
    ],
)
def test_feature_is_supported_by_these_specs(feature: Feature, supporting: set[str]) -> None:
    found = set()
    for name, traits in TRAITS.items():
        try:
            FeaturesInUse(name, traits).use(feature)
        except FftError:
            continue
        found.add(name)
    assert found == supporting


@pytest.mark.parametrize(
    ("spec", "config", "expected"),
    [
        ("diloco", {"active": (fft.active.max_active(1),)}, "active=…"),
        ("diloco", {"check_buffers": True}, "check_buffers=True"),
        ("async", {"membership": "lighthouse"}, "membership="),
    ],
)
def test_manager_refuses_settings_that_its_spec_excludes(
    tmp_path: Path, spec: str, config: dict[str, Any], expected: str
) -> None:
    with job(tmp_path, 1) as made, pytest.raises(ConfigError, match=f"{expected}.*spec='{spec}'"):
        made.member("0", spec=spec, register=False, **config)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path, 1) as made:
        yield made


def test_manager_refuses_calls_that_its_spec_excludes(made: Job) -> None:
    member = made.member("0", spec="diloco", register=False)
    manager, model = member.manager, member.model
    for call in (manager.stop, manager.start_quorum, lambda: manager.sync_gradients(model)):
        with pytest.raises(FftError, match="with spec='diloco'"):
            call()
    with pytest.raises(FftError, match=r"manager\.live\(\) with spec='diloco'"), manager.live():
        pass


def test_global_batch_of_local_steps_is_refused_by_its_own_limit(made: Job) -> None:
    """Its former message advised a call of ``sync_gradients``, which local steps exclude."""
    manager = made.member("0", spec="diloco", register=False).manager
    with pytest.raises(FftError, match="global_batch= with spec='diloco'"):
        manager.transactions(fft.Loader([1], global_batch=8))


def test_sequential_loader_is_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match="local steps"):
        FeaturesInUse("diloco", ()).use(Feature.LOCAL_STEPS, Feature.SEQUENTIAL)
