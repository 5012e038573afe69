"""AMD cards from sysfs trees: three recorded shapes, and trees built per test."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkguard.probe import amdgpu

DATA = Path(__file__).parents[2] / "data"
GIB = 1 << 30


def card_folder(sys_root: Path, number: int = 0, /, metrics: bytes | None = None, **files: str | int) -> Path:
    """A card in a sysfs tree, an AMD one unless told otherwise."""
    folder = sys_root / f"class/drm/card{number}/device"
    folder.mkdir(parents=True)
    for name, text in {"vendor": "0x1002", **files}.items():
        (folder / name).write_text(f"{text}\n")
    if metrics is not None:
        (folder / "gpu_metrics").write_bytes(metrics)
    return folder


def test_strix_halo_shares_the_ram() -> None:
    """A Strix Halo with a small carve-out is integrated, and GTT bounds what it may use of the RAM."""
    (card,) = amdgpu.cards(str(DATA / "strix-halo"))
    assert (card.name, card.integrated, card.carved_apart()) == ("AMD Strix Halo", True, False)
    assert card.shared_bytes(124 * GIB) == 96 * GIB
    assert card.shared_bytes(90 * GIB) == 90 * GIB
    assert card.shared_free_bytes(100 * GIB) == 95 * GIB
    assert card.shared_free_bytes(10 * GIB) == 10 * GIB


def test_a_large_carve_out_is_apart() -> None:
    """64 GiB that the BIOS takes of 128 are larger than the GTT of the rest, and so a memory apart."""
    (card,) = amdgpu.cards(str(DATA / "strix-halo-carved"))
    assert (card.integrated, card.carved_apart()) == (True, True)
    assert card.free_bytes() == 56 * GIB


def test_a_discrete_card() -> None:
    """A Radeon RX has its own memory, and is known by the id that ROCR_VISIBLE_DEVICES takes."""
    (card,) = amdgpu.cards(str(DATA / "radeon-7900xtx"))
    assert (card.integrated, card.carved_apart(), card.uuid) == (False, False, "GPU-9f0c8a7b6d5e4f32")
    assert card.name == "AMD GPU 0x744c"


@pytest.mark.parametrize("format_revision, integrated", [(0, False), (1, False), (2, True), (3, True)])
def test_an_unknown_id_is_judged_by_its_metrics(tmp_path: Path, format_revision: int, integrated: bool) -> None:
    """gpu_metrics of format 2 and 3 are of APUs."""
    card_folder(tmp_path, device="0x9999", mem_info_vram_total=8 * GIB, metrics=bytes((0xA0, 0, format_revision, 1)))
    assert [card.integrated for card in amdgpu.cards(str(tmp_path))] == [integrated]


@pytest.mark.parametrize("metrics", [None, b"", b"\xa0\x00"])
def test_without_metrics_the_size_decides(tmp_path: Path, metrics: bytes | None) -> None:
    """Where gpu_metrics is missing or cut, less than 1 GiB of VRAM is an APU's carve-out."""
    card_folder(tmp_path, 0, device="0x9999", mem_info_vram_total=GIB // 2, metrics=metrics)
    card_folder(tmp_path, 1, device="0x9999", mem_info_vram_total=GIB, metrics=metrics)
    assert [card.integrated for card in amdgpu.cards(str(tmp_path))] == [True, False]


@pytest.mark.parametrize("device", ["0x164e", "0x13c0", "0x1506"])
def test_a_desktop_cpus_display_is_no_accelerator(tmp_path: Path, device: str) -> None:
    """The two compute units of a Raphael or Granite Ridge do not make a machine unified."""
    card_folder(tmp_path, device=device, mem_info_vram_total=GIB // 2, mem_info_gtt_total=16 * GIB)
    assert amdgpu.cards(str(tmp_path)) == ()


def test_others_and_connectors_are_passed_over(tmp_path: Path) -> None:
    """Cards of other makers, AMD cards without amdgpu, and connector folders are no cards; the order is by number."""
    card_folder(tmp_path, 0, vendor="0x10de", device="0x2704", mem_info_vram_total=GIB)
    card_folder(tmp_path, 1, device="0x744c")
    card_folder(tmp_path, 10, device="0x744c", mem_info_vram_total=20 * GIB)
    card_folder(tmp_path, 2, device="0x744c", mem_info_vram_total=24 * GIB)
    for name in ("card2-DP-1", "renderD128", "version", "cardx"):
        (tmp_path / "class/drm" / name).mkdir()
    assert [card.vram_total_bytes for card in amdgpu.cards(str(tmp_path))] == [24 * GIB, 20 * GIB]


@pytest.mark.parametrize("nonsense", ["", "N/A", "-1", "9" * 40, "１２", "0x10"])
def test_nonsense_figures_are_unknown(tmp_path: Path, nonsense: str) -> None:
    """A figure that is no number is unknown, and free memory with it; a card without a size is none."""
    card_folder(
        tmp_path, 0, device="0x744c", mem_info_vram_total=24 * GIB, mem_info_vram_used=nonsense, mem_info_gtt_total=nonsense
    )
    card_folder(tmp_path, 1, device="0x744c", mem_info_vram_total=nonsense)
    (card,) = amdgpu.cards(str(tmp_path))
    assert (card.free_bytes(), card.gtt_total_bytes) == (None, None)


def test_an_apu_without_gtt_figures_is_bounded_by_the_ram(tmp_path: Path) -> None:
    """Where the driver names no GTT, the RAM is the bound, and the carve-out is not taken for a card."""
    card_folder(tmp_path, device="0x1586", mem_info_vram_total=GIB // 2)
    (card,) = amdgpu.cards(str(tmp_path))
    assert (card.carved_apart(), card.shared_bytes(8 * GIB), card.shared_free_bytes(5 * GIB)) == (False, 8 * GIB, 5 * GIB)


def test_mi300a_has_one_memory(tmp_path: Path) -> None:
    """All memory of an MI300A counts as VRAM without being carved out of the RAM."""
    card_folder(tmp_path, device="0x74a0", mem_info_vram_total=128 * GIB, mem_info_gtt_total=64 * GIB)
    (card,) = amdgpu.cards(str(tmp_path))
    assert (card.integrated, card.carved_apart(), card.shared_bytes(126 * GIB)) == (True, False, 126 * GIB)


def test_overused_gtt_leaves_nothing(tmp_path: Path) -> None:
    """More GTT used than there is leaves 0, not less."""
    card_folder(tmp_path, device="0x1586", mem_info_vram_total=GIB // 2, mem_info_gtt_total=GIB, mem_info_gtt_used=2 * GIB)
    assert amdgpu.cards(str(tmp_path))[0].shared_free_bytes(5 * GIB) == 0


def test_a_card_without_unique_id_is_named_by_its_address(tmp_path: Path) -> None:
    """The PCI address stands in for an id that the driver does not give (APUs give 0)."""
    real = card_folder(tmp_path / "devices", device="0x1586", mem_info_vram_total=GIB // 2, unique_id="0x0")
    address = tmp_path / "devices/0000:c5:00.0"
    real.rename(address)
    (tmp_path / "sys/class/drm/card0").mkdir(parents=True)
    (tmp_path / "sys/class/drm/card0/device").symlink_to(address)
    assert [card.uuid for card in amdgpu.cards(str(tmp_path / "sys"))] == ["0000:c5:00.0"]


def test_no_sysfs_no_cards(tmp_path: Path) -> None:
    """A machine without DRM has no AMD cards."""
    assert amdgpu.cards(str(tmp_path / "missing")) == ()
