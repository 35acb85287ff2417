"""Proves on the running device that the kernels still see faults, and that they stay silent without one.

Each run builds a private pool, stamps it, verifies it clean, plants one fault of each kind at a random place and checks
that exactly that one is reported: by the daemon's own kernels (plan, digest, write, compare, verify), and by the
contract launchers (plan, write and verify with the hash of all real KV bytes). Nothing here touches an engine's memory,
and its launches are counted apart from those of bursts.
"""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from canary_kernels.chain import chain_head
from canary_kernels.context import (
    CanaryLaunchTag,
    FailReason,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
)
from canary_kernels.launches import Backend, counted_launches
from canary_kernels.layout import GroupLayout, Region
from canary_kernels.plan import launch_canary_plan_kernels
from canary_kernels.scheme import SCHEMES, Scheme
from canary_kernels.validation import KernelArgumentError
from canary_kernels.verify import launch_canary_verify_kernel
from canary_kernels.write import launch_canary_write_kernel

from canaryd.backend.pool_backend import PoolBackend, is_device_error, make_backend
from canaryd.errors import BackendError
from canaryd.watch.burst import (
    FAIL_CHAIN,
    FAIL_POSITION,
    FAIL_TOKEN,
    NO_PREVIOUS,
    Burst,
    CompareWork,
    GroupResult,
    GroupWork,
    LinkWork,
    Runs,
    StampWork,
)

_PAGES = 9
_PAGE_SIZE = 4
_SLOT_BYTES = 64
_LENGTH = 13
_SCRATCH_ITEMS = 64
_RING_ROWS = 16
_VIOLATION_SLOT = 1
_VIOLATION_BITS = 7


@dataclass(frozen=True, kw_only=True)
class SelfTestReport:
    """What one run found. `failures` are sentences, empty when all is well; `launches` by kernel label; `seed`
    replays the run."""

    scheme: Scheme
    failures: tuple[str, ...]
    launches: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    seed: int = 0

    @property
    def passed(self) -> bool:
        """Whether every planted fault was seen and nothing else."""
        return not self.failures


