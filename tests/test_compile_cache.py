"""Compiled programs in files: found again, bounded, private, and never trusted when damaged."""

import os
import stat
from pathlib import Path

import jax
import pytest

from detspec.compile_cache import VARIABLE, CompileCache, user_cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that DETSPEC_COMPILE_CACHE names; it does not exist yet."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "a" / "programs"))
    return tmp_path / "a" / "programs"


def test_programs_are_found_under_their_names_in_a_private_folder(folder):
    cache = user_cache()
    assert cache is not None
    assert cache.read("x") is None
    cache.write("x", b"program")
    assert cache.read("x") == b"program"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:-1] + b"?"])
def test_damaged_file_is_removed_with_one_line(damage, folder):
    cache = user_cache()
    cache.write("x", b"program")
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="is not used: it is damaged. It is compiled again") as warned:
        assert cache.read("x") is None
    assert len(warned) == 1
    assert list(folder.iterdir()) == []


def test_least_recently_used_programs_go_when_they_are_too_many_bytes(tmp_path):
    cache = CompileCache(tmp_path, max_bytes=3 * (32 + 10))
    for age, name in enumerate("abc"):
        cache.write(name, b"0123456789")
        os.utime(tmp_path / f"{name}.program", (age, age))
    cache.read("a")
    cache.write("d", b"0123456789")
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_folder_that_others_can_write_to_is_refused_with_one_line(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    with pytest.warns(UserWarning, match="others can write to it") as warned:
        assert user_cache() is None
    assert len(warned) == 1
    folder.chmod(0o750)
    assert user_cache() is not None


def test_folder_of_another_user_and_one_that_cannot_be_made_are_refused(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        with pytest.warns(UserWarning, match="belongs to another user"):
            assert user_cache() is None
    folder.rmdir()
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="are not kept in"):
        assert user_cache() is None


def test_full_disk_costs_a_warning(tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="was not kept in .*: No space left on device"):
        CompileCache(tmp_path).write("x", b"program")
    assert list(tmp_path.iterdir()) == []


def test_cache_is_off_where_asked_and_where_jax_has_one_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "off")
    assert user_cache() is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jax.config.jax_compilation_cache_dir  # the tests'
    assert user_cache() is None
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert user_cache().folder == tmp_path / "detspec" / "programs"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_name_depends_on_texts_settings_and_flags(tmp_path, monkeypatch):
    cache = CompileCache(tmp_path)
    name = cache.name("a", "b")
    assert name == cache.name("a", "b")
    names = {name, cache.name("a", "c"), cache.name("ab")}
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        names.add(cache.name("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(type(jax.config), "values", {**jax.config.values, "jax_threefry_partitionable": "other"})
        names.add(cache.name("a", "b"))
    assert len(names) == 5
    assert name == cache.name("a", "b")
