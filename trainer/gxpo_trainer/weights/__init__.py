"""Weight sync: the learner publishes a version in buckets; every engine loads and verifies them.

Four transports with the same interface, `publish` on the learner and `WeightReceiver.receive` in each engine worker:

    shared_memory   one host: two buckets under /dev/shm that the workers map
    object_store    between hosts: the same buckets through Ray's object store
    nccl            between GPUs: one broadcast per bucket
    cuda_ipc        on shared GPUs: workers map the learner's buckets on their own GPU

Order of one sync: the learner packs bucket i while the engines load bucket i-1. After the last bucket each worker
reads every tensor back, packed copies included, and compares checksums with what was published; only then does the
engine serve the new version. After a failed sync it holds no version. The number of syncs is part of the prefix
cache's key, so blocks of earlier weights are never reused.

With LoRA the base weights stay, and the adapter is sent in the same buckets. Checksums weight bits by position, so they
detect a changed last bit, a shift and an exchange of two tensors.
"""

from __future__ import annotations