class SelfTest:
    """A self-test of one device and scheme; `run` as often as wanted.

    Args:
        device: where to run; host devices use the torch references, CUDA devices the kernels.
        scheme: the fingerprint scheme of the daemon's own kernels. The contract launchers have only one.
        backend: as for the launchers; None picks by device.
        seed: None draws one for each run.
    """

    def __init__(
        self,
        *,
        device: torch.device | str,
        scheme: Scheme = "native",
        backend: Backend | None = None,
        seed: int | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._scheme: Scheme = scheme
        self._backend = backend
        self._seed = seed

    def run(self) -> SelfTestReport:
        """One run, some milliseconds. A device that fails is a failure in the report, not an exception."""
        seed = secrets.randbits(32) if self._seed is None else self._seed
        began = time.perf_counter()
        with counted_launches() as launches:
            trial = _Trial(self._device, self._scheme, self._backend, seed)
            try:
                trial.own_kernels()
                trial.contract_launchers()
            except Exception as error:
                if not (isinstance(error, BackendError | KernelArgumentError) or is_device_error(error)):
                    raise
                trial.failures.append(f"the device failed: {type(error).__name__}: {error}")
        return SelfTestReport(
            scheme=self._scheme,
            failures=tuple(trial.failures),
            launches=dict(launches),
            seconds=time.perf_counter() - began,
            seed=seed,
        )


def run_and_print(device: str) -> bool:
    """Runs the self-test of both schemes and writes one line for each to standard output; whether all passed."""
    passed = True
    for scheme in SCHEMES:
        report = SelfTest(device=device, scheme=scheme).run()
        passed &= report.passed
        word = "passed" if report.passed else "FAILED"
        sys.stdout.write(f"self-test {scheme} on {device}: {word} in {report.seconds:.3f} s\n")
        for failure in report.failures:
            sys.stdout.write(f"  {failure} (seed {report.seed})\n")
    return passed


class _Trial:
    """One run's private pool and random places."""

    def __init__(self, device: torch.device, scheme: Scheme, backend: Backend | None, seed: int) -> None:
        self.failures: list[str] = []
        self._device = device
        self._scheme: Scheme = scheme
        self._backend = backend
        self._generator = torch.Generator().manual_seed(seed)
        self._key = self._draw(1 << 62)
        self._regions = 3
        region_bytes = _PAGES * _PAGE_SIZE * _SLOT_BYTES
        self._memory = torch.randint(
            0, 256, (self._regions * region_bytes,), dtype=torch.uint8, generator=self._generator
        ).to(device)
        half = _SLOT_BYTES // 2
        flat = {"page_stride": _PAGE_SIZE * _SLOT_BYTES, "slot_stride": _SLOT_BYTES, "piece_bytes": _SLOT_BYTES}
        heads = {
            "page_stride": _PAGE_SIZE * _SLOT_BYTES,
            "slot_stride": half,
            "piece_bytes": half,
            "pieces": 2,
            "piece_stride": _PAGE_SIZE * half,
        }
        self._layout = GroupLayout(
            regions=tuple(
                Region(
                    memory=self._memory, offset=number * region_bytes, dtype=None, **(heads if number == 1 else flat)
                )
                for number in range(self._regions)
            ),
            num_pages=_PAGES,
            page_size=_PAGE_SIZE,
        )
        # Page 0 stays out: slot 0 is padding for the contract launchers.
        self._pages = 1 + torch.randperm(_PAGES - 1, generator=self._generator)[: -(-_LENGTH // _PAGE_SIZE)]
        self._slots = (self._pages[:, None] * _PAGE_SIZE + torch.arange(_PAGE_SIZE)).view(-1)[:_LENGTH]
        self._tokens = torch.randint(0, 1 << 15, (_LENGTH,), generator=self._generator)

    def _draw(self, bound: int) -> int:
        return int(torch.randint(0, bound, (1,), generator=self._generator))

    def _expect(self, what: str, seen: object, wanted: object) -> None:
        if seen != wanted:
            self.failures.append(f"{what}: saw {seen}, expected {wanted}")

    def _flip(self, slot: int, region: int, bit: int) -> None:
        """Flips one bit of the first byte of a slot in a region; waits until the device sees it."""
        spec = self._layout.regions[region]
        page, offset = divmod(slot, _PAGE_SIZE)
        self._memory[spec.offset + page * spec.page_stride + offset * spec.slot_stride] ^= 1 << bit
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    # --- the daemon's own kernels -------------------------------------------------------------------------------

    def own_kernels(self) -> None:
        """Stamp, verify clean, then one fault of each kind."""
        self._wait()
        backend = make_backend(
            [self._layout], scheme=self._scheme, key=self._key, backend=self._backend, chunk_items=_SCRATCH_ITEMS
        )
        try:
            self._own_kernels(backend)
        finally:
            backend.close()

    def _own_kernels(self, backend: PoolBackend) -> None:
        def column(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.array(values, dtype=np.int64)

        head = chain_head(self._scheme)
        tokens = self._tokens.numpy()
        runs = Runs(
            pages=self._pages.numpy(),
            page_offsets=column(0, self._pages.numel()),
            first_offsets=column(0),
            lengths=column(_LENGTH),
            first_positions=column(0),
        )

        def burst(
            *, stamp: bool = False, link_tokens: object = tokens, link_runs: Runs = runs, link_head: int = head
        ) -> tuple[list[int], list[list[int]]]:
            """(items whose bytes differ, [item, bits] of links that do not hold)."""
            work = GroupWork(
                group=0,
                stamps=StampWork(
                    runs=runs, tokens=tokens, generations=np.ones(_LENGTH, dtype=np.int64), seeds=column(head)
                )
                if stamp
                else None,
                compare=CompareWork(runs=runs),
                links=LinkWork(
                    runs=link_runs,
                    tokens=np.asarray(link_tokens, dtype=np.int64),
                    prev_slots=column(NO_PREVIOUS),
                    heads=column(link_head),
                ),
            )
            return _seen(backend.run(Burst(number=0, works=(work,))).groups[0])

        self._expect("clean pool", burst(stamp=True), ([], []))

        item, region, bit = self._draw(_LENGTH), self._draw(self._regions), self._draw(8)
        slot = int(self._slots[item])
        record = backend.slot_record(0, slot)
        self._flip(slot, region, bit)
        self._expect("flipped bit", burst(), ([item], []))
        if self._scheme == "native":
            change = backend.locate(0, slot, stored_digest=record.digest, stored_sum=record.sum)
            place = None if change is None else (change.region, change.word, change.changed_bits)
            self._expect("place of the flipped bit", place, (region, 0, 1 << bit))
        self._flip(slot, region, bit)

        wrong = tokens.copy()
        wrong[item] ^= 1
        self._expect("wrong token", burst(link_tokens=wrong), ([], [[item, FAIL_TOKEN]]))
        self._expect("wrong chain head", burst(link_head=head ^ 1), ([], [[0, FAIL_CHAIN]]))
        shifted = Runs(
            pages=runs.pages,
            page_offsets=runs.page_offsets,
            first_offsets=runs.first_offsets,
            lengths=runs.lengths,
            first_positions=column(1),
        )
        self._expect(
            "wrong positions", burst(link_runs=shifted), ([], [[number, FAIL_POSITION] for number in range(_LENGTH)])
        )
        self._expect("clean pool again", burst(), ([], []))

    # --- the contract launchers ---------------------------------------------------------------------------------

    def contract_launchers(self) -> None:
        """Plan, write, plan again, verify with all real KV bytes: clean, then one fault of each kind."""
        device = self._device
        row = 1
        table = torch.zeros((2, _LENGTH), dtype=torch.int32)
        table[row] = self._slots.to(torch.int32)
        table = table.to(device)
        expected = torch.zeros((2, _LENGTH), dtype=torch.int32)
        expected[row] = self._tokens.to(torch.int32)
        expected = expected.to(device)
        flat = [number for number, region in enumerate(self._layout.regions) if region.pieces == 1]
        context = self._context(flat)
        write_plan = WritePlan.allocate(write_req_capacity=1, device=device)
        verify_plan = VerifyPlan.allocate(verify_capacity=_LENGTH, device=device)

        def plan(prefix: int, extend: int) -> None:
            launch_canary_plan_kernels(
                verify_plan_out=verify_plan,
                write_plan_out=write_plan,
                req_pool_indices=torch.tensor([row], device=device),
                prefix_lens=torch.tensor([prefix], device=device),
                extend_seq_lens=torch.tensor([extend], device=device),
                req_to_token=table,
                swa_window_size=0,
                full_to_swa_index_mapping=None,
                verify_capacity=_LENGTH,
                req_to_verify_expected_tokens=expected,
                req_to_verify_expected_tokens_valid_lens=torch.tensor([_LENGTH], device=device),
                kv_token_id_vs_position_offset=0,
                backend=self._backend,
            )

        def verify() -> list[list[int]]:
            """[slot, bits] of each violation row."""
            context.violation_write_index.zero_()
            plan(_LENGTH, 0)
            launch_canary_verify_kernel(
                context=context, plan=verify_plan, check_verify_expected_token=True, backend=self._backend
            )
            count = min(int(context.violation_write_index), _RING_ROWS)
            rows = context.violation_ring[:count].tolist()
            return sorted([entry[_VIOLATION_SLOT], entry[_VIOLATION_BITS]] for entry in rows)

        plan(0, _LENGTH)
        launch_canary_write_kernel(
            context=context,
            plan=write_plan,
            input_ids=self._tokens.to(device),
            positions=torch.arange(_LENGTH, device=device),
            out_cache_loc=self._slots.to(device),
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
            backend=self._backend,
        )
        self._expect("contract launchers, clean pool", verify(), [])

        item = self._draw(_LENGTH)
        slot, region, bit = int(self._slots[item]), flat[self._draw(len(flat))], self._draw(8)
        self._flip(slot, region, bit)
        self._expect(
            "contract launchers, flipped bit", verify(), [[slot, int(FailReason.VERIFY_REAL_KV_HASH_MISMATCH)]]
        )
        self._flip(slot, region, bit)

        expected[row, item] ^= 1
        self._expect("contract launchers, wrong token", verify(), [[slot, int(FailReason.VERIFY_TOKEN_MISMATCH)]])
        expected[row, item] ^= 1

        last = int(self._slots[-1])
        chain = context.canary_buf[last].view(torch.int64)[2:3]
        chain ^= 1
        self._expect("contract launchers, broken chain", verify(), [[last, int(FailReason.VERIFY_CHAIN_HASH_MISMATCH)]])
        chain ^= 1
        self._expect("contract launchers, clean pool again", verify(), [])

    def _context(self, regions: list[int]) -> VerifyOrWriteContext:
        device = self._device
        size = _PAGES * _PAGE_SIZE * _SLOT_BYTES
        return VerifyOrWriteContext(
            canary_buf=torch.zeros((_PAGES * _PAGE_SIZE, 32), dtype=torch.uint8, device=device),
            kernel_kind=CanaryLaunchTag.SWEEP_K_FULL,
            violation_ring=torch.zeros((_RING_ROWS, 8), dtype=torch.int64, device=device),
            violation_write_index=torch.zeros(1, dtype=torch.int32, device=device),
            slot_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
            real_kv_sources=tuple(
                RealKvSource(
                    tensor=self._memory[number * size : (number + 1) * size].view(_PAGES, _PAGE_SIZE * _SLOT_BYTES),
                    page_size=_PAGE_SIZE,
                    num_bytes_per_token=_SLOT_BYTES,
                    read_bytes=_SLOT_BYTES,
                )
                for number in regions
            ),
            real_kv_hash_mode=RealKvHashMode.ALL,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=device),
        )


def _seen(result: GroupResult) -> tuple[list[int], list[list[int]]]:
    """A burst's findings as plain lists."""
    items = [] if result.compare is None else result.compare.items.tolist()
    links = [] if result.links is None else np.stack([result.links.items, result.links.bits], axis=1).tolist()
    return items, links
