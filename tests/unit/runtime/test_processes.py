"""Writes that fail within libraries in Rust, and objects that are exempt from garbage collection."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from gxpo_trainer.reporting.outcome import reason_of
from gxpo_trainer.runtime.processes import frozen_allocations, write_errors

WRITES = {
    "safetensors": "import torch; from safetensors.torch import save_file\n"
    "write = lambda path: save_file({'a': torch.zeros(1000)}, path)\n",
    "tokenizers": "from tokenizers import Tokenizer, models\n"
    "write = Tokenizer(models.WordLevel({str(n): n for n in range(1000)}, unk_token='0')).save\n",
    "python": "from pathlib import Path\nwrite = lambda path: Path(path).write_text('a' * 2000)\n",
}


@pytest.mark.parametrize("library", WRITES)
def test_a_failed_write_has_its_error_number(tmp_path: Path, library: str) -> None:
    code = WRITES[library] + (
        "import resource, sys; from gxpo_trainer.runtime.processes import frozen_allocations, write_errors\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    with write_errors(): write(sys.argv[1])\n"
        "except OSError as error: print(error.errno)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(errno.EFBIG)]


def test_a_full_disk_is_the_reason_and_other_errors_pass() -> None:
    with pytest.raises(OSError, match="No space left") as caught, write_errors():
        raise Exception(f"I/O error: No space left on device (os error {errno.ENOSPC})")
    assert reason_of(caught.value) == "disk_full"
    with pytest.raises(ValueError, match="shape"), write_errors():
        raise ValueError("shape")


def test_objects_allocated_in_the_block_are_never_collected():
    before = gc.get_freeze_count()
    try:
        with frozen_allocations():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_collection_resumes_after_a_failed_import():
    try:
        with pytest.raises(ImportError), frozen_allocations():
            raise ImportError("no such engine")
        assert gc.isenabled()
    finally:
        gc.unfreeze()
