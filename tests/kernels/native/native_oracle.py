"""The native fingerprint and the sglang fold in plain Python integers, written from the contract alone."""

from __future__ import annotations

from canary_kernels import GroupLayout, Region

MASK = (1 << 64) - 1
WORD_STEP = 0x9E3779B97F4A7C15
REGION_STEP = 0xD1342543DE82EF95
ANCHOR = 0xC0FFEE1234567890


def s(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix3(a: int, b: int, c: int) -> int:
    return s(s(s(a) ^ (b & MASK)) ^ (c & MASK))


def signed(x: int) -> int:
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def slot_bytes(layout: GroupLayout, region: Region, slot: int) -> bytes:
    page, offset = divmod(slot, layout.page_size)
    start = region.offset + page * region.page_stride + offset * region.slot_stride
    joined = b""
    for piece in range(region.pieces):
        at = start + piece * region.piece_stride
        joined += bytes(region.memory[at : at + region.piece_bytes].tolist())
    return joined


def words(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def key(region: int, word: int) -> int:
    return s((word + 1) * WORD_STEP) ^ s((region + 1) * REGION_STEP)


def digest(layout: GroupLayout, slot: int) -> tuple[int, int, list[int]]:
    """Native digest, sum (both as int64) and region bytes."""
    total, plain, tops = 0, 0, []
    for number, region in enumerate(layout.regions):
        values = words(slot_bytes(layout, region, slot))
        part = sum(s(value ^ key(number, at)) for at, value in enumerate(values)) & MASK
        tops.append(part >> 56)
        total += part
        plain += sum(values)
    return signed(total), signed(plain), tops


def fold(layout: GroupLayout, slot: int) -> tuple[int, int, list[int]]:
    """The sglang digest over all regions as sources, the sum, and the top bytes of the regions' folds."""
    total, plain, tops = 0, 0, []
    for region in layout.regions:
        accumulator = 0
        for value in words(slot_bytes(layout, region, slot)):
            accumulator = s(accumulator ^ value)
            plain += value
        tops.append(accumulator >> 56)
        total = s(total ^ accumulator)
    return signed(total), signed(plain), tops


def step(scheme: str, before: int, token: int, position: int, secret: int) -> int:
    """The hash after one token, as int64."""
    if scheme == "native":
        return signed(before * REGION_STEP + s(s((token ^ secret) & MASK) ^ (position & MASK)))
    return signed(mix3(before & MASK, token, position))


def chain(scheme: str, seed: int, tokens: list[int], positions: list[int], secret: int) -> list[tuple[int, int]]:
    """(before, after) of each token of one run."""
    steps = []
    state = signed(seed)
    for token, position in zip(tokens, positions, strict=True):
        after = state if position < 0 else step(scheme, state, token, position, secret)
        steps.append((state, after))
        state = after
    return steps
