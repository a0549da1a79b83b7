"""MLX's folder of compiled kernels, lent to processes that each write to their own."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from mlx_experts.engine.tools.device import compiled


def files_of(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A machine's folder with one kernel, whose name has a folder in it as MLX's long ones do."""
    folder = tmp_path / "home"
    (folder / "long").mkdir(parents=True)
    for kind in ("ptx", "txt"):
        (folder / "long" / f"name.{kind}").write_text(f"kept {kind}")
    monkeypatch.setenv(compiled.VARIABLE, str(folder))
    return folder


def test_a_process_begins_with_what_is_kept_and_its_new_kernels_are_kept(home, tmp_path):
    lent = [tmp_path / "0", tmp_path / "1"]
    for folder in lent:
        compiled.lend(folder)
        assert files_of(folder) == files_of(home)
        (folder / "both.ptx").write_text("either's")
    (lent[1] / "new.ptx").write_text("its own")
    before = files_of(home)
    compiled.keep(lent)
    assert files_of(home) == before | {"both.ptx": "either's", "new.ptx": "its own"}


def test_what_is_kept_is_not_written_anew(home, tmp_path):
    compiled.lend(tmp_path / "0")
    (tmp_path / "0" / "long" / "name.ptx").unlink()
    (tmp_path / "0" / "long" / "name.ptx").write_text("compiled again")
    compiled.keep([tmp_path / "0"])
    assert files_of(home)["long/name.ptx"] == "kept ptx"


def test_a_kernel_appears_when_all_of_its_files_are_there(home, tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    for kind in ("ptx", "cu", "txt"):
        (tmp_path / "0" / f"new.{kind}").write_text(kind)
    order, real = [], compiled.os.replace

    def replace(made, to):
        order.append(Path(to).suffix)
        real(made, to)

    monkeypatch.setattr(compiled.os, "replace", replace)
    compiled.keep([tmp_path / "0"])
    assert sorted(order[:2]) == [".cu", ".txt"]
    assert order[2:] == [".ptx"]


def test_a_machine_without_kernels_has_none_to_lend(tmp_path, monkeypatch):
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setattr(compiled.tempfile, "tempdir", str(tmp_path))
    assert compiled.kept() == tmp_path / "mlx" / version("mlx") / "ptx"
    compiled.lend(tmp_path / "0")
    assert files_of(tmp_path / "0") == {}
