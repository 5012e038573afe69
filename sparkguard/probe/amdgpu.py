"""AMD GPUs, from the amdgpu driver's files in sysfs.

An APU has two pools that are both the machine's RAM: the carve-out that the BIOS takes away before Linux starts
(mem_info_vram_*, missing from MemTotal), and GTT, ordinary RAM that the GPU may map (mem_info_gtt_*). Their sum has
been seen above the RAM that is there (135 and 132 of 128 GiB), so they are never added up.
"""

from __future__ import annotations

import os

from sparkguard.core.record import Record

_VENDOR = "0x1002"
_GIB = 1 << 30

# PCI ids of APUs (amdgpu's own table and libdrm's amdgpu.ids). gpu_metrics would tell too, but reading it wakes a
# sleeping laptop GPU, and the older APUs have none.
_APUS = {
    "0x1586": "Strix Halo",
    "0x150e": "Strix Point",
    "0x1114": "Krackan Point",
    "0x1902": "Krackan Point",
    "0x15bf": "Phoenix",
    "0x15c8": "Phoenix",
    "0x1900": "Hawk Point",
    "0x1901": "Hawk Point",
    "0x1681": "Rembrandt",
    "0x164d": "Rembrandt",
    "0x163f": "Van Gogh",
    "0x1435": "Van Gogh",
    "0x1636": "Renoir",
    "0x1638": "Cezanne",
    "0x164c": "Lucienne",
    "0x15e7": "Barcelo",
    "0x15dd": "Raven",
    "0x15d8": "Picasso",
    "0x74a0": "Instinct MI300A",
}
# Two compute units to draw a desktop with (Raphael, Granite Ridge, Mendocino): no accelerator, nobody serves from it.
_DISPLAY_ONLY = ("0x164e", "0x13c0", "0x1506")
# All of an MI300A's memory counts as VRAM; nothing is carved out of it.
_ONE_MEMORY = "0x74a0"


class Card(Record):
    """One AMD GPU. Figures that the driver does not give are None."""

    name: str
    uuid: str  # as ROCR_VISIBLE_DEVICES takes it, else the PCI address
    integrated: bool
    vram_total_bytes: int
    vram_used_bytes: int | None = None
    gtt_total_bytes: int | None = None
    gtt_used_bytes: int | None = None
    one_memory: bool = False

    def carved_apart(self) -> bool:
        """An APU's carve-out that is larger than its GTT: the kernel then gives applications the carve-out."""
        gtt = self.gtt_total_bytes
        return self.integrated and not self.one_memory and gtt is not None and self.vram_total_bytes > gtt

    def free_bytes(self) -> int | None:
        """What is free of the card's own memory."""
        return None if self.vram_used_bytes is None else max(0, self.vram_total_bytes - self.vram_used_bytes)

    def shared_bytes(self, ram_bytes: int) -> int:
        """How much of the RAM an APU may use: GTT, which the kernel has let grow beyond the RAM until 2026."""
        return ram_bytes if self.one_memory or not self.gtt_total_bytes else min(ram_bytes, self.gtt_total_bytes)

    def shared_free_bytes(self, available_bytes: int) -> int:
        """How much of the RAM that is available the APU may still map.

        gtt_used has been reported not to follow hipMalloc, so it only ever lowers the figure.
        """
        if self.one_memory or not self.gtt_total_bytes:
            return available_bytes
        return max(0, min(available_bytes, self.gtt_total_bytes - (self.gtt_used_bytes or 0)))


def cards(sys_root: str) -> tuple[Card, ...]:
    """Every AMD accelerator, in the order of its card number. No amdgpu, no cards: never an error."""
    try:
        names = os.listdir(f"{sys_root}/class/drm")
    except OSError:
        return ()
    numbers = sorted(int(name[4:]) for name in names if name.startswith("card") and name[4:].isdecimal())
    found = (_card(f"{sys_root}/class/drm/card{number}/device") for number in numbers)
    return tuple(card for card in found if card is not None)


def _card(folder: str) -> Card | None:
    if _text(f"{folder}/vendor") != _VENDOR:
        return None
    device = _text(f"{folder}/device").lower()
    vram = _bytes(f"{folder}/mem_info_vram_total")
    if vram is None or device in _DISPLAY_ONLY:
        return None
    unique = _text(f"{folder}/unique_id")
    return Card(
        name=f"AMD {_APUS.get(device) or _text(f'{folder}/product_name') or f'GPU {device}'}",
        uuid=f"GPU-{unique}" if unique.strip("0x") else os.path.basename(os.path.realpath(folder)),
        # No discrete card that anybody serves from has less than 1 GiB; an APU's default carve-out is 512 MiB.
        integrated=device in _APUS or vram < _GIB or _metrics_of_an_apu(f"{folder}/gpu_metrics"),
        vram_total_bytes=vram,
        vram_used_bytes=_bytes(f"{folder}/mem_info_vram_used"),
        gtt_total_bytes=_bytes(f"{folder}/mem_info_gtt_total"),
        gtt_used_bytes=_bytes(f"{folder}/mem_info_gtt_used"),
        one_memory=device == _ONE_MEMORY,
    )


def _metrics_of_an_apu(path: str) -> bool:
    """gpu_metrics starts with its size (2 bytes) and its format: 1 is of discrete cards, 2 and 3 are of APUs."""
    return _read(path)[2:3] in (b"\x02", b"\x03")


def _bytes(path: str) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _text(path: str) -> str:
    return _read(path).decode("ascii", "replace").strip()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(4096)
    except OSError:
        return b""
