"""Work lists: whatever is packed arrives in its segments, and nothing else is touched, whatever the header says."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from canary_kernels.device.worklist import enqueue_hand_back, enqueue_spread
from canary_kernels.worklist import BLOCK, WorkList

sys.path.insert(0, str(Path(__file__).parents[1]))
from compile import CAPABILITIES, KernelSpec, compile_kernels

MARK = -0x5A5A_5A5A


def draw_capacities(random: np.random.Generator) -> list[int]:
    """Some empty, some whole blocks, some a word more or less."""
    choices = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000]
    return [int(random.choice(choices)) for _ in range(int(random.integers(1, 9)))]


def test_segments_arrive_and_the_rest_stays(device: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(12):
        capacities = draw_capacities(random)
        worklist = WorkList(capacities, torch.device(device))
        for _ in range(3):
            worklist.target.fill_(MARK)
            worklist.begin()
            packed: dict[int, np.ndarray] = {}
            for number, capacity in enumerate(capacities):
                if random.random() < 0.7:
                    size = int(random.integers(0, capacity + 1))
                    packed[number] = random.integers(-(1 << 63), (1 << 63) - 1, size)
                    worklist.room(number, size)[:] = packed[number]
            worklist.enqueue(worklist.seal())
            for number in range(len(capacities)):
                segment = worklist.segment(number).cpu().numpy()
                values = packed.get(number, np.zeros(0, dtype=np.int64))
                assert np.array_equal(segment[: values.size], values)
                # what follows in the last block of a segment is of no meaning, what follows that block is untouched
                assert (segment[-(-values.size // BLOCK) * BLOCK :] == MARK).all()


def test_the_smallest_class_that_holds_the_list_is_sent(device: str) -> None:
    worklist = WorkList([100_000], torch.device(device))
    assert worklist.classes == [4096, 16384, 65536, (1 + 391) * BLOCK]
    for size, number in ((0, 0), (15 * BLOCK, 0), (15 * BLOCK + 1, 1), (63 * BLOCK, 1), (65_280, 2), (65_281, 3)):
        worklist.begin()
        worklist.room(0, size)[:] = np.arange(size)
        assert worklist.seal() == number
        worklist.target.fill_(MARK)
        worklist.enqueue(number)
        assert worklist.segment(0)[:size].tolist() == list(range(size))


def test_a_segment_that_is_too_long_is_refused() -> None:
    worklist = WorkList([10, 20], torch.device("cpu"))
    with pytest.raises(ValueError, match="segment 1 holds 20 words, not 21"):
        worklist.room(1, 21)


def test_no_header_makes_the_kernel_write_elsewhere(device: str, seed: int) -> None:
    """Random headers: marks around source and target survive."""
    random = np.random.default_rng(seed)
    segments, blocks = 4, 6
    for _ in range(30):
        memory = torch.full(((3 * blocks + 1) * BLOCK,), MARK, dtype=torch.int64)
        wild = [-(1 << 62), -7, -1, 0, 1, 2, 5, blocks, 1 << 40]
        memory[: 1 + 2 * segments] = torch.tensor([int(random.choice(wild)) for _ in range(1 + 2 * segments)])
        memory = memory.to(device)
        before = memory.clone()
        target = slice((blocks + 1) * BLOCK, 2 * blocks * BLOCK)
        enqueue_spread(memory[: blocks * BLOCK], memory[target], segments=segments, header_blocks=1, block=BLOCK)
        before[target] = memory[target]
        assert torch.equal(memory, before)


def test_words_are_handed_back(device: str) -> None:
    for count in (1, 18, 64, 100):
        source = torch.arange(count, dtype=torch.int64, device=device) - 3
        target = torch.full((count + 40,), MARK, dtype=torch.int64, pin_memory=device == "cuda")
        enqueue_hand_back(source, target[:count])
        if device == "cuda":
            torch.cuda.synchronize()
        assert target.tolist() == [*(number - 3 for number in range(count)), *[MARK] * 40]


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    specs = [
        KernelSpec(
            module="canary_kernels.device.worklist",
            kernel="spread_kernel",
            pointers={"packed": "*i64", "target": "*i64"},
            constants={"SEGMENTS": 32, "HEADER": 1, "BLOCK": BLOCK},
        ),
        KernelSpec(
            module="canary_kernels.device.worklist",
            kernel="hand_back_kernel",
            pointers={"source": "*i64", "target": "*i64"},
            constants={"BLOCK": 32},
            num_warps=1,
        ),
    ]
    done = compile_kernels(specs, cache=tmp_path)
    assert len(done) == len(specs) * len(CAPABILITIES)
