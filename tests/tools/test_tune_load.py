"""The file of tables: where it is, what is wrong with it, and that the CUDA engine takes it at its first use."""

import importlib
import json
from pathlib import Path

import pytest
import torch

import onepass
from lib.tune import BASE, tables_back
from onepass import native
from onepass import tables as store

__all__ = ["tables_back"]

engines = importlib.import_module("onepass._engines")
KIND = store.GpuModel("a GPU", 90, 7)  # that there is none of
GOOD = {
    "version": store.VERSION,
    "gpu": "a GPU",
    "compute": 90,
    "multiprocessors": 7,
    "date": "2026-11-21T10:00:00+00:00",
    "tables": BASE,
    "measured": [],
}


def changed(**fields) -> str:
    return json.dumps({**GOOD, **fields})


def with_table(name: str, table) -> str:
    return changed(tables={**BASE, name: table})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a GPU of KIND in an empty folder of settings."""
    monkeypatch.delenv("ONEPASS_TABLES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    native.set_tables(KIND.name, "before", BASE)
    path = tmp_path / "onepass" / "tables-a-gpu.json"
    path.parent.mkdir()
    return path


def test_the_file_is_in_the_users_folder_of_settings(tmp_path, monkeypatch):
    monkeypatch.delenv("ONEPASS_TABLES", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/settings")
    assert store.default_path("NVIDIA H200") == Path("/etc/settings/onepass/tables-nvidia-h200.json")
    for ignored in ("", "relative/folder"):  # as the specification has it
        monkeypatch.setenv("XDG_CONFIG_HOME", ignored)
        path = store.default_path("NVIDIA GeForce RTX 4090")
        assert path == tmp_path / ".config/onepass/tables-nvidia-geforce-rtx-4090.json"
    monkeypatch.setenv("ONEPASS_TABLES", "/else/where.json")
    assert store.default_path("NVIDIA H200") == Path("/else/where.json")
    monkeypatch.setenv("ONEPASS_TABLES", "off")
    assert store.default_path("NVIDIA H200") == tmp_path / ".config/onepass/tables-nvidia-h200.json"


def test_a_good_file_is_taken(config, tmp_path, monkeypatch):
    assert store.load(KIND) is None
    tables = {**BASE, "unaligned_f32": [[store.ANY, -1, 0, 0, 1, 0]]}
    config.write_text(changed(tables=tables))
    stored = store.load(KIND)
    assert stored is not None
    assert native.tables(KIND.name) == {"origin": stored.origin, "tables": tables}
    assert stored.origin == f"{config}, measured on a GPU, 2026-11-21"
    config.write_text("nonsense")  # not looked at where a file is named, which has to be there
    monkeypatch.setenv("ONEPASS_TABLES", str(tmp_path / "mine.json"))
    with pytest.raises(ValueError, match=r"mine\.json cannot be read: No such file"):
        store.load(KIND)
    (tmp_path / "mine.json").write_text(changed())
    assert store.load(KIND).path == tmp_path / "mine.json"


def test_off_is_off_and_a_user_without_a_home_has_no_file(config, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    config.write_text("nonsense")
    monkeypatch.setenv("ONEPASS_TABLES", "off")
    assert store.load(KIND) is None
    assert native.tables(KIND.name)["origin"] == "before"
    monkeypatch.delenv("ONEPASS_TABLES")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert store.load(KIND) is None


LAST = [store.ANY, 5, 512, 16, 1, 0]


WRONG_FILES = {
    **dict.fromkeys(("", "{", "[" * 100_000, "\x00"), "is not JSON"),
    "[]": "it is a JSON object",
    "3": "it is a JSON object, got 3",
    "{}": "its version is 5, got None",
    changed(version=1): "its version is 5, got 1",
    changed(version=True): "its version is 5, got True",
    changed(gpu=None): "its gpu is a text",
    changed(compute="90"): "its compute is a whole number, got '90'",
    changed(multiprocessors=7.0): "its multiprocessors is a whole number",
    changed(date=1): "its date is a text",
    changed(tables=None): "tables are write_f32",
    changed(tables={"write_f32": [LAST]}): "got write_f32",
    with_table("more", [LAST]): "got write_f32, write_f16, reduce_f32, reduce_f16, unaligned_f32, .*, more",
    with_table("write_f16", []): "table write_f16 is a list of entries",
    with_table("write_f16", {}): "table write_f16 is a list of entries",
    with_table("write_f32", [[1, 2, 3], LAST]): "table write_f32, entry 0: six whole numbers",
    with_table("write_f32", [[8.0, 0, 1, 0, 1, 0], LAST]): "table write_f32, entry 0: six whole numbers",
    with_table("write_f32", [[True, 0, 1, 0, 1, 0], LAST]): "table write_f32, entry 0: six whole numbers",
    with_table("write_f32", [[8, 0, 1, 0, 1, 0], [8, 0, 2, 0, 1, 0], LAST]): "table write_f32: limits rise, got 8",
    with_table("write_f32", [[-8, 0, 1, 0, 1, 0], LAST]): "table write_f32: limits rise, got -8",
    with_table("write_f32", [[2**63, 5, 512, 16, 1, 0]]): "table write_f32, entry 0: six whole numbers",
    with_table("write_f32", [[8, 0, 1, 0, 1, 0]]): "the last entry is for rows of any length",
    with_table("write_f32", [[8, 6, 1, 0, 1, 0], LAST]): "limit 8: no such tier",
    with_table("write_f32", [[8, 0, 10**30, 0, 1, 0], LAST]): "table write_f32, entry 0: six whole numbers",
    with_table("write_f32", [[8, 0, -1, 0, 1, 0], LAST]): "threads is a power of two",
    with_table("columns_f32", [LAST]): "the tiers columns and columns-grid alone",
    with_table("write_f32", [[8, 0, 3, 0, 1, 0], LAST]): "limit 8: threads is a power of two",  # the engine says
    changed(compute=80): "is of a GPU .compute 80, multiprocessors 7.; this GPU is a GPU .compute 90, multiproc",
    changed(multiprocessors=132): "multiprocessors 132.; this GPU is a GPU .compute 90, multiprocessors 7",
    changed(gpu="another GPU"): "is of another GPU .compute 90, multiprocessors 7.; this GPU is a GPU .comp",
}


@pytest.mark.parametrize(("text", "words"), WRONG_FILES.items(), ids=map(str, range(len(WRONG_FILES))))
def test_a_bad_file_is_told(config, text, words):
    config.write_text(text)
    with pytest.raises(ValueError, match=words) as raised:
        store.load(KIND)
    assert f"onepass: the file of tables {config} " in str(raised.value)
    assert str(raised.value).count("\n") == 0
    assert native.tables(KIND.name)["origin"] == "before"


COLUMN_ENTRIES = [
    ([2, 128, 8, 8, 0], "the tiers columns and columns-grid alone"),
    ([6, 128, 8, 3, 0], "tile_vecs is a power of two"),
    ([6, 128, 8, 256, 0], "tile_vecs is a power of two"),
    ([6, 32, 8, 8, 0], "threads is a multiple of 32 from 64 to 512"),
    ([6, 100, 8, 8, 0], "threads is a multiple of 32 from 64 to 512"),
    ([6, 1024, 8, 8, 0], "threads is a multiple of 32 from 64 to 512"),
    ([6, 128, 26, 8, 0], "vecs_per_thread is 1 to "),
    ([6, 128, 0, 8, 0], "vecs_per_thread is 1 to "),
    ([6, 128, 8, 8, 2], "smem_vecs is 1, or a multiple of 4"),
    ([6, 128, 8, 8, 52], "smem_vecs is 1, or a multiple of 4"),
    ([7, 128, 0, 8, 0], "columns-grid has tile_vecs alone"),
]


@pytest.mark.parametrize(
    ("name", "entry", "words"),
    [
        ("write_f32", [8, 0, 3, 0, 1, 0], "threads is a power of two"),
        ("write_f32", [8, -1, 0, 0, 1, 0], "no such tier"),
        ("write_f32", [4096, 0, 32, 0, 1, 0], "so few threads"),
        ("reduce_f32", [8, -1, 0, 0, 1, 0], "no such tier"),
        ("reduce_f16", [8, 0, 3, 0, 1, 0], "threads is a power of two"),
        ("reduce_f16", [store.ANY, 5, 32, 16, 1, 0], "threads is a multiple of 32 from 64 to 1024"),
        ("unaligned_f16", LAST, "unaligned tables have the tier staged alone"),
        *((name, [store.ANY, *e], w) for name in ("columns_f32", "columns_backward_f16") for e, w in COLUMN_ENTRIES),
        ("columns_backward_f16", [store.ANY, 6, 128, 24, 8, 0], "vecs_per_thread is 1 to 16"),  # of two operands
    ],
)
def test_unsound_entries_are_refused_by_the_engine(name, entry, words):
    table = [entry] if entry[0] == store.ANY else [entry, LAST]
    with pytest.raises(RuntimeError, match=f"table {name}: .*{words}"):
        native.set_tables("a GPU", "a test", {**BASE, name: table})


def test_softmax_of_columns_keeps_more_vectors_than_its_gradient():
    native.set_tables("a GPU", "a test", {**BASE, "columns_f16": [[store.ANY, 6, 128, 24, 8, 0]]})


def test_a_file_that_is_none(config):
    config.write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ValueError, match="is not JSON"):
        store.load(KIND)
    config.unlink()
    config.mkdir()
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        store.load(KIND)


# At the first use of the engine


@pytest.fixture
def cuda_here(config, monkeypatch):
    """As on a machine whose CUDA device 0 is of KIND."""
    monkeypatch.setattr(engines, "_ready_devices", {-1})
    monkeypatch.setattr(engines, "unavailable", lambda engine, device: None if device.type == "cuda" else "no")
    monkeypatch.setattr(store, "gpu_model", lambda index: KIND)
    for cached in (store.load_once, engines._best):
        cached.cache_clear()
    yield config
    for cached in (store.load_once, engines._best):
        cached.cache_clear()


@pytest.mark.parametrize("engine", ["auto", "cuda"])
def test_the_first_use_loads_the_file_and_a_bad_one_is_told_until_it_is_mended(cuda_here, engine):
    gpu = torch.device("cuda", 0)
    cuda_here.write_text("nonsense")
    for _ in range(2):
        with pytest.raises(ValueError, match="is not JSON"):
            engines.resolve(engine, gpu)
    assert {-1} == engines._ready_devices  # no call takes the short way past it
    cuda_here.write_text(changed())
    assert engines.resolve(engine, gpu) == "cuda"
    assert str(cuda_here) in native.tables(KIND.name)["origin"]
    cuda_here.write_text("nonsense")  # it is read once a process
    assert engines.resolve(engine, gpu) == "cuda"


def test_no_other_engine_needs_the_file(cuda_here):
    cuda_here.write_text("nonsense")
    assert engines.resolve("triton", torch.device("cuda", 0)) == "triton"
    assert engines.resolve("cpu", torch.device("cuda", 0)) == "cpu"  # which is said to serve it here
    assert engines.resolve("auto", torch.device("cpu")) == "cpu"


def test_explain_names_the_tables(config):
    plan = onepass.explain((8192, 1024), device="h200")
    origin = native.tables("NVIDIA H200")["origin"]
    assert [note for note in plan.notes if "tables" in note] == [f"tables {origin}"]
    columns = onepass.explain((8, 1024, 64), 1, device="h200")
    assert [note for note in columns.notes if "tables" in note] == [f"tables {origin}"]
    assert "measured on NVIDIA H200" in origin
    assert not [note for note in onepass.explain((8, 8), device="cpu").notes if "tables" in note]
    assert not [note for note in onepass.explain((0, 8), device="h200").notes if "tables" in note]
    config.write_text(changed())
    store.load(KIND)
    assert store.note(native.tables(KIND.name)["origin"], KIND.name) == (
        f"tables from {config}, measured on a GPU, 2026-11-21"
    )


def test_an_h100_has_not_the_tables_of_an_h200(tables_back):
    """Though it has as many multiprocessors of the same compute capability."""
    h100 = "NVIDIA H100 80GB HBM3"
    native.set_tables("NVIDIA H200", "a test", {**BASE, "write_f32": [LAST]})
    assert native.tables(h100) == {"origin": native.tables()["origin"], "tables": BASE}
    assert "(the nearest)" in store.note(native.tables(h100)["origin"], h100)
    layout = [9000, 1024], [1024, 1], [1024, 1], [1], torch.float32, torch.float32
    tiers = [native.plan("softmax", True, *layout, gpu=gpu)["tier"] for gpu in ("NVIDIA H200", h100, "")]
    assert tiers == ["twopass", "block", "block"]
    with pytest.raises(RuntimeError, match="a GPU that has a name"):
        native.set_tables("", "a test", BASE)
