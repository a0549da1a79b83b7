"""The break-even moves only outside the noise, and is kept for exactly what was measured."""

import json

import pytest
from platformdirs import user_cache_path

from mlx_experts.engine.dispatch import tuning_cache
from mlx_experts.engine.dispatch.policy import Bounds, Tuned
from mlx_experts.engine.dispatch.tuning_cache import Timing
from mlx_experts.registry.errors import SettingError


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(tuning_cache.CACHE_DIR, str(tmp_path / "kept"))
    return tmp_path / "kept"


STORAGE = "affine 4-bit g64"


def timing(width, ratio, noise=0.05, **more):
    return Timing(width, 100 * ratio, 100.0, noise, **more)


@pytest.mark.parametrize(
    ("timings", "bound"),
    [
        ([timing(512, 3.0), timing(4096, 1.2)], None),
        ([timing(512, 3.0), timing(4096, 0.97)], None),
        ([timing(512, 3.0), timing(2048, 1.0), timing(4096, 0.90), timing(8192, 1.5)], 2048),
        ([timing(4096, 0.90), timing(512, 3.0)], 512),
        ([timing(512, 0.5)], 0),
        ([timing(512, 0.5, noise=0.6)], None),
    ],
)
def test_the_bound_is_the_widest_before_fused_loses_outside_the_noise(timings, bound):
    assert tuning_cache.break_even(timings) == {STORAGE: Bounds(bound)}


@pytest.mark.parametrize(
    ("ratios", "rows"), [({2: 3.0, 4: 2.0}, None), ({2: 3.0, 4: 0.9, 8: 2.0}, 2), ({2: 0.5}, 1), ({}, 7)]
)
def test_the_rows_end_where_fused_first_loses(ratios, rows):
    timings = [timing(512, 3.0), *(timing(512, ratio, rows=n) for n, ratio in ratios.items())]
    assert tuning_cache.break_even(timings, Bounds(max_rows=7))[STORAGE].max_rows == rows


@pytest.mark.parametrize(
    ("ratios", "start"),
    [
        ({32: 3.0, 128: 5.0}, 17),
        ({32: 0.5, 128: 5.0}, 65),
        ({32: 3.0, 128: 0.5, 512: 4.0}, 257),
        ({32: 3.0, 128: 0.5}, None),
        ({}, 9),
    ],
)
def test_the_path_for_many_rows_starts_where_it_never_loses_again(ratios, start):
    timings = [timing(512, 3.0), *(timing(512, r, rows=n, path="many") for n, r in ratios.items())]
    assert tuning_cache.break_even(timings, Bounds(many_from=9))[STORAGE].many_from == start


def test_every_storage_has_its_own_bounds():
    timings = [timing(512, 3.0), timing(1024, 0.5), timing(1024, 2.0, storage="mxfp4 4-bit g32")]
    assert tuning_cache.break_even(timings) == {STORAGE: Bounds(512), "mxfp4 4-bit g32": Bounds()}


def test_what_was_measured_on_devices_of_the_name_holds_until_this_one_is_tuned(monkeypatch):
    assert tuning_cache.bound("cpu") is None
    shipped = {tuning_cache.device_name("cpu"): {STORAGE: Bounds(1024, 1)}}
    monkeypatch.setattr(tuning_cache, "_shipped", lambda: shipped)
    found = tuning_cache.bound("cpu")
    assert found is not None
    assert found.bounds == {STORAGE: Bounds(1024, 1)}
    assert tuning_cache.device_name("cpu") in found.source
    tuning_cache.save("cpu", [timing(512, 0.5)])
    assert tuning_cache.bound("cpu") == Tuned({STORAGE: Bounds(0, None)})


def test_the_shipped_bounds_are_read_and_name_storages():
    shipped = tuning_cache._shipped()
    assert shipped
    for bounds in shipped.values():
        for storage in bounds:
            assert storage.split()[0] in ("affine", "mxfp4", "mxfp8", "nvfp4", "plain")


def test_what_is_kept_is_found_again_and_only_for_this_device(folder):
    assert tuning_cache.bound("cpu") is None
    tuning_cache.save("cpu", [timing(512, 3.0), timing(4096, 0.5)])
    assert tuning_cache.bound("cpu") == Tuned({STORAGE: Bounds(512, None)})
    tuning_cache.save("cpu", [timing(512, 3.0)])
    assert tuning_cache.bound("cpu") == Tuned({STORAGE: Bounds(None, None)})
    assert [path.name for path in folder.iterdir()] == ["tune.json"]


@pytest.mark.parametrize("changed", ["kernel_hash", "device"])
def test_another_kernel_or_device_does_not_find_it(monkeypatch, changed):
    tuning_cache.save("cpu", [timing(512, 0.5)])
    if changed == "kernel_hash":
        monkeypatch.setattr(tuning_cache, "kernel_hash", lambda: "other")
    else:
        monkeypatch.setattr(tuning_cache.mx, "device_info", lambda kind: {"device_name": "another"})
    assert tuning_cache.bound("cpu") is None


def test_the_kernel_hash_covers_every_file_of_the_kernels(monkeypatch, tmp_path):
    (tmp_path / "cpu.py").write_text("a")
    (tmp_path / "gpu").mkdir()
    monkeypatch.setattr(tuning_cache, "files", lambda package: tmp_path)
    seen = set()
    for text in ("a", "b"):
        (tmp_path / "gpu" / "rows.h").write_text(text)
        tuning_cache.kernel_hash.cache_clear()
        seen.add(tuning_cache.kernel_hash())
    tuning_cache.kernel_hash.cache_clear()
    assert len(seen) == 2


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"KEY": 3}', '{"KEY": {"bounds": {"a": {"max_width": "wide"}}}}']
)
def test_a_damaged_file_is_an_error_that_names_it(folder, text):
    folder.mkdir()
    (folder / "tune.json").write_text(text.replace("KEY", tuning_cache.entry_key("cpu").replace('"', '\\"')))
    with pytest.raises(SettingError, match=r"tune\.json"):
        tuning_cache.bound("cpu")


def test_the_file_keeps_the_timings_and_other_devices(folder):
    folder.mkdir()
    (folder / "tune.json").write_text(json.dumps({"another": {"max_width": 7}}))
    tuning_cache.save("cpu", [timing(1024, 2.0), timing(512, 3.0)])
    kept = json.loads((folder / "tune.json").read_text())
    assert kept["another"] == {"max_width": 7}
    assert [t["width"] for t in kept[tuning_cache.entry_key("cpu")]["timings"]] == [512, 1024]


def test_the_folder_is_the_users_cache_unless_a_variable_names_another(monkeypatch, folder):
    assert tuning_cache.cache_file() == folder / "tune.json"
    monkeypatch.delenv(tuning_cache.CACHE_DIR)
    assert tuning_cache.cache_file() == user_cache_path("mlx-experts", appauthor=False) / "tune.json"
