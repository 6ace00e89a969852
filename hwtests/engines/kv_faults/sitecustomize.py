"""Damages KV that a vLLM engine has pulled by NIXL, just before it is used; see ../kvcanary.py.

Python imports this by its name, from PYTHONPATH. NIXL moves memory by shared memory or RDMA, past any proxy, so that
the fault is planted where the connector has received: in the engine's own KV, before its scheduler is told. The file
KV_FAULT_FILE says what happens: nothing, or `flip`, `truncate`, `stale`, `other`, `swap`. Each transfer that was
damaged adds a line to the file of that name and `.done`.
"""

import importlib.abc
import importlib.util
import os
import sys

WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"


def damage(fault, caches, blocks, before):
    """Changes `blocks` of all layers; `before` has those of the transfer before this one, by layer."""
    middle = blocks[len(blocks) // 2]
    if fault == "flip":
        # one bit of the exponent of every value of one block
        for cache in caches:
            bits = cache[middle].contiguous().view(cache.dtype)
            words = bits.view(__import__("torch").int32 if cache.element_size() == 4 else __import__("torch").int16)
            words ^= 1 << (25 if cache.element_size() == 4 else 9)
            cache[middle] = bits
    elif fault == "truncate":
        for cache in caches:
            for block in blocks[len(blocks) * 2 // 3:]:
                cache[block] = 0
    elif fault in ("stale", "other"):
        changed = blocks[:max(1, len(blocks) // 2)] if fault == "stale" else blocks
        for cache, old in zip(caches, before):
            for at, block in enumerate(changed):
                cache[block] = old[at % len(old)]
    elif fault == "swap":
        for block in blocks:
            first = caches[0][block].clone()
            caches[0][block] = caches[1][block]
            caches[1][block] = first


def patch(module):
    worker = module.NixlBaseConnectorWorker
    results, before = worker.get_transfer_results, []

    def damaged_results(self):
        waiting = dict(self._recving_metadata)
        told = results(self)
        for request in told.finished_recving - told.failed_recving:
            blocks = [block for group in waiting[request].local_physical_block_ids for block in group]
            if not blocks:
                continue
            caches = list(self.device_kv_caches.values())
            copies = [[cache[block].clone() for block in blocks] for cache in caches]
            with open(os.environ["KV_FAULT_FILE"]) as file:
                fault = file.read().strip()
            if fault and before:
                damage(fault, caches, blocks, before)
                with open(os.environ["KV_FAULT_FILE"] + ".done", "a") as file:
                    file.write(f"{fault} {len(blocks)} of {len(caches)} layers\n")
            before[:] = copies
        return told

    worker.get_transfer_results = damaged_results


class Finder(importlib.abc.MetaPathFinder):
    """Patches the connector once it is loaded."""

    def find_spec(self, name, path, target=None):
        if name != WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch
        return spec


if "KV_FAULT_FILE" in os.environ:
    sys.meta_path.insert(0, Finder())
