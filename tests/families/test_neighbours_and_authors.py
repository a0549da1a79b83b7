"""Every family against what its neighbours' code, its authors' files and other tools' checkpoints say."""

from __future__ import annotations

import config_keys
import disk_names
import original_sources
import pytest
import stated_settings
import zero_scores
from class_plans import source_types

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.catalog.catalog import Catalog

NAMES = catalog().names()
LISTED = sorted(disk_names.disk_names())
TEXTS = [(name, kind) for name in NAMES for kind in source_types(catalog().load(name))]


@pytest.mark.parametrize("name", NAMES)
def test_some_neighbour_or_carried_config_knows_every_key_that_a_family_reads(name: str) -> None:
    assert config_keys.unknown(catalog().load(name)) == set()
    assert config_keys.unread(catalog().load(name)) == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_the_authors_files_and_of_transformers_lead_to_the_family(name: str) -> None:
    config_keys.check_names(name, Catalog())


@pytest.mark.parametrize("name", NAMES)
def test_stated_defaults_nulls_and_constants_are_the_familys(name: str) -> None:
    family = catalog().load(name)
    assert config_keys.missed_stated(family) == {}
    assert config_keys.missed_nulls(family) == {}
    assert config_keys.missed_words(family) == {}


@pytest.mark.parametrize("name", sorted({*config_keys.stated()} & {*NAMES}))
def test_stated_settings_mean_what_the_authors_make_of_them_under_each_of_their_names(name: str) -> None:
    family = catalog().load(name)
    assert stated_settings.missed_alike(family) == {}
    assert stated_settings.missed_means(family) == {}
    assert stated_settings.missed_nested(family) == {}


@pytest.mark.parametrize(("name", "model_type"), TEXTS)
def test_the_text_of_the_original_router_says_what_the_family_says(name: str, model_type: str) -> None:
    assert original_sources.contradictions(catalog().load(name), model_type) == []


@pytest.mark.parametrize("name", [n for n in NAMES if catalog().load(n).backbone is None])
def test_scores_that_all_underflow_leave_the_weights_finite(name: str) -> None:
    zero_scores.check(catalog().load(name))


@pytest.mark.parametrize("name", LISTED)
def test_tensors_of_other_parts_are_ignored_and_no_parameter_is(name: str) -> None:
    disk_names.check_ignored(catalog().load(name))


@pytest.mark.parametrize("name", LISTED)
def test_checkpoints_of_other_tools_are_read_as_the_parameters_they_were_made_of(name: str) -> None:
    disk_names.check_spellings(catalog().load(name))


def test_every_listed_family_exists() -> None:
    assert set(LISTED) <= set(NAMES)
    assert set(config_keys.stated()) - {"*"} <= set(NAMES)
